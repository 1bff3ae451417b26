"""Compiled functions that draw the spans of an Example into its scratch space, and write parts A and B with them."""

from __future__ import annotations

from typing import NamedTuple

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
from data_utils.objectives.compiled import (
    Tables,
    compiled,
    copy_range,
    count_up,
    draw_length,
    inlined,
    maskable_length,
    set_range,
)

MOST_CUT = 32  # a chunk whose spans do not fit loses at most length // MOST_CUT tokens at its end


class SpanScratch(NamedTuple):
    """Work space for one Example: int64 [row_length + 2] each. The spans of a text are text[starts[i] : ends[i]]."""

    starts: np.ndarray  # in text order
    ends: np.ndarray
    order: np.ndarray  # the spans in the order of part B
    mask_at: np.ndarray  # the mask of each span in part A, from the beginning of the Example
    lengths: np.ndarray  # of spans that have no place yet
    word_starts: np.ndarray  # of the maskable text, and its end
    sentence_ends: np.ndarray  # of the maskable text
    marks: np.ndarray  # of what is chosen
    candidates: np.ndarray  # what can be chosen


class Drawn(NamedTuple):
    """What was drawn for an Example; the spans themselves are in the SpanScratch."""

    objective: int  # TOKEN, SENTENCE or DOCUMENT
    is_tail: bool  # the span is the end of the text
    spans: int  # their number


@inlined
def with_scratch(tables):
    """As in compiled.py, with a SpanScratch."""
    length_table, rng, lines, sentence_end = tables
    scratch = SpanScratch(
        *(lines[0], lines[1], lines[2], lines[3], lines[4]),
        *(lines[5], lines[6], lines[7], lines[8]),
    )
    return Tables(length_table, rng, scratch, sentence_end)


@compiled
def least_tokens(length, settings):
    """Row tokens that a chunk of `length` tokens needs with the fewest spans."""
    target = max(1, int(settings.masked_ratio * (length + 1)))
    return length + 1 + 2 * ((target + settings.longest_token_span - 1) // settings.longest_token_span)


@inlined
def _place_spans(rng, scratch, count, total, units, uniform):
    """Turn `scratch.lengths`, `total` together, into spans of the `units` with at least one unit between them.

    `free` counts the units beyond these. Uniform: choose which `count` of `free + count` slots
    hold a span (Floyd's algorithm), every choice equally likely. Reference: an offset per span,
    independent in 0..free, sorted; several spans may share one, so close spans are too frequent.
    """
    free = units - total - (count - 1)
    slots = free + count if uniform else free + 1
    marks, starts, lengths = scratch.marks, scratch.starts, scratch.lengths
    set_range(marks, 0, slots, 0)
    for i in range(count):
        if uniform:
            last = free + i
            slot = below(rng, last + 1)
            marks[last if marks[slot] else slot] = 1
        else:
            marks[below(rng, slots)] += 1
    set_range(starts, 0, count, 0)
    placed = np.uint64(0)
    # Unsigned, because numba tests a signed index for being negative, which keeps LLVM from vectorizing.
    for slot in range(np.uint64(slots)):  # the marked slots, in order, without a mispredicted branch
        starts[placed] = slot
        placed += np.uint64(marks[slot])
    slot, before = 0, 0  # before: tokens and, where they are not slots, gaps of the spans before
    for i in range(count):
        slot = max(slot, starts[i])  # a slot of several spans was noted for the first of them
        starts[i] = slot + before
        scratch.ends[i] = slot + before + lengths[i]
        before += lengths[i] if uniform else lengths[i] + 1


@compiled
def tokens_to_cut(text, count, available):
    """How many row tokens a text with CLS and `count` spans lacks."""
    return max(0, len(text) + 1 + 2 * count - available)


@compiled
def _find_words(word_starts, is_word_start, maskable):
    """Write where the words of the maskable text begin, and its end. Returns their number."""
    count = 0
    for i in range(maskable):
        if i == 0 or is_word_start[i]:
            word_starts[count] = i
            count += 1
    word_starts[count] = maskable
    return count


@inlined
def draw_token_spans(tables, chunk, available, is_single, use_fewest, settings):
    """Draw short spans that mask the ratio of the text, or as much as the gaps allow. Returns their count, -1: failed.

    Lengths and the ratio count units: tokens or words. Where the spans need more than the `available` row tokens, they
    are placed in a shorter text.
    """
    rng, scratch, text = tables.rng, tables.scratch, chunk.text
    n, maskable = len(text) + 1, maskable_length(text, settings)  # n: tokens with CLS
    if maskable == 0:
        return 0
    units = maskable
    if settings.whole_words:
        units = _find_words(scratch.word_starts, chunk.unit_start, maskable)
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
            length = draw_length(rng, min(longest, room), tables.length_table)
        scratch.lengths[count] = length
        count += 1
        total += length
        if is_single:
            break
    cut = tokens_to_cut(text, count, available)
    maskable = min(maskable, n - 1 - cut)
    # Words beyond the shortened text can no longer be chosen.
    if settings.whole_words:
        while scratch.word_starts[units] > maskable:
            units -= 1
    else:
        units = maskable
    # The caller draws again: cutting more would lose text, and without a token between them spans would join.
    if cut > (n - 1) // MOST_CUT or total + count - 1 > units:
        return -1
    shuffle(rng, scratch.lengths, count)  # the last length drawn is larger on average
    _place_spans(rng, scratch, count, total, units, settings.uniform_placement)
    if settings.whole_words:
        for i in range(count):
            first, end = scratch.word_starts[scratch.starts[i]], scratch.word_starts[scratch.ends[i]]
            # The row has room for spans of `longest_span` tokens at most, so a longer word is masked in part.
            scratch.starts[i], scratch.ends[i] = first, min(end, first + settings.longest_span)
    return count


@compiled
def _find_sentences(ends, text, maskable, sentence_end, settings):
    """Write the ends of the sentences of the maskable text. Returns their number."""
    count = 0
    for i in range(maskable):
        token = text[i]
        is_in_vocabulary = 0 <= token < len(sentence_end)
        if token == settings.eos or i == maskable - 1 or (is_in_vocabulary and sentence_end[token]):
            ends[count] = i + 1
            count += 1
    return count


@inlined
def draw_sentences(tables, text, use_fewest, settings):
    """Draw whole sentences until the ratio of the text is masked. Returns their count.

    Args: use_fewest: consecutive ones as one span.
    """
    rng, scratch = tables.rng, tables.scratch
    maskable, ends = maskable_length(text, settings), scratch.sentence_ends
    if maskable == 0:
        return 0
    sentences = _find_sentences(ends, text, maskable, tables.sentence_end, settings)
    target = min(max(1, int(settings.sentence_ratio * (len(text) + 1))), maskable)
    if use_fewest:
        # Grows from a random sentence to the right, then to the left: one span needs one mask and one sop.
        first = last = below(rng, sentences)
        while True:
            start = ends[first - 1] if first > 0 else 0
            if ends[last] - start >= target:
                break
            if last < sentences - 1:
                last += 1
            else:
                first -= 1
        scratch.starts[0] = max(start, ends[last] - settings.longest_span)
        scratch.ends[0] = ends[last]
        return 1
    for i in range(sentences):
        scratch.candidates[i] = i
        scratch.marks[i] = 0
    total = 0
    for i in range(sentences):
        j = i + below(rng, sentences - i)
        chosen = scratch.candidates[j]
        scratch.candidates[j] = scratch.candidates[i]
        scratch.marks[chosen] = 1
        total += ends[chosen] - (ends[chosen - 1] if chosen > 0 else 0)
        if total >= target:
            break
    count, start = 0, 0
    for i in range(sentences):
        if scratch.marks[i]:
            scratch.starts[count] = max(start, ends[i] - settings.longest_span)
            scratch.ends[count] = ends[i]
            count += 1
        start = ends[i]
    return count


@inlined
def draw_document_span(tables, text, is_tail, settings):
    """Draw one long span: the tail of the text with its eos, or anywhere in the maskable text. Returns the count."""
    n, maskable = len(text) + 1, maskable_length(text, settings)
    available = len(text) if is_tail else min(maskable, settings.longest_span)
    if available == 0:
        return 0
    longest = max(1, min(available, int(settings.document_max_ratio * n), n - settings.document_min_context))
    shortest = min(longest, max(1, int(settings.document_min_ratio * n)))
    span = shortest + below(tables.rng, longest - shortest + 1)
    start = len(text) - span if is_tail else below(tables.rng, maskable - span + 1)
    tables.scratch.starts[0], tables.scratch.ends[0] = start, start + span
    return 1


@inlined
def _write_in_place(row, chunk, count, scratch, settings):
    """masked_lm: CLS + text with the spans masked and predicted in place. Returns the new end."""
    text, first = chunk.text, chunk.offset + 1
    row[TOKENS, chunk.offset] = settings.cls
    copy_range(row[TOKENS], first, first + len(text), text, 0)
    for span in range(count):
        start, end = scratch.starts[span], scratch.ends[span]
        set_range(row[TOKENS], first + start, first + end, settings.mask)
        copy_range(row[TARGETS], first + start, first + end, text, start)
        set_range(row[WEIGHTS], first + start, first + end, ONE_AS_INT32)
    return first + len(text)


@inlined
def _write_part_a(row, chunk, drawn, scratch, settings):
    """CLS and the text with one mask per span, whose places go to scratch.mask_at. Returns the end of part A."""
    mask = (
        settings.mask
        if drawn.objective == TOKEN
        else settings.smask
        if drawn.objective == SENTENCE
        else settings.gmask
    )
    text, offset = chunk.text, chunk.offset
    row[TOKENS, offset] = settings.cls
    # One mask stands for each span, whatever its length, so that part A does not give lengths away.
    at, last = offset + 1, 0
    for i in range(drawn.spans):
        between = scratch.starts[i] - last
        copy_range(row[TOKENS], at, at + between, text, last)
        at += between
        row[TOKENS, at] = mask
        scratch.mask_at[i] = at - offset
        at += 1
        last = scratch.ends[i]
    copy_range(row[TOKENS], at, at + len(text) - last, text, last)
    return at + len(text) - last


@inlined
def _write_part_b(row, part_b, chunk, drawn, tables, settings):
    """The spans in `scratch.order`: sop + span -> span + eop; a tail has no eop. Returns the end."""
    tokens, scratch = row[TOKENS], tables.scratch
    at = part_b
    for k in range(drawn.spans):
        span = scratch.order[k]
        start = scratch.starts[span]
        length = scratch.ends[span] - start
        # The position id of a token of part B is that of its mask, the block position counts within the span from 1.
        position = scratch.mask_at[span]
        sop = settings.sop
        if settings.sentinel_first >= 0:
            # T5's sentinels name the span, so positions of part B need not; all have the same one.
            position = settings.sequence_length
            if k > 0:
                pair = settings.sentinel_first + 2 * ((k - 1) % settings.sentinel_count)
                tokens[chunk.offset + scratch.mask_at[span]] = pair
                sop = pair + 1
        tokens[at] = sop
        # A tail's last token is no input; it is overwritten later.
        copy_range(tokens, at + 1, at + 1 + length, chunk.text, start)
        copy_range(row[TARGETS], at, at + length, chunk.text, start)
        end = at + length
        if not drawn.is_tail:
            row[TARGETS, end] = settings.eop
            end += 1
        set_range(row[POSITION_IDS], at, end, position)
        count_up(row[BLOCK_POSITION_IDS], at, end, 1)
        at = end
        if drawn.objective == TOKEN and settings.block_mask_below > 0:
            for j in range(at - length, at):
                if chance(tables.rng, settings.block_mask_below):
                    tokens[j] = settings.dblock
    # Only part B is predicted. ORD above 0 makes it causal, and hides it from part A.
    set_range(row[WEIGHTS], part_b, at, ONE_AS_INT32)
    count_up(row[ORD], part_b, at, 1)
    return at


@inlined
def _mask_context(row, part_b, chunk, count, tables, settings):
    """Replace int(ratio * n) tokens of part A within range of a mask by dBLOCK; CLS, eos and masks stay."""
    scratch, offset = tables.scratch, chunk.offset
    size, reach = part_b - offset, settings.context_mask_range
    near, candidates = scratch.marks, scratch.candidates
    set_range(near, 0, size, 0)
    for i in range(count):
        at = scratch.mask_at[i]
        set_range(near, max(1, at - reach), min(size, at + reach + 1), 1)
    for i in range(count):
        near[scratch.mask_at[i]] = 0
    number = 0
    for i in range(size):
        if near[i] and row[TOKENS, offset + i] != settings.eos:
            candidates[number] = i
            number += 1
    for i in range(min(number, int(settings.context_mask_ratio * (len(chunk.text) + 1)))):
        j = i + below(tables.rng, number - i)
        row[TOKENS, offset + candidates[j]] = settings.dblock
        candidates[j] = candidates[i]


@inlined
def write_example(row, chunk, drawn, tables, settings):
    """Write the Example with the spans in the scratch to row[chunk.offset:], except for zeros. Returns its end."""
    offset = chunk.offset
    if settings.masked_lm:
        part_b = end = _write_in_place(row, chunk, drawn.spans, tables.scratch, settings)
    else:
        part_b = _write_part_a(row, chunk, drawn, tables.scratch, settings)
        end = _write_part_b(row, part_b, chunk, drawn, tables, settings)
        if drawn.objective == TOKEN and settings.context_mask_ratio > 0:
            _mask_context(row, part_b, chunk, drawn.spans, tables, settings)
    count_up(row[POSITION_IDS], offset, part_b, 0)
    if settings.random_position:
        # Positions that short texts never reach are trained as well: the whole Example moves by a random offset.
        shift = below(tables.rng, settings.sequence_length + 1 - (part_b - offset - 1))
        stop = part_b if settings.sentinel_first >= 0 else end
        for i in range(offset, stop):
            row[POSITION_IDS, i] += shift
    set_range(row[DOC], offset, end, chunk.document)
    set_range(row[OBJECTIVE], offset, end, drawn.objective)
    return end
