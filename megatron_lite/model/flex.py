"""FlexAttention with the rule as its mask function, for structures that need a mask on CUDA.

FlexAttention works on blocks of queries and keys. Which pairs of blocks hold a visible pair, and which no other, is
decided without a mask of all pairs: by the smallest and largest (key_time, query_bound, grp) of each stretch of a
block that belongs to one document. Tokens are put into the order of the layout, where those ranges are narrow. Padding
goes to the end, so all batches have one shape and the kernel is compiled once.

FlexAttention has no backward pass on CPU, and no dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_lite.model.batch import Layout, may_see

BLOCK = 128  # rows and keys; FlexAttention's own default


@dataclass(frozen=True)
class BlockLists:
    """For each block of queries: how many blocks of keys it needs, and which, in the first entries. int32."""

    partial_counts: np.ndarray  # [blocks]
    partial: np.ndarray  # [blocks, blocks]: the mask function decides within these
    full_counts: np.ndarray  # [blocks]
    full: np.ndarray  # [blocks, blocks]: every pair is allowed


def block_lists(layout: Layout, blocks: int, block: int = BLOCK) -> BlockLists:
    """The pairs of blocks that have something to compute; `blocks` x `block` >= the tokens of the layout."""
    place = np.arange(len(layout.rows)) // block
    changes = (np.diff(place) != 0) | (np.diff(layout.document) != 0)
    begins = np.flatnonzero(np.r_[len(place) > 0, changes])
    lengths = np.diff(np.r_[begins, len(place)])

    def smallest(x: np.ndarray) -> np.ndarray:
        return np.minimum.reduceat(x, begins) if len(begins) else x

    def largest(x: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(x, begins) if len(begins) else x

    document, number = layout.document[begins], place[begins]
    groups = (smallest(np.where(layout.grp != 0, layout.grp, np.iinfo(np.int64).max)), largest(layout.grp))
    one_group = (smallest(layout.grp) == groups[1]) & (groups[1] != 0)
    query, key = _pairs_within(document)
    some = smallest(layout.key_time)[key] <= largest(layout.query_bound)[query]
    some |= (groups[0][key] <= groups[1][query]) & (groups[0][query] <= groups[1][key])
    every = largest(layout.key_time)[key] <= smallest(layout.query_bound)[query]
    every |= one_group[query] & one_group[key] & (groups[1][query] == groups[1][key])
    whole = lengths == block
    every &= whole[query] & whole[key]
    pairs = number * blocks
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


@functools.cache
def _kernel(compiled: bool) -> Any:
    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


class FlexPlan:
    """One FlexAttention call over the tokens of the batch in the order of the layout, padding at the end.

    Args:
        with_dropout: makes the plan that is used with dropout.
        compiled: false = the plain reference, which computes every pair.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        with_dropout: Callable[[], Any],
        *,
        compiled: bool = True,
    ):
        self.with_dropout = with_dropout
        tokens = layout.shape[0] * layout.shape[1]  # padding included
        rows = np.concatenate([layout.rows, np.setdiff1d(np.arange(tokens), layout.rows)])
        self.compiled = compiled
        self.rows = None if (rows == np.arange(tokens)).all() else torch.from_numpy(rows).to(device)
        self.inverse = None if self.rows is None else torch.from_numpy(np.argsort(rows)).to(device)
        columns = torch.from_numpy(layout.in_place().reshape(4, -1)[:, rows]).to(device)
        self.block_mask = self._block_mask(layout, columns)

    @staticmethod
    def _block_mask(layout: Layout, columns: torch.Tensor) -> BlockMask:
        numbers, tokens = columns.unbind(0), columns.shape[1]

        def rule(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return may_see([x[q] for x in numbers], [x[k] for x in numbers])

        lists = block_lists(layout, -(-tokens // BLOCK))
        arrays = (lists.partial_counts, lists.partial, lists.full_counts, lists.full)
        counts, entries, full_counts, full = (
            torch.from_numpy(array)[None, None].to(columns.device) for array in arrays
        )
        return BlockMask.from_kv_blocks(
            *(counts, entries, full_counts, full, BLOCK, rule),
            seq_lengths=(tokens, tokens),
        )

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        if dropout:
            return self.with_dropout().attend(layer, q, k, v, dropout)
        heads = (_reorder(x.flatten(0, 1), self.rows, self.inverse).transpose(0, 1)[None] for x in (q, k, v))
        out = _kernel(self.compiled)(*heads, block_mask=self.block_mask)[0].transpose(0, 1)
        return _reorder(out, self.inverse, self.rows).view(q.shape)


class _Permutation(torch.autograd.Function):
    """x[rows]. The backward pass gathers as well, where that of indexing would add row by row."""

    @staticmethod
    def forward(ctx, x, rows, inverse):  # type: ignore[no-untyped-def]
        ctx.inverse = inverse
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad.index_select(0, ctx.inverse), None, None


def _reorder(x: torch.Tensor, rows: torch.Tensor | None, inverse: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else _Permutation.apply(x, rows, inverse)
