#!/usr/bin/env python3
"""Causes that keep a small model from learning to look back: the initial scales of words and of positions, or the rate?

    python benchmarks/recall.py --plot recall.png

Trains scripts/quickstart/recall.yaml's task with every way to begin, a seed's on the same fresh samples: of two keys
with a word each, the word of the key that is named again. Who cannot look back has half of them right. A table shows
the share of right words at each evaluation, the mean of the seeds, and their deviation at the end.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
from benchmarks.arguments import check_at_least, check_places, write_json
from benchmarks.quickstart_runs import ROOT, records
from benchmarks.second_positions import Curves, draw
from data_utils.common.errors import ArgumentParser, DataError, expanded_path, run_command
from data_utils.common.files import require_writable
from data_utils.tasks.readers.synthetic import synthetic_vocabulary

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TASK = "scripts/quickstart/recall.yaml"
BATCH, EVALUATIONS = 32, 8  # samples of a step; evaluations of a run
SMALL = ("model.init_words_std=0.1", "model.init_positions_std=0.1")  # as all other weights
# Name -> settings on top of the task's file.
WAYS: dict[str, tuple[str, ...]] = {
    "all at 0.1": SMALL,
    "all at 0.1, rate x 3": (*SMALL, "optimizer.lr=1e-2"),
    "words at 0.8": ("model.init_positions_std=0.1",),
    "words and positions at 0.8": (),
    "the same, tied head": ("model.tie_word_embeddings=true",),
}


def curve(options: Any, work: Path, seed: int, way: str) -> list[dict[str, float]]:
    """The share of right words after each part of a run. Raises DataError if it fails."""
    run = work / f"{list(WAYS).index(way)}_{seed}_{options.steps}"
    if not (run / "results.json").exists():
        command = [sys.executable, "scripts/finetune.py", "--config", TASK, "--task", TASK]
        command += ["--output", str(run), f"tokenizer.path={work / 'vocab.txt'}", f"training.seed={seed}"]
        command += [
            f"task.train=recall:pairs=2,samples={BATCH * options.steps},seed={100 + seed}",
            *WAYS[way],
        ]
        command += [f"finetune.evaluations_per_epoch={EVALUATIONS}", "run.tensorboard=false"]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        if done.returncode:
            raise DataError(f"{run.name} failed: {' '.join((done.stdout + done.stderr).split())[-800:]}")
    return records(run / f"seed_{seed}", "scores", ("step", "accuracy"))


def table(curves: Curves) -> str:
    """A row for each way to begin, a column for each evaluation."""
    steps = [int(point["step"]) for point in next(iter(curves.values()))[0]]
    lines = [
        f"| begins with | {' | '.join(map(str, steps))} | deviation |",
        f"|---|{'---|' * (len(steps) + 1)}",
    ]
    for way, of_seeds in curves.items():
        shares = list(zip(*([point["accuracy"] for point in one] for one in of_seeds), strict=True))
        cells = [f"{statistics.mean(part):.2f}" for part in shares]
        last = f"{statistics.stdev(shares[-1]):.3f}" if len(of_seeds) > 1 else ""
        lines.append(f"| {way} | {' | '.join(cells)} | {last} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=1600, help="of each run, of 32 samples (default: 1600)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--work", type=Path, help="directory that keeps the runs, and goes on after an interruption")
    add("--json", type=expanded_path, metavar="FILE", help="write the curves there")
    add("--plot", type=Path, metavar="FILE", help="draw them there")
    options = parser.parse_args(arguments)
    check_at_least(options, EVALUATIONS, "steps")
    check_at_least(options, 0, "seeds")
    check_places(options.work, options.json)
    if options.plot is not None:
        require_writable(options.plot, "--plot")
    curves: dict[str, list[list[dict[str, float]]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        (work / "vocab.txt").write_text("".join(f"{word}\n" for word in (*SPECIAL, *synthetic_vocabulary())))
        for seed in options.seeds:
            for way, own in curves.items():
                own.append(curve(options, work, seed, way))
                print(f"{way}, seed {seed}: {own[-1][-1]['accuracy']:.3f}", flush=True)
    print(table(curves))
    if options.json is not None:
        write_json(options.json, curves)
    if options.plot is not None:
        draw(curves, options.plot, "accuracy", "right words (1 is possible, 0.5 a guess)")
    return 0


if __name__ == "__main__":
    run_command(main)
