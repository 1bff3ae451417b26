"""Tables of scores by the distance of two tokens, which attention's programs read and whose gradients they write."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_lite.model.kernels import rule_attention

MOST_ROWS, _SUMMED = tl.constexpr(rule_attention.MOST_ROWS), tl.constexpr(rule_attention.SUMMED)


@triton.jit
def of_head(table, head, tokens, width):
    """The lines of a head, [T, N] of [H, T, N]."""
    return table + head.to(tl.int64) * tokens * width


@triton.jit
def scatter(table, value, is_seen, found, line, tokens, width):
    """Add what a tile of scores gives to its lines of a table, which no other program has.

    Args: line: places of the tile's first dimension. found: of each score, see `table_places`: in which row it counts,
        and the turn in which it is added, so that no two are added to a number at once.
    """
    place, turn = found % MOST_ROWS, found // MOST_ROWS
    at = table + line[:, None] * width + place
    tl.store(at, value.to(table.dtype.element_ty), mask=is_seen & (turn == 0))
    for i in range(1, tl.max(tl.where(is_seen & (turn < _SUMMED), turn, 0)) + 1):
        tl.debug_barrier()  # for what other threads have written
        now = is_seen & (turn == i)
        total = tl.load(at, mask=now, other=0.0).to(tl.float32) + value
        tl.store(at, total.to(table.dtype.element_ty), mask=now)
    summed = is_seen & (turn == _SUMMED)
    for row in range(tl.min(tl.where(summed, place, MOST_ROWS)), tl.max(tl.where(summed, place, -1)) + 1):
        tl.debug_barrier()
        cell = table + line * width + row
        total = tl.sum(tl.where(summed & (place == row), value, 0.0), 1)
        total += tl.load(cell, mask=line < tokens, other=0.0).to(tl.float32)
        tl.store(cell, total.to(table.dtype.element_ty), mask=line < tokens)
