"""Runs of configs/tiny.yaml on the quickstart's corpus, with settings on top, as benchmarks compare them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_utils.common.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
LOSSES = {"loss": "all", "loss/token": "short spans", "loss/document": "long spans"}


def settings_of(options: Any, run: Path, seed: int, evaluations: int) -> list[str]:
    """Settings on top of the file: `options` has quickstart (a directory), steps and samples (of a validation)."""
    data = options.quickstart.resolve()
    return [
        f"tokenizer.path={data / 'tokenizer/tokenizer.json'}",
        f"data.train=[{{prefix: {data / 'data/corpus_train'}}}]",
        f"data.validation=[{{prefix: {data / 'data/corpus_validation'}}}]",
        f"training.steps={options.steps}",
        f"training.eval_interval={max(1, options.steps // evaluations)}",
        f"training.eval_samples={options.samples}",
        f"training.seed={seed}",
        "checkpoint.save_interval=0",
        "run.tensorboard=false",
        "run.peak_tflops=1",
        f"run.directory={run}",
    ]


def train(run: Path, settings: Sequence[str], threads: int | None) -> list[dict[str, float]]:
    """Train a run, and return its validations. Raises DataError if it fails."""
    start(run, settings, threads)
    return validations(run)


def start(run: Path, settings: Sequence[str], threads: int | None) -> None:
    """Train a run to its end. Raises DataError if it fails."""
    command = [sys.executable, "pretrain_glm.py", "--config", "configs/tiny.yaml", *settings]
    own = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"{run.name} failed: {' '.join((done.stdout + done.stderr).split())[-800:]}")


def validations(run: Path) -> list[dict[str, float]]:
    """The step and the losses of each validation of a run, none if it has not begun."""
    return records(run, "validation", ("step", *LOSSES))


def records(run: Path, kind: str, kept: Sequence[str]) -> list[dict[str, float]]:
    """The fields `kept` of the records of a kind that a run has written."""
    record = run / "metrics.jsonl"
    text = record.read_text(encoding="utf-8") if record.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    return [{name: line[name] for name in kept} for line in lines if line["kind"] == kind]
