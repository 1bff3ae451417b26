"""Attention on CUDA where a mask or a bias of the scores by distance is needed: kernels that evaluate the rule.

They work on blocks of queries and keys. Which pairs of blocks hold a visible pair, and which no other, is decided
without a mask of all pairs: by the smallest and largest (key_time, query_bound, grp) of each stretch of a block that
belongs to one document. The tokens are in the order of the layout, where those ranges are narrow; padding is at the
end. The kernels are in triton_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data_utils.common.errors import ConfigError
from megatron_lite.model.attention_backends.calls import HostPlan, Packed
from megatron_lite.model.attention_backends.dense import DensePlan
from megatron_lite.model.attention_backends.layout import PADDING, Layout, padded_order
from megatron_lite.model.attention_backends.tables import has_positions_apart
from megatron_lite.model.kernels.dropout import AttentionDropout
from megatron_lite.model.kernels.fused import kernels_are_wanted
from megatron_lite.model.kernels.rule_attention import (
    BLOCK,
    rule_attention_kernel,
    rule_attention_keys_kernel,
    rule_attention_queries_kernel,
)

_LARGEST_HEAD_SIZE = 128  # more does not fit into a processor's shared memory
_NEVER = np.iinfo(np.int32).max  # key_time of a query-stream token, as int32


@dataclass(frozen=True)
class BlockLists:
    """For each block of queries: how many blocks of keys it needs, and which, in the first entries. int32."""

    partial_counts: np.ndarray  # [blocks]
    partial: np.ndarray  # [blocks, blocks]: the mask function decides within these
    full_counts: np.ndarray  # [blocks]
    full: np.ndarray  # [blocks, blocks]: every pair is allowed

    def arrays(self) -> list[np.ndarray]:
        return [self.partial_counts, self.partial, self.full_counts, self.full]

    def transposed(self) -> BlockLists:
        """For each block of keys: the blocks of queries that need it."""
        blocks = len(self.full)
        found: list[np.ndarray] = []
        for counts, lists in ((self.partial_counts, self.partial), (self.full_counts, self.full)):
            query = np.repeat(np.arange(blocks), counts)
            key = lists[np.arange(blocks) < counts[:, None]]
            found += _as_lists(np.sort(key.astype(np.int64) * blocks + query), blocks)
        return BlockLists(*found)


def block_lists(layout: Layout, blocks: int, block: int = BLOCK, window: int = 0) -> BlockLists:
    """The pairs of blocks that have something to compute; `blocks` x `block` >= the tokens of the layout.

    Args: window: of a local layer; 0 = none.
    """
    place = np.arange(len(layout.rows)) // block
    # Stretches: tokens of one block and one document. Their smallest and largest numbers bound what any pair of them
    # sees.
    changes = (np.diff(place) != 0) | (np.diff(layout.document) != 0)
    begins = np.flatnonzero(np.r_[len(place) > 0, changes])
    lengths = np.diff(np.r_[begins, len(place)])

    def smallest(x: np.ndarray) -> np.ndarray:
        return np.minimum.reduceat(x, begins) if len(begins) else x

    def largest(x: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(x, begins) if len(begins) else x

    document, number = layout.document[begins], place[begins]
    groups = (smallest(np.where(layout.grp != 0, layout.grp, np.iinfo(np.int64).max)), largest(layout.grp))
    # All tokens of the stretch in the same group.
    one_group = (smallest(layout.grp) == groups[1]) & (groups[1] != 0)
    query, key = _pairs_within(document)
    # `some`: a pair may be visible; `every`: all pairs are. Both err to the safe side, where the kernel masks.
    some = smallest(layout.key_time)[key] <= largest(layout.query_bound)[query]
    some |= (groups[0][key] <= groups[1][query]) & (groups[0][query] <= groups[1][key])
    every = largest(layout.key_time)[key] <= smallest(layout.query_bound)[query]
    every |= one_group[query] & one_group[key] & (groups[1][query] == groups[1][key])
    if window:
        nearest, farthest = smallest(layout.position), largest(layout.position)
        some &= np.maximum(nearest[key] - farthest[query], nearest[query] - farthest[key]) <= window
        every &= np.maximum(farthest[key] - nearest[query], farthest[query] - nearest[key]) <= window
    # A block that is shared by documents, or not full, always needs the mask.
    whole = lengths == block
    every &= whole[query] & whole[key]
    pairs = number * blocks
    # A pair of blocks is one number, query x blocks + key, so that sets of pairs are sorted arrays.
    full = np.unique(pairs[query[every]] + number[key[every]])
    partial = np.setdiff1d(pairs[query[some]] + number[key[some]], full)
    return BlockLists(*_as_lists(partial, blocks), *_as_lists(full, blocks))


def _pairs_within(document: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of entries with the same number, which is ascending: two int64 arrays of indices."""
    first = np.searchsorted(document, document)
    count = np.searchsorted(document, document, side="right") - first
    query = np.repeat(np.arange(len(document)), count)
    offset = np.arange(len(query)) - np.repeat(np.cumsum(count) - count, count)
    return query, np.repeat(first, count) + offset


def _as_lists(pairs: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted query x blocks + key -> counts int32 [blocks] and lists int32 [blocks, blocks]."""
    query, key = pairs // blocks, pairs % blocks
    counts = np.bincount(query, minlength=blocks).astype(np.int32)
    lists = np.zeros((blocks, blocks), np.int32)
    lists[query, np.arange(len(pairs)) - (np.cumsum(counts) - counts)[query]] = key
    return counts, lists


@dataclass(frozen=True)
class DistanceBias:
    """A bias of all layers' scores by the distance of two positions. H heads of this rank, S tokens of a row."""

    table: torch.Tensor  # [32, H], which learns
    line: torch.Tensor  # fp32 [H, 2 S + 1]: the bias of each distance from -S on
    buckets: torch.Tensor  # int32 [2 S + 1]: their rows of the table

    @staticmethod
    def of(table: torch.Tensor, buckets: torch.Tensor) -> DistanceBias:
        # The line is made once for all layers; gradients come back through the table, by bucket.
        return DistanceBias(table, table.detach().float()[buckets.long()].T.contiguous(), buckets)


class BlockPlan:
    """One call over the tokens of the batch in the order of the layout, padding at the end.

    Its bias: a DistanceBias, a TableBias, or a QueryBias.

    Args: window: of a local layer; 0 = none.
    """

    columns: torch.Tensor  # int32 [5, T]
    lists: list[torch.Tensor]  # of BlockLists, for the queries of a block
    key_lists: list[torch.Tensor]  # for its keys

    def __init__(self, layout: Layout, length: int, *, window: int = 0):
        self.length, self.window = length, window
        self.row_length = layout.shape[1]
        self.order = padded_order(layout, length)
        self.of_queries = block_lists(layout, -(-length // BLOCK), BLOCK, window)
        columns = np.repeat(PADDING, length, axis=1)
        columns[:, : len(layout.rows)] = layout.columns
        self._columns = np.minimum(columns, _NEVER).astype(np.int32)

    def arrays(self) -> list[np.ndarray]:
        return [self._columns, *self.of_queries.arrays(), *self.of_queries.transposed().arrays()]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> BlockPlan:
        self.columns, self.lists, self.key_lists = arrays[0], arrays[1:5], arrays[5:]
        return self

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: Any = None
    ) -> torch.Tensor:
        (qkv,) = inputs
        if qkv.shape[-1] > _LARGEST_HEAD_SIZE:
            raise ConfigError(
                f"heads have {qkv.shape[-1]} features; the kernels of attention with a mask or a bias take up to "
                f"{_LARGEST_HEAD_SIZE}: set training.kernels=torch, or more heads."
            )
        drawn: tuple[Any, ...] = (None, None, 0.0, 0)
        if dropout is not None:
            drawn = dropout.keys, dropout.salt, dropout.p, dropout.first_head
        if bias is None or isinstance(bias, DistanceBias):
            return _Attend.apply(qkv.contiguous(), None if bias is None else bias.table, self, bias, drawn)
        return bias.attend(qkv.contiguous(), self, drawn)


def block_plan(layout: Layout, length: int, window: int = 0, *, kernel: str = "blocks") -> HostPlan:
    """A BlockPlan, or the dense one where no kernels are wanted, or cannot be.

    Args: length, window: as for BlockPlan. kernel: as for `plan_attention`.
    """
    # `training.kernels=torch`: a mask of all pairs, without Triton.
    if not kernels_are_wanted():
        return DensePlan(layout, window=window)
    if kernel in ("tables", "query tables") and not has_positions_apart(layout, kernel == "query tables"):
        return DensePlan(layout)
    return BlockPlan(layout, length, window=window)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv, table, plan, bias, drawn):  # type: ignore[no-untyped-def]
        of_bias: Any = (None, None, []) if bias is None else (bias.line, bias.buckets, [])
        out, log_sums = rule_attention_kernel(qkv, plan.columns, plan.lists, *of_bias, *drawn, plan.window)
        ctx.save_for_backward(qkv, out, log_sums)
        ctx.plan, ctx.rest = plan, (*of_bias, *drawn, plan.window)
        ctx.type = None if table is None else table.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[no-untyped-def]
        qkv, out, log_sums = ctx.saved_tensors
        plan, rest, grad = ctx.plan, ctx.rest, grad.contiguous()
        d_qkv, products = rule_attention_queries_kernel(
            [], grad, qkv, out, log_sums, plan.columns, plan.lists, *rest
        )
        sums = rule_attention_keys_kernel(
            d_qkv, [], grad, qkv, log_sums, products, plan.columns, plan.key_lists, *rest
        )
        d_table = None if ctx.type is None else sums.sum(0).T.to(ctx.type)
        return d_qkv, d_table, None, None, None
