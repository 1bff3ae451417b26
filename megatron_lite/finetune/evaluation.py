"""Records -> samples -> what the model answers -> predictions -> metrics: the same for a run and for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data_utils.tasks.answers import positive_label, prediction, references
from data_utils.tasks.base import Record, TaskSample
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.metrics import measure
from data_utils.tasks.metrics_by_task import metrics_of
from data_utils.tasks.render import Renderer
from megatron_lite.finetune.data import as_batch
from megatron_lite.finetune.gather import gather_arrays
from megatron_lite.model.task_batch import TaskBatch
from megatron_lite.parallel.context import ParallelContext

Answer = Callable[[TaskBatch], tuple[torch.Tensor, torch.Tensor]]  # PlainEngine.answers, or of a model alone


@dataclass(frozen=True)
class Evaluated:
    measured: dict[str, float]  # {} for a file without labels
    records: list[Record]
    predictions: list[Any]  # of the records
    cut: int  # samples of which something was cut off


class Evaluation:
    """The samples of one file, made once.

    Args: size: samples of a forward pass and rank.
    """

    def __init__(
        self,
        task: TaskConfig,
        renderer: Renderer,
        records: Sequence[Record],
        context: ParallelContext,
        size: int,
    ):
        self._task, self._renderer, self._context, self._size = task, renderer, context, size
        self.records = renderer.prepare(records, training=False)
        self._samples = [renderer.sample(record, number) for number, record in enumerate(self.records)]

    def run(self, answer: Answer) -> Evaluated:
        """Called by every rank; every rank gets the same result."""
        answers = self._answers(answer)
        found = [
            prediction(self._renderer, record, sample, given)
            for record, sample, given in zip(self.records, self._samples, answers, strict=True)
        ]
        cut = sum(sample.cut > 0 for sample in self._samples)
        return Evaluated(self._measured(found), self.records, found, cut)

    def _measured(self, predictions: Sequence[Any]) -> dict[str, float]:
        if any(record.label is None for record in self.records):
            return {}
        return measure(
            metrics_of(self._task).names,
            predictions,
            references(self.records),
            groups=[record.group for record in self.records],
            positive=positive_label(self._renderer.labels),
        )

    def _answers(self, answer: Answer) -> list[np.ndarray]:
        """Of each sample, see data_utils/tasks/answers.py."""
        dp, samples, mine = self._context.dp, self._samples, []
        per_pass = self._size * dp.size
        for start in range(0, len(samples), per_pass):
            own = range(len(samples))[start : start + per_pass][dp.rank :: dp.size]
            # Under ZeRO 3 the ranks compute together: one without a sample of its own computes another's.
            numbers = list(own) or [start]
            chosen = [samples[number] for number in numbers]
            answered = answer(as_batch(chosen, numbers, self._renderer))
            mine += self._split(chosen, *answered)[: len(own)]
        everyone = gather_arrays(self._context, mine)
        by_sample: list[np.ndarray] = [np.zeros(0)] * len(samples)
        for rank, theirs in enumerate(everyone):
            by_sample[rank :: dp.size] = (
                theirs  # passes hold a multiple of the ranks: sample i is of rank i % size
            )
        return by_sample

    def _split(
        self, samples: Sequence[TaskSample], outputs: torch.Tensor, likeliest: torch.Tensor
    ) -> list[np.ndarray]:
        if self._renderer.head == "choices":
            outputs = torch.stack([outputs, likeliest.to(outputs)], dim=1)
        of_rows = self._renderer.head in ("tags", "spans")
        counts = [
            sum(len(part.rows) for part in sample.parts) if of_rows else len(sample.parts)
            for sample in samples
        ]
        parts = outputs.double().cpu().split(counts)
        return [part.numpy() for part in parts]
