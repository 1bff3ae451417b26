"""The training samples of a task by their number, for the trainer."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np

from data_utils.common.seeds import derive_seed
from data_utils.tasks.base import TaskRecord, TaskSample
from data_utils.tasks.templates.collate import collate
from data_utils.tasks.templates.render import Renderer
from megatron_lite.finetune.multi_task import TaskOrder
from megatron_lite.transformer.task_batch import TaskBatch

MOST_DOCUMENTS = 1 << 12  # of a sample; each document has its own dropout


def make_task_batch(
    samples: Sequence[TaskSample],
    numbers: Sequence[int],
    renderer: Renderer,
    head: str | None = None,
    *,
    has_language: bool = False,
    place: int = -1,
) -> TaskBatch:
    """A micro-batch.

    Args:
        numbers: of the samples, from which dropout follows.
        head: how the parts are scored; None = as the task has it.
        has_language: the documents' own tokens have a loss too.
        place: index of the task's loss.
    """
    fields, parts = collate(samples)
    documents = [
        # Dropout hashes the sample's number: documents of one sample need different ones.
        number * MOST_DOCUMENTS + document
        for number, sample in zip(numbers, samples, strict=True)
        for document in range(len(sample.documents))
    ]
    task, head = renderer.inputs.config, head or renderer.head
    samples_of = np.array(documents, np.int64)
    return TaskBatch(fields, samples_of, parts, head, task.loss, has_language, task.name, place)


class TaskData:
    """Sample number -> epoch and record. Each epoch has all records once, in another random order.

    Args:
        records: prepared for training, see `Renderer.prepare`.
        seed: that of the run.
        with_language: sample and number -> the same with documents of the run's objective (language.py); None = none.
    """

    def __init__(
        self,
        records: Sequence[TaskRecord],
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
        # Draws depend on the record and the epoch, not on the place in the order.
        made = self._renderer.sample(self.records[record], record, epoch)
        return made if self._with_language is None else self._with_language(made, number)

    def batch(self, indices: np.ndarray, names: np.ndarray | None = None, place: int = -1) -> TaskBatch:
        """Samples int64 [B] as one micro-batch. Args: names: their numbers in the run; place: of the loss."""
        samples = [self.sample(number) for number in indices.tolist()]
        has_language = self._with_language is not None
        names = indices if names is None else names
        return make_task_batch(
            samples, names.tolist(), self._renderer, has_language=has_language, place=place
        )

    def prefetch(self, indices: np.ndarray) -> None:
        """Does nothing: all records are in memory."""

    def fingerprint(self) -> list[dict[str, object]]:
        """Number and SHA-256 of the records, as checkpoints store them."""
        return [{"samples": len(self.records), "sha256": digest(self.records)}]


def digest(records: Sequence[TaskRecord]) -> str:
    """SHA-256 of records, 64 hexadecimal digits."""
    hasher = hashlib.sha256()
    for record in records:
        hasher.update(json.dumps([record.fields, record.label], default=str, sort_keys=True).encode())
    return hasher.hexdigest()


class MultiTaskData:
    """The samples of a run of several tasks by their number. Each batch of the run is of one task.

    Args: size: samples of a batch, on all ranks.
    """

    def __init__(self, tasks: Sequence[TaskData], turns: TaskOrder, size: int):
        self._tasks, self._turns, self._size = tasks, turns, size

    def batch(self, indices: np.ndarray) -> TaskBatch:
        """Samples int64 [B] of one batch as one micro-batch."""
        batch = int(indices[0]) // self._size
        task, number = self._turns.of(batch)
        # The same places in the task's own batch `number`; the run's numbers stay for dropout.
        own = indices + (number - batch) * self._size
        return self._tasks[task].batch(own, indices, task - len(self._tasks))

    def prefetch(self, indices: np.ndarray) -> None:
        """Does nothing: all records are in memory."""

    def fingerprint(self) -> list[dict[str, object]]:
        """Those of all tasks."""
        return [one for task in self._tasks for one in task.fingerprint()]
