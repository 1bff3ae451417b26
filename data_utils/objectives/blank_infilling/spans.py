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
from data_utils.objectives.compiled import compiled, copy_range, count_up, draw_length, inlined, set_range

MOST_CUT = 32  # a chunk whose spans do not fit loses at most length // MOST_CUT tokens at its end

# Lines of the scratch array, see `RowObjective._tables`: the spans of the current Example in text order, the order of
# part B, the index of each span's mask in part A, and marks of what is chosen.
STARTS, ENDS, ORDER, MASK_AT, MARKS = range(5)


@compiled
def least_tokens(length, settings):
    """Row tokens that a chunk of `length` tokens needs with the fewest spans."""
    target = max(1, int(settings.masked_ratio * (length + 1)))
    return length + 1 + 2 * ((target + settings.longest_token_span - 1) // settings.longest_token_span)


@compiled
def _place_spans(rng, scratch, count, total, maskable, uniform):
    """Turn the lengths in `scratch[ORDER]` into spans with at least one token between them.

    `free` counts the tokens beyond these. Uniform: choose which `count` of `free + count` slots
    hold a span (Floyd's algorithm), every choice equally likely. Reference: an offset per span,
    independent in 0..free, sorted; several spans may share one, so close spans are too frequent.
    """
    free = maskable - total - (count - 1)
    slots = free + count if uniform else free + 1
    marks = scratch[MARKS]
    set_range(scratch, MARKS, 0, slots, 0)
    for i in range(count):
        if uniform:
            last = free + i
            slot = below(rng, last + 1)
            marks[last if marks[slot] else slot] = 1
        else:
            marks[below(rng, slots)] += 1
    set_range(scratch, STARTS, 0, count, 0)
    placed = np.uint64(0)
    # Unsigned, because numba tests a signed index for being negative, which keeps LLVM from vectorizing.
    for slot in range(np.uint64(slots)):  # the marked slots, in order, without a mispredicted branch
        scratch[STARTS, placed] = slot
        placed += np.uint64(marks[slot])
    slot, before = 0, 0  # before: tokens and, where they are not slots, gaps of the spans before
    for i in range(count):
        slot = max(slot, scratch[STARTS, i])  # a slot of several spans was noted for the first of them
        scratch[STARTS, i] = slot + before
        scratch[ENDS, i] = slot + before + scratch[ORDER, i]
        before += scratch[ORDER, i] if uniform else scratch[ORDER, i] + 1


@compiled
def tokens_to_cut(n, count, available):
    """How many row tokens a text of n tokens (CLS counted) with `count` spans lacks."""
    return max(0, n + 2 * count - available)


@compiled
def find_words(scratch, words, start, maskable):
    """Write where the words of the maskable text begin, and its end, to `scratch[MASK_AT]`. Returns their number."""
    count = 0
    for i in range(maskable):
        if i == 0 or words[start + i]:
            scratch[MASK_AT, count] = i
            count += 1
    scratch[MASK_AT, count] = maskable
    return count


@compiled
def draw_token_spans(
    rng, scratch, n, maskable, units, available, is_single, use_fewest, length_table, settings
):
    """Draw short spans that mask the ratio of the text, or as much as the gaps allow. Returns their count, -1: failed.

    Lengths and the ratio count units: tokens, or the words in `scratch[MASK_AT]`. Where the spans need more than the
    `available` row tokens, they are placed in a shorter text. Args: n: tokens with CLS.
    """
    longest = settings.longest_token_span
    most = units - units // (longest + 1)  # one unit in every longest + 1 is a gap
    target = min(max(1, int(settings.masked_ratio * (n - maskable + units))), most)
    count, total = 0, 0
    while total < target:
        room = units - total - count  # each span before this one also takes a gap
        if room < 1:
            return -1
        # The caller's last resort where drawn spans do not fit the row: the longest spans need the fewest masks
        # and sop tokens.
        if use_fewest and not is_single:
            length = min(longest, target - total)
        else:
            length = draw_length(rng, min(longest, room), length_table)
        scratch[ORDER, count] = length
        count += 1
        total += length
        if is_single:
            break
    cut = tokens_to_cut(n, count, available)
    maskable = min(maskable, n - 1 - cut)
    # Words beyond the shortened text can no longer be chosen.
    if settings.whole_words:
        while scratch[MASK_AT, units] > maskable:
            units -= 1
    else:
        units = maskable
    # The caller draws again: cutting more would lose text, and without a token between them spans would join.
    if cut > (n - 1) // MOST_CUT or total + count - 1 > units:
        return -1
    shuffle(rng, scratch[ORDER], count)  # the last length drawn is larger on average
    _place_spans(rng, scratch, count, total, units, settings.uniform_placement)
    if settings.whole_words:
        for i in range(count):
            scratch[STARTS, i] = scratch[MASK_AT, scratch[STARTS, i]]
            # The row has room for spans of `longest_span` tokens at most, so a longer word is masked in part.
            scratch[ENDS, i] = min(
                scratch[MASK_AT, scratch[ENDS, i]], scratch[STARTS, i] + settings.longest_span
            )
    return count


@compiled
def _find_sentences(scratch, text, start, maskable, sentence_end, settings):
    """Write the ends of the sentences of the maskable text to `scratch[ENDS]`. Returns their number."""
    count = 0
    for i in range(maskable):
        token = text[start + i]
        is_in_vocabulary = 0 <= token < len(sentence_end)
        if token == settings.eos or i == maskable - 1 or (is_in_vocabulary and sentence_end[token]):
            scratch[ENDS, count] = i + 1
            count += 1
    return count


@compiled
def draw_sentences(rng, scratch, text, start, n, maskable, use_fewest, sentence_end, settings):
    """Draw whole sentences until the ratio of n is masked. `use_fewest`: consecutive ones as one span."""
    sentences = _find_sentences(scratch, text, start, maskable, sentence_end, settings)
    target = min(max(1, int(settings.sentence_ratio * n)), maskable)
    if use_fewest:
        # Grows from a random sentence to the right, then to the left: one span needs one mask and one sop.
        first = last = below(rng, sentences)
        while True:
            begin = scratch[ENDS, first - 1] if first > 0 else 0
            if scratch[ENDS, last] - begin >= target:
                break
            if last < sentences - 1:
                last += 1
            else:
                first -= 1
        end = scratch[ENDS, last]
        scratch[STARTS, 0] = max(begin, end - settings.longest_span)
        scratch[ENDS, 0] = end
        return 1
    for i in range(sentences):
        scratch[ORDER, i] = i
        scratch[MARKS, i] = 0
    total = 0
    for i in range(sentences):
        j = i + below(rng, sentences - i)
        chosen = scratch[ORDER, j]
        scratch[ORDER, j] = scratch[ORDER, i]
        scratch[MARKS, chosen] = 1
        total += scratch[ENDS, chosen] - (scratch[ENDS, chosen - 1] if chosen > 0 else 0)
        if total >= target:
            break
    count, begin = 0, 0
    for i in range(sentences):
        end = scratch[ENDS, i]
        if scratch[MARKS, i]:
            scratch[STARTS, count] = max(begin, end - settings.longest_span)
            scratch[ENDS, count] = end  # count <= i, so no end is overwritten before it is read
            count += 1
        begin = end
    return count


@compiled
def draw_document_span(rng, scratch, n, length, maskable, is_tail, settings):
    """Draw one long span: the tail of the text with its eos, or anywhere in the maskable text."""
    available = length if is_tail else min(maskable, settings.longest_span)
    if available == 0:
        return 0
    longest = max(1, min(available, int(settings.document_max_ratio * n), n - settings.document_min_context))
    shortest = min(longest, max(1, int(settings.document_min_ratio * n)))
    span = shortest + below(rng, longest - shortest + 1)
    scratch[STARTS, 0] = length - span if is_tail else below(rng, maskable - span + 1)
    scratch[ENDS, 0] = scratch[STARTS, 0] + span
    return 1


@compiled
def _write_in_place(row, offset, text, start, length, count, scratch, settings):
    """masked_lm: CLS + text with the spans masked and predicted in place. Returns the new end."""
    row[TOKENS, offset] = settings.cls
    first = offset + 1
    copy_range(row, TOKENS, first, first + length, text, start)
    for span in range(count):
        begin, end = scratch[STARTS, span], scratch[ENDS, span]
        set_range(row, TOKENS, first + begin, first + end, settings.mask)
        copy_range(row, TARGETS, first + begin, first + end, text, start + begin)
        set_range(row, WEIGHTS, first + begin, first + end, ONE_AS_INT32)
    return first + length


@compiled
def _write_part_a(row, offset, text, start, length, count, objective, scratch, settings):
    """CLS and the text with one mask per span, whose indices go to scratch[MASK_AT]. Returns the end of part A."""
    mask = (
        settings.mask if objective == TOKEN else settings.smask if objective == SENTENCE else settings.gmask
    )
    row[TOKENS, offset] = settings.cls
    # One mask stands for each span, whatever its length, so that part A does not give lengths away.
    at, last = offset + 1, 0
    for i in range(count):
        between = scratch[STARTS, i] - last
        copy_range(row, TOKENS, at, at + between, text, start + last)
        at += between
        row[TOKENS, at] = mask
        scratch[MASK_AT, i] = at - offset
        at += 1
        last = scratch[ENDS, i]
    copy_range(row, TOKENS, at, at + length - last, text, start + last)
    return at + length - last


@compiled
def _write_part_b(row, part_b, offset, text, start, count, objective, is_tail, rng, scratch, settings):
    """The spans in `scratch[ORDER]`: sop + span -> span + eop; a tail has no eop. Returns the end."""
    tokens = row[TOKENS]
    at = part_b
    for k in range(count):
        span = scratch[ORDER, k]
        begin = start + scratch[STARTS, span]
        length = scratch[ENDS, span] - scratch[STARTS, span]
        # The first position id of a token of part B is that of its mask, the second one counts within the span from 1.
        position = scratch[MASK_AT, span]
        sop = settings.sop
        if settings.sentinel_first >= 0:
            # T5's sentinels name the span, so positions of part B need not; all have the same one.
            position = settings.sequence_length
            if k > 0:
                pair = settings.sentinel_first + 2 * ((k - 1) % settings.sentinel_count)
                tokens[offset + scratch[MASK_AT, span]] = pair
                sop = pair + 1
        tokens[at] = sop
        # A tail's last token is no input; it is overwritten later.
        copy_range(row, TOKENS, at + 1, at + 1 + length, text, begin)
        copy_range(row, TARGETS, at, at + length, text, begin)
        end = at + length
        if not is_tail:
            row[TARGETS, end] = settings.eop
            end += 1
        set_range(row, POSITION_IDS, at, end, position)
        count_up(row, BLOCK_POSITION_IDS, at, end, 1)
        at = end
        if objective == TOKEN and settings.block_mask_below > 0:
            for j in range(at - length, at):
                if chance(rng, settings.block_mask_below):
                    tokens[j] = settings.dblock
    # Only part B is predicted. ORD above 0 makes it causal, and hides it from part A.
    set_range(row, WEIGHTS, part_b, at, ONE_AS_INT32)
    count_up(row, ORD, part_b, at, 1)
    return at


@compiled
def _mask_context(row, offset, part_b, count, rng, scratch, settings, n):
    """Replace int(ratio * n) tokens of part A within range of a mask by dBLOCK; CLS, eos and masks stay."""
    size = part_b - offset
    near = scratch[MARKS]
    set_range(scratch, MARKS, 0, size, 0)
    for i in range(count):
        at = scratch[MASK_AT, i]
        set_range(
            scratch,
            MARKS,
            max(1, at - settings.context_mask_range),
            min(size, at + settings.context_mask_range + 1),
            1,
        )
    for i in range(count):
        near[scratch[MASK_AT, i]] = 0
    candidates = scratch[STARTS]  # no longer needed: the spans are written
    number = 0
    for i in range(size):
        if near[i] and row[TOKENS, offset + i] != settings.eos:
            candidates[number] = i
            number += 1
    for i in range(min(number, int(settings.context_mask_ratio * n))):
        j = i + below(rng, number - i)
        row[TOKENS, offset + candidates[j]] = settings.dblock
        candidates[j] = candidates[i]


@inlined
def write_example(
    row, offset, document, text, start, length, count, objective, is_tail, rng, scratch, settings
):
    """Write the Example with the spans in `scratch` to row[offset:], except for zeros. Returns its end."""
    if settings.masked_lm:
        part_b = end = _write_in_place(row, offset, text, start, length, count, scratch, settings)
    else:
        part_b = _write_part_a(row, offset, text, start, length, count, objective, scratch, settings)
        end = _write_part_b(
            row, part_b, offset, text, start, count, objective, is_tail, rng, scratch, settings
        )
        if objective == TOKEN and settings.context_mask_ratio > 0:
            _mask_context(row, offset, part_b, count, rng, scratch, settings, length + 1)
    count_up(row, POSITION_IDS, offset, part_b, 0)
    if settings.random_position:
        # Positions that short texts never reach are trained as well: the whole Example moves by a random offset.
        shift = below(rng, settings.sequence_length + 1 - (part_b - offset - 1))
        stop = part_b if settings.sentinel_first >= 0 else end
        for i in range(offset, stop):
            row[POSITION_IDS, i] += shift
    set_range(row, DOC, offset, end, document)
    set_range(row, OBJECTIVE, offset, end, objective)
    return end
