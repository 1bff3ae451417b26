"""A batch on the host: the fields of its sequences as the loader made them, and the counts that follow from them.

It knows no model's attention plan and no device, and needs no torch: estimates and scripts count with it.
micro_batch.py makes of it what a model reads.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from data_utils.common.batch_fields import (
    DOC,
    GRP,
    OBJECTIVE,
    ORD,
    PADDING_DOC,
    POSITION_IDS,
    TARGETS,
    TOKENS,
    WEIGHTS,
)
from data_utils.common.losses import BY_TOKENS, CLASS_LEVEL, MTP
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends.layout import Layout, make_layout
from megatron_lite.transformer.loss_positions import LossPositions, find_loss_positions

if TYPE_CHECKING:
    import torch


class MakeInputs(Protocol):
    """Tensors by name -> the object that a model reads."""

    def __call__(self, tensors: dict[str, torch.Tensor], /) -> Any: ...


def _no_inputs(tensors: dict[str, torch.Tensor]) -> None:
    """Most models read nothing besides the tokens."""


@dataclass(frozen=True)
class ExtraInputs:
    """What a task or a model reads of a micro-batch besides its tokens, on the host."""

    # By name; they lie in the micro-batch's buffer: integers as int32, floats as fp32.
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    # Makes `MicroBatch.extra_inputs` of these arrays, on the host and on the device.
    make: MakeInputs = _no_inputs
    # fp32: of losses other than those of the tokens' own targets, and the number of each one's loss, int64.
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    weight_objectives: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    # Positions with a loss and their targets, in place of those of the tokens' weights.
    predictions: tuple[LossPositions[np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True)
class FurtherTokens:
    """What the block of further tokens reads of a micro-batch (multi_token.py): T tokens, K of them with such a loss.

    The weights of the losses are `MicroBatch.extra_weights`.
    """

    next_tokens: torch.Tensor  # int32 [T]; 0 at the end of a document, which no other token sees
    targets: torch.Tensor  # int32 [K]
    loss_positions: LossPositions[torch.Tensor]

    @staticmethod
    def of(tensors: dict[str, torch.Tensor], /) -> FurtherTokens:
        """Args: tensors: of `Batch.extra_inputs`, by name."""
        prefix = "positions."
        positions = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        return FurtherTokens(tensors["next_tokens"], tensors["targets"], LossPositions(**positions))


class Batch:
    """B sequences of length S, padding included, and their counts. The attention layout is computed once.

    Args:
        fields: int32 [B, fields, S] (data_utils/common/batch_fields.py), not changed from here on.
        samples: int64 [B], the numbers of the samples, from which dropout follows; None = 0, 1, ...
    """

    def __init__(self, fields: np.ndarray, samples: np.ndarray | None = None):
        self.fields = fields
        self.samples = np.arange(len(fields)) if samples is None else samples
        self.weights = fields[:, WEIGHTS].view(np.float32)  # [B, S]: of each token's loss

    @cached_property
    def layout(self) -> Layout:
        return make_layout(*(self.fields[:, field] for field in (DOC, ORD, GRP, POSITION_IDS)))

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return len(self.layout.batch_index)

    @property
    def visible_keys(self) -> int:
        """Sum over tokens of the keys that the rule lets them see."""
        return int(self.layout.visible_keys.count.sum())

    def layer_keys(self, model: ModelConfig) -> float:
        """`visible_keys` of the model's layers on average: local ones see what is near."""
        if not model.attention_window:
            return self.visible_keys
        # Imports torch, which processes that only count batches do without.
        from megatron_lite.transformer.attention_backends.window import count_window_keys

        near = int(count_window_keys(self.layout, model.attention_window).sum())
        return self.visible_keys + (near - self.visible_keys) * model.local_share

    @property
    def decoder_tokens(self) -> int:
        """Tokens that a decoder computes, where the model has one."""
        return int(self.layout.is_target.sum())

    @property
    def decoder_keys(self) -> int:
        """`visible_keys` of those tokens alone."""
        return int(self.layout.visible_keys.count[self.layout.is_target].sum())

    @property
    def loss_tokens(self) -> int:
        """Tokens that the vocabulary's head predicts: those with a loss, without classes such as the next sentence."""
        return int(np.count_nonzero(self.weights[~np.isin(self.fields[:, OBJECTIVE], CLASS_LEVEL)]))

    def further_tokens(self, model: ModelConfig) -> int:
        """Predictions of further tokens, which the model's head computes besides `loss_tokens`."""
        return model.mtp_layers and int(np.count_nonzero(self.further[2]))

    @cached_property
    def further(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each token's successor in its document: token, target and loss weight, each [B, S]; 0 without one.

        In a text that is read from left to right the target is the token after the next (MTP).
        """
        doc = self.fields[:, DOC]
        has_next = (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] != PADDING_DOC)
        fields = self.fields[:, TOKENS], self.fields[:, TARGETS], self.weights
        token, target, weight = (
            np.pad(np.where(has_next, each[:, 1:], each.dtype.type(0)), ((0, 0), (0, 1))) for each in fields
        )
        return token, target, weight

    @cached_property
    def token_divisors(self) -> np.ndarray:
        """The addend of each token to the divisor of its loss, fp32 [B, S]: its weight, or 1 (`BY_TOKENS`)."""
        # Masked diffusion weighs tokens by 1 / t: its sum is divided by the number of tokens, masked or not.
        by_tokens = np.isin(self.fields[:, OBJECTIVE], BY_TOKENS) & (self.fields[:, DOC] != PADDING_DOC)
        return np.where(by_tokens, np.float32(1.0), self.weights)

    @property
    def loss_divisor(self) -> float:
        """The divisor of all losses."""
        return float(self.token_divisors.sum())

    def loss_divisors(self, num_losses: int) -> np.ndarray:
        """The divisor of each loss, float64 [num_losses]."""
        # float64: sums of whole weights over a step and its ranks stay exact.
        return np.bincount(
            self.fields[:, OBJECTIVE].ravel(), self.token_divisors.ravel(), minlength=num_losses
        )

    def with_scaled_weights(self, scales: np.ndarray) -> Batch:
        """The batch with each loss's weights times its scale, fp32 [losses]; where it is 0, no loss is computed."""
        # Shallow: the layout costs most of a batch's time, and weights do not change it.
        other = copy.copy(self)
        other.weights = self.weights * scales[self.fields[:, OBJECTIVE]]
        return other

    def extra_inputs(
        self,
        order: np.ndarray,
        decoder_start: int,
        predicted: np.ndarray,
        few_counts: bool,
        config: ModelConfig,
    ) -> ExtraInputs:
        """The model's inputs besides the tokens, in the order of the attention plan.

        Args:
            order: int64 [T], index of each token of the plan into the flattened batch, -1 for padding.
            decoder_start: the decoder's first token of [T], from which positions are counted; 0 without a decoder.
            predicted: int64, the tokens with a loss, counted from there, -1 for padding.
            few_counts: pad what is counted to one of few counts, see `few_count`.
        """
        return self._further_inputs(order, few_counts, config) if config.mtp_layers else ExtraInputs()

    def _further_inputs(self, order: np.ndarray, few_counts: bool, config: ModelConfig) -> ExtraInputs:
        """The `FurtherTokens`. Args: as for `extra_inputs`."""
        next_tokens, targets, weights = (
            np.where(order < 0, 0, field.reshape(-1)[order]).astype(field.dtype) for field in self.further
        )
        objectives = np.full(len(order), MTP.number)
        positions, predicted = find_loss_positions(weights, objectives, config, few_counts=few_counts)
        is_token = predicted >= 0  # False for padding up to one of few counts
        arrays = {
            "next_tokens": next_tokens,
            "targets": np.where(is_token, targets[predicted], 0),
            **{f"positions.{name}": array for name, array in vars(positions).items()},
        }
        weights = np.where(is_token, weights[predicted], np.float32(0.0))
        return ExtraInputs(arrays, FurtherTokens.of, weights, positions.objectives)

    def padded(self, sequences: int) -> Batch:
        """The batch with sequences of padding added, without documents or loss, up to `sequences` in all."""
        padded = np.zeros((sequences, *self.fields.shape[1:]), np.int32)
        padded[:, DOC] = PADDING_DOC
        padded[: len(self.fields)] = self.fields
        return Batch(padded)


class Samples(Protocol):
    """Sample numbers -> batch, as the SampleLoader of pretraining has it."""

    def batch(self, indices: np.ndarray) -> np.ndarray | Batch:
        """Samples int64 [B] as fields int32 [B, len(FIELDS), row_length], or as a Batch."""

    def prefetch(self, indices: np.ndarray) -> None:
        """A hint that a later step reads the samples int64 [B]."""

    def fingerprint(self) -> list[dict[str, object]]:
        """The identity of the data, for checkpoints."""
