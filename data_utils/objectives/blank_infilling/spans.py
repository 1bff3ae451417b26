"""Compiled functions that draw the spans of an Example into a scratch array, and write parts A and B with them."""

from __future__ import annotations

import numpy as np

from data_utils.common.batch_fields import (
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
from data_utils.common.random_streams import below, chance, shuffle
from data_utils.objectives.blank_infilling.config import SENTENCE, TOKEN
from data_utils.objectives.row_loops import compiled, copy_range, count_up, draw_length, inlined, set_range

MOST_CUT = 32  # a chunk whose spans do not fit loses at most length // MOST_CUT tokens at its end

# Lines of the scratch array `w`, see `RowObjective._tables`: the spans of the current Example in text order, the
# order of part B, the place of each span's mask in part A, and marks of what is chosen.
STARTS, ENDS, ORDER, MASK_AT, MARKS = range(5)


@compiled
def least_tokens(length, s):
    """Row tokens that a chunk of `length` tokens needs with the fewest spans."""
    target = max(1, int(s.masked_ratio * (length + 1)))
    return length + 1 + 2 * ((target + s.longest_token_span - 1) // s.longest_token_span)


@compiled
def _place_spans(rng, w, count, total, maskable, uniform):
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
            slot = below(rng, last + 1)
            marks[last if marks[slot] else slot] = 1
        else:
            marks[below(rng, slots)] += 1
    set_range(w, STARTS, 0, count, 0)
    placed = np.uint64(0)
    # Unsigned, because numba tests a signed index for being negative, which keeps LLVM from vectorizing.
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
def find_words(w, words, start, maskable):
    """Write where the words of the maskable text begin, and its end, to `w[MASK_AT]`. Returns their number."""
    count = 0
    for i in range(maskable):
        if i == 0 or words[start + i]:
            w[MASK_AT, count] = i
            count += 1
    w[MASK_AT, count] = maskable
    return count


@compiled
def draw_token_spans(rng, w, n, maskable, units, available, single, fewest, cumulative, s):
    """Draw short spans that mask the ratio of the text, or as much as the gaps allow. Returns their count, -1: failed.

    Lengths and the ratio count units: tokens, or the words in `w[MASK_AT]`. Where the spans need more than the
    `available` row tokens, they are placed in a shorter text. Args: n: tokens with CLS.
    """
    longest = s.longest_token_span
    most = units - units // (longest + 1)  # one unit in every longest + 1 is a gap
    target = min(max(1, int(s.masked_ratio * (n - maskable + units))), most)
    count, total = 0, 0
    while total < target:
        room = units - total - count  # each span before this one also takes a gap
        if room < 1:
            return -1
        # The caller's last resort where drawn spans do not fit the row: the longest spans need the fewest masks
        # and sop tokens.
        if fewest and not single:
            length = min(longest, target - total)
        else:
            length = draw_length(rng, min(longest, room), cumulative)
        w[ORDER, count] = length
        count += 1
        total += length
        if single:
            break
    cut = tokens_to_cut(n, count, available)
    maskable = min(maskable, n - 1 - cut)
    # Words beyond the shortened text can no longer be chosen.
    if s.whole_words:
        while w[MASK_AT, units] > maskable:
            units -= 1
    else:
        units = maskable
    # The caller draws again: cutting more would lose text, and without a token between them spans would join.
    if cut > (n - 1) // MOST_CUT or total + count - 1 > units:
        return -1
    shuffle(rng, w[ORDER], count)  # the last length drawn is larger on average
    _place_spans(rng, w, count, total, units, s.uniform_placement)
    if s.whole_words:
        for i in range(count):
            w[STARTS, i] = w[MASK_AT, w[STARTS, i]]
            # The row has room for spans of `longest_span` tokens at most, so a longer word is masked in part.
            w[ENDS, i] = min(w[MASK_AT, w[ENDS, i]], w[STARTS, i] + s.longest_span)
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
def draw_sentences(rng, w, text, start, n, maskable, fewest, sentence_end, s):
    """Draw whole sentences until the ratio of n is masked. Fewest: consecutive ones as one span."""
    number = _find_sentences(w, text, start, maskable, sentence_end, s)
    target = min(max(1, int(s.sentence_ratio * n)), maskable)
    if fewest:
        # Grows from a random sentence to the right, then to the left: one span needs one mask and one sop.
        first = last = below(rng, number)
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
        j = i + below(rng, number - i)
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
def draw_document_span(rng, w, n, length, maskable, tail, s):
    """Draw one long span: the tail of the text with its eos, or anywhere in the maskable text."""
    most = length if tail else min(maskable, s.longest_span)
    if most == 0:
        return 0
    high = max(1, min(most, int(s.document_max_ratio * n), n - s.document_min_context))
    low = min(high, max(1, int(s.document_min_ratio * n)))
    span = low + below(rng, high - low + 1)
    w[STARTS, 0] = length - span if tail else below(rng, maskable - span + 1)
    w[ENDS, 0] = w[STARTS, 0] + span
    return 1


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
    # One mask stands for each span, whatever its length, so that part A does not give lengths away.
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
def _write_part_b(row, part_b, used, text, start, count, objective, tail, rng, w, s):
    """The spans in `w[ORDER]`: sop + span -> span + eop; a tail has no eop. Returns the end."""
    tokens = row[TOKENS]
    at = part_b
    for k in range(count):
        span = w[ORDER, k]
        begin = start + w[STARTS, span]
        length = w[ENDS, span] - w[STARTS, span]
        # The first position id of a token of part B is that of its mask, the second one counts within the span
        # from 1.
        position = w[MASK_AT, span]
        sop = s.sop
        if s.sentinel_first >= 0:
            # T5's sentinels name the span, so positions of part B need not; all have the same one.
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
                if chance(rng, s.block_mask_below):
                    tokens[j] = s.dblock
    # Only part B is predicted. ORD above 0 makes it causal, and hides it from part A.
    set_range(row, WEIGHTS, part_b, at, ONE_AS_INT32)
    count_up(row, ORD, part_b, at, 1)
    return at


@compiled
def _mask_context(row, used, part_b, count, rng, w, s, n):
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
        j = i + below(rng, number - i)
        row[TOKENS, used + candidates[j]] = s.dblock
        candidates[j] = candidates[i]


@inlined
def write_example(row, used, document, text, start, length, count, objective, tail, rng, w, s):
    """Write the Example with the spans in `w` to `row` from `used` on, except for zeros. Returns the new end."""
    if s.masked_lm:
        part_b = end = _write_in_place(row, used, text, start, length, count, w, s)
    else:
        part_b = _write_part_a(row, used, text, start, length, count, objective, w, s)
        end = _write_part_b(row, part_b, used, text, start, count, objective, tail, rng, w, s)
        if objective == TOKEN and s.context_mask_ratio > 0:
            _mask_context(row, used, part_b, count, rng, w, s, length + 1)
    count_up(row, POSITION_IDS, used, part_b, 0)
    if s.random_position:
        # Positions that short texts never reach are trained as well: the whole Example moves by a random
        # offset.
        shift = below(rng, s.sequence_length + 1 - (part_b - used - 1))
        stop = part_b if s.sentinel_first >= 0 else end
        for i in range(used, stop):
            row[POSITION_IDS, i] += shift
    set_range(row, DOC, used, end, document)
    set_range(row, OBJECTIVE, used, end, objective)
    return end
