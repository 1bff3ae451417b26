"""Compiled functions that draw the spans of an Example into one scratch array."""

from __future__ import annotations

import numpy as np

from data_utils.base.random_streams import below, shuffle
from data_utils.objectives.masking import compiled, draw_length
from data_utils.objectives.rows import set_range

MOST_CUT = 32  # a piece whose spans do not fit loses at most length // MOST_CUT tokens at its end

# Lines of the scratch array `w`, see `RowObjective._tables`: the spans of the current Example in text order, the
# order of part B, the place of each span's mask in part A, and marks of what is chosen.
STARTS, ENDS, ORDER, MASK_AT, MARKS = range(5)


@compiled
def least_tokens(length, s):
    """Row tokens that a piece of `length` tokens needs with the fewest spans."""
    target = max(1, int(s.masked_ratio * (length + 1)))
    return length + 1 + 2 * ((target + s.longest_token_span - 1) // s.longest_token_span)


@compiled
def _place_spans(stream, w, count, total, maskable, uniform):
    """Turn the lengths in `w[ORDER]` into spans with at least one token between them.

    `free` counts the tokens beyond these. Uniform: choose which `count` of `free + count` slots
    hold a span (Floyd's algorithm), every choice equally likely. Reference: an offset per span,
    independent in 0..free, sorted; several spans may share one, so close spans are too frequent.
    """
    free = maskable - total - (count - 1)
    slots = free + count if uniform else free + 1
    marks = w[MARKS]
    set_range(w, MARKS, 0, slots, 0)
    for i in range(count):
        if uniform:
            last = free + i
            slot = below(stream, last + 1)
            marks[last if marks[slot] else slot] = 1
        else:
            marks[below(stream, slots)] += 1
    set_range(w, STARTS, 0, count, 0)
    placed = np.uint64(0)
    for slot in range(np.uint64(slots)):  # the marked slots, in order, without a mispredicted branch
        w[STARTS, placed] = slot
        placed += np.uint64(marks[slot])
    slot, before = 0, 0  # before: tokens and, where they are not slots, gaps of the spans before
    for i in range(count):
        slot = max(slot, w[STARTS, i])  # a slot of several spans was noted for the first of them
        w[STARTS, i] = slot + before
        w[ENDS, i] = slot + before + w[ORDER, i]
        before += w[ORDER, i] if uniform else w[ORDER, i] + 1


@compiled
def tokens_to_cut(n, count, available):
    """How many row tokens a text of n tokens (CLS counted) with `count` spans lacks."""
    return max(0, n + 2 * count - available)


@compiled
def draw_token_spans(stream, w, n, maskable, available, single, fewest, cumulative, s):
    """Draw short spans that mask the ratio of n, or as much as the gaps allow. Returns their count, -1: failed.

    Where they need more than the `available` row tokens, they are placed in a shorter text.
    """
    longest = s.longest_token_span
    most = maskable - maskable // (longest + 1)  # one token in every longest + 1 is a gap
    target = min(max(1, int(s.masked_ratio * n)), most)
    count, total = 0, 0
    while total < target:
        room = maskable - total - count  # each span before this one also takes a gap
        if room < 1:
            return -1
        if fewest and not single:
            length = min(longest, target - total)
        else:
            length = draw_length(stream, min(longest, room), cumulative)
        w[ORDER, count] = length
        count += 1
        total += length
        if single:
            break
    cut = tokens_to_cut(n, count, available)
    maskable = min(maskable, n - 1 - cut)
    if cut > (n - 1) // MOST_CUT or total + count - 1 > maskable:
        return -1
    shuffle(stream, w[ORDER], count)  # the last length drawn is larger on average
    _place_spans(stream, w, count, total, maskable, s.uniform_placement)
    return count


@compiled
def _find_sentences(w, text, start, maskable, sentence_end, s):
    """Write the ends of the sentences of the maskable text to `w[ENDS]`. Returns their number."""
    count = 0
    for i in range(maskable):
        token = text[start + i]
        known = 0 <= token < len(sentence_end)
        if token == s.eos or i == maskable - 1 or (known and sentence_end[token]):
            w[ENDS, count] = i + 1
            count += 1
    return count


@compiled
def draw_sentences(stream, w, text, start, n, maskable, fewest, sentence_end, s):
    """Draw whole sentences until the ratio of n is masked. Fewest: consecutive ones as one span."""
    number = _find_sentences(w, text, start, maskable, sentence_end, s)
    target = min(max(1, int(s.sentence_ratio * n)), maskable)
    if fewest:
        first = last = below(stream, number)
        while True:
            begin = w[ENDS, first - 1] if first > 0 else 0
            if w[ENDS, last] - begin >= target:
                break
            if last < number - 1:
                last += 1
            else:
                first -= 1
        end = w[ENDS, last]
        w[STARTS, 0] = max(begin, end - s.longest_span)
        w[ENDS, 0] = end
        return 1
    for i in range(number):
        w[ORDER, i] = i
        w[MARKS, i] = 0
    total = 0
    for i in range(number):
        j = i + below(stream, number - i)
        chosen = w[ORDER, j]
        w[ORDER, j] = w[ORDER, i]
        w[MARKS, chosen] = 1
        total += w[ENDS, chosen] - (w[ENDS, chosen - 1] if chosen > 0 else 0)
        if total >= target:
            break
    count, begin = 0, 0
    for i in range(number):
        end = w[ENDS, i]
        if w[MARKS, i]:
            w[STARTS, count] = max(begin, end - s.longest_span)
            w[ENDS, count] = end  # count <= i, so no end is overwritten before it is read
            count += 1
        begin = end
    return count


@compiled
def draw_document_span(stream, w, n, length, maskable, tail, s):
    """Draw one long span: the tail of the text with its eos, or anywhere in the maskable text."""
    most = length if tail else min(maskable, s.longest_span)
    if most == 0:
        return 0
    high = max(1, min(most, int(s.document_max_ratio * n), n - s.document_min_context))
    low = min(high, max(1, int(s.document_min_ratio * n)))
    span = low + below(stream, high - low + 1)
    w[STARTS, 0] = length - span if tail else below(stream, maskable - span + 1)
    w[ENDS, 0] = w[STARTS, 0] + span
    return 1
