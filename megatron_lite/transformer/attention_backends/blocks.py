"""Attention on CUDA where a mask or a bias of the scores by distance is needed: kernels that evaluate the rule.

They work on blocks of queries and keys. Which pairs of blocks hold a visible pair, and which no other, is decided
without a mask of all pairs: by the smallest and largest (key_time, query_bound, grp) of the tokens of a block that
belong to one document. The tokens are in the order of the layout, where those ranges are narrow; padding is at the end.
The kernels are in kernels/triton_attention.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data_utils.common.errors import ConfigError
from megatron_lite.config.attention import LARGEST_HEAD_OF_RULE
from megatron_lite.transformer.attention_backends.interface import AttentionFunction, Packed
from megatron_lite.transformer.attention_backends.layout import PADDING, Layout, padded_order
from megatron_lite.transformer.kernels.dropout import AttentionDropout
from megatron_lite.transformer.kernels.rule_attention import (
    BLOCK,
    rule_attention_kernel,
    rule_attention_keys_kernel,
    rule_attention_queries_kernel,
)

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
        transposed: list[np.ndarray] = []
        for counts, lists in ((self.partial_counts, self.partial), (self.full_counts, self.full)):
            query = np.repeat(np.arange(blocks), counts)
            key = lists[np.arange(blocks) < counts[:, None]]
            transposed += _as_lists(np.sort(key.astype(np.int64) * blocks + query), blocks)
        return BlockLists(*transposed)


def block_lists(layout: Layout, blocks: int, block: int = BLOCK, window: int = 0) -> BlockLists:
    """The pairs of blocks that have something to compute; `blocks` x `block` >= the tokens of the layout.

    Args: window: of a local layer; 0 = none.
    """
    block_index = np.arange(len(layout.batch_index)) // block
    # Runs: tokens of one block and one document. Their smallest and largest numbers bound what any pair of them sees.
    changes = (np.diff(block_index) != 0) | (np.diff(layout.document) != 0)
    begins = np.flatnonzero(np.r_[len(block_index) > 0, changes])
    lengths = np.diff(np.r_[begins, len(block_index)])

    def smallest(x: np.ndarray) -> np.ndarray:
        return np.minimum.reduceat(x, begins) if len(begins) else x

    def largest(x: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(x, begins) if len(begins) else x

    document, run_block = layout.document[begins], block_index[begins]
    smallest_grp = smallest(np.where(layout.grp != 0, layout.grp, np.iinfo(np.int64).max))
    largest_grp = largest(layout.grp)
    # All tokens of the run are in the same private group.
    is_one_group = (smallest(layout.grp) == largest_grp) & (largest_grp != 0)
    query, key = _pairs_within(document)
    # `some`: a pair may be visible; `every`: all pairs are. Both err to the safe side, where the kernel masks.
    some = smallest(layout.key_time)[key] <= largest(layout.query_bound)[query]
    some |= (smallest_grp[key] <= largest_grp[query]) & (smallest_grp[query] <= largest_grp[key])
    every = largest(layout.key_time)[key] <= smallest(layout.query_bound)[query]
    every |= is_one_group[query] & is_one_group[key] & (largest_grp[query] == largest_grp[key])
    if window:
        nearest, farthest = smallest(layout.position), largest(layout.position)
        some &= np.maximum(nearest[key] - farthest[query], nearest[query] - farthest[key]) <= window
        every &= np.maximum(farthest[key] - nearest[query], farthest[query] - nearest[key]) <= window
    # A block that is shared by documents, or not full, always needs the mask.
    is_whole = lengths == block
    every &= is_whole[query] & is_whole[key]
    # A pair of blocks is one number, query x blocks + key, so that sets of pairs are sorted arrays.
    pairs = run_block[query] * blocks + run_block[key]
    full = np.unique(pairs[every])
    partial = np.setdiff1d(pairs[some], full)
    return BlockLists(*_as_lists(partial, blocks), *_as_lists(full, blocks))


def _pairs_within(document: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of runs of the same document; documents ascend. Returns: two int64 arrays of indices."""
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


class BlockPlan:
    """One launch over the tokens of the batch in the order of the layout, padding at the end.

    Args: window: of a local layer; 0 = none.
    """

    columns: torch.Tensor  # int32 [5, T]
    query_lists: list[torch.Tensor]  # of BlockLists, for the queries of a block
    key_lists: list[torch.Tensor]  # for its keys

    def __init__(self, layout: Layout, length: int, *, window: int = 0):
        self.length, self.window = length, window
        self.row_length = layout.shape[1]
        self.order = padded_order(layout, length)
        self.block_lists = block_lists(layout, -(-length // BLOCK), BLOCK, window)
        columns = np.repeat(PADDING, length, axis=1)
        columns[:, : len(layout.batch_index)] = layout.columns
        self._host_columns = np.minimum(columns, _NEVER).astype(np.int32)

    def arrays(self) -> list[np.ndarray]:
        return [self._host_columns, *self.block_lists.arrays(), *self.block_lists.transposed().arrays()]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> BlockPlan:
        self.columns, self.query_lists, self.key_lists = arrays[0], arrays[1:5], arrays[5:]
        return self

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: Any = None
    ) -> torch.Tensor:
        """As AttentionPlan. Args: bias: a KernelBias."""
        (qkv,) = inputs
        if qkv.shape[-1] > LARGEST_HEAD_OF_RULE:
            raise ConfigError(
                f"heads have {qkv.shape[-1]} features; the kernels of attention with a mask or a bias take up to "
                f"{LARGEST_HEAD_OF_RULE}: set training.kernels=torch, or more heads."
            )
        if bias is None:
            return AttentionFunction.apply(RuleAttention(self, dropout), qkv.contiguous())
        return bias.attend(qkv.contiguous(), self, dropout)


class RuleAttention:
    """The kernels that evaluate the rule (see `AttentionKernels`), without a bias of the scores; subclasses add one.

    The kernels add a number of each distance (`line`), or look up numbers of the distance in tables, which are made
    from the inputs after the packed one: the operands of the bias.
    """

    def __init__(self, plan: BlockPlan, dropout: AttentionDropout | None):
        self.plan, self.columns = plan, plan.columns
        self.dropout: tuple[Any, ...] = (
            None,
            None,
            0.0,
            0,
        )  # keys, salt, probability, this rank's first head
        if dropout is not None:
            self.dropout = dropout.keys, dropout.salt, dropout.p, dropout.first_head
        self.line: torch.Tensor | None = None  # fp32 [H, 2 S + 1], see `rule_attention`
        self.buckets: torch.Tensor | None = None  # int32 [2 S + 1]

    def factors(self, qkv: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the tables are products of."""
        return operands

    def tables(self, *factors: torch.Tensor) -> list[torch.Tensor]:
        """[H, T, N] each."""
        return []

    def operand_grads(
        self,
        grad_tables: list[torch.Tensor],
        sums: torch.Tensor,
        grad_qkv: torch.Tensor,
        *factors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of the operands. Adds to that of q and k, [T, 3, H, D].

        Args: sums: of the gradient of `line` by bucket, fp32 [programs, H, 32].
        """
        return ()

    def forward(self, inputs: Packed) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        qkv, *operands = inputs
        # Not saved for the backward pass: [H, T, N] of each layer would be most of the memory of attention.
        tables = self.tables(*self.factors(qkv, *operands))
        out, log_sums = rule_attention_kernel(
            qkv,
            self.columns,
            self.plan.query_lists,
            self.line,
            self.buckets,
            tables,
            *self.dropout,
            self.plan.window,
        )
        return out, [[log_sums, *inputs]]

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, saved: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        log_sums, qkv, *operands = saved[0]
        grad, factors = grad.contiguous(), self.factors(qkv, *operands)
        tables = self.tables(*factors)
        shared = self.line, self.buckets, tables, *self.dropout, self.plan.window
        # Zeros: the kernels write a number only where a visible pair has that distance.
        grad_tables = [torch.zeros(table.shape, dtype=table.dtype, device=table.device) for table in tables]
        grad_qkv, products = rule_attention_queries_kernel(
            grad_tables, grad, qkv, out, log_sums, self.columns, self.plan.query_lists, *shared
        )
        sums = rule_attention_keys_kernel(
            grad_qkv, grad_tables, grad, qkv, log_sums, products, self.columns, self.plan.key_lists, *shared
        )
        # The tables are freed before `operand_grads` allocates its products.
        del tables, shared
        return grad_qkv, *self.operand_grads(grad_tables, sums, grad_qkv, *factors)


class KernelBias(ABC):
    """A bias of the scores that the kernels of a BlockPlan compute for each pair."""

    @abstractmethod
    def attend(self, qkv: torch.Tensor, plan: BlockPlan, dropout: AttentionDropout | None) -> torch.Tensor:
        """Attention with this bias: [T, 3, H, D] -> [T, H, D]."""


@dataclass(frozen=True)
class DistanceBias(KernelBias):
    """A bias of all layers' scores by the distance of two positions. H heads of this rank, S tokens of a row."""

    table: torch.Tensor  # [32, H], which learns
    line: torch.Tensor  # fp32 [H, 2 S + 1]: the bias of each distance from -S on
    buckets: torch.Tensor  # int32 [2 S + 1]: their rows of the table

    @staticmethod
    def of(table: torch.Tensor, buckets: torch.Tensor) -> DistanceBias:
        # The line is made once for all layers; gradients come back through the table, by bucket.
        return DistanceBias(table, table.detach().float()[buckets.long()].T.contiguous(), buckets)

    def attend(self, qkv: torch.Tensor, plan: BlockPlan, dropout: AttentionDropout | None) -> torch.Tensor:
        return AttentionFunction.apply(_DistanceAttention(plan, dropout, self), qkv, self.table)


class _DistanceAttention(RuleAttention):
    def __init__(self, plan: BlockPlan, dropout: AttentionDropout | None, bias: DistanceBias):
        super().__init__(plan, dropout)
        self.line, self.buckets = bias.line, bias.buckets

    def operand_grads(self, grad_tables, sums, grad_qkv, *factors):  # type: ignore[no-untyped-def]
        (table,) = factors
        return (sums.sum(0).T.to(table.dtype),)
