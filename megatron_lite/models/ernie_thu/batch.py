"""Batches with entities: what the model reads at each mention, and what it predicts there.

A token at which an entity begins is read with another entity of its Example (`entities.replaced_ratio`), without any
(`entities.removed_ratio`), or with its own; each is predicted among the Example's entities and none. The draw is a pure
function of (seed, sample, position in its sequence), so that it is the same in any batch and on any rank.

Shapes: N Examples, M entities that are read in one, CLS included, L that are predicted, C candidates, E their width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC
from data_utils.common.losses import ENTITIES
from data_utils.common.random_streams import derive_seed
from data_utils.dataset.vectors import Vectors
from data_utils.loader.loader import SampleLoader
from data_utils.objectives.entities import EntitiesConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.batch import Batch, Samples
from megatron_lite.model.kernels.dropout import token_keys
from megatron_lite.model.micro_batch import few_count
from megatron_lite.model.task_batch import HostTaskParts, Parts, TaskBatch


@dataclass(frozen=True)
class Noise:
    """How entities are drawn. Args: seed: of the draws."""

    seed: int
    replaced: float
    removed: float

    def uniform(self, name: str, samples: np.ndarray, length: int) -> np.ndarray:
        """Numbers in [0, 1) for the tokens of samples int64 [B], float64 [B, length]."""
        # The hash of dropout: a function of (seed, sample, place), equal in every layout and batch.
        keys = token_keys(derive_seed(self.seed, name), samples, length)
        return keys.view(np.uint32) / 2.0**32


@dataclass(frozen=True)
class Mentions:
    """Entities of a micro-batch on the device; N Examples, padded with -1."""

    positions: torch.Tensor  # int32 [N, M]: tokens of [T] that read an entity, CLS first
    inputs: torch.Tensor  # int32 [N, M]: the candidate that each reads; 0: no entity
    predicted: torch.Tensor  # int32 [N, L]: tokens whose entity is predicted
    classes: torch.Tensor  # int32 [N, L]: the candidate to predict
    counts: torch.Tensor  # int32 [N]: candidates of each Example, "no entity" included
    vectors: torch.Tensor  # fp32 [N, C, E]: of the candidates; 0 for "no entity"

    added = None  # to the embeddings, see `Condition`

    def remembered(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        return qkv

    def input_vectors(self) -> torch.Tensor:
        """The vector that each position reads, fp32 [N, M, E]."""
        given = self.inputs.long().clamp(min=0)[..., None].expand(-1, -1, self.vectors.shape[2])
        return self.vectors.gather(1, given)


class EntityBatch(Batch):
    """Args: fields, samples: as for Batch. vectors: of the entities."""

    def __init__(self, fields: np.ndarray, samples: np.ndarray, noise: Noise, vectors: Any):
        super().__init__(fields, samples)
        self._noise, self._vectors = noise, vectors
        self._parts: HostMentions | None = None

    @property
    def loss_divisor(self) -> float:
        """1: the losses are means, whose sum is not divided."""
        return 1.0

    @cached_property
    def mentioned(self) -> np.ndarray:
        """Tokens at which an entity begins, int64, indices into the flattened batch."""
        return np.flatnonzero(self.fields[:, BLOCK_POSITION_IDS].ravel())

    def loss_weights(self, num_losses: int) -> np.ndarray:
        weights = super().loss_weights(num_losses)
        weights[ENTITIES.number] = len(self.mentioned)
        return weights

    def more_weights(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """1 for each entity that is predicted, in the order of `Mentions.predicted`; 0 for padding."""
        assert self._parts is not None  # `prepare` asks for them first
        weights = (self._parts.predicted >= 0).astype(np.float32).ravel()
        return weights, np.full(len(weights), ENTITIES.number)

    def host_parts(
        self, order: np.ndarray, first: int, predicted: np.ndarray, few_counts: bool, config: ModelConfig
    ) -> HostMentions:
        self._parts = HostMentions(self, order, few_counts)
        return self._parts

    @cached_property
    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        """The Example of each token, -1 for padding, int64 [B * S], and the first token of each, CLS, int64 [N]."""
        doc = self.fields[:, DOC].astype(np.int64)
        rows = np.arange(len(doc))[:, None] * (int(doc.max(initial=0)) + 1)
        keys = np.where(doc < 0, -1, rows + doc).ravel()
        real = np.flatnonzero(keys >= 0)
        _, first, number = np.unique(keys[real], return_index=True, return_inverse=True)
        numbers = np.full(keys.shape, -1)
        numbers[real] = number
        return numbers, real[first]

    @cached_property
    def candidates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The candidates of all Examples, sorted; the candidate of each mention; bounds of the Examples, [N + 1]."""
        numbers, heads = self.examples
        entities = self.fields[:, BLOCK_POSITION_IDS].ravel()[self.mentioned]
        # Example and entity in one key: sorting it groups the entities by Example, each once.
        found, which = np.unique((numbers[self.mentioned] << 32) + entities, return_inverse=True)
        return found & 0xFFFFFFFF, which, np.searchsorted(found >> 32, np.arange(len(heads) + 1))

    @cached_property
    def given(self) -> np.ndarray:
        """The candidate that each mentioned token reads, int64, an index into all; -1 = none."""
        _, which, begins = self.candidates
        example = self.examples[0][self.mentioned]
        length = self.fields.shape[2]
        # Drawn where a batch is made, not in the row, which keeps what is predicted: fate decides whether an
        # entity is replaced, removed or read as it is, choice which one replaces it.
        fate, choice = (
            self._noise.uniform(name, self.samples, length).ravel()[self.mentioned]
            for name in ("fate", "choice")
        )
        counts = begins[example + 1] - begins[example]
        drawn = begins[example] + (choice * counts).astype(np.int64)
        removed = fate < self._noise.replaced + self._noise.removed
        return np.where(fate < self._noise.replaced, drawn, np.where(removed, -1, which))

    def padded(self, rows: int) -> EntityBatch:
        samples = np.pad(self.samples, (0, rows - len(self.samples)))
        return EntityBatch(super().padded(rows).fields, samples, self._noise, self._vectors)


class HostMentions:
    """`Mentions` on the host. Args: order, few_counts: as for `Batch.host_parts`."""

    ARRAYS = 6

    def __init__(self, batch: EntityBatch, order: np.ndarray, few_counts: bool):
        numbers, heads = batch.examples
        entities, which, begins = batch.candidates
        # Index in the batch -> index in the plan's order, in which the model has its tokens.
        place = np.full(len(numbers), -1)
        place[order[order >= 0]] = np.flatnonzero(order >= 0)
        count = few_count(max(1, len(heads))) if few_counts else max(1, len(heads))

        def in_rows(example: np.ndarray, *values: np.ndarray, fill: int = -1) -> list[np.ndarray]:
            """Values that are sorted by Example -> one matrix row per Example, [N, most], padded with `fill`."""
            begin = np.searchsorted(example, np.arange(count + 1))
            most = max(1, int(np.diff(begin).max(initial=0)))
            made = []
            for value in values:
                rows = np.full((count, few_count(most) if few_counts else most), fill)
                rows[example, np.arange(len(example)) - begin[example]] = value
                made.append(rows)
            return made

        mentioned, given = batch.mentioned, batch.given
        example = numbers[mentioned]
        by_example = np.argsort(example, kind="stable")
        # Candidate 0 of each Example is "no entity", hence + 1.
        own = np.where(given < 0, 0, given - begins[example] + 1)
        with_one = by_example[given[by_example] >= 0]
        of_read = np.concatenate([np.arange(len(heads)), example[with_one]])
        read = np.argsort(of_read, kind="stable")  # CLS first
        places = place[np.concatenate([heads, mentioned[with_one]])]
        reads = np.concatenate([np.zeros(len(heads), np.int64), own[with_one]])
        self.positions, self.inputs = in_rows(of_read[read], places[read], reads[read])
        classes = (which - begins[example] + 1)[by_example]
        self.predicted, self.classes = in_rows(example[by_example], place[mentioned][by_example], classes)
        sizes = np.diff(begins)
        (others,) = in_rows(np.repeat(np.arange(len(heads)), sizes), entities, fill=0)
        # [N, C]: a column before the others for "no entity".
        self.candidates = np.pad(others, ((0, 0), (1, 0)))
        self.counts = np.ones(count, np.int64)
        self.counts[: len(heads)] += sizes
        # Only the vectors of a batch's candidates go to the device: the table of all entities may have
        # gigabytes.
        self._vectors = batch._vectors.of(self.candidates)

    def arrays(self) -> list[np.ndarray]:
        integers = (self.positions, self.inputs, self.predicted, self.classes, self.counts)
        return [*(array.astype(np.int32) for array in integers), self._vectors.view(np.int32)]

    def loss_rows(self) -> None:
        """None: the predicted positions are the batch's own."""

    def on_device(self, arrays: list[torch.Tensor]) -> Mentions:
        vectors = arrays.pop()
        return Mentions(*arrays, vectors.view(torch.float32))  # type: ignore[call-arg]


class EntitySamples:
    """The samples of a loader as EntityBatches. Raises: DataError if the corpora have more entities than vectors."""

    def __init__(self, loader: SampleLoader, config: EntitiesConfig, vectors: Vectors, seed: int):
        for mixture in loader.mixtures:
            for index in mixture.indexes:
                count = index.dataset.manifest["entities"]["count"]
                vectors.require(count, f"dataset {index.dataset.prefix}")
        self._loader, self.prefetch = loader, loader.prefetch
        self._vectors = vectors
        self._noise = Noise(seed, config.replaced_ratio, config.removed_ratio)

    def batch(self, indices: np.ndarray) -> EntityBatch:
        """Samples int64 [B]."""
        return EntityBatch(self._loader.batch(indices), indices, self._noise, self._vectors)

    def fingerprint(self) -> list[dict[str, object]]:
        return [{**entry, "vectors_crc32": self._vectors.identity} for entry in self._loader.fingerprint()]


_NONE = Noise(0, 0.0, 0.0)  # of tasks: each entity is read as it is


@dataclass(frozen=True)
class EntityTaskInputs(Parts):
    """What the task's head reads of a micro-batch, with the entities of its texts."""

    mentions: Mentions | None = None


class EntityTaskBatch(TaskBatch):
    """A task's batch with the vectors of its entities."""

    def __init__(self, batch: TaskBatch, vectors: Vectors | NoVectors):
        scored = (batch.head, batch.loss, batch.has_language, batch.task, batch.place)
        super().__init__(batch.fields, batch.samples, batch.parts, *scored)
        self._entities = EntityBatch(batch.fields, batch.samples, _NONE, vectors)

    def host_parts(self, *arguments: Any) -> Any:
        """`HostEntityParts`. Args: arguments: as for `Batch.host_parts`."""
        of_task = super().host_parts(*arguments)
        assert of_task is not None, "this model has no task that is trained by the documents' own targets"
        return HostEntityParts(of_task, self._entities.host_parts(*arguments))


class HostEntityParts:
    """`EntityTaskInputs` on the host."""

    ARRAYS = HostTaskParts.ARRAYS + HostMentions.ARRAYS

    def __init__(self, of_task: HostTaskParts, mentions: HostMentions):
        self._of_task, self._mentions = of_task, mentions
        self.loss_rows = of_task.loss_rows

    def arrays(self) -> list[np.ndarray]:
        return [*self._of_task.arrays(), *self._mentions.arrays()]

    def on_device(self, arrays: list[torch.Tensor]) -> EntityTaskInputs:
        parts = self._of_task.on_device(arrays[: HostTaskParts.ARRAYS])
        mentions = self._mentions.on_device(arrays[HostTaskParts.ARRAYS :])
        return EntityTaskInputs(**vars(parts), mentions=mentions)


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
