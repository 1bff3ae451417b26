"""Tables of numbers for the distance of two tokens: attention's programs read them and write their gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_lite.transformer.kernels import rule_attention

MOST_VECTORS, _SUMMED = tl.constexpr(rule_attention.MOST_VECTORS), tl.constexpr(rule_attention.SUMMED)


@triton.jit
def lookup(table, head, token, slot, tokens, width):
    """The numbers of a table [H, T, N] for scores of a head. Args: token: indices that broadcast to the scores."""
    table += head.to(tl.int64) * tokens * width
    return tl.load(table + tl.minimum(token, tokens - 1) * width + slot % MOST_VECTORS)


@triton.jit
def scatter(table, head, value, is_seen, slot, token, tokens, width):
    """Add a tile of gradients of a head's scores to its tokens' numbers of a table, which no other program writes.

    Args: token: indices along the tile's first dimension. slot: of each score, see `table_slots`: its vector, and the
        turn in which it is added, so that no two are added to a number at once.
    """
    table += head.to(tl.int64) * tokens * width
    vector, turn = slot % MOST_VECTORS, slot // MOST_VECTORS
    pointer = table + token[:, None] * width + vector
    tl.store(pointer, value.to(table.dtype.element_ty), mask=is_seen & (turn == 0))
    last_turn = tl.max(tl.where(is_seen, turn, 0))
    if last_turn == _SUMMED:
        summed = is_seen & (turn == _SUMMED)
        last_turn = tl.max(tl.where(is_seen & (turn < _SUMMED), turn, 0))
        first_vector = tl.min(tl.where(summed, vector, MOST_VECTORS))
        for index in range(first_vector, tl.max(tl.where(summed, vector, 0)) + 1):
            tl.debug_barrier()  # for what other threads have written
            cell = table + token * width + index
            total = tl.sum(tl.where(summed & (vector == index), value, 0.0), 1)
            total += tl.load(cell, mask=token < tokens, other=0.0).to(tl.float32)
            tl.store(cell, total.to(table.dtype.element_ty), mask=token < tokens)
    for i in range(1, last_turn + 1):
        tl.debug_barrier()
        now = is_seen & (turn == i)
        total = tl.load(pointer, mask=now, other=0.0).to(tl.float32) + value
        tl.store(pointer, total.to(table.dtype.element_ty), mask=now)
