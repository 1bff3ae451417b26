"""The kernels of scores whose relative positions depend on queries, beside those of dense attention."""

from __future__ import annotations

from typing import Any

from megatron_lite.estimate.roofline import Work
from megatron_lite.estimate.tally import Tally

BlockCosts = Any  # that of block_costs.py, which imports this file


def relative_terms(costs: BlockCosts, tally: Tally, pairs: float, backward: bool = False) -> None:
    """Learned terms of the scores of one layer; none where relative positions are buckets, or not there."""
    if costs.model.relative == "disentangled":
        _positions(costs, tally, pairs, backward)
    elif costs.model.has_query_terms:
        _distances(costs, tally, pairs, backward)


def _distances(costs: BlockCosts, tally: Tally, pairs: float, backward: bool) -> None:
    """Terms by distance and segment."""
    s, e, numbers = costs.s, costs.e, pairs * costs.s.heads
    whole, scores = costs.T * s.attended * e, table_bytes(costs)
    tally.product(s.distances, s.width, s.attended, e)
    tally.kernel(2 * whole, 4)
    tally.kernel(6 * whole)
    tally.kernel(scores + whole, 2 if backward else 1, "matmul")
    tally.small(2)
    if backward:
        tally.kernel(6.5 * numbers, 2)
        tally.kernel((8 + 2 * e) * numbers)
        tally.kernel(2 * e * numbers)
        tally.kernel(2 * scores)
        tally.small(8)
    else:
        tally.kernel((8 + 2 * e) * numbers, 2)
        tally.kernel(3 * e * numbers)
        tally.kernel(2 * e * numbers)
        tally.kernel(8 * pairs, 4)
        tally.small(9)


def table_bytes(costs: BlockCosts) -> float:
    """A layer's products of queries, or of keys, with the vectors of buckets or of distances."""
    rows = costs.s.distances if costs.model.has_distance_scores else costs.model.position_rows
    return costs.T * costs.s.heads * rows * costs.e


def moved_bytes(costs: BlockCosts, work: Work, backward: bool) -> float:
    """Bytes of tables and of their gradients that a call of attention reads and writes."""
    if work.kind == "tables":
        return (6 if backward else 2) * table_bytes(costs)
    if work.kind == "query tables":  # a number of each pair
        return (3 if backward else 1) * work.pairs * costs.s.heads * costs.e
    return 0.0


def tables(costs: BlockCosts, tally: Tally, kind: str, backward: bool = False) -> None:
    """Kernels beside those that read tables of scores within their tiles. Args: kind: of a Work."""
    if kind == "tables":
        _two_tables(costs, tally, backward)
    elif kind == "query tables":
        _query_table(costs, tally, backward)


def _query_table(costs: BlockCosts, tally: Tally, backward: bool) -> None:
    """A table of all distances twice: for the same segment, and for another."""
    s, e = costs.s, costs.e
    whole, scores = costs.T * s.attended * e, 2 * table_bytes(costs)
    tally.product(s.distances, s.width, s.attended, e)
    tally.kernel(6 * whole)
    tally.kernel(2 * whole)  # queries with the numbers of segments
    tally.kernel(scores + whole, 1, "matmul")
    if backward:
        tally.kernel(scores)  # zeros
        tally.kernel(scores + whole, 2, "matmul")
        tally.kernel(whole, 5)
        tally.kernel(3 * whole, 2)
        tally.small(4)
    else:
        tally.kernel(2 * whole, 3)
        tally.kernel(whole)
        tally.small(2)


def _two_tables(costs: BlockCosts, tally: Tally, backward: bool) -> None:
    """A table of queries, and one of keys."""
    s, e, model = costs.s, costs.e, costs.model
    rows, whole, scores = model.position_rows, costs.T * s.attended * e, table_bytes(costs)
    width = 2 * s.attended if model.position_projections else s.qkv
    tally.kernel(scores + whole, 2, "matmul")
    if backward:
        tally.kernel(scores, 2)  # zeros
        tally.kernel(scores + whole, 4, "matmul")
        tally.kernel(3 * whole, 2)
        costs.products_backward(tally, rows, s.width, width, True, model.has_bias("qkv"))
        tally.small(5 + costs.dropout)
        if not model.position_projections:  # gradients of weights that tokens use too
            tally.kernel(3 * width * s.width * e)
            tally.small(1 + model.has_bias("qkv"))
    else:
        tally.product(rows, s.width, width, e)
        tally.small(2 + 15 * costs.dropout)  # a hash of each row's number


def _positions(costs: BlockCosts, tally: Tally, pairs: float, backward: bool) -> None:
    """Terms by queries and keys of buckets."""
    s, e, model = costs.s, costs.e, costs.model
    numbers, rows = pairs * s.heads, model.position_rows
    whole, scores = costs.T * s.attended * e, table_bytes(costs)
    width = 2 * s.attended if model.position_projections else s.qkv
    if backward:
        costs.products_backward(tally, rows, s.width, width, False, False)
        tally.kernel((8 + 2 * e) * numbers, 2)
        tally.kernel(scores, 2)
        tally.kernel(scores + whole, 4, "matmul")
        tally.kernel(3 * whole, 4)
    else:
        tally.product(rows, s.width, width, e)
        tally.kernel(2 * whole, 2)
        tally.kernel(scores + whole, 2, "matmul")
        tally.kernel((8 + 2 * e) * numbers, 2)
        tally.kernel(3 * e * numbers)
    tally.small(4)
