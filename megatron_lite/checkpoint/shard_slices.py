"""Which rows and columns of the whole parameter a rank's elements are (Megatron: global offsets of a ShardedTensor).

A parameter is a matrix here: [rows, columns], a vector being one column. ZeRO gives a rank a range of elements of the
flattened tensor-parallel shard. In the whole matrix such a range is a few slices (a partial first row, whole rows, a
partial last row, for each block of a fused parameter). Slices do not depend on ranks, so a checkpoint is read under any
parallel sizes and ZeRO stage.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads torch, which commands that only look at manifests do not need
    from megatron_lite.transformer.tensor_parallel import Partition


@dataclass(frozen=True, order=True)
class ShardSlice:
    """Rows [row, row_stop) and columns [column, column_stop) of a whole parameter."""

    row: int
    row_stop: int
    column: int
    column_stop: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.row_stop - self.row, self.column_stop - self.column

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: ShardSlice) -> ShardSlice | None:
        """The elements that both hold; None if there are none."""
        common = ShardSlice(
            max(self.row, other.row),
            min(self.row_stop, other.row_stop),
            max(self.column, other.column),
            min(self.column_stop, other.column_stop),
        )
        return common if common.row < common.row_stop and common.column < common.column_stop else None

    def within(self, outer: ShardSlice) -> tuple[slice, slice]:
        """Indices of this slice into a matrix that holds `outer`."""
        return (
            slice(self.row - outer.row, self.row_stop - outer.row),
            slice(self.column - outer.column, self.column_stop - outer.column),
        )


@dataclass(frozen=True)
class FlattenedRange:
    """Elements [start, stop) of a flattened shard, and the slice of the whole parameter that they are."""

    start: int
    stop: int
    slice: ShardSlice


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a parameter of this shape."""
    return shape[0], math.prod(shape[1:])


def flattened_ranges(
    shape: tuple[int, ...], partition: Partition, rank: int, size: int, start: int, count: int
) -> Iterator[FlattenedRange]:
    """Elements [start, start + count) of the flattened shard of `rank`, one range a slice, without padding rows.

    Args:
        shape: of the shard. partition: how the whole parameter is split over `size` ranks.
    """
    rows, columns = matrix_shape(shape)
    # The fused parameter's blocks (Q, K, V): each is split over the ranks by itself, so rows of the shard are
    # neighbours in the whole parameter only within a block.
    bounds = [0, *accumulate(partition.block_rows(rows))] if partition.dim == 0 else [0, rows]
    stop = start + count
    while start < stop:
        row, column = divmod(start, columns)
        # A range may begin and end within a row: ZeRO cuts the flattened shard anywhere.
        if column or stop - start < columns:  # part of one row
            end = min(stop, (row + 1) * columns)
            found = ShardSlice(row, row + 1, column, column + end - start)
        else:  # whole rows, up to the end of the range or of the block
            row_stop = min(stop // columns, bounds[bisect_right(bounds, row)])
            end = row_stop * columns
            found = ShardSlice(row, row_stop, 0, columns)
        whole = _to_whole(found, partition, rank, size, bounds, columns)
        yield from _without_padding(FlattenedRange(start, end, whole), partition)
        start = end


def _to_whole(
    local: ShardSlice, partition: Partition, rank: int, size: int, bounds: list[int], columns: int
) -> ShardSlice:
    """A slice of the shard -> the same elements in the whole parameter."""
    if partition.dim == 0:
        block = bisect_right(bounds, local.row)
        first, end = bounds[block - 1], bounds[block]
        # Before this block the whole parameter has `first` rows of every rank, in it those of the ranks before this
        # one.
        shift = first * (size - 1) + rank * (end - first)
        return ShardSlice(local.row + shift, local.row_stop + shift, local.column, local.column_stop)
    if partition.dim == 1:
        shift = rank * columns
        return ShardSlice(local.row, local.row_stop, local.column + shift, local.column_stop + shift)
    return local


def _without_padding(found: FlattenedRange, partition: Partition) -> Iterator[FlattenedRange]:
    """The range without the rows that pad the vocabulary: their number depends on the tensor-parallel size."""
    limit, whole = partition.rows, found.slice
    if limit is None or whole.row_stop <= limit:
        yield found
    elif whole.row < limit:
        kept = ShardSlice(whole.row, limit, whole.column, whole.column_stop)
        yield FlattenedRange(found.start, found.start + kept.size, kept)
