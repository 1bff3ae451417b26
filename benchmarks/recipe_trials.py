#!/usr/bin/env python3
"""Trials of the laptop's recipe in fewer steps, each with another setting or other weights of the text.

    bash scripts/laptop.sh
    python benchmarks/recipe_trials.py recipe query-key-norm --laptop laptop --work laptop/trials --blimp blimp/data

A trial is configs/laptop.yaml with --steps, its two phases and schedule in proportion, and what TRIALS says; experts is
configs/laptop-experts.yaml in the same way. --seeds are runs of their own. Each is scored on held-out sentences of the
test split and, with --blimp, on minimal pairs, both written from left to right. The table has all that is below --work.

For text-weights the corpus is split by its packages: 15 % of the tokens are documentation, 8 % religious, no
dictionaries, the rest other prose. A document stays in its split, so no held-out sentence is trained on.

The same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
from benchmarks.arguments import check_at_least, check_once, write_json
from benchmarks.same_hours import (
    LAPTOP_CONFIG,
    ROOT,
    check_pairs,
    knowledge,
    mean_text,
    quoted,
    scorer_of_ours,
)
from data_utils.common.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.common.files import require_directory, require_writable, write_whole
from data_utils.common.untrusted import load_json
from scripts.laptop.collect_text import SOURCES

STEPS = 5400  # of configs/laptop.yaml, and those of its parts
FIRST_PHASE, WARM_UP, DECAY = 4800 / STEPS, 200 / STEPS, 1300 / STEPS
SHORT_SPANS = "{token_prob: 0.3, single_span_prob: 0.1}"
ONE_PHASE = ("phases=[]", "data.sequence_length=128")
TRIALS = {
    "recipe": (),
    "no-short-spans": ONE_PHASE,  # rows of 128 tokens to the end
    "few-short-spans": (
        *ONE_PHASE,
        "blank_infilling.token_prob=0.0625",
    ),  # a sixteenth of the samples, throughout
    "text-weights": (),
    "query-key-norm": ("model.query_key_norm=true",),
    "experts": (),  # configs/laptop-experts.yaml, of as many FLOPs for a token
}
SHARES = {"documentation": 0.15, "religion": 0.08, "prose": 0.77}  # of the tokens; dictionaries have none


def kind_of(package: str) -> str:
    """What a package's text is, a key of SHARES, or dictionaries."""
    if package.startswith("dict-"):
        return "dictionaries"
    if package.startswith("sword-"):
        return "religion"
    technical = {source.package.partition("|")[0] for source in SOURCES if source.technical}
    return "documentation" if package in technical else "prose"


def weighted_text(options: argparse.Namespace) -> str:
    """The setting of the corpora with their shares, which are made once. Raises: DataError."""
    directory = options.work / "text"
    prefixes = {kind: directory / kind / "corpus" for kind in SHARES}
    texts: dict[str, list[str]] = {kind: [] for kind in SHARES}
    with (options.laptop / "corpus.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            texts.get(kind_of(json.loads(line)["source"]), []).append(line)
    for kind, prefix in prefixes.items():
        if not texts[kind]:
            raise DataError(
                f"{options.laptop}/corpus.jsonl has no text of {kind}; text-weights needs the packages."
            )
        text = directory / f"{kind}.jsonl"
        write_whole(text, "".join(texts[kind]).encode(), "--work")
        if not Path(f"{prefix}_test.json").exists():  # the last file
            command(
                options, "scripts/preprocess_data.py", "--input", text, "--output", prefix, "--overwrite",
                "--deduplicate", "--tokenizer-kind", "hf_json", "--tokenizer-path",
                options.laptop / "tokenizer/tokenizer.json", "--split", "train=0.98,validation=0.01,test=0.01",
            )  # fmt: skip
    corpora = (
        f"{{name: {kind}, prefix: {quoted(Path(f'{prefix}_train'))}, tokens: {SHARES[kind]}}}"
        for kind, prefix in prefixes.items()
    )
    return f"data.train=[{', '.join(corpora)}]"


def command(options: argparse.Namespace, *given: str | Path) -> None:
    """A command of this project. Raises: DataError with the end of what it said."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, *map(str, given)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise DataError(f"{given[0]} failed: {' '.join((done.stdout + done.stderr).split())[-800:]}")


def config_of(trial: str) -> Path:
    return ROOT / "configs/laptop-experts.yaml" if trial == "experts" else LAPTOP_CONFIG


def settings(options: argparse.Namespace, trial: str, seed: int) -> list[str]:
    """Of a trial, on top of its file."""
    tokenizer, data = options.laptop / "tokenizer/tokenizer.json", options.laptop / "data/corpus"
    warm_up, decay = round(options.steps * WARM_UP), round(options.steps * DECAY)
    parts = (
        f"{{kind: linear, steps: {warm_up}, start: 0, end: 1}}, "
        f"{{kind: constant, steps: {options.steps - warm_up - decay}}}, {{kind: 1-sqrt, steps: {decay}, end: 0}}"
    )
    first_phase = round(options.steps * FIRST_PHASE)
    return [
        f"tokenizer.path={quoted(tokenizer)}", f"data.train=[{{prefix: {quoted(Path(f'{data}_train'))}}}]",
        f"data.validation=[{{prefix: {quoted(Path(f'{data}_validation'))}}}]",
        f"phases=[{{steps: {first_phase}, sequence_length: 128}}, {{blank_infilling: {SHORT_SPANS}}}]",
        f"training.steps={options.steps}", f"schedule.parts=[{parts}]", f"training.seed={seed}",
        f"training.precision={options.precision}", f"run.directory={quoted(options.work / trial / str(seed) / 'run')}",
        *TRIALS[trial], *([weighted_text(options)] if trial == "text-weights" else []), *options.set,
    ]  # fmt: skip


def run_trial(options: argparse.Namespace, trial: str, seed: int) -> None:
    """Train and score, unless it is done. Raises: ConfigError where it was done with other settings."""
    path, given = options.work / trial / str(seed) / "scores.json", settings(options, trial, seed)
    of = {
        "settings": given,
        "pairs": options.pairs,
        "sentences": options.sentences,
        "blimp": options.blimp is not None,
    }
    if not path.exists():
        command(options, "pretrain_glm.py", "--config", config_of(trial), *given)
        write_json(path, {**knowledge(options, scorer_of_ours(path.parent / "run")), "of": of})
    if load_json(path, "scores")["of"] != of:
        raise ConfigError(f"{path} is of other settings; give another --work.")


def table(options: argparse.Namespace) -> str:
    """Mean and deviation over the seeds of each trial below --work."""
    lines = ["| trial | seeds | nats per word | BLiMP |", "|---|---|---|---|"]
    for trial in TRIALS:
        found = [load_json(path, "scores") for path in sorted((options.work / trial).glob("*/scores.json"))]
        if found:
            nats = mean_text([one["nats_per_word"] for one in found])
            right = mean_text([100 * one["blimp"] for one in found if "blimp" in one], ".1f")
            lines.append(f"| {trial} | {len(found)} | {nats} | {right} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "trials",
        nargs="+",
        choices=tuple(TRIALS),
        help=f"one or more of {', '.join(TRIALS)}",
        metavar="TRIAL",
    )
    add("--laptop", type=Path, required=True, help="directory of scripts/laptop.sh: text, tokenizer and data")
    add("--work", type=Path, required=True, help="directory of the runs and their scores")
    add("--blimp", type=Path, help="BLiMP's files; without them only the loss is measured")
    add("--pairs", type=int, default=200, help="minimal pairs of each paradigm (default: 200)")
    add("--sentences", type=int, default=400, help="held-out sentences (default: 400)")
    add("--seeds", type=int, nargs="+", default=[1234], help="a run each (default: 1234)")
    add("--steps", type=int, default=STEPS // 6, help="of a run (default: 900, a sixth of the laptop's)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="default: all cores")
    add("--precision", choices=("bf16", "fp32"), default="bf16", help="default: bf16")
    add("--set", nargs="+", default=[], metavar="section.key=value", help="further settings of all trials")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "pairs", "sentences", "threads")
    check_at_least(options, 60, "steps")
    check_at_least(options, 0, "seeds")
    check_once(options, "trials", "seeds")
    require_writable(options.work / "file", "--work")
    options.laptop, options.work = options.laptop.resolve(), options.work.resolve()
    for name in ("tokenizer", "data"):
        require_directory(options.laptop / name, "run scripts/laptop.sh, or give --laptop its directory")
    if options.blimp is not None:
        check_pairs(options)
    for seed in options.seeds:
        for trial in options.trials:
            run_trial(options, trial, seed)
    print(table(options))
    return 0


if __name__ == "__main__":
    run_command(main)
