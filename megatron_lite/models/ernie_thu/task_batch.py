"""Batches of tasks with entities: what a task reads of them, and the entities that its samples mention, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data_utils.dataset.vectors import Vectors
from megatron_lite.model.batch import Samples
from megatron_lite.model.task_batch import HostTaskParts, Parts, TaskBatch
from megatron_lite.models.ernie_thu.batch import EntityBatch, HostMentions, Mentions, Noise

_NONE = Noise(0, 0.0, 0.0)


@dataclass(frozen=True)
class EntityParts(Parts):
    """The parts of a micro-batch with its entities."""

    mentions: Mentions | None = None


class EntityTaskBatch(TaskBatch):
    """A task's batch with the vectors of its entities."""

    def __init__(self, batch: TaskBatch, vectors: Vectors | NoVectors):
        scored = (batch.head, batch.loss, batch.has_language, batch.task, batch.place)
        super().__init__(batch.planes, batch.samples, batch.parts, *scored)
        self._entities = EntityBatch(batch.planes, batch.samples, _NONE, vectors)

    def host_parts(self, *arguments: Any) -> Any:
        """`HostEntityParts`. Args: arguments: as for `Batch.host_parts`."""
        of_task = super().host_parts(*arguments)
        assert of_task is not None, "no task of this kind of model is solved by the documents' own targets"
        return HostEntityParts(of_task, self._entities.host_parts(*arguments))


class HostEntityParts:
    """`EntityParts` on the host."""

    ARRAYS = HostTaskParts.ARRAYS + HostMentions.ARRAYS

    def __init__(self, of_task: HostTaskParts, mentions: HostMentions):
        self._of_task, self._mentions = of_task, mentions
        self.loss_rows = of_task.loss_rows

    def arrays(self) -> list[np.ndarray]:
        return [*self._of_task.arrays(), *self._mentions.arrays()]

    def on_device(self, arrays: list[torch.Tensor]) -> EntityParts:
        parts = self._of_task.on_device(arrays[: HostTaskParts.ARRAYS])
        mentions = self._mentions.on_device(arrays[HostTaskParts.ARRAYS :])
        return EntityParts(**vars(parts), mentions=mentions)


class TaskSamples:
    """The samples of a task, or of several, with the vectors of their entities."""

    def __init__(self, samples: Any, vectors: Vectors | NoVectors):
        self._samples: Samples = samples
        self.prefetch, self._vectors = samples.prefetch, vectors

    def batch(self, indices: np.ndarray) -> EntityTaskBatch:
        """Samples int64 [B]."""
        batch = self._samples.batch(indices)
        assert isinstance(batch, TaskBatch)
        return EntityTaskBatch(batch, self._vectors)

    def fingerprint(self) -> list[dict[str, object]]:
        return [{**entry, "vectors_crc32": self._vectors.identity} for entry in self._samples.fingerprint()]


class NoVectors:
    """Vectors of a task without entities. Args: size: of a vector."""

    identity = None

    def __init__(self, size: int):
        self._size = size

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """As `Vectors.of`: fp32 [..., size], zeros."""
        return np.zeros((*numbers.shape, self._size), np.float32)
