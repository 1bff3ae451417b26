"""Tables of scores by the distance of two tokens, which attention's programs read and whose gradients they write."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_lite.model.kernels import rule_attention

MOST_ROWS, _SUMMED = tl.constexpr(rule_attention.MOST_ROWS), tl.constexpr(rule_attention.SUMMED)


@triton.jit
def number(table, head, line, found, tokens, width):
    """Numbers of a table [H, T, N] for scores of a head, see `scatter`. Args: line: places that broadcast to them."""
    table += head.to(tl.int64) * tokens * width
    return tl.load(table + tl.minimum(line, tokens - 1) * width + found % MOST_ROWS)


@triton.jit
def scatter(table, head, value, is_seen, found, line, tokens, width):
    """Add what a tile of a head's scores gives to its lines of a table [H, T, N], which no other program has.

    Args: line: places of the tile's first dimension. found: of each score, see `table_places`: in which row it counts,
        and the turn in which it is added, so that no two are added to a number at once.
    """
    table += head.to(tl.int64) * tokens * width
    place, turn = found % MOST_ROWS, found // MOST_ROWS
    at = table + line[:, None] * width + place
    tl.store(at, value.to(table.dtype.element_ty), mask=is_seen & (turn == 0))
    most = tl.max(tl.where(is_seen, turn, 0))
    if most == _SUMMED:
        summed = is_seen & (turn == _SUMMED)
        most = tl.max(tl.where(is_seen & (turn < _SUMMED), turn, 0))
        for row in range(tl.min(tl.where(summed, place, MOST_ROWS)), tl.max(tl.where(summed, place, 0)) + 1):
            tl.debug_barrier()  # for what other threads have written
            cell = table + line * width + row
            total = tl.sum(tl.where(summed & (place == row), value, 0.0), 1)
            total += tl.load(cell, mask=line < tokens, other=0.0).to(tl.float32)
            tl.store(cell, total.to(table.dtype.element_ty), mask=line < tokens)
    for i in range(1, most + 1):
        tl.debug_barrier()
        now = is_seen & (turn == i)
        total = tl.load(at, mask=now, other=0.0).to(tl.float32) + value
        tl.store(at, total.to(table.dtype.element_ty), mask=now)
