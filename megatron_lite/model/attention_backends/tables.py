"""A bias of scores by the distance of two tokens that depends on the query, or on the query and the key, on CUDA.

They meet vectors of distances: their products are tables, of which the kernels that evaluate the rule read a number of
each for each pair, and whose gradients they write. Tables are made again in the backward pass, so that no layer keeps
one. Shapes: T tokens, H heads of this rank, D head size, N vectors, S the longest distance of two tokens.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_lite.model.attention_backends.layout import NEVER, Layout
from megatron_lite.model.kernels.rule_attention import (
    MOST_ROWS,
    rule_attention_kernel,
    rule_attention_keys_kernel,
    rule_attention_queries_kernel,
)

log = logging.getLogger(__name__)

MOST_SEGMENTS = 16  # that a QueryBias tells apart


@dataclass(frozen=True)
class TableBias:
    """A query's product with a vector of the distance, and a key's with another."""

    vectors: torch.Tensor  # [2, N, H, D]: those that queries meet, and those that keys meet
    places: torch.Tensor  # int32 [2 S + 1]: `table_places` of each distance, key less query

    def attend(self, qkv: torch.Tensor, plan: Any, drawn: tuple[Any, ...]) -> torch.Tensor:
        """Args: qkv: [T, 3, H, D]. plan: a BlockPlan. drawn: keys, salt, probability and first head of dropout."""
        return _Attend.apply(TableBias, plan, plan.columns, self.places, drawn, qkv, self.vectors)

    @staticmethod
    def factors(qkv: torch.Tensor, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The operands of the products that are tables."""
        return qkv, vectors

    @staticmethod
    def tables(qkv: torch.Tensor, vectors: torch.Tensor) -> list[torch.Tensor]:
        """[H, T, N] each."""
        heads = qkv.permute(1, 2, 0, 3)  # [3, H, T, D]
        return [heads[i] @ of_heads.permute(1, 2, 0) for i, of_heads in enumerate(vectors)]

    @staticmethod
    def gradients(
        d_tables: list[torch.Tensor], d_qkv: torch.Tensor, qkv: torch.Tensor, vectors: torch.Tensor
    ) -> tuple[torch.Tensor]:
        """The gradient of the vectors. Adds to that of queries and keys."""
        d_vectors = torch.empty_like(vectors)
        for i, d_table in enumerate(d_tables):
            d_qkv[:, i].add_((d_table @ vectors[i].transpose(0, 1)).transpose(0, 1))
            d_vectors[i] = (d_table.mT @ qkv[:, i].transpose(0, 1)).transpose(0, 1)
        return (d_vectors,)


@dataclass(frozen=True)
class QueryBias:
    """A query's product with a vector of the distance, and a number of whether the segments differ; own queries."""

    columns: torch.Tensor  # int32 [5, T], see `segment_columns`
    queries: torch.Tensor  # [T, H, D]
    vectors: torch.Tensor  # [N, H, D], of each distance, query less key, from -S on; N is `vectors_of`
    segments: torch.Tensor  # [T, H, 2]: of the same segment, of another
    longest: int  # S

    def attend(self, qkv: torch.Tensor, plan: Any, drawn: tuple[Any, ...]) -> torch.Tensor:
        """Attention with this bias. Args: as for TableBias."""
        places = segment_places(self.longest, qkv.device)
        operands = self.queries, self.vectors, self.segments
        return _Attend.apply(QueryBias, plan, self.columns, places, drawn, qkv, *operands)

    @staticmethod
    def factors(
        qkv: torch.Tensor, queries: torch.Tensor, vectors: torch.Tensor, segments: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[H, T, D + 8] and [H, 2 N, D + 8]: of distances in the same segment, then in another."""
        marks = _marks(queries.dtype, queries.device)
        # One product gives both terms: D features meet the vector of the distance, one of two more the segment's
        # number.
        left = torch.cat([queries, segments, marks[0, :, :, 2:].expand(*segments.shape[:2], -1)], 2)
        both = vectors.expand(2, *vectors.shape), marks.expand(-1, *vectors.shape[:2], -1)
        return left.transpose(0, 1), torch.cat(both, 3).flatten(0, 1).transpose(0, 1)

    @staticmethod
    def tables(left: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
        """One, [H, T, 2 N]."""
        return [left @ right.mT]

    @staticmethod
    def gradients(
        d_tables: list[torch.Tensor], d_qkv: torch.Tensor, left: torch.Tensor, right: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of queries, vectors and segments."""
        # The transposed product gives the gradients of all three parts, which are cut apart here.
        d_left, size = (d_tables[0] @ right).transpose(0, 1), left.shape[2] - 8
        same, other = (d_tables[0].mT @ left)[..., :size].transpose(0, 1).chunk(2)
        return d_left[..., :size], same + other, d_left[..., size : size + 2]


@functools.lru_cache(maxsize=8)
def _marks(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Which of the numbers of segments counts, for both, [2, 1, 1, 8]; products are fast by eights."""
    return torch.eye(2, 8, dtype=dtype, device=device).view(2, 1, 1, 8)


def vectors_of(longest: int) -> int:
    """Vectors of a QueryBias: one for each distance up to the longest in both directions, filled up to eights."""
    return -(-(2 * longest + 1) // 8) * 8


def segment_columns(columns: torch.Tensor, segments: torch.Tensor, longest: int) -> torch.Tensor:
    """A plan's columns, whose differences of positions tell those of segments, see `segment_places`.

    Args: segments: int [T]; from MOST_SEGMENTS - 1 on all are one. longest: S, which no distance exceeds.
    """
    coded = columns.clone()
    # Position and segment in one number: the kernels know differences of positions only, and need no other column.
    coded[4] += segments.clamp(max=MOST_SEGMENTS - 1) * (2 * longest + 1)
    return coded


@functools.lru_cache(maxsize=8)
def segment_places(longest: int, device: torch.device) -> torch.Tensor:
    """The column of the table of a QueryBias that each difference has, key less query, int32.

    A difference is a distance and 2 S + 1 times that of the segments. Columns have one turn (`table_places`): the keys
    of a query have positions of their own.
    """
    # Wider than any distance, so that a difference tells distance and segments apart.
    width = 2 * longest + 1
    most = (MOST_SEGMENTS - 1) * width + longest
    difference = torch.arange(-most, most + 1)
    segments = torch.div(difference + longest, width, rounding_mode="floor")
    distance = difference - segments * width
    return (longest - distance + vectors_of(longest) * (segments != 0)).int().to(device)


def has_positions_apart(layout: Layout, of_keys: bool = False) -> bool:
    """Whether no two tokens of a document have one position; if some have, it is said once.

    The kernels need it: each token that a query sees gives its own part of a table's gradient.

    Args: of_keys: only those that some token sees, and none beyond the row's length, see QueryBias.
    """
    if of_keys:
        longest = layout.shape[1]
        if 2 * vectors_of(longest) > MOST_ROWS or layout.position.max(initial=0) > longest:
            _say_slow("a row has more distances than a table")
            return False
        layout = layout.part((layout.key_time < NEVER) | (layout.grp != 0))
    order = np.lexsort((layout.position, layout.document))
    is_same = (np.diff(layout.document[order]) == 0) & (np.diff(layout.position[order]) == 0)
    if is_same.any():
        _say_slow("a document has two tokens of one position")
    return not is_same.any()


@functools.cache
def _say_slow(reason: str) -> None:
    log.warning(
        f"{reason}: attention computes all pairs of tokens of such a batch's rows, and keeps a number for each, since "
        "the kernel of relative positions needs positions that differ, of at most the row's length."
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind, plan, columns, places, drawn, qkv, *operands):  # type: ignore[no-untyped-def]
        # Not saved for the backward pass: [H, T, N] of each layer would be most of the memory of attention.
        tables = kind.tables(*kind.factors(qkv, *operands))
        out, log_sums = rule_attention_kernel(qkv, columns, plan.lists, None, places, tables, *drawn, 0)
        ctx.save_for_backward(columns, places, out, log_sums, qkv, *operands)
        ctx.kind, ctx.plan, ctx.drawn = kind, plan, drawn
        return out

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[no-untyped-def]
        columns, places, out, log_sums, qkv, *operands = ctx.saved_tensors
        plan, grad, factors = ctx.plan, grad.contiguous(), ctx.kind.factors(qkv, *operands)
        tables = ctx.kind.tables(*factors)
        rest = None, places, tables, *ctx.drawn, 0
        # Zeros: the kernels write a number only where a visible pair has that distance.
        d_tables = [torch.zeros(table.shape, dtype=table.dtype, device=table.device) for table in tables]
        given = d_tables, grad, qkv, out, log_sums, columns, plan.lists, *rest
        d_qkv, products = rule_attention_queries_kernel(*given)
        rule_attention_keys_kernel(
            d_qkv, d_tables, grad, qkv, log_sums, products, columns, plan.key_lists, *rest
        )
        # The tables are freed before the products below allocate theirs.
        del tables, rest, given
        return *[None] * 5, d_qkv, *ctx.kind.gradients(d_tables, d_qkv, *factors)
