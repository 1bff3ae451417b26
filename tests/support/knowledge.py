"""Small models with entities: configurations, batches of the objective with mentions, and fixed vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from data_utils.base.planes import TARGETS, TOKENS
from data_utils.base.settings import build, merge
from data_utils.objectives import LOSSES
from data_utils.samples.loader import collate
from megatron_lite.config.tree import Config
from megatron_lite.knowledge.batch import EntityBatch, Noise
from support.parity_cases import ROW_LENGTH, VOCAB_SIZE, Case
from support.recipes import make, windows

VOCAB, COUNT, SIZE = 131, 50, 12
SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "max_position": 63}
TREE: dict[str, Any] = {
    "model": {**SIZES, "system": "bert", "vocab_size": VOCAB},
    "data": {"sequence_length": 60},
    "objectives": {"entities": 1},
    "entities": {"size": SIZE, "heads": 2},
    "training": {"steps": 6, "precision": "fp32", "seed": 7, "loss_normalization": "per_objective"},
}
NO_DROPOUT = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0}
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
    pieces = [piece for sample in samples for piece in sample]
    lengths, counts = ([len(part) for part in parts] for parts in (pieces, samples))
    made = make("entities", length, row_length=length + 4, **options)
    tokens = with_entities(np.concatenate(pieces), share, first)
    rows = collate(made, tokens, np.array(lengths), np.array(counts), np.arange(first, first + count))
    rows[:, [TOKENS, TARGETS]] %= vocab
    return rows


def batch_of(
    count: int, first: int = 0, noise: Noise = NOISE, vectors: Any = None, **options: Any
) -> EntityBatch:
    samples = np.arange(first, first + count)
    return EntityBatch(rows_of(count, first, **options), samples, noise, vectors or RandomVectors())


@dataclass(frozen=True)
class EntityCase(Case):
    """Both streams in a layout. The losses are sums here, which the factor of a step makes means."""

    num_losses: ClassVar[int] = len(LOSSES)

    def config(self) -> Config:
        tree = {
            "model": {
                **SIZES, "system": "bert", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "init_std": 0.05,
                "num_attention_heads": 8, "embedding_dropout": self.dropout, "output_dropout": self.dropout,
                "attention_dropout": self.attention_dropout, "max_position": 64,
            },
            "training": {"recompute": self.recompute},
            "batch": {"micro_batch_size": self.micro_batch_size, "global_batch_size": self.num_samples},
            "data": {"sequence_length": 32, "row_length": ROW_LENGTH},
            "optimizer": {"clip_grad_norm": 0.3, "weight_decay": 0.1, "eps": 1e-3},
            "parallel": self.parallel,
        }  # fmt: skip
        if self.zero_stage == 3:
            tree["deepspeed"] = {"zero_optimization": {"stage3_param_persistence_threshold": 500}}
        return entity_config(**tree)

    def samples(self, step: int) -> np.ndarray:
        return rows_of(self.num_samples, 100 * step, length=ROW_LENGTH - 4, vocab=VOCAB_SIZE)

    def batch(self, planes: np.ndarray, samples: np.ndarray) -> EntityBatch:
        return EntityBatch(planes, samples, NOISE, RandomVectors())
