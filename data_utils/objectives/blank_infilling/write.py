"""Compiled functions that write part A and part B of an Example with the spans that draw.py placed."""

from __future__ import annotations

from data_utils.base.planes import (
    BLOCK_POSITION_IDS,
    DOC,
    OBJECTIVE,
    ONE_AS_INT32,
    ORD,
    POSITION_IDS,
    TARGETS,
    TOKENS,
    WEIGHTS,
)
from data_utils.base.random_streams import below, chance
from data_utils.objectives.blank_infilling.config import SENTENCE, TOKEN
from data_utils.objectives.blank_infilling.draw import (
    ENDS,
    MARKS,
    MASK_AT,
    ORDER,
    STARTS,
)
from data_utils.objectives.masking import compiled, inlined
from data_utils.objectives.rows import copy_range, count_up, set_range


@compiled
def _write_in_place(row, used, text, start, length, count, w, s):
    """masked_lm: CLS + text with the spans masked and predicted in place. Returns the new end."""
    row[TOKENS, used] = s.cls
    first = used + 1
    copy_range(row, TOKENS, first, first + length, text, start)
    for span in range(count):
        begin, end = w[STARTS, span], w[ENDS, span]
        set_range(row, TOKENS, first + begin, first + end, s.mask)
        copy_range(row, TARGETS, first + begin, first + end, text, start + begin)
        set_range(row, WEIGHTS, first + begin, first + end, ONE_AS_INT32)
    return first + length


@compiled
def _write_part_a(row, used, text, start, length, count, objective, w, s):
    """CLS and the text with one mask per span, whose places go to w[MASK_AT]. Returns the end of part A."""
    mask = s.mask if objective == TOKEN else s.smask if objective == SENTENCE else s.gmask
    row[TOKENS, used] = s.cls
    at, last = used + 1, 0
    for i in range(count):
        between = w[STARTS, i] - last
        copy_range(row, TOKENS, at, at + between, text, start + last)
        at += between
        row[TOKENS, at] = mask
        w[MASK_AT, i] = at - used
        at += 1
        last = w[ENDS, i]
    copy_range(row, TOKENS, at, at + length - last, text, start + last)
    return at + length - last


@compiled
def _write_part_b(row, part_b, used, text, start, count, objective, tail, stream, w, s):
    """The spans in `w[ORDER]`: sop + span -> span + eop; a tail has no eop. Returns the end."""
    tokens = row[TOKENS]
    at = part_b
    for k in range(count):
        span = w[ORDER, k]
        begin = start + w[STARTS, span]
        length = w[ENDS, span] - w[STARTS, span]
        position = w[MASK_AT, span]
        sop = s.sop
        if s.sentinel_first >= 0:
            position = s.sequence_length
            if k > 0:
                pair = s.sentinel_first + 2 * ((k - 1) % s.sentinel_count)
                tokens[used + w[MASK_AT, span]] = pair
                sop = pair + 1
        tokens[at] = sop
        # A tail's last token is no input; it is overwritten later.
        copy_range(row, TOKENS, at + 1, at + 1 + length, text, begin)
        copy_range(row, TARGETS, at, at + length, text, begin)
        end = at + length
        if not tail:
            row[TARGETS, end] = s.eop
            end += 1
        set_range(row, POSITION_IDS, at, end, position)
        count_up(row, BLOCK_POSITION_IDS, at, end, 1)
        at = end
        if objective == TOKEN and s.block_mask_below > 0:
            for j in range(at - length, at):
                if chance(stream, s.block_mask_below):
                    tokens[j] = s.dblock
    set_range(row, WEIGHTS, part_b, at, ONE_AS_INT32)
    count_up(row, ORD, part_b, at, 1)
    return at


@compiled
def _mask_context(row, used, part_b, count, stream, w, s, n):
    """Replace int(ratio * n) tokens of part A within range of a mask by dBLOCK; CLS, eos and masks stay."""
    size = part_b - used
    near = w[MARKS]
    set_range(w, MARKS, 0, size, 0)
    for i in range(count):
        at = w[MASK_AT, i]
        set_range(w, MARKS, max(1, at - s.context_mask_range), min(size, at + s.context_mask_range + 1), 1)
    for i in range(count):
        near[w[MASK_AT, i]] = 0
    candidates = w[STARTS]  # no longer needed: the spans are written
    number = 0
    for i in range(size):
        if near[i] and row[TOKENS, used + i] != s.eos:
            candidates[number] = i
            number += 1
    for i in range(min(number, int(s.context_mask_ratio * n))):
        j = i + below(stream, number - i)
        row[TOKENS, used + candidates[j]] = s.dblock
        candidates[j] = candidates[i]


@inlined
def write_example(row, used, document, text, start, length, count, objective, tail, stream, w, s):
    """Write the Example with the spans in `w` to `row` from `used` on, except for zeros. Returns the new end."""
    if s.masked_lm:
        part_b = end = _write_in_place(row, used, text, start, length, count, w, s)
    else:
        part_b = _write_part_a(row, used, text, start, length, count, objective, w, s)
        end = _write_part_b(row, part_b, used, text, start, count, objective, tail, stream, w, s)
        if objective == TOKEN and s.context_mask_ratio > 0:
            _mask_context(row, used, part_b, count, stream, w, s, length + 1)
    count_up(row, POSITION_IDS, used, part_b, 0)
    if s.random_position:
        shift = below(stream, s.sequence_length + 1 - (part_b - used - 1))
        stop = part_b if s.sentinel_first >= 0 else end
        for i in range(used, stop):
            row[POSITION_IDS, i] += shift
    set_range(row, DOC, used, end, document)
    set_range(row, OBJECTIVE, used, end, objective)
    return end
