"""The training samples of a task by their number, as the trainer asks for them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np

from data_utils.base.random_streams import derive_seed
from data_utils.tasks.base import Record, TaskSample
from data_utils.tasks.layouts.collate import collate
from data_utils.tasks.layouts.render import Renderer
from megatron_lite.model.input.task_batch import TaskBatch

MOST_DOCUMENTS = 1 << 12  # of a sample, so that each of them drops other elements


def as_batch(
    samples: Sequence[TaskSample],
    numbers: Sequence[int],
    renderer: Renderer,
    head: str | None = None,
    *,
    has_language: bool = False,
) -> TaskBatch:
    """A micro-batch.

    Args:
        numbers: of the samples, from which dropout follows.
        head: how the parts are scored; None = as the task has it.
        has_language: the documents' own tokens have a loss beside.
    """
    planes, parts = collate(samples)
    documents = [
        number * MOST_DOCUMENTS + document
        for number, sample in zip(numbers, samples, strict=True)
        for document in range(len(sample.documents))
    ]
    loss = renderer.inputs.config.loss
    return TaskBatch(planes, np.array(documents, np.int64), parts, head or renderer.head, loss, has_language)


class TaskData:
    """Sample number -> epoch and record. Each epoch has all records once, in an order of its own.

    Args:
        records: prepared for training, see `Renderer.prepare`.
        seed: that of the run.
        with_language: sample and number -> the same with documents of the run's objective (language.py); None = none.
    """

    def __init__(
        self,
        records: Sequence[Record],
        renderer: Renderer,
        seed: int,
        with_language: Callable[[TaskSample, int], TaskSample] | None = None,
    ):
        self.records, self._renderer, self._seed = list(records), renderer, seed
        self._with_language = with_language
        self._order = functools.lru_cache(maxsize=2)(self._order_of)

    def _order_of(self, epoch: int) -> np.ndarray:
        return np.random.default_rng(derive_seed(self._seed, "task order", epoch)).permutation(
            len(self.records)
        )

    def sample(self, number: int) -> TaskSample:
        epoch, place = divmod(number, len(self.records))
        record = int(self._order(epoch)[place])
        made = self._renderer.sample(self.records[record], record, epoch)
        return made if self._with_language is None else self._with_language(made, number)

    def batch(self, indices: np.ndarray) -> TaskBatch:
        """Samples int64 [B] as one micro-batch."""
        numbers = indices.tolist()
        samples = [self.sample(number) for number in numbers]
        return as_batch(samples, numbers, self._renderer, has_language=self._with_language is not None)

    def prefetch(self, indices: np.ndarray) -> None:
        """Does nothing: all records are in memory."""

    def fingerprint(self) -> list[dict[str, object]]:
        """Number and SHA-256 of the records, as checkpoints store them."""
        hasher = hashlib.sha256()
        for record in self.records:
            hasher.update(json.dumps([record.fields, record.label], default=str, sort_keys=True).encode())
        return [{"samples": len(self.records), "sha256": hasher.hexdigest()}]
