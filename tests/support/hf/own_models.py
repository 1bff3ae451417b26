"""Tests of models that an objective brings (ELECTRA, entities): cases of layouts, runs on random samples, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.training.parity_cases import ROW_LENGTH, VOCAB_SIZE, Case
from support.training.whole_weights import load_weights

from data_utils.common.errors import ConfigError
from data_utils.objectives import LOSS_NAMES, LOSSES
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.train.trainer import Trainer
from megatron_lite.transformer.batch import Batch

NO_DROPOUT = {"embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0}


@dataclass(frozen=True)
class OwnModelCase(Case):
    """A parity case of such a model. Its losses are sums, which the factor of a step makes means."""

    num_losses: ClassVar[int] = len(LOSSES)

    @property
    def changes(self) -> dict[str, Any]:
        """The sections of the layout, over those of a small model."""
        stage_3 = {"zero_optimization": {"stage3_param_persistence_threshold": 500}}
        return {
            "model": {
                "vocab_size": VOCAB_SIZE, "hidden_size": 64, "init_std": 0.05, "num_attention_heads": 8,
                "embedding_dropout": self.dropout, "output_dropout": self.dropout,
                "attention_dropout": self.attention_dropout, "max_position": 64,
            },
            "training": {"recompute": self.recompute},
            "batch": {"micro_batch_size": self.micro_batch_size, "global_batch_size": self.num_samples},
            "data": {"sequence_length": 32, "row_length": ROW_LENGTH},
            "optimizer": {"clip_grad_norm": 0.3, "weight_decay": 0.1, "eps": 1e-3},
            "parallel": self.parallel,
            "deepspeed": stage_3 if self.zero_stage == 3 else {},
        }  # fmt: skip


class RandomSamples:
    """The samples of a run, as a loader would give them.

    Args:
        rows_of: (count, first sample) -> rows of the objective.
        make_task_batch: (rows, samples) -> the batch of the model.
        first: added to the number of each sample.
    """

    def __init__(
        self,
        rows_of: Callable[[int, int], np.ndarray],
        make_task_batch: Callable[[np.ndarray, np.ndarray], Batch],
        first: int = 0,
    ):
        self.rows_of, self.make_task_batch, self.first = rows_of, make_task_batch, first

    def batch(self, indices: np.ndarray) -> Batch:
        rows = np.concatenate([self.rows_of(1, self.first + int(index)) for index in indices])
        return self.make_task_batch(rows, indices)

    def prefetch(self, indices: np.ndarray) -> None:
        """Nothing to read ahead."""

    def fingerprint(self) -> list[dict[str, object]]:
        return [{"random": self.first}]


def run_sections(directory: Path) -> dict[str, Any]:
    """The sections of a run of a few steps that saves after three."""
    return {
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_steps": 0},
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "checkpoint": {"save_interval": 3},
        "run": {"directory": str(directory), "log_interval": 1},
    }


def train(context: Any, config: Config, samples: RandomSamples, validation: RandomSamples) -> None:
    """Train a run to its end, as the function of `run_ranks`."""
    engine = make_engine(config, context, len(LOSS_NAMES))
    Trainer(config, context, engine, samples, validation, LOSS_NAMES).fit()


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint of a run, whole."""
    return load_weights(find_manifest(directory))


def records(directory: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a kind."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def check_same_run(expected: Path, found: Path) -> None:
    """Losses and weights of two runs are equal to the bit."""
    before, after = weights_of(expected), weights_of(found)
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert [r["loss"] for r in records(found)] == [r["loss"] for r in records(expected)]


def check_refusal(make: Callable[[], Any], parts: tuple[str, ...]) -> None:
    """A ConfigError of one line that has all parts."""
    with pytest.raises(ConfigError) as error:
        make()
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in parts), message
