"""Positions of a rank's elements in the whole parameter, as boxes of rows and columns.

A parameter is a matrix here: [rows, columns], a vector being one column. ZeRO gives a rank a range of elements of the
flattened tensor-parallel shard. In the whole matrix such a range is a few boxes (a partial first row, whole rows, a
partial last row, for each block of a fused parameter). Boxes do not depend on ranks, so any layout can read what any
other wrote.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads torch, which commands that only look at manifests do not need
    from megatron_lite.model.tensor_parallel import Partition


@dataclass(frozen=True, order=True)
class Box:
    """Rows [row, row_stop) and columns [column, column_stop)."""

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

    def overlap(self, other: Box) -> Box | None:
        """The box that both share, None if there is none."""
        box = Box(
            max(self.row, other.row),
            min(self.row_stop, other.row_stop),
            max(self.column, other.column),
            min(self.column_stop, other.column_stop),
        )
        return box if box.row < box.row_stop and box.column < box.column_stop else None

    def within(self, outer: Box) -> tuple[slice, slice]:
        """This box as indices into a matrix that holds `outer`."""
        return (
            slice(self.row - outer.row, self.row_stop - outer.row),
            slice(self.column - outer.column, self.column_stop - outer.column),
        )


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a flattened shard and the box they fill in the whole parameter."""

    start: int
    stop: int
    box: Box


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a parameter of this shape."""
    return shape[0], math.prod(shape[1:])


def runs(
    shape: tuple[int, ...], partition: Partition, rank: int, size: int, start: int, count: int
) -> Iterator[Run]:
    """The boxes of elements [start, start + count) of the flattened shard of `rank`, without padding rows.

    Args:
        shape: of the shard. partition: how the whole parameter is split over `size` ranks.
    """
    rows, columns = matrix_shape(shape)
    # Between two of these, rows of the shard are neighbours in the whole parameter, too.
    bounds = [0, *accumulate(partition.part_rows(rows))] if partition.dim == 0 else [0, rows]
    stop = start + count
    while start < stop:
        row, column = divmod(start, columns)
        if column or stop - start < columns:  # part of one row
            end = min(stop, (row + 1) * columns)
            box = Box(row, row + 1, column, column + end - start)
        else:  # whole rows, up to the end of the range or of the block
            row_stop = min(stop // columns, bounds[bisect_right(bounds, row)])
            end = row_stop * columns
            box = Box(row, row_stop, 0, columns)
        yield from _visible(
            Run(start, end, _to_whole(box, partition, rank, size, bounds, columns)), partition
        )
        start = end


def _to_whole(box: Box, partition: Partition, rank: int, size: int, bounds: list[int], columns: int) -> Box:
    if partition.dim == 0:
        block = bisect_right(bounds, box.row)
        first, end = bounds[block - 1], bounds[block]
        shift = first * (size - 1) + rank * (end - first)
        return Box(box.row + shift, box.row_stop + shift, box.column, box.column_stop)
    if partition.dim == 1:
        return Box(box.row, box.row_stop, box.column + rank * columns, box.column_stop + rank * columns)
    return box


def _visible(run: Run, partition: Partition) -> Iterator[Run]:
    """The run without padding rows."""
    limit, box = partition.rows, run.box
    if limit is None or box.row_stop <= limit:
        yield run
    elif box.row < limit:
        kept = Box(box.row, limit, box.column, box.column_stop)
        yield Run(run.start, run.start + kept.size, kept)
