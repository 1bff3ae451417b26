#!/usr/bin/env python3
"""Measure a checkpoint on tasks of lm_eval (EleutherAI's harness), without a network.

    python scripts/harness.py --checkpoint runs/glm --tasks own_choices --include-path tasks --json numbers.json

Takes what scripts/evaluate.py takes: runs in any layout, single checkpoints, exported directories. --include-path names
a directory with tasks as YAML files; they may name Python functions, so take only files that you trust.
Needs lm_eval: pip install -r requirements-lm-eval.txt
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import difflib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

# isort: split
from data_utils.common.errors import ArgumentParser, ConfigError, run_command
from data_utils.common.files import require_directory, require_writable, write_whole
from data_utils.common.settings import merge, parse_override
from data_utils.tasks.config import FORMS, MASKS
from megatron_lite.checkpoint.resolve_path import MODEL_OR_EXPORT_PATH, resolve_model

BOOTSTRAP = 100  # draws for standard errors of perplexities and F1


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="PATH", required=True, help="run, checkpoint or export")
    text = "names of tasks, groups or tags; * is a wildcard"
    add("--tasks", required=True, metavar="NAME[,NAME]", help=text)
    add("--include-path", type=Path, metavar="DIR", help="directory with task YAML files")
    add("--online", action="store_true", help="include lm_eval's own tasks, whose data are downloaded")
    add("--json", type=Path, metavar="FILE", help="write the results to this JSON file")
    add("--num-fewshot", type=int, metavar="N", help="number of few-shot examples")
    add("--limit", type=int, metavar="N", help="only the first N samples of each task")
    add("--gen-kwargs", metavar="KEY=VALUE[,...]", help="overrides of the tasks' generation_kwargs")
    add("--tokenizer", type=Path, help="tokenizer path, if it moved since training")
    add("--batch", type=int, default=16, metavar="TEXTS", help="batch size of a forward pass (default 16)")
    text = "input format (default: the run's objective)"
    add("--form", default="auto", choices=FORMS, help=text)
    text = "GLM: mask token of the blank (default: gmask if the run was trained with it)"
    add("--mask", default="auto", choices=MASKS, help=text)
    add("--score-end", action="store_true", help="append the end-of-text token to each continuation")
    text = "treat [MASK] in a context as the blank that the continuation fills"
    add("--allow-masks", action="store_true", help=text)
    add(
        "--sequence-length",
        type=int,
        metavar="TOKENS",
        help="maximum input length (default: the model's positions)",
    )
    add(
        "--stride",
        type=int,
        metavar="TOKENS",
        help="perplexity: stride between windows (default: half a window)",
    )
    add("--left-to-right", action="store_true", help="perplexity with GLM: causal attention over the context")
    text = "perplexity without each text's first token, as GLM's published figures have it"
    add("--skip-first-token", action="store_true", help=text)
    text = "causal: no eos before contexts, as in lm_eval's own models"
    add("--no-start", action="store_true", help=text)
    text = "settings of an export that has none"
    add("overrides", nargs="*", metavar="section.key=value", help=text)
    arguments = parser.parse_intermixed_args()
    least = {"batch": 1, "limit": 1, "stride": 1, "sequence_length": 1, "num_fewshot": 0}
    for name, lowest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < lowest:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {lowest}.")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    arguments.checkpoint = resolve_model(arguments.checkpoint, "--checkpoint", MODEL_OR_EXPORT_PATH)
    if arguments.include_path is not None:
        require_directory(arguments.include_path, "pass the directory with the task YAML files")
    elif not arguments.online:
        raise ConfigError("no tasks given; pass --include-path DIR with task YAML files, or --online.")
    if arguments.json is not None:
        require_writable(arguments.json, "--json")
    tree: dict[str, Any] = {}
    for override in arguments.overrides:
        tree = merge(tree, parse_override(override))
    require_lm_eval()
    # Before anything reads them. Draws in processes of their own would cost more than they save.
    os.environ.update(DISABLE_MULTIPROC="1")
    if not arguments.online:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.finetune.checkpoints import opened
    from megatron_lite.finetune.harness import Harness, HarnessOptions
    from megatron_lite.finetune.lm_eval_model import LocalTasks
    from megatron_lite.finetune.setup import is_export

    if arguments.overrides and not is_export(arguments.checkpoint):
        raise ConfigError(
            f"settings are given ({arguments.overrides[0]}), but the run {arguments.checkpoint} has its own; "
            "remove them."
        )
    manager = LocalTasks(include_path=arguments.include_path, include_defaults=arguments.online)
    names = task_names(arguments.tasks, manager.all_tasks)
    asking = HarnessOptions(
        form=arguments.form,
        mask=arguments.mask,
        bidirectional=not arguments.left_to_right,
        sequence_length=arguments.sequence_length,
        stride=arguments.stride,
        score_end=arguments.score_end,
        allow_masks=arguments.allow_masks,
        first_token=not arguments.skip_first_token,
        no_start=arguments.no_start,
    )
    with opened(arguments.checkpoint, arguments.tokenizer, tree) as run:
        harness = Harness(run.with_model(), asking, arguments.batch)
        results = measure(harness, manager, names, arguments)
    print(table(results))
    for line in remarks(harness.report()):
        print(line)
    if arguments.json is not None:
        write_whole(arguments.json, (as_json(results, harness.report()) + "\n").encode(), "--json")


def require_lm_eval() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "scripts/harness.py needs the package lm_eval, which is not installed; run pip install -r "
            "requirements-lm-eval.txt, or use scripts/evaluate.py."
        )


def task_names(given: str, known: list[str]) -> list[str]:
    """The names of `given`, patterns resolved. Raises: ConfigError for one that matches none."""
    from lm_eval.utils import pattern_match

    found: list[str] = []
    for name in filter(None, (part.strip() for part in given.split(","))):
        matching = pattern_match([name], known)
        if not matching:
            close = difflib.get_close_matches(name, known, n=1) or known[:5]
            raise ConfigError(
                f"--tasks contains {name}, which is not one of the {len(known)} tasks found; did you mean "
                f"{' or '.join(close)}?"
                if known
                else f"--tasks contains {name}, but no YAML file there defines a task; correct --include-path."
            )
        found += matching
    if not found:
        raise ConfigError("--tasks is empty; pass one or more names, separated by commas.")
    return list(dict.fromkeys(found))


def measure(harness: Any, manager: Any, names: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    import lm_eval

    from megatron_lite.finetune.lm_eval_model import CheckpointLM

    return lm_eval.simple_evaluate(
        model=CheckpointLM(harness),
        tasks=names,
        task_manager=manager,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        gen_kwargs=arguments.gen_kwargs,
        bootstrap_iters=BOOTSTRAP,
        log_samples=False,
    )


def table(results: dict[str, Any]) -> str:
    from lm_eval.utils import make_table

    return make_table(results).rstrip()


def remarks(report: dict[str, Any]) -> list[str]:
    """Remarks on the numbers of a report, one line each."""
    lines = []
    if report["cut"]:
        total = sum(report["requests"].values())
        lines.append(f"{report['cut']} of {total} contexts were truncated on the left to fit the model.")
    return [*lines, *([f"Note: {report['note']}."] if "note" in report else [])]


def as_json(results: dict[str, Any], report: dict[str, Any]) -> str:
    """lm_eval's results without the samples, and how they came about."""
    from lm_eval.utils import handle_non_serializable

    whole = {**{name: value for name, value in results.items() if name != "samples"}, "harness": report}
    return json.dumps(whole, indent=2, default=handle_non_serializable, ensure_ascii=False)


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
