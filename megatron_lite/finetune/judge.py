"""Evaluation during fine-tuning: which checkpoint is the best so far, and whether better ones are to be expected."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from data_utils.base.files import sync_directory
from data_utils.tasks.scores.metrics_by_task import Metrics
from megatron_lite.checkpoint.manifest import checkpoint_name, list_checkpoints, step_of
from megatron_lite.finetune.evaluation import Evaluation, Model
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.observe.records import read_metrics

BEST = "best"  # the directory of the best checkpoint, in a run's
FAR = 0.1  # relative, below the best possible score


class TaskJudge:
    """A run's judge (loop/evaluation.py). With several validation files the mean of their scores counts.

    Args:
        evaluations: name -> Evaluation, for each validation file.
        directory: of the run.
        patience: evaluations without a better one after which training ends; None = never.
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
        self._evaluations, self._metrics, self._model = evaluations, metrics, model
        self._context, self._directory, self._patience = context, directory, patience
        self._scores: list[float] = []

    @property
    def ends_training(self) -> bool:
        if self._patience is None or not self._scores:
            return False
        return len(self._scores) - 1 - self._scores.index(max(self._scores)) >= self._patience

    def resume(self, step: int) -> int:
        """Scores up to this step, which the main rank reads from the run's records."""
        records = read_metrics(self._directory) if self._context.is_main and step else []
        scores = {r["step"]: r["score"] for r in records if r["kind"] == "scores" and r["step"] <= step}
        last = max(scores, default=0)
        count, last = self._context.sum_of_hosts([float(len(scores)), float(last)])
        own = list(scores.values()) if self._context.is_main else [0.0] * int(count)
        self._scores = self._context.sum_of_hosts(own)
        return int(last)

    def lack(self, labels: Collection[Any], possible: Mapping[str, Mapping[str, float]]) -> str:
        """Words on a best score that shows little learning, "" where it shows enough.

        It is compared with the best possible one where that is known, else with that of one label for every sample (0
        where answers are no labels), from which 1/sqrt(samples) can be chance: twice the error of a share at most.

        Args:
            labels: of the training samples; () where answers are no labels.
            possible: validation file -> the best metrics that any predictor can have, of those that are known.
        """
        best, evaluations = max(self._scores), self._evaluations.values()
        compared = set(self._metrics.compared or self._metrics.names)
        if possible and all(compared <= of.keys() for of in possible.values()):
            most = statistics.mean(map(self._metrics.score, possible.values()))
            return f"the best score is {best:.4f} of a possible {most:.4f}" * (best < most - FAR * abs(most))
        alike = [[e.measured([label] * len(e.records)) for e in evaluations] for label in labels]
        guess = max((statistics.mean(map(self._metrics.score, of_files)) for of_files in alike), default=0.0)
        count = sum(len(evaluation.records) for evaluation in evaluations)
        if best > guess + count**-0.5 or (not labels and best < 0):  # as of perplexities
            return ""
        return f"the best score is {best:.4f}, one answer to all {count} validation samples has {guess:.4f}"

    def evaluate(self, step: int) -> dict[str, float]:
        measured = self.measured()
        score = measured["score"]
        if self._context.is_main and score > max(self._scores, default=float("-inf")):
            keep_best(self._directory, step)
        self._scores.append(score)
        return measured

    def measured(self) -> dict[str, float]:
        """The metrics of all files, and the score."""
        measured = {
            name: evaluation.run(self._model).measured for name, evaluation in self._evaluations.items()
        }
        score = sum(map(self._metrics.score, measured.values())) / len(measured)
        one = len(measured) == 1
        named = {
            key if one else f"{name}/{key}": value
            for name, own in measured.items()
            for key, value in own.items()
        }
        return {**named, "score": score}


class TasksJudge(TaskJudge):
    """The judge of a run of several tasks: the mean of their scores counts. Args: judges: name of a task -> its own."""

    def __init__(self, judges: Mapping[str, TaskJudge], *arguments: Any):
        super().__init__({}, Metrics(()), *arguments)
        self._judges = judges

    def measured(self) -> dict[str, float]:
        by_task = {name: judge.measured() for name, judge in self._judges.items()}
        named = {f"{name}/{key}": value for name, own in by_task.items() for key, value in own.items()}
        return {**named, "score": statistics.mean(own["score"] for own in by_task.values())}


def keep_best(directory: Path, step: int) -> None:
    """Make the checkpoint of `step` the only one of DIRECTORY/best. Files are shared, not copied, where possible."""
    best, name = directory / BEST, checkpoint_name(step)
    partial = best / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in (directory / "checkpoints" / name).iterdir():
        try:
            os.link(file, partial / file.name)
        except OSError:  # a file system without links
            shutil.copy2(file, partial / file.name)
    shutil.rmtree(best / name, ignore_errors=True)
    partial.rename(best / name)
    sync_directory(best)
    for path in list_checkpoints(best):
        if step_of(path) != step:
            shutil.rmtree(path, ignore_errors=True)
