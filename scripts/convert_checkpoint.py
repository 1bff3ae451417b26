#!/usr/bin/env python3
"""Convert checkpoints to and from Hugging Face directories, and compare the logits of both models.

    python scripts/convert_checkpoint.py import --input google-bert/bert-base-uncased --output runs/bert
    python scripts/convert_checkpoint.py export --checkpoint runs/bert --output bert-continued

See docs/huggingface.md.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from data_utils.common.errors import ArgumentParser, ConfigError, expanded_path, run_command
from data_utils.common.files import require_directory, require_new_directory, write_whole
from data_utils.common.hub import (
    HubName,
    Snapshot,
    could_be_hub_name,
    fetch,
    hub_name,
    push,
    require_hub_name,
    require_token,
)
from data_utils.common.settings import to_tree
from data_utils.tasks.config import TaskConfig
from megatron_lite.checkpoint.resolve_path import ADAPTER_CONFIG, check_is_export, resolve_model
from megatron_lite.config.tree import load_config, load_tree
from megatron_lite.hf.common.hub_files import wanted

if TYPE_CHECKING:
    from megatron_lite.hf.common.verify import Comparison

MAX_SHARD_SIZE = "5GB"
TOLERANCE = 1e-5  # as in hf/common/verify.py, which imports torch
_OF_MODELS = ("copy_eop_to_gmask", "max_shard_size", "no_verify")  # options
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    add_export_arguments(commands.add_parser("export", help="training checkpoint -> Hugging Face directory"))
    sources = {
        "import": (
            "Hugging Face directory (exported here, released GLM, or another published model) -> run "
            "directory"
        ),
        "import-megatron": "mp_rank_XX_model_states.pt of the GLM reference code -> run directory",
    }
    for name, text in sources.items():
        add_import_arguments(commands.add_parser(name, help=text))
    for command in commands.choices.values():
        command.add_argument("--output", required=True, type=Path, help="directory to create")
        command.add_argument(
            "--no-verify", action="store_true", help="do not compare the logits of both models"
        )
        text = (
            "maximum logit difference that passes, relative to the largest logit if that exceeds 1 (default: "
            f"{TOLERANCE:g})"
        )
        command.add_argument("--tolerance", type=float, help=text)
    return parser.parse_args()


def add_export_arguments(export: argparse.ArgumentParser) -> None:
    text = "run directory (latest valid checkpoint), or a step_... directory"
    export.add_argument("--checkpoint", required=True, type=Path, help=text)
    text = (
        "huggingface: with code and tokenizer; released: tensor names of the released GLM (default: "
        "huggingface)"
    )
    export.add_argument("--layout", default="huggingface", choices=("huggingface", "released"), help=text)
    text = "data type of the weights (default: fp32)"
    export.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"), help=text)
    text = f"maximum size of a weight file in bytes, KB, MB or GB (default: {MAX_SHARD_SIZE})"
    export.add_argument("--max-shard-size", help=text)
    export.add_argument("--tokenizer", type=Path, help="tokenizer path, if it moved since training")
    text = "same for the decoder's tokenizer (OPTIMUS)"
    export.add_argument("--decoder-tokenizer", type=Path, help=text)
    text = "write the updates of LoRA alone, as files of peft, instead of merging them into the weights"
    export.add_argument("--adapter", action="store_true", help=text)
    text = "also write what sentence-transformers needs: pooling, prompts, length (the section embedding)"
    export.add_argument("--sentence-transformers", action="store_true", help=text)
    text = "upload the directory to this Hugging Face hub repository; created if it does not exist"
    export.add_argument("--push-to-hub", metavar="ORG/NAME", help=text)
    export.add_argument(
        "--private", action="store_true", help="with --push-to-hub: create the repository as private"
    )


def add_import_arguments(command: argparse.ArgumentParser) -> None:
    text = "directory with the weights; for import also org/name or org/name@revision of the Hugging Face hub"
    command.add_argument("--input", required=True, type=expanded_path, help=text)
    text = "YAML file of the new run, or a name in configs/; repeatable"
    command.add_argument(
        "--config", type=expanded_path, action="append", default=[], metavar="FILE", help=text
    )
    text = "for an adapter of peft: run or checkpoint of the model that it was trained on"
    command.add_argument("--base", type=Path, metavar="RUN", help=text)
    text = "initialize [gMASK] from the embedding of eop (GLM-10B-Chinese was trained with one id for both)"
    command.add_argument("--copy-eop-to-gmask", action="store_true", help=text)
    text = "settings on top of the files, for example model.activation=gelu_erf"
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help=text)


def parse_size(text: str) -> int:
    """Bytes of "500MB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|)", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ConfigError(
            f"--max-shard-size is {text!r}; it must be a number of bytes, KB, MB or GB, for example 5GB."
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


def main() -> None:
    arguments = parse_arguments()
    require_options(arguments)
    require_new_directory(arguments.output)
    # Imported here: --help and mistakes in the arguments must not wait for torch and transformers.
    if arguments.command == "export":
        shard_size = MAX_SHARD_SIZE if arguments.max_shard_size is None else arguments.max_shard_size
        max_shard_bytes = parse_size(shard_size)
        resolve_model(arguments.checkpoint, "--checkpoint")
        to_push = require_push(arguments)
        from megatron_lite.hf.export import ExportOptions, export_run

        options = ExportOptions(
            layout=arguments.layout,
            dtype=arguments.dtype,
            max_shard_bytes=max_shard_bytes,
            verify=not arguments.no_verify,
            tolerance=TOLERANCE if arguments.tolerance is None else arguments.tolerance,
            adapter=arguments.adapter,
            sentence_transformers=arguments.sentence_transformers,
        )
        tokenizers = arguments.tokenizer, arguments.decoder_tokenizer
        result = export_run(arguments.checkpoint, arguments.output, options, *tokenizers)
    else:
        check_is_export(Path(arguments.input), "--input")
        tree, *_, notes = load_tree(arguments.config, arguments.overrides)
        source = find_source(arguments.input, is_hub=arguments.command == "import")
        result = convert(arguments, source.directory, tree)
    print(f"not verified: {_unverified(arguments)}" if result is None else f"proof: {result}")
    print(f"wrote {arguments.output}")
    if arguments.command != "export":
        if source.repository:
            keep_source(source, arguments.output, is_adapter=arguments.base is not None)
        print("\n".join([*notes, *what_follows(arguments.output / "config.yaml")]))
    elif to_push is not None:
        print(f"pushed to {push(arguments.output, to_push, private=arguments.private)}")


def convert(arguments: argparse.Namespace, source: Path, tree: dict[str, Any]) -> Comparison | None:
    """Import a directory as --output. Returns: the comparison, None if nothing is compared."""
    from megatron_lite.hf.adapters import import_adapter, is_adapter
    from megatron_lite.hf.importing import import_directory

    if is_adapter(source):
        if arguments.base is None:
            raise ConfigError(
                f"--input {source} is an adapter on another model; pass --base RUN, the run of that model (import its "
                "directory first)."
            )
        refuse_options_of_models(arguments, f"--input {source} is an adapter")  # one of the hub
        import_adapter(source, arguments.base, arguments.output, tree)
        return None
    if arguments.base is not None:
        raise ConfigError(f"--base is for an adapter, but --input {source} is a model; remove it.")
    return import_directory(
        source,
        arguments.output,
        tree,
        is_megatron=arguments.command != "import",
        copy_eop_to_gmask=arguments.copy_eop_to_gmask,
        verify=not arguments.no_verify,
        tolerance=TOLERANCE if arguments.tolerance is None else arguments.tolerance,
    )


def require_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that contradict each other or have no effect, before anything is read."""
    tolerance = arguments.tolerance
    if tolerance is not None and not tolerance >= 0:
        raise ConfigError(f"--tolerance is {tolerance}; it must be 0 or more.")
    if arguments.command == "export" and arguments.adapter:
        refuse_options_of_models(arguments, "--adapter writes the updates alone")
    if arguments.command == "export" and arguments.sentence_transformers:
        require_sentence_transformers(arguments)
    if arguments.command == "import" and (Path(arguments.input) / ADAPTER_CONFIG).exists():
        refuse_options_of_models(arguments, f"--input {arguments.input} is an adapter")
    if tolerance is not None and arguments.no_verify:
        raise ConfigError(
            f"--tolerance is {tolerance:g}, but --no-verify compares nothing; remove one of them."
        )


def require_sentence_transformers(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for what does not go with --sentence-transformers, and without the package that proves it."""
    if arguments.adapter or arguments.layout == "released":
        raise ConfigError(
            "--sentence-transformers writes a whole model in the layout huggingface; remove --adapter and --layout."
        )
    if not arguments.no_verify and importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError(
            "--sentence-transformers compares vectors with the package sentence-transformers; install it "
            "(pip install sentence-transformers), or add --no-verify."
        )


def refuse_options_of_models(arguments: argparse.Namespace, reason: str) -> None:
    """Raise ConfigError for the given options that an adapter's files leave without effect, all of them at once."""
    values = {f"--{name.replace('_', '-')}": getattr(arguments, name, None) for name in _OF_MODELS}
    given = [option for option, value in values.items() if value]
    given += ["--tolerance"] * (arguments.tolerance is not None)
    given += ["--layout released"] * (getattr(arguments, "layout", None) == "released")
    if given:
        raise ConfigError(
            f"{reason}: one file of weights under the names of transformers' classes, and no logits to compare; remove "
            f"{', '.join(given)}."
        )


def find_source(text: str, is_hub: bool) -> Snapshot:
    """The directory of an import; that of a name of the hub is fetched. Says which it is where it could be both.

    Raises: DataError.
    """
    if not text:
        raise ConfigError("--input is empty; pass the directory with the weights.")
    name = hub_name(text) if is_hub else None
    if name is None:
        remedy = "pass the directory with the weights"
        require_directory(Path(text), f"{remedy}, or a hub name such as org/name@main" if is_hub else remedy)
        if is_hub and could_be_hub_name(text):
            print(
                f"--input {text}: using the directory {Path(text).resolve()}, not the hub model of that name"
            )
        return Snapshot(Path(text), "", "")
    again = "`python scripts/convert_checkpoint.py import --input DIR --output RUN`"
    found = fetch(name, "--input", again, wanted)
    print(f"--input {text}: {found} of the hub, in {found.directory}")
    return found


def keep_source(source: Snapshot, run: Path, is_adapter: bool) -> None:
    """Note in the run's directory of which repository and commit its first weights are, or an adapter's updates."""
    # An adapter's run has the note of --base already, from which an export of its updates names the base model.
    name = "adapter_source.json" if is_adapter else "source.json"
    described = {"repository": source.repository, "commit": source.commit}
    write_whole(run / name, (json.dumps(described, indent=2) + "\n").encode(), "--output")


def _unverified(arguments: argparse.Namespace) -> str:
    if arguments.no_verify:
        return "--no-verify"
    return (
        "updates of LoRA compute nothing alone; an export of the whole model, without --adapter, is compared"
    )


def require_push(arguments: argparse.Namespace) -> HubName | None:
    """The repository to push to, if one is given. Raises: ConfigError before anything is written."""
    if arguments.push_to_hub is None:
        if arguments.private:
            raise ConfigError("--private needs --push-to-hub; pass --push-to-hub ORG/NAME, or remove it.")
        return None
    name = require_hub_name(arguments.push_to_hub, "--push-to-hub")
    require_token("--push-to-hub")
    return name


def what_follows(path: Path) -> list[str]:
    """What the configuration of an imported run trains, and the commands for a corpus and for the training."""
    config = load_config([path])
    names = ", ".join(choice.name for choice in config.objective_choices)
    batch, tokenizer = config.batch, config.tokenizer
    if config.task is not None:
        return _commands_of_task(path, config.task)
    lines = [
        f"{path} trains {names} on samples of {config.data.sequence_length:,} tokens, global batch "
        f"{batch.global_batch_size}, micro-batch {batch.micro_batch_size}, for {config.training.steps:,} "
        f"steps with {config.schedule.warmup_steps:,} warmup steps; edit this file or pass "
        "section.key=value to change it"
    ]
    if tokenizer is None or config.decoder is not None or config.data.train:
        return lines
    given = ["--tokenizer-kind", tokenizer.kind, "--tokenizer-path", tokenizer.path]
    given += ["--added-tokens", tokenizer.added_tokens]
    given += [] if tokenizer.vocab_size is None else ["--vocab-size", str(tokenizer.vocab_size)]
    given += ["--no-lowercase"] * (tokenizer.kind == "bert_wordpiece" and not tokenizer.lowercase)
    given += ["--shared-command-tokens"] * (not tokenizer.fixed_command_tokens)
    for role, token in tokenizer.roles.items():
        given += ["--token-role", f"{role}={token}"]
    corpus = ["python", "scripts/preprocess_data.py", "--input", "FILE", "--output", "data/corpus", *given]
    train = ["python", "pretrain_glm.py", "--config", str(path), "data.train=[{prefix: data/corpus}]"]
    return [
        *lines,
        f"next: {shlex.join(corpus)}",
        f"then: {shlex.join(train)}",
        f"or, on a task (docs/tasks.md): {_tuning(path, 'TASK.yaml')}",
    ]


def _tuning(path: Path, task: str, *settings: str) -> str:
    """The command that tunes the run of a configuration on a task."""
    run = str(path.parent)
    options = ["--checkpoint", run, "--task", task, "--output", f"{run}-tuned"]
    return shlex.join(["python", "scripts/finetune.py", *options, *settings])


def _commands_of_task(path: Path, task: TaskConfig) -> list[str]:
    """Write the section `task` beside the configuration of an imported head, and say how it is measured and tuned."""
    file, run = path.with_name("task.yaml"), str(path.parent)
    section = {
        name: to_tree(getattr(task, name))
        for name, field in TaskConfig.__dataclass_fields__.items()
        if getattr(task, name) not in (field.default, {})
    }
    write_whole(file, yaml.safe_dump({"task": section}, sort_keys=False).encode(), "--output")
    script, labelled = ["python", "scripts/evaluate.py"], "task.validation=[FILE]"
    measure = [*script, "--checkpoint", run, labelled]
    return [
        f"{path} has the head of a task, in {file}; FILE has a line of JSON for each sample, see docs/tasks.md",
        f"next: {shlex.join(measure)}",
        f"or: {_tuning(path, str(file), 'task.train=FILE', labelled)}",
    ]


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
