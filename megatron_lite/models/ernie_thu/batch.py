"""Batches with entities: what the model reads at each mention, and what it predicts there.

A token at which an entity begins is read with another entity of its Example (`entities.replaced_ratio`), without any
(`entities.removed_ratio`), or with its own; each is predicted among the Example's entities and none. The draw is a pure
function of (seed, sample, position in its sequence), so that it is the same in any batch and on any rank.

Shapes: N Examples, M entities that are read in one, CLS included, L that are predicted, C candidates, E their width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, DOC
from data_utils.common.losses import ENTITIES
from data_utils.common.seeds import derive_seed
from data_utils.dataset.vectors import Vectors
from data_utils.loader.loader import SampleLoader
from data_utils.objectives.entities import EntitiesConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.batch import Batch, ExtraInputs, Samples
from megatron_lite.transformer.kernels.dropout import token_keys
from megatron_lite.transformer.loss_positions import few_count
from megatron_lite.transformer.task_batch import TaskBatch, TaskInputs


@dataclass(frozen=True)
class Noise:
    """How entities are drawn. Args: seed: of the draws."""

    seed: int
    replaced: float
    removed: float

    def uniform(self, name: str, samples: np.ndarray, length: int) -> np.ndarray:
        """Numbers in [0, 1) for the tokens of samples int64 [B], float64 [B, length]."""
        # The hash of dropout: a function of (seed, sample, position), equal in every layout and batch.
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
        index = self.inputs.long().clamp(min=0)[..., None].expand(-1, -1, self.vectors.shape[2])
        return self.vectors.gather(1, index)


class EntityBatch(Batch):
    """Args: fields, samples: as for Batch. vectors: of the entities."""

    def __init__(self, fields: np.ndarray, samples: np.ndarray, noise: Noise, vectors: Any):
        super().__init__(fields, samples)
        self._noise, self._vectors = noise, vectors

    @property
    def loss_divisor(self) -> float:
        """1: the losses are means, whose sum is not divided."""
        return 1.0

    @cached_property
    def mentioned(self) -> np.ndarray:
        """Tokens at which an entity begins, int64, indices into the flattened batch."""
        return np.flatnonzero(self.fields[:, BLOCK_POSITION_IDS].ravel())

    def loss_divisors(self, num_losses: int) -> np.ndarray:
        divisors = super().loss_divisors(num_losses)
        divisors[ENTITIES.number] = len(self.mentioned)
        return divisors

    def extra_inputs(
        self,
        order: np.ndarray,
        decoder_start: int,
        predicted: np.ndarray,
        few_counts: bool,
        config: ModelConfig,
    ) -> ExtraInputs:
        """`Mentions`, and the weights of the entity loss: 1 for each entity of `Mentions.predicted`, 0 for padding."""
        arrays = self._mention_arrays(order, few_counts)
        weights = (arrays["predicted"] >= 0).astype(np.float32).ravel()
        return ExtraInputs(
            arrays=arrays,
            make=lambda tensors: Mentions(**tensors),
            weights=weights,
            weight_objectives=np.full(len(weights), ENTITIES.number),
        )

    @cached_property
    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        """The Example of each token, -1 for padding, int64 [B * S], and the first token of each, CLS, int64 [N]."""
        doc = self.fields[:, DOC].astype(np.int64)
        first_of_sequence = np.arange(len(doc))[:, None] * (int(doc.max(initial=0)) + 1)
        keys = np.where(doc < 0, -1, first_of_sequence + doc).ravel()
        real = np.flatnonzero(keys >= 0)
        _, first, number = np.unique(keys[real], return_index=True, return_inverse=True)
        example = np.full(keys.shape, -1)
        example[real] = number
        return example, real[first]

    @cached_property
    def candidates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The candidates of all Examples, sorted; the candidate of each mention; bounds of the Examples, [N + 1]."""
        examples, cls = self.examples
        entities = self.fields[:, BLOCK_POSITION_IDS].ravel()[self.mentioned]
        # Example and entity in one key: sorting it groups the entities by Example, each once.
        keys, candidate = np.unique((examples[self.mentioned] << 32) + entities, return_inverse=True)
        return keys & 0xFFFFFFFF, candidate, np.searchsorted(keys >> 32, np.arange(len(cls) + 1))

    @cached_property
    def read_candidates(self) -> np.ndarray:
        """The candidate that each mentioned token reads, int64, an index into all; -1 = none."""
        _, candidate, begins = self.candidates
        example = self.examples[0][self.mentioned]
        length = self.fields.shape[2]
        # Drawn where a batch is made, not in the sequence, which keeps what is predicted: fate decides whether an
        # entity is replaced, removed or read as it is, choice which one replaces it.
        fate, choice = (
            self._noise.uniform(name, self.samples, length).ravel()[self.mentioned]
            for name in ("fate", "choice")
        )
        counts = begins[example + 1] - begins[example]
        drawn = begins[example] + (choice * counts).astype(np.int64)
        removed = fate < self._noise.replaced + self._noise.removed
        return np.where(fate < self._noise.replaced, drawn, np.where(removed, -1, candidate))

    def padded(self, sequences: int) -> EntityBatch:
        samples = np.pad(self.samples, (0, sequences - len(self.samples)))
        return EntityBatch(super().padded(sequences).fields, samples, self._noise, self._vectors)

    def _mention_arrays(self, order: np.ndarray, few_counts: bool) -> dict[str, np.ndarray]:
        """The arrays of `Mentions` by name. Args: as for `extra_inputs`."""
        examples, cls = self.examples
        entities, mentioned_candidate, bounds = self.candidates
        # Index in the flattened batch -> index in the plan's order, in which the model has its tokens.
        index_in_order = np.full(len(examples), -1)
        index_in_order[order[order >= 0]] = np.flatnonzero(order >= 0)
        real = len(cls)
        count = few_count(max(1, real)) if few_counts else max(1, real)

        def by_example(example: np.ndarray, values: np.ndarray, padding: int = -1) -> np.ndarray:
            """Values that are sorted by Example -> one matrix row for each Example, int64 [N, most], padded."""
            begins = np.searchsorted(example, np.arange(count + 1))
            most = max(1, int(np.diff(begins).max(initial=0)))
            matrix = np.full((count, few_count(most) if few_counts else most), padding)
            matrix[example, np.arange(len(example)) - begins[example]] = values
            return matrix

        mentioned, read_candidate = self.mentioned, self.read_candidates
        example = examples[mentioned]
        sorted_mentions = np.argsort(example, kind="stable")
        # Predicted: the entity of every mention. Candidate 0 of each Example is "no entity", hence + 1.
        predicted = index_in_order[mentioned][sorted_mentions]
        classes = (mentioned_candidate - bounds[example] + 1)[sorted_mentions]
        # Read: CLS, without an entity, and the mentions that have one to read.
        inputs = np.where(read_candidate < 0, 0, read_candidate - bounds[example] + 1)
        readers = sorted_mentions[read_candidate[sorted_mentions] >= 0]
        reader_example = np.concatenate([np.arange(real), example[readers]])
        cls_first = np.argsort(reader_example, kind="stable")
        reader_positions = index_in_order[np.concatenate([cls, mentioned[readers]])]
        reader_inputs = np.concatenate([np.zeros(real, np.int64), inputs[readers]])
        sizes = np.diff(bounds)
        # [N, C]: a column before the others for "no entity".
        candidates = np.pad(
            by_example(np.repeat(np.arange(real), sizes), entities, padding=0), ((0, 0), (1, 0))
        )
        counts = np.ones(count, np.int64)
        counts[:real] += sizes
        return {
            "positions": by_example(reader_example[cls_first], reader_positions[cls_first]),
            "inputs": by_example(reader_example[cls_first], reader_inputs[cls_first]),
            "predicted": by_example(example[sorted_mentions], predicted),
            "classes": by_example(example[sorted_mentions], classes),
            "counts": counts,
            # Only the vectors of a batch's candidates go to the device: the table of all entities may have
            # gigabytes.
            "vectors": self._vectors.of(candidates),
        }


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
_MENTIONS = "mentions."  # both have `positions`


@dataclass(frozen=True)
class EntityTaskInputs(TaskInputs):
    """What the task's head reads of a micro-batch, with the entities of its texts."""

    mentions: Mentions | None = None


class EntityTaskBatch(TaskBatch):
    """A task's batch with the vectors of its entities."""

    def __init__(self, batch: TaskBatch, vectors: Vectors | NoVectors):
        super().__init__(
            batch.fields,
            batch.samples,
            batch.target_groups,
            batch.head,
            batch.loss,
            batch.has_language,
            batch.task,
            batch.loss_number,
        )
        self._entities = EntityBatch(batch.fields, batch.samples, _NONE, vectors)

    def extra_inputs(
        self,
        order: np.ndarray,
        decoder_start: int,
        predicted: np.ndarray,
        few_counts: bool,
        config: ModelConfig,
    ) -> ExtraInputs:
        """`EntityTaskInputs`."""
        assert self.head != "tokens", "this model has no task that is trained by the documents' own targets"
        arguments = order, decoder_start, predicted, few_counts, config
        task, mentions = super().extra_inputs(*arguments), self._entities.extra_inputs(*arguments)

        def make(tensors: dict[str, torch.Tensor]) -> EntityTaskInputs:
            task_inputs = task.make({name: tensors[name] for name in task.arrays})
            read = {name: tensors[f"{_MENTIONS}{name}"] for name in mentions.arrays}
            return EntityTaskInputs(**vars(task_inputs), mentions=mentions.make(read))

        named_mentions = {f"{_MENTIONS}{name}": array for name, array in mentions.arrays.items()}
        return replace(task, arrays={**task.arrays, **named_mentions}, make=make)


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
