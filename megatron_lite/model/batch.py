"""A batch on the host: the fields of its rows, and what follows from them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from data_utils.common.batch_fields import DOC, GRP, OBJECTIVE, ORD, PADDING_DOC, POSITION_IDS, WEIGHTS
from data_utils.common.losses import BY_TOKENS, CLASS_LEVEL
from megatron_lite.model.attention_backends.layout import Layout, make_layout

if TYPE_CHECKING:
    import torch

    from megatron_lite.config.model import ModelConfig


def mean_scales(factors: Sequence[float], totals: Sequence[float]) -> np.ndarray:
    """Each loss's factor over its total in the step, fp32 [losses]: weights times it make sums means."""
    scales = [f / total if total else 0.0 for f, total in zip(factors, totals, strict=True)]
    return np.array(scales, np.float32)


class HostParts(Protocol):
    """Inputs of a model beside the tokens, as arrays on the host."""

    ARRAYS: int  # number of arrays that `arrays` returns

    def arrays(self) -> list[np.ndarray]:
        """int32, floats by their bits."""

    def on_device(self, arrays: list[torch.Tensor]) -> Any:
        """Args: arrays: as `arrays` gave them, on the device."""

    def loss_rows(self) -> tuple[Any, np.ndarray] | None:
        """Rows with loss and their targets instead of those of the batch's weights; None = those."""


class Batch:
    """A batch as it was read, and what follows from it. Each fact is computed once, when it is first needed.

    Args:
        fields: int32 [B, fields, S] (data_utils/common/batch_fields.py), not changed from here on.
        samples: int64 [B], their numbers, from which dropout follows; None = 0, 1, ...
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
        from megatron_lite.model.attention_backends.window import count_window_keys

        near = int(count_window_keys(self.layout, model.attention_window).sum())
        return self.visible_keys + (near - self.visible_keys) * model.local_share

    @property
    def targets(self) -> int:
        """Tokens that a decoder computes, where the model has one."""
        return int(self.layout.is_target.sum())

    @property
    def target_keys(self) -> int:
        """`visible_keys` of those tokens alone."""
        return int(self.layout.visible_keys.count[self.layout.is_target].sum())

    @property
    def loss_rows(self) -> int:
        # Losses of classes are no rows of the vocabulary's head.
        return int(np.count_nonzero(self.weights[~np.isin(self.fields[:, OBJECTIVE], CLASS_LEVEL)]))

    @cached_property
    def divisors(self) -> np.ndarray:
        """Share of each token in the divisor of its loss, fp32 [B, S]: its weight, or 1 (`BY_TOKENS`)."""
        # Masked diffusion weighs tokens by 1 / t: its sum is divided by the number of tokens, masked or not.
        by_tokens = np.isin(self.fields[:, OBJECTIVE], BY_TOKENS) & (self.fields[:, DOC] != PADDING_DOC)
        return np.where(by_tokens, np.float32(1.0), self.weights)

    @property
    def loss_weight(self) -> float:
        """The divisor of all losses."""
        return float(self.divisors.sum())

    def loss_weights(self, num_losses: int) -> np.ndarray:
        """The divisor of each loss, float64 [num_losses]."""
        # float64: sums of whole weights over a step and its ranks stay exact.
        return np.bincount(self.fields[:, OBJECTIVE].ravel(), self.divisors.ravel(), minlength=num_losses)

    def as_means(self, factors: Sequence[float], totals: Sequence[float]) -> Batch:
        """The batch with each loss's weights times its factor over its total in the step: sums become means."""
        # Shallow: the layout is the dearest part of a batch, and weights do not change it.
        other = copy.copy(self)  # the fields are shared, and the layout where it is known
        other.weights = self.weights * mean_scales(factors, totals)[self.fields[:, OBJECTIVE]]
        return other

    def host_parts(
        self, order: np.ndarray, first: int, predicted: np.ndarray, few_counts: bool, config: ModelConfig
    ) -> HostParts | None:
        """The model's inputs beside the tokens, in the order of the attention plan; None = there are none.

        Args: order: int64 [T], index of each token of the plan into the flattened batch, -1 for padding. first: token
            of [T] from which rows are counted: with a decoder its first. predicted: int64, the tokens with loss,
            counted from `first`, -1 for those that fill up. few_counts: of rows, see `few_count`.
        """
        return None

    def more_weights(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights of losses that the vocabulary's head does not compute, fp32, and the number of each one's loss."""
        return self.weights[:0, 0], order[:0]

    def padded(self, rows: int) -> Batch:
        """The batch filled with rows of padding, without documents or loss, up to `rows`."""
        padded = np.zeros((rows, *self.fields.shape[1:]), np.int32)
        padded[:, DOC] = PADDING_DOC
        padded[: len(self.fields)] = self.fields
        return Batch(padded)


class Samples(Protocol):
    """Sample numbers -> batch, as the SampleLoader of pretraining has it."""

    def batch(self, indices: np.ndarray) -> np.ndarray | Batch:
        """Samples int64 [B] as fields int32 [B, len(FIELDS), row_length], or as a Batch."""

    def prefetch(self, indices: np.ndarray) -> None:
        """Told which samples int64 [B] a later step reads."""

    def fingerprint(self) -> list[dict[str, object]]:
        """The identity of the data, for checkpoints."""
