"""A bias of scores by the distance of two tokens that depends on the query, or on the query and the key, on CUDA.

There is a vector for each distance, or several distances share one. The products of all queries (keys) with all
vectors are a table, from which the kernels that evaluate the rule read one number for each pair, and whose gradient
they write. Tables are made again in the backward pass, so that no layer keeps one.

Shapes: T tokens, H heads of this rank, D head size, N vectors, S the longest distance of two tokens.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import numpy as np
import torch

from megatron_lite.transformer.attention_backends.blocks import BlockPlan, KernelBias, RuleAttention
from megatron_lite.transformer.attention_backends.interface import AttentionFunction
from megatron_lite.transformer.attention_backends.layout import NEVER, Layout
from megatron_lite.transformer.kernels.dropout import AttentionDropout
from megatron_lite.transformer.kernels.rule_attention import MOST_VECTORS

log = logging.getLogger(__name__)

MOST_SEGMENTS = 16  # that a QueryBias tells apart


@dataclass(frozen=True)
class TableBias(KernelBias):
    """A query's product with a vector of the distance, and a key's with another."""

    vectors: torch.Tensor  # [2, N, H, D]: for the products with queries, and with keys
    slots: torch.Tensor  # int32 [2 S + 1]: `table_slots` of each distance, key less query

    def attend(self, qkv: torch.Tensor, plan: BlockPlan, dropout: AttentionDropout | None) -> torch.Tensor:
        return AttentionFunction.apply(_TableAttention(plan, dropout, self.slots), qkv, self.vectors)


class _TableAttention(RuleAttention):
    """Args: slots: of TableBias."""

    def __init__(self, plan: BlockPlan, dropout: AttentionDropout | None, slots: torch.Tensor):
        super().__init__(plan, dropout)
        self.buckets = slots

    def factors(self, qkv, *operands):  # type: ignore[no-untyped-def]
        (vectors,) = operands
        return qkv, vectors

    def tables(self, *factors):  # type: ignore[no-untyped-def]
        """Of queries and of keys, [H, T, N] each."""
        qkv, vectors = factors
        heads = qkv.permute(1, 2, 0, 3)  # [3, H, T, D]
        return [heads[i] @ per_head.permute(1, 2, 0) for i, per_head in enumerate(vectors)]

    def operand_grads(self, grad_tables, sums, grad_qkv, *factors):  # type: ignore[no-untyped-def]
        """The gradient of the vectors. Adds to that of queries and keys."""
        qkv, vectors = factors
        grad_vectors = torch.empty_like(vectors)
        for i, grad_table in enumerate(grad_tables):
            grad_qkv[:, i].add_((grad_table @ vectors[i].transpose(0, 1)).transpose(0, 1))
            grad_vectors[i] = (grad_table.mT @ qkv[:, i].transpose(0, 1)).transpose(0, 1)
        return (grad_vectors,)


@dataclass(frozen=True)
class QueryBias(KernelBias):
    """A query's product with a vector of the distance, and a number of whether the segments differ.

    The queries of these products are not those of attention.
    """

    columns: torch.Tensor  # int32 [5, T], see `segment_columns`
    queries: torch.Tensor  # [T, H, D]
    vectors: torch.Tensor  # [N, H, D], of each distance, query less key, from -S on; N is `vector_count`
    segments: torch.Tensor  # [T, H, 2]: of the same segment, of another
    longest: int  # S

    def attend(self, qkv: torch.Tensor, plan: BlockPlan, dropout: AttentionDropout | None) -> torch.Tensor:
        slots = segment_slots(self.longest, qkv.device)
        kernels = _QueryTableAttention(plan, dropout, self.columns, slots)
        return AttentionFunction.apply(kernels, qkv, self.queries, self.vectors, self.segments)


class _QueryTableAttention(RuleAttention):
    """Args: columns: of QueryBias. slots: `segment_slots`."""

    def __init__(
        self, plan: BlockPlan, dropout: AttentionDropout | None, columns: torch.Tensor, slots: torch.Tensor
    ):
        super().__init__(plan, dropout)
        self.columns, self.buckets = columns, slots

    def factors(self, qkv, *operands):  # type: ignore[no-untyped-def]
        """[H, T, D + 8] and [H, 2 N, D + 8]: of distances in the same segment, then in another."""
        queries, vectors, segments = operands
        marks = _segment_marks(queries.dtype, queries.device)
        # One product gives both terms: D features meet the vector of the distance, one of two others the segment's
        # number.
        left = torch.cat([queries, segments, marks[0, :, :, 2:].expand(*segments.shape[:2], -1)], 2)
        both = vectors.expand(2, *vectors.shape), marks.expand(-1, *vectors.shape[:2], -1)
        return left.transpose(0, 1), torch.cat(both, 3).flatten(0, 1).transpose(0, 1)

    def tables(self, *factors):  # type: ignore[no-untyped-def]
        """One, [H, T, 2 N]."""
        left, right = factors
        return [left @ right.mT]

    def operand_grads(self, grad_tables, sums, grad_qkv, *factors):  # type: ignore[no-untyped-def]
        """The gradients of queries, vectors and segments."""
        left, right = factors
        # One product gives the gradient of all columns of `left`: queries, segments and marks.
        grad_left, size = (grad_tables[0] @ right).transpose(0, 1), left.shape[2] - 8
        same, other = (grad_tables[0].mT @ left)[..., :size].transpose(0, 1).chunk(2)
        return grad_left[..., :size], same + other, grad_left[..., size : size + 2]


@functools.lru_cache(maxsize=8)
def _segment_marks(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Which of the two numbers of segments counts, in the same segment and in another: [2, 1, 1, 8], mostly zeros.

    Eight columns instead of two: products are fast where widths are multiples of eight.
    """
    return torch.eye(2, 8, dtype=dtype, device=device).view(2, 1, 1, 8)


def vector_count(longest: int) -> int:
    """Vectors of a QueryBias: one for each distance up to the longest in both directions, to a multiple of eight."""
    return -(-(2 * longest + 1) // 8) * 8


def segment_columns(columns: torch.Tensor, segments: torch.Tensor, longest: int) -> torch.Tensor:
    """A plan's columns, whose differences of positions tell those of segments, see `segment_slots`.

    Args: segments: int [T]; from MOST_SEGMENTS - 1 on all are one. longest: S, which no distance exceeds.
    """
    coded = columns.clone()
    # Position and segment in one number: the kernels know differences of positions only, and need no other column.
    coded[4] += segments.clamp(max=MOST_SEGMENTS - 1) * (2 * longest + 1)
    return coded


@functools.lru_cache(maxsize=8)
def segment_slots(longest: int, device: torch.device) -> torch.Tensor:
    """The column of the table of a QueryBias that each difference has, key less query, int32.

    A difference is a distance and 2 S + 1 times that of the segments. Columns have one turn (`table_slots`): the keys
    of a query have positions of their own.
    """
    # Wider than any distance, so that a difference tells distance and segments apart.
    width = 2 * longest + 1
    most = (MOST_SEGMENTS - 1) * width + longest
    difference = torch.arange(-most, most + 1)
    segments = torch.div(difference + longest, width, rounding_mode="floor")
    distance = difference - segments * width
    return (longest - distance + vector_count(longest) * (segments != 0)).int().to(device)


def has_distinct_positions(layout: Layout, visible_only: bool = False) -> bool:
    """Whether no two tokens of a document have one position; the first time that some have, a warning is logged.

    The kernels need it: each token that a query sees adds its own term to a table's gradient.

    Args: visible_only: compare only tokens that some token sees, and require positions up to the row's length, for a
        QueryBias.
    """
    if visible_only:
        longest = layout.shape[1]
        if 2 * vector_count(longest) > MOST_VECTORS or layout.position.max(initial=0) > longest:
            _warn_slow("a row has more distances than a table")
            return False
        layout = layout.subset((layout.key_time < NEVER) | (layout.grp != 0))
    order = np.lexsort((layout.position, layout.document))
    is_same = (np.diff(layout.document[order]) == 0) & (np.diff(layout.position[order]) == 0)
    if is_same.any():
        _warn_slow("a document has two tokens of one position")
    return not is_same.any()


@functools.cache
def _warn_slow(reason: str) -> None:
    log.warning(
        f"{reason}: attention computes all pairs of tokens of such a batch's rows, and keeps a number for each, since "
        "the kernel of relative positions needs positions that differ, of at most the row's length."
    )
