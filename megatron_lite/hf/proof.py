"""Proof of a conversion: the logits of both models on the same input.

The input, drawn from a fixed seed, has rows of different lengths with padding, a row without spans, and one with two
spans. The models are loaded one after the other, so the proof needs the memory of one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from data_utils.base.errors import CheckpointError
from data_utils.objectives.planes import (
    BLOCK_POSITION_IDS,
    DOC,
    FIELDS,
    ORD,
    PADDING_DOC,
    POSITION_IDS,
    TOKENS,
    WEIGHTS,
)
from megatron_lite.config.tree import ModelConfig
from megatron_lite.hf.described import by_transformers
from megatron_lite.hf.modeling_glm import GLMForBlankInfilling, GLMForSequenceClassification
from megatron_lite.hf.released import reference_logits
from megatron_lite.hf.weights import Weights
from megatron_lite.model.batch import Batch, allowed
from megatron_lite.model.glm import GLM, ModelInput

TOLERANCE = 1e-5  # fp32: the same sums in another order


@dataclass(frozen=True)
class Proof:
    """The result of a comparison."""

    largest_difference: float
    agreement: float  # share of rows with the same argmax, ties within the tolerance counted as the same
    rows: int
    largest_logit: float  # magnitude; fp32 rounding grows with it

    def __str__(self) -> str:
        return (
            f"largest logit difference {self.largest_difference:.2e}, argmax agreement {self.agreement:.2%} "
            f"of {self.rows} rows"
        )

    def joined(self, other: Proof) -> Proof:
        """Both comparisons as one."""
        rows = self.rows + other.rows
        agreeing = self.agreement * self.rows + other.agreement * other.rows
        return Proof(
            max(self.largest_difference, other.largest_difference),
            agreeing / rows,
            rows,
            max(self.largest_logit, other.largest_logit),
        )

    def require(self, tolerance: float, what: str) -> None:
        """Raise CheckpointError unless logits differ by at most `tolerance` (times the largest beyond 1)."""
        limit = tolerance * max(1.0, self.largest_logit)
        if not (self.largest_difference <= limit and self.agreement == 1.0):  # so that NaN fails too
            raise CheckpointError(
                f"{what} does not compute what its source computes: {self} (tolerance {limit:.1e}); "
                "nothing was kept."
            )


def require_all(comparisons: Mapping[str, Proof], tolerance: float, what: str) -> Proof:
    """All comparisons as one. Args: comparisons: by name. Raises: as `Proof.require`, for the first that fails."""
    for name, result in comparisons.items():
        result.require(tolerance, what if name == "logits" else f"{what} ({name})")
    first, *others = comparisons.values()
    for other in others:
        first = first.joined(other)
    return first


def compare(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> Proof:
    """Two fp32 logit tensors [..., V] of one shape."""
    largest = expected.abs().max().item()
    best = expected.gather(-1, actual.argmax(-1, keepdim=True)).squeeze(-1)
    agreeing = best >= expected.amax(-1) - tolerance * max(1.0, largest)
    difference = (actual - expected).abs().max().item()
    return Proof(difference, agreeing.float().mean().item(), agreeing.numel(), largest)


def proof_batch(config: ModelConfig, seed: int = 0) -> np.ndarray:
    """int32 [3, fields, S], as Batch: part A and two spans, padded; with one span, unpadded; part A, padded."""
    assert config.vocab_size is not None
    rng = np.random.default_rng(seed)
    length = min(96, config.max_position)
    batch = np.zeros((3, len(FIELDS), length), np.int32)
    batch[:, DOC] = PADDING_DOC
    for row, (context, spans) in enumerate(_proof_rows(length)):
        total = context + sum(spans)
        batch[row, TOKENS, :total] = rng.integers(0, config.vocab_size, total)
        batch[row, DOC, :total] = 0
        batch[row, POSITION_IDS, :context] = np.arange(context)
        batch[row, ORD, context:total] = np.arange(1, total - context + 1)
        start = context
        for span in spans:
            batch[row, POSITION_IDS, start : start + span] = rng.integers(0, context)
            batch[row, BLOCK_POSITION_IDS, start : start + span] = np.arange(1, span + 1)
            start += span
    batch[:, WEIGHTS].view(np.float32)[:] = 1.0
    return batch


def _proof_rows(length: int) -> list[tuple[int, list[int]]]:
    """Length of part A and of each span, per row."""
    third = max(1, length // 3)
    return [
        (third, [max(1, third // 2), max(1, third // 3)]),
        (length - third, [third]),
        (max(1, length // 2), []),
    ]


def training_logits(model: GLM, batch: np.ndarray) -> torch.Tensor:
    """fp32 [B, S, vocab_size] of our training model, on padding too."""
    return training_states(model, batch)[1]


@torch.no_grad()
def training_states(model: GLM, batch: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The last block's output [B, S, D], and the logits."""
    inputs = ModelInput.from_batch(Batch(batch), torch.device("cpu"), model.config, kernel="dense")
    hidden = model.hidden_states(inputs.tokens, inputs.ids, inputs.plan)
    rows = hidden, model.logits(hidden).float()
    states, logits = (x.unflatten(0, (len(batch), -1)) for x in rows)
    return states, logits


@torch.no_grad()
def exported_logits(directory: Path, batch: np.ndarray) -> torch.Tensor:
    """The same of a Hugging Face directory, loaded as its users load it, computed in fp32."""
    if not sys.stderr.isatty():  # our own progress bars are off, too
        transformers_logging.disable_progress_bar()
    with by_transformers(directory):
        model = GLMForBlankInfilling.from_pretrained(directory, dtype=torch.float32).eval()
        return model(**_inputs(batch), use_cache=False).logits


@torch.no_grad()
def training_classes(model: GLM, batch: np.ndarray) -> torch.Tensor:
    """What the head of a task says of each row's first token, fp32 [B, classes]."""
    states, _ = training_states(model, batch)
    first = torch.arange(len(batch))
    return model.heads.task_rows([states[:, 0]], first, model.final_layernorm, None).float()


@torch.no_grad()
def exported_classes(directory: Path, batch: np.ndarray) -> torch.Tensor:
    """The same of a Hugging Face directory."""
    with by_transformers(directory):
        model = GLMForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
        return model(**_inputs(batch)).logits


@torch.no_grad()
def released_logits(shards: Sequence[Weights], config: ModelConfig, batch: np.ndarray) -> torch.Tensor:
    """The same of weights in the released layout, by the reference's arithmetic."""
    doc = batch[:, DOC]
    visible = torch.from_numpy(allowed(doc, batch[:, ORD], np.zeros_like(doc)))
    tokens, positions = _tensor(batch, TOKENS), _tensor(batch, POSITION_IDS)
    return reference_logits(shards, config, tokens, positions, _tensor(batch, BLOCK_POSITION_IDS), visible)


def _inputs(batch: np.ndarray) -> dict[str, torch.Tensor]:
    return {
        "input_ids": _tensor(batch, TOKENS),
        "attention_mask": (_tensor(batch, DOC) != PADDING_DOC).long(),
        "position_ids": _tensor(batch, POSITION_IDS),
        "block_position_ids": _tensor(batch, BLOCK_POSITION_IDS),
    }


def _tensor(batch: np.ndarray, plane: int) -> torch.Tensor:
    return torch.from_numpy(batch[:, plane].astype(np.int64))
