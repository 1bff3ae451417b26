#!/usr/bin/env python3
"""Measure checkpoints: a task's metrics, or the validation losses of pretraining; predict with a tuned run.

    python scripts/evaluate.py --checkpoint runs/glm
    python scripts/evaluate.py --checkpoint runs/rte --task configs/tasks/rte.yaml [section.key=value]
    python scripts/evaluate.py --checkpoint runs/votes --predict new.jsonl --predictions out
    python scripts/evaluate.py --checkpoint runs/glm --minimal-pairs blimp/data --plot blimp.png

Takes runs in any layout, single checkpoints, exported directories, and the output of scripts/finetune.py, from which it
takes the best checkpoint of each seed. Without --task it is the task that the run was trained on; a pretraining run has
its validation losses measured as in training ('data.validation=[{prefix: PATH}]' measures other data). --predict takes
samples without labels, in the format of the task's files.

--minimal-pairs takes BLiMP's files as they are published, and needs no fine-tuning: how often does the acceptable
sentence of two get the higher score?

--sts, --retrieval and --reranking measure the vectors of texts (docs/embeddings.md), and take directories of
sentence-transformers too.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# isort: split
from data_utils.common.errors import ArgumentParser, ConfigError, DataError, expanded_path, run_command
from data_utils.common.files import require_named, require_writable, short_names, write_picture, write_whole
from data_utils.common.setting_files import load_yaml, shown
from data_utils.common.settings import build, merge, parse_override
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.minimal_pairs import SCORES, pair_files, read_minimal_pairs
from megatron_lite.checkpoint.resolve_path import resolve_models
from megatron_lite.finetune.setup import is_export, located_settings

BATCH = 16  # samples of a forward pass
# How a run reads a text, where its objectives or its positions leave that open.
PAIR_SETTINGS = ("form", "mask", "sequence_length")

if TYPE_CHECKING:
    from megatron_lite.finetune.checkpoints import CheckpointResult


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "run, checkpoint or export; repeatable"
    add("--checkpoint", type=Path, action="append", default=[], metavar="PATH", help=text)
    text = "task YAML, or a name in configs/tasks/; default: the run's task"
    add("--task", type=expanded_path, metavar="FILE", help=text)
    text = "directory or file of minimal pairs (BLiMP's JSON lines), instead of a task"
    add("--minimal-pairs", type=Path, metavar="PATH", help=text)
    text = (
        "minimal pairs: score of a sentence; left-to-right: its log probability; words, tokens: masked models, pseudo "
        "log likelihood; blanks: GLM, each word as a blank (default: words for masked models, blanks for GLM, else "
        "left-to-right)"
    )
    add("--score", choices=SCORES, help=text)
    text = "minimal pairs: only the first of each paradigm, for an estimate (default: all)"
    add("--pairs", type=int, metavar="COUNT", help=text)
    text = "vectors: files of two sentences and a score, joined; Spearman's correlation; repeatable"
    add("--sts", nargs="+", action="append", type=Path, default=[], metavar="FILE", help=text)
    text = "vectors: directory of BEIR (corpus.jsonl, queries.jsonl, qrels/test.tsv); repeatable"
    add("--retrieval", action="append", type=Path, default=[], metavar="DIR", help=text)
    text = "vectors: JSON lines of query, positive and negative; repeatable"
    add("--reranking", action="append", type=Path, default=[], metavar="FILE", help=text)
    add("--every-step", action="store_true", help="all checkpoints of each run instead of the latest")
    add("--tokenizer", type=Path, help="tokenizer path, if it moved since training")
    add("--batch", type=int, metavar="SAMPLES", help=f"batch size of a forward pass (default {BATCH})")
    add("--json", type=Path, metavar="FILE", help="write the results to this JSON file")
    add("--predictions", type=Path, metavar="DIR", help="write the predictions to this directory")
    text = "predict the samples of this file, in the format of the task's files; goes with --predictions"
    add("--predict", type=expanded_path, metavar="FILE", help=text)
    add("--plot", type=Path, metavar="FILE", help="plot the first metric over the steps (PNG, SVG or PDF)")
    add("overrides", nargs="*", metavar="section.key=value", help="settings on top of the task file")
    arguments = parser.parse_intermixed_args()
    if not arguments.checkpoint:
        raise ConfigError("no checkpoint given; pass --checkpoint RUN.")
    if arguments.predict is not None and arguments.predictions is None:
        raise ConfigError("--predict needs a place for its predictions; pass --predictions DIR.")
    if arguments.minimal_pairs is not None and (
        arguments.task is not None or arguments.predictions is not None
    ):
        raise ConfigError(
            "--minimal-pairs is no task, so --task and --predictions do not go with it; leave them out."
        )
    others = (arguments.task, arguments.minimal_pairs, arguments.predictions, arguments.batch, arguments.plot)
    if has_vectors(arguments) and any(each is not None for each in others):
        raise ConfigError(
            "--sts, --retrieval and --reranking measure vectors, with which --task, --minimal-pairs, --predictions, "
            "--batch and --plot do not go; leave them out."
        )
    if arguments.score is not None and arguments.minimal_pairs is None:
        raise ConfigError(
            "--score is how minimal pairs are scored; pass --minimal-pairs PATH, or leave it out."
        )
    if arguments.pairs is not None and arguments.minimal_pairs is None:
        raise ConfigError(
            "--pairs is how many minimal pairs are scored; pass --minimal-pairs PATH, or leave it out."
        )
    if arguments.pairs is not None and arguments.pairs < 1:
        raise ConfigError(f"--pairs is {arguments.pairs}; it must be a number of pairs, at least 1.")
    if arguments.batch is not None and arguments.batch < 1:
        raise ConfigError(f"--batch is {arguments.batch}; it must be a number of samples, at least 1.")
    return arguments


def has_vectors(arguments: argparse.Namespace) -> bool:
    return bool(arguments.sts or arguments.retrieval or arguments.reranking)


def main() -> None:
    arguments = parse_arguments()
    given = [path for each in arguments.checkpoint for path in resolve_models(each, "--checkpoint")]
    if arguments.json is not None:
        require_writable(arguments.json, "--json")
    if arguments.plot is not None:
        require_named(arguments.plot, "--plot")
    if arguments.predictions is not None:
        require_writable(arguments.predictions / "file", "--predictions")
    tree: dict[str, Any] = {} if arguments.task is None else load_yaml(arguments.task, "tasks")
    if arguments.task is not None and "task" not in tree:
        raise ConfigError(
            f"--task {arguments.task} has no section task; use a file like those in configs/tasks/."
        )
    for override in arguments.overrides:
        runs = [path for path in given if not is_export(path)]
        if runs and override.startswith("model."):
            raise ConfigError(
                f"{override} is given, but the run {runs[0]} has its own model; remove the setting."
            )
        tree = merge(tree, parse_override(override))
    if arguments.predict is not None:
        tree = merge(tree, {"task": {"validation": [], "test": [str(arguments.predict)]}})
    if arguments.minimal_pairs is not None:
        compare_pairs(arguments, given, tree)
        return
    if has_vectors(arguments):
        measure_vectors(arguments, given, tree)
        return
    # Imported here: mistakes in the arguments must not wait for torch.
    from megatron_lite.finetune.checkpoints import evaluate, steps_of

    checkpoints = [each for path in given for each in (steps_of(path) if arguments.every_step else [path])]
    if "task" not in tree and not any(map(is_export, given)):
        from megatron_lite.checkpoint.verify import find_manifest

        # By the manifests: opening a run reads the whole checkpoint for its checksums.
        configs = [find_manifest(path).trainer_state().config for path in checkpoints]
        if not any(config.get("task") or config.get("tasks") for config in configs):
            measure_validation(arguments, checkpoints, tree)
            return
    measured = []
    for checkpoint in checkpoints:
        with located_settings([], arguments.task, arguments.overrides):
            measured.append(evaluate(checkpoint, tree, arguments.batch or BATCH, arguments.tokenizer))
        print(f"measured {checkpoint}", flush=True)
    print(table(measured))
    if arguments.json is not None:
        write_whole(arguments.json, (json.dumps(as_json(measured), indent=2) + "\n").encode(), "--json")
    if arguments.predictions is not None:
        write_all_predictions(arguments.predictions, measured)
    if arguments.plot is not None:
        plot(arguments.plot, measured)


def measure_validation(
    arguments: argparse.Namespace, checkpoints: Sequence[Path], tree: Mapping[str, Any]
) -> None:
    """The validation losses of pretraining runs, a line for all corpora and for each."""
    from megatron_lite.inference.open_run import open_run
    from megatron_lite.inference.validation import one_process, validation_losses
    from megatron_lite.telemetry.reports import validation_line

    if arguments.predictions or arguments.plot or arguments.batch:
        raise ConfigError(
            f"{checkpoints[0]} was pretrained, and has validation losses alone: --predictions, --plot and "
            "--batch need a task; pass --task FILE, or leave them out (batch.micro_batch_size=N is the batch size)."
        )
    measured = []
    with one_process() as context:
        for path in checkpoints:
            run = open_run(path, arguments.tokenizer)
            with located_settings([], None, arguments.overrides):
                found = validation_losses(run, tree, context)
            for corpora, values in found.items():
                print(f"{path} | {corpora} | {validation_line(run.checkpoint.step, values)}", flush=True)
            measured.append({"checkpoint": str(path), "step": run.checkpoint.step, "validation": found})
    if arguments.json is not None:
        write_whole(arguments.json, (json.dumps(measured, indent=2) + "\n").encode(), "--json")


def measure_vectors(arguments: argparse.Namespace, given: Sequence[Path], tree: Mapping[str, Any]) -> None:
    """The vectors of every checkpoint, a line for each set of files."""
    runs = [path for path in given if not is_export(path)]
    if runs and set(tree) - {"embedding"}:
        raise ConfigError(
            f"settings of {', '.join(sorted(set(tree) - {'embedding'}))} are given, but the run {runs[0]} has its own; "
            "remove them."
        )
    from data_utils.tasks.readers.similarity import read_reranking, read_retrieval, read_scored_pairs
    from megatron_lite.embedding.scores import VectorScores, require_ir_measures
    from megatron_lite.finetune.checkpoints import opened, steps_of

    if arguments.retrieval or arguments.reranking:
        require_ir_measures()
    # All files first: a mistake in the last must not wait for the others' vectors.
    tasks: list[tuple[str, str, Any]] = []
    for files in arguments.sts:
        pairs = read_scored_pairs(files)
        name = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
        if pairs.without_score:
            print(f"{name}: {pairs.without_score} lines without a score are left out")
        tasks.append((name, "sts", pairs))
    tasks += [(str(path), "retrieval", read_retrieval(path)) for path in arguments.retrieval]
    tasks += [(str(path), "reranking", read_reranking(path)) for path in arguments.reranking]
    measured: list[dict[str, Any]] = []
    checkpoints = [each for path in given for each in (steps_of(path) if arguments.every_step else [path])]
    for path in checkpoints:
        with opened(path, arguments.tokenizer, tree) as run:
            scores = VectorScores(run.with_model(), tree.get("embedding", {}))
            for name, kind, task in tasks:
                found = getattr(scores, kind)(task)
                numbers = "  ".join(f"{measure} {value:.2f}" for measure, value in found.items())
                print(f"{path} | {name} | {numbers}", flush=True)
                measured.append({"checkpoint": str(path), "kind": kind, "name": name, "measures": found})
    if arguments.json is not None:
        write_whole(arguments.json, (json.dumps(measured, indent=2) + "\n").encode(), "--json")


def compare_pairs(arguments: argparse.Namespace, given: Sequence[Path], tree: Mapping[str, Any]) -> None:
    """Score the minimal pairs with every checkpoint."""
    settings = pair_settings(tree, [path for path in given if not is_export(path)])
    files = {file.resolve() for file in pair_files(arguments.minimal_pairs)}
    if arguments.json is not None and arguments.json.resolve() in files:
        raise ConfigError(f"--json {arguments.json} is a file of the minimal pairs; choose another --json.")
    pairs = read_minimal_pairs(arguments.minimal_pairs, arguments.pairs)
    from megatron_lite.finetune import minimal_pairs
    from megatron_lite.finetune.checkpoints import opened, steps_of
    from megatron_lite.finetune.harness import Harness, HarnessOptions, make_template

    options = HarnessOptions(**settings)
    # Hours of scores would be spent before a later checkpoint is found that cannot be scored. One is checked anyway.
    for path in given if len(given) > 1 else ():
        with opened(path, arguments.tokenizer, tree) as run:
            run.require_one_transformer()
            template = make_template(run, options)
            minimal_pairs.check(template, pairs, arguments.score or minimal_pairs.default_score(template))
    measured = {}
    for checkpoint in dict.fromkeys(
        checkpoint for path in given for checkpoint in (steps_of(path) if arguments.every_step else [path])
    ):
        with opened(checkpoint, arguments.tokenizer, tree) as run:
            harness = Harness(run.with_model(), options, size=arguments.batch or BATCH)
            score = arguments.score or minimal_pairs.default_score(harness.template)
            measured[str(checkpoint)] = minimal_pairs.measure(harness, pairs, score)
        print(f"measured {checkpoint}", flush=True)
        if arguments.json is not None:  # now, so that an interruption loses one checkpoint alone
            numbers = {name: scores.as_json() for name, scores in measured.items()}
            write_whole(arguments.json, (json.dumps(numbers, indent=2) + "\n").encode(), "--json")
    print(minimal_pairs.table(measured))
    if arguments.plot is not None:
        minimal_pairs.draw(arguments.plot, measured)


def pair_settings(tree: Mapping[str, Any], runs: Sequence[Path]) -> dict[str, Any]:
    """The settings of PAIR_SETTINGS that are given.

    Args: runs: checkpoints that are no exports.
    Raises: ConfigError for settings that would change nothing.
    """
    others = ", ".join(sorted(set(tree) - {"task"}))
    if runs and others:
        raise ConfigError(f"settings of {others} are given, but the run {runs[0]} has its own; remove them.")
    task = tree.get("task", {})
    if not isinstance(task, Mapping) or set(task) - set(PAIR_SETTINGS):
        allowed = ", ".join(f"task.{name}" for name in PAIR_SETTINGS)
        raise ConfigError(f"task is {shown(task)}, but minimal pairs take only {allowed}; remove the others.")
    built = build(TaskConfig, {"name": "pairs", "kind": "blanks", "reader": "jsonl", **task}, "task.")
    return {name: getattr(built, name) for name in task}


def table(measured: Sequence[CheckpointResult]) -> str:
    """A line for each checkpoint and file."""
    lines = []
    for one in measured:
        for file, found in one.files.items():
            numbers = [f"{name} {value:.4f}" for name, value in found.metrics.items()] or ["no labels"]
            cut = [f"cut {found.cut}"] if found.cut else []
            lines.append(
                [one.name, f"step {one.step}", file, f"{len(found.records)} samples", *numbers, *cut]
            )
    columns = max(map(len, lines))
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(columns)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=False)).rstrip() for line in lines
    )


def as_json(measured: Sequence[CheckpointResult]) -> list[dict[str, Any]]:
    from megatron_lite.finetune.run import file_result

    return [
        {
            "checkpoint": one.name,
            "step": one.step,
            "task": one.task.settings.name,
            "files": {file: file_result(found) for file, found in one.files.items()},
        }
        for one in measured
    ]


def write_all_predictions(directory: Path, measured: Sequence[CheckpointResult]) -> None:
    from megatron_lite.finetune.run import write_file_predictions

    for number, one in enumerate(measured):
        own = directory if len(measured) == 1 else directory / str(number)
        write_file_predictions(own, one.task.settings, one.files, "--predictions")


def plot(path: Path, measured: Sequence[CheckpointResult]) -> None:
    """The first metric of each file over the steps, a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    metric = ""
    for one in measured:
        given = Path(one.name)
        run = str(given.parent.parent if given.name.startswith("step_") else given)
        for file, found in one.files.items():
            if found.metrics:
                metric = next(iter(found.metrics))
                lines.setdefault((run, file), []).append((one.step, found.metrics[metric]))
    runs, files = short_names(run for run, _ in lines), short_names(file for _, file in lines)
    for (run, file), points in lines.items():
        # A legend leaves out labels that begin with _.
        label = f" {runs[run]}, {files[file]}"
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    if not lines:
        plt.close(figure)
        raise DataError(f"--plot {path}: no file has labels, so there is nothing to plot; remove it.")
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    for text in axes.legend().get_texts():
        text.set_parse_math(False)
    write_picture(path, figure, "--plot")
    plt.close(figure)


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
