"""Small models with entities: configurations, batches of the objective with mentions, and fixed vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from support.data.recipes import make, windows
from support.hf.own_models import OwnModelCase
from support.training.parity_cases import ROW_LENGTH, VOCAB_SIZE

from data_utils.common.batch_fields import TARGETS, TOKENS
from data_utils.common.settings import build, merge
from data_utils.loader.loader import collate
from megatron_lite.config.tree import Config
from megatron_lite.models.ernie_thu.batch import EntityBatch, Noise

VOCAB, COUNT, SIZE = 131, 50, 12
SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "max_position": 63}
TREE: dict[str, Any] = {
    "model": {**SIZES, "system": "bert", "vocab_size": VOCAB},
    "data": {"sequence_length": 60},
    "objectives": {"entities": 1},
    "entities": {"size": SIZE, "heads": 2},
    "training": {"steps": 6, "precision": "fp32", "seed": 7, "loss_normalization": "per_objective"},
}
NOISE = Noise(5, 0.05, 0.15)


class RandomVectors:
    """Vectors of COUNT entities, as a file has them."""

    identity = "random"

    def __init__(self, size: int = SIZE) -> None:
        self.rows = np.random.default_rng(1).normal(size=(COUNT, size)).astype(np.float32)

    def of(self, numbers: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros_like(self.rows[:1]), self.rows])[numbers]


def entity_config(**changes: Any) -> Config:
    return build(Config, merge(TREE, changes))


def with_entities(tokens: np.ndarray, share: float, seed: int = 0, count: int = COUNT) -> np.ndarray:
    """Tokens with entities at a share of them, int32 [2, tokens], as `gather` gives both."""
    rng = np.random.default_rng([seed, len(tokens)])
    entities = np.where(rng.random(len(tokens)) < share, rng.integers(0, count, len(tokens)), -1)
    return np.stack([tokens, entities]).astype(np.int32)


def rows_of(
    count: int, first: int = 0, share: float = 0.2, length: int = 60, vocab: int = VOCAB, **options: Any
) -> np.ndarray:
    """int32 [count, fields, length + 4]: rows of the objective, several documents in each."""
    samples = windows(count, length, seed=3 + first)
    chunks = [chunk for sample in samples for chunk in sample]
    lengths, counts = ([len(part) for part in parts] for parts in (chunks, samples))
    made = make("entities", length, row_length=length + 4, **options)
    tokens = with_entities(np.concatenate(chunks), share, first)
    rows = collate(made, tokens, np.array(lengths), np.array(counts), np.arange(first, first + count))
    rows[:, [TOKENS, TARGETS]] %= vocab
    return rows


def make_task_batch(fields: np.ndarray, samples: np.ndarray) -> EntityBatch:
    return EntityBatch(fields, samples, NOISE, RandomVectors())


def batch_of(
    count: int, first: int = 0, noise: Noise = NOISE, vectors: Any = None, **options: Any
) -> EntityBatch:
    samples = np.arange(first, first + count)
    return EntityBatch(rows_of(count, first, **options), samples, noise, vectors or RandomVectors())


@dataclass(frozen=True)
class EntityCase(OwnModelCase):
    @property
    def tolerances(self) -> dict[str, float]:
        """Gradients of the head of sentences nearly cancel: it has few labels. Measured: half of it."""
        return super().tolerances | {"gradients": 5e-5, "weights": 5e-5}

    def config(self) -> Config:
        return entity_config(**self.changes)

    def samples(self, step: int) -> np.ndarray:
        return rows_of(self.num_samples, 100 * step, length=ROW_LENGTH - 4, vocab=VOCAB_SIZE)

    batch = staticmethod(make_task_batch)


CASES = [  # the first two in the default run
    EntityCase(2, 1, 1, 2, accumulation=4, dropout=0.1, attention_dropout=0.1),
    EntityCase(1, 1, 2, 3, recompute="full", dropout=0.1),
    EntityCase(1, 1, 2, 2, accumulation=4, dropout=0.1, attention_dropout=0.1),
    EntityCase(2, 1, 2, 1, recompute="selective", attention_dropout=0.1),
    EntityCase(4, 1, 1, 3),
]
