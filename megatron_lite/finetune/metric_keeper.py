"""Evaluation during fine-tuning: keeps the best checkpoint, and stops early."""

from __future__ import annotations

import logging
import os
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_utils.common.files import sync_directory
from data_utils.tasks.metrics.metrics_by_task import Metrics
from megatron_lite.checkpoint.manifest import (
    BEST,
    CHECKPOINTS,
    checkpoint_name,
    checkpoint_step,
    list_checkpoints,
)
from megatron_lite.finetune.evaluation import Evaluation, Model
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.telemetry.records import read_metrics

log = logging.getLogger(__name__)


class TaskMetricKeeper:
    """Evaluates a task during training (train/evaluation.py). The score is the mean over the validation files.

    Args:
        evaluations: name -> Evaluation, for each validation file.
        directory: of the run.
        patience: evaluations without improvement after which training stops; None: never.
    """

    def __init__(
        self,
        evaluations: Mapping[str, Evaluation],
        metrics: Metrics,
        model: Model,
        context: ParallelContext,
        directory: Path,
        patience: int | None,
    ):
        self._evaluations, self.metrics, self._model = evaluations, metrics, model
        self._context, self._directory, self._patience = context, directory, patience
        self._scores: list[float] = []
        self._best_saved = float("-inf")  # score of the checkpoint in DIRECTORY/best, on the main rank

    @property
    def ends_training(self) -> bool:
        """True when early stopping triggers."""
        if self._patience is None or not self._scores:
            return False
        return len(self._scores) - 1 - self._scores.index(max(self._scores)) >= self._patience

    def resume(self, step: int) -> int:
        """Restore the scores up to this step, which the main rank reads from the run's records."""
        records = read_metrics(self._directory) if self._context.is_main and step else []
        scores = {r["step"]: r["score"] for r in records if r["kind"] == "scores" and r["step"] <= step}
        last = max(scores, default=0)
        # The main rank alone reads the file, since other nodes may see it later; all ranks must stop at the same
        # evaluation.
        count, last = self._context.sum_on_hosts([float(len(scores)), float(last)])
        rank_scores = list(scores.values()) if self._context.is_main else [0.0] * int(count)
        self._scores = self._context.sum_on_hosts(rank_scores)
        if self._context.is_main:
            self._best_saved = keep_best_of(self._directory, scores)
        return int(last)

    def evaluate(self, step: int) -> dict[str, float]:
        metrics = self.compute_metrics()
        score = metrics["score"]
        # Of equal scores the first checkpoint stays: it was trained for fewer steps.
        if self._context.is_main and score > self._best_saved and keep_best(self._directory, step):
            self._best_saved = score
        self._scores.append(score)
        return metrics

    def compute_metrics(self) -> dict[str, float]:
        """The metrics of all files, and the score."""
        by_file = {
            name: evaluation.run(self._model).metrics for name, evaluation in self._evaluations.items()
        }
        score = sum(map(self.metrics.score, by_file.values())) / len(by_file)
        is_single = len(by_file) == 1
        metrics = {
            key if is_single else f"{name}/{key}": value
            for name, values in by_file.items()
            for key, value in values.items()
        }
        return {**metrics, "score": score}


class MultiTaskMetricKeeper(TaskMetricKeeper):
    """A TaskMetricKeeper of several tasks: the score is the mean of the tasks' scores. Args: keepers: by task name."""

    def __init__(self, keepers: Mapping[str, TaskMetricKeeper], *arguments: Any):
        super().__init__({}, Metrics(()), *arguments)
        self._keepers = keepers

    def compute_metrics(self) -> dict[str, float]:
        by_task = {name: keeper.compute_metrics() for name, keeper in self._keepers.items()}
        metrics = {f"{task}/{key}": value for task, each in by_task.items() for key, value in each.items()}
        return {**metrics, "score": statistics.mean(each["score"] for each in by_task.values())}


def keep_best_of(directory: Path, scores: Mapping[int, float]) -> float:
    """Make DIRECTORY/best hold the best checkpoint of a resumed run. Returns its score, -inf if there is none.

    After a rewind or a fallback to an older checkpoint, checkpoints of later steps do not count.

    Args: scores: of the completed steps, in order.
    """
    valid = {checkpoint_step(path): path for path in list_checkpoints(directory / CHECKPOINTS)}
    best = {checkpoint_step(path): path for path in list_checkpoints(directory / BEST)}
    for step, path in best.items():
        # A rewound run must not report the score of steps that it no longer has.
        if step not in scores or (step in valid and _manifest(valid[step]) != _manifest(path)):
            log.info("%s is of steps that were rewound; it is removed", path)
            shutil.rmtree(path)
    available = [
        step for step in scores if step in valid or (directory / BEST / checkpoint_name(step)).exists()
    ]
    if not available:
        return float("-inf")
    chosen = max(available, key=lambda step: scores[step])  # the first of equal scores
    if scores[chosen] < max(scores.values()):
        log.warning(
            "%s: the checkpoint with the best score, %.4f, is missing; the best that remains is that of step %d "
            "with %.4f",
            *(directory, max(scores.values()), chosen, scores[chosen]),
        )
    if (directory / BEST / checkpoint_name(chosen)).exists() or keep_best(directory, chosen):
        return scores[chosen]
    return float("-inf")


def _manifest(checkpoint: Path) -> bytes:
    try:
        return (checkpoint / "manifest.json").read_bytes()
    except OSError:
        return b""


def keep_best(directory: Path, step: int) -> bool:
    """Make the checkpoint of `step` the only one of DIRECTORY/best. Files are shared, not copied, where possible.

    Returns: False, with a warning, if that fails, as it does when the disk is full and the step was not saved: the run
    goes on, and DIRECTORY/best is as it was.
    """
    best, name = directory / BEST, checkpoint_name(step)
    partial = best / f"{name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        # Links cost no space, and stay when the run deletes its old checkpoint.
        for file in (directory / CHECKPOINTS / name).iterdir():
            try:
                os.link(file, partial / file.name)
            except OSError:  # a file system without links
                shutil.copyfile(file, partial / file.name)
        shutil.rmtree(best / name, ignore_errors=True)
        partial.rename(best / name)
        sync_directory(best)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        log.warning(
            "step %d has the best score so far, but its checkpoint cannot be kept in %s (%s: %s); training goes on",
            *(step, best, error.filename, error.strerror),
        )
        return False
    for path in list_checkpoints(best):
        if checkpoint_step(path) != step:
            shutil.rmtree(path, ignore_errors=True)
    return True
