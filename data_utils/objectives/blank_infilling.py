"""GLM's autoregressive blank infilling (arXiv:2103.10360): token, sentence and document objectives, mixed.

An Example is `[part A | part B]`: the text with each span replaced by one mask token, then the spans in
shuffled order, each as `sop + span` predicting `span + eop`. Everything random about it is a pure
function of (seed, sample index, piece index, attempt), so it does not depend on batch size, position in
the batch, worker or history. docs/objectives.md explains the options and the differences from the
reference implementation.

A row has a fixed length near the mean: room for the mean number of spans and one standard deviation. Where the
spans of a piece do not fit, its last tokens give way to them, a few in one row of ten; so spans keep their
distribution and rows are full, at the price of about one token of text in 2,500. Where that would cost more than
1 / MOST_CUT of the piece, spans are drawn again; after `ATTEMPTS` draws the fewest spans that still mask enough
are used, and those always fit. A longer `row_length` loses nothing and pads more.

The compiled part works on flat integer arrays, one pass per row, no allocation per row.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numba import njit

from data_utils import random_streams
from data_utils.objectives import masking, planes
from data_utils.objectives.masking import cumulative_table, draw_length, run_count_moments
from data_utils.objectives.planes import (
    BLOCK_POSITION_IDS,
    DOC,
    DOCUMENT,
    DOCUMENT_OVERHEAD,
    FIELDS,
    OBJECTIVE,
    ONE_AS_INT32,
    ORD,
    PADDING_DOC,
    POSITION_IDS,
    SENTENCE,
    TARGETS,
    TOKEN,
    TOKENS,
    WEIGHTS,
    Example,
    SpecialTokens,
)
from data_utils.random_streams import (
    below,
    chance,
    chance_threshold,
    new_stream,
    next_word,
    open_stream,
    shuffle,
)
from megatron_lite.errors import DataError
from megatron_lite.settings import check, choice, setting

ROOM_DEVIATIONS = 1.0  # of the number of spans, beyond its mean, for which a row has room
MOST_CUT = 32  # a piece loses at most length // MOST_CUT tokens at its end, where its spans do not fit
ATTEMPTS = 16  # draws of spans before falling back to the fewest
EXPECTED_SENTENCE_LENGTH = 8  # tokens; shorter than real text, only sizes rows without the token objective
SHORTEST_CROP = 32  # tokens
PLACEMENTS = ("uniform", "reference")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlankInfillingConfig:
    """What is masked, and how. Probabilities are per Example; ratios are of n, the text with its CLS."""

    segments = 1  # segment ids are below this
    has_sentence_label = False  # see RowSizes

    token_prob: float = setting(
        1.0, "probability of the token objective (short spans, [MASK]); bert_prob in the reference"
    )
    sentence_prob: float = setting(
        0.0, "probability of the sentence objective (whole sentences, [sMASK]); the rest is document"
    )
    masked_ratio: float = setting(0.15, "token objective: at least this part of the tokens is masked")
    sentence_ratio: float = setting(0.15, "sentence objective: at least this part of the tokens is masked")
    mean_span_length: float = setting(
        3.0, "token objective: mean of the Poisson distribution of span lengths, before truncation, tokens"
    )
    max_span_length: int = setting(39, "token objective: the Poisson is truncated to 1..this, tokens")
    placement: str = setting(
        "uniform",
        "token objective: 'uniform' over all placements with a token between spans; 'reference' sorts "
        "independent offsets, which favours spans a single token apart",
    )
    document_min_ratio: float = setting(
        0.5, "document objective: shortest span as a part of n; gpt_min_ratio in the reference"
    )
    document_max_ratio: float = setting(1.0, "document objective: longest span as a part of n")
    document_min_context: int = setting(
        2, "document objective: tokens, CLS included, that are never masked (reference 2; paper 1)"
    )
    document_tail_prob: float = setting(
        0.5,
        "document objective: probability that the span is the tail of the text (ends with eos, no eop) and "
        "not placed anywhere; gpt_infill_prob in the reference, which despite its name selects the tail",
    )
    single_span_prob: float = setting(
        0.0, "probability of one short span only, drawn before the objective is; counts as token objective"
    )
    short_seq_prob: float = setting(
        0.0,
        f"probability of cropping the text to a uniform length from {SHORTEST_CROP} tokens, anywhere in it",
    )
    block_mask_prob: float = setting(
        0.0, "token objective: probability of replacing each part-B input after sop by dBLOCK"
    )
    context_mask_ratio: float = setting(
        0.0, "token objective: replace int(this x n) part-A tokens near masks by dBLOCK, no loss on them"
    )
    context_mask_range: int = setting(3, "how near to a mask context_mask_ratio acts, tokens")
    random_position: bool = setting(
        False, "shift the position ids of an Example by a uniform offset that keeps them <= sequence_length"
    )
    sentinel_first: int | None = setting(
        None,
        "ablation: id of the first of sentinel_count token pairs (mask, start). The k-th span of part B uses "
        "pair k - 1 instead of [MASK] and sop; the first keeps those. Part-B positions are sequence_length",
    )
    sentinel_count: int = setting(100, "pairs from sentinel_first on; more spans start again at the first")
    masked_lm: bool = setting(
        False, "ablation: BERT-style, spans are replaced by [MASK] in place and predicted there; no part B"
    )
    shuffle_spans: bool = setting(True, "false (ablation): part B keeps the order of the text")
    cross_document_attention: bool = setting(
        False, "true (reference): the pieces of a row are one text, masked and attended to as a whole"
    )

    def __post_init__(self) -> None:
        for name in (
            "token_prob",
            "sentence_prob",
            "masked_ratio",
            "sentence_ratio",
            "document_min_ratio",
            "document_max_ratio",
            "document_tail_prob",
            "single_span_prob",
            "short_seq_prob",
            "block_mask_prob",
            "context_mask_ratio",
        ):
            value = getattr(self, name)
            check(0.0 <= value <= 1.0, f"blank_infilling.{name} is {value}; it must lie in 0..1.")
        for name in ("max_span_length", "document_min_context", "context_mask_range", "sentinel_count"):
            value = getattr(self, name)
            check(value >= 1, f"blank_infilling.{name} is {value}; it must be at least 1.")
        mean = self.mean_span_length
        check(0.0 < mean < math.inf, f"blank_infilling.mean_span_length is {mean}; it must be positive.")
        choice("blank_infilling.placement", self.placement, PLACEMENTS)
        check(
            self.token_prob + self.sentence_prob <= 1.0 + 1e-9,
            f"blank_infilling.token_prob ({self.token_prob}) + sentence_prob ({self.sentence_prob}) exceed "
            "1; lower one of them (the rest is the document objective).",
        )
        check(
            self.document_min_ratio <= self.document_max_ratio,
            f"blank_infilling.document_min_ratio ({self.document_min_ratio}) exceeds document_max_ratio "
            f"({self.document_max_ratio}); swap them.",
        )
        check(
            not self.masked_lm or self.token_prob == 1.0,
            f"blank_infilling.masked_lm needs token_prob 1.0, not {self.token_prob}; set it to 1.",
        )
        first = self.sentinel_first
        check(
            first is None or first >= 0, f"blank_infilling.sentinel_first is {first}; it must be a token id."
        )

    @property
    def document_prob(self) -> float:
        """Probability of the document objective."""
        return max(0.0, 1.0 - self.token_prob - self.sentence_prob)

    def least_row_length(self, sequence_length: int) -> int:
        """A row length that every valid window fits when each piece has the fewest spans, tokens.

        A piece of t tokens needs at most t + 3 + 2 * masked_ratio * (t + 1) / longest span. Documents
        that begin in the window have `DOCUMENT_OVERHEAD` = 4 reserved, a continuing one nothing.
        """
        longest = min(self.max_span_length, max(1, sequence_length - 1))
        return sequence_length + 3 + int(2 * self.masked_ratio * (sequence_length + 1) / longest)

    def row_length_for(self, sequence_length: int) -> int:
        """Row length for windows of `sequence_length` source tokens, a multiple of 8: see `ROOM_DEVIATIONS`."""
        length = max(
            sequence_length + 1 + self._room(sequence_length + 1), self.least_row_length(sequence_length)
        )
        return -(-length // 8) * 8

    def _room(self, n: int) -> int:
        """Tokens that the spans of a text of n tokens add, mean + ROOM_DEVIATIONS, for the busiest objective."""
        room = 2
        if self.sentence_prob > 0:
            room = 2 * (int(self.sentence_ratio * n) // EXPECTED_SENTENCE_LENGTH + 1)
        if self.token_prob > 0 and not self.masked_lm:
            weights = np.diff(_length_cumulative(self.mean_span_length, self.max_span_length)) / 2.0**32
            mean, deviation = run_count_moments(weights, int(self.masked_ratio * n))
            room = max(room, math.ceil(2 * (mean + ROOM_DEVIATIONS * deviation)))
        return room

    def max_position_needed(self, sequence_length: int) -> int:
        """Largest position id and block position id that can occur; the model needs one row more.

        Part A counts at most CLS + sequence_length tokens from 0. A block position is at most the span
        with its sop, and no span but a document's tail (which has no eop) exceeds sequence_length - 1.
        """
        return sequence_length


def _length_cumulative(mean: float, longest: int) -> np.ndarray:
    """Truncated Poisson of span lengths, cumulative in units of 2**-32: int64 `[longest + 1]`, from 0.

    See `cumulative_table`. Every length keeps a weight, or nothing could be drawn where only it fits.
    """
    lengths = np.arange(1, longest + 1)
    log_weights = lengths * math.log(mean) - np.array([math.lgamma(length + 1) for length in lengths])
    return cumulative_table(np.exp(log_weights - log_weights.max()))


# The config as the compiled code reads it. A record, not a tuple: it is passed as one pointer, where a tuple
# is copied, and its arrays are reference-counted, at every call. `*_below` are thresholds for `chance`.
_SETTINGS = np.dtype(
    [
        (name, dtype)
        for dtype, names in (
            (np.int64, "cls sop eop eos pad dblock mask smask gmask"),
            (np.int64, "longest_span longest_token_span sequence_length document_min_context"),
            (np.int64, "context_mask_range sentinel_first sentinel_count"),
            (np.uint64, "key token_below token_or_sentence_below tail_below single_below short_below"),
            (np.uint64, "block_mask_below"),
            (np.float64, "masked_ratio sentence_ratio context_mask_ratio"),
            (np.float64, "document_min_ratio document_max_ratio"),
            (np.bool_, "uniform_placement random_position masked_lm shuffle_spans cross_document_attention"),
        )
        for name in names.split()
    ],
    align=True,
)


# Rows of the scratch array `w`, int64 [5, longest text]: the spans of the Example in hand, in text order, the
# order of part B, the place of each span's mask in part A, and marks for whatever is being chosen.
STARTS, ENDS, ORDER, MASK_AT, MARKS = range(5)


# Numba optimises the whole tree below a function again at each level of calls; flattening the upper levels
# takes a third off the time to compile.
_inlined = njit(nogil=True, error_model="numpy", inline="always")


@njit(nogil=True, error_model="numpy")
def _new_work(longest_text):
    return np.empty((5, longest_text + 2), np.int64)


# Loops over stretches of a row. As slices they would take numba ten times as long to compile. The indices are unsigned
# because a signed one may be negative, and the test for that keeps the loop from being vectorised: 3 to 6 times slower.


@_inlined
def _set(array, line, start, stop, value):
    """array[line, start:stop] = value"""
    for i in range(np.uint64(start), np.uint64(stop)):
        array[line, i] = value


@_inlined
def _count(array, line, start, stop, first):
    """array[line, start:stop] = first, first + 1, ..."""
    at = np.uint64(start)
    for i in range(np.uint64(stop - start)):
        array[line, at + i] = np.uint64(first) + i


@_inlined
def _copy(array, line, at, text, start, length):
    """array[line, at : at + length] = text[start : start + length]"""
    target, source = np.uint64(at), np.uint64(start)
    for i in range(np.uint64(length)):
        array[line, target + i] = text[source + i]


@njit(nogil=True, error_model="numpy")
def _least_length(length, s):
    """Row tokens that a piece of `length` tokens needs with the fewest spans."""
    target = max(1, int(s.masked_ratio * (length + 1)))
    return length + 1 + 2 * ((target + s.longest_token_span - 1) // s.longest_token_span)


@njit(nogil=True, error_model="numpy")
def _place_spans(stream, w, count, total, maskable, uniform):
    """Turn the lengths in `w[ORDER]` into spans with at least one token between them.

    The gaps beyond that token are what is free. Uniform: choose which `count` of `free + count` slots
    hold a span (Floyd's algorithm), every choice equally likely. Reference: an offset per span,
    independent in 0..free, sorted; several spans may share one, so tight clusters come too often.
    """
    free = maskable - total - (count - 1)
    slots = free + count if uniform else free + 1
    marks = w[MARKS]
    _set(w, MARKS, 0, slots, 0)
    for i in range(count):
        if uniform:
            last = free + i
            slot = below(stream, last + 1)
            marks[last if marks[slot] else slot] = 1
        else:
            marks[below(stream, slots)] += 1
    _set(w, STARTS, 0, count, 0)
    placed = np.uint64(0)
    for slot in range(
        np.uint64(slots)
    ):  # the marked slots, in order, without a branch that is hard to predict
        w[STARTS, placed] = slot
        placed += np.uint64(marks[slot])
    slot, before = 0, 0  # before: tokens and, where they are not slots, gaps of the spans before
    for i in range(count):
        slot = max(slot, w[STARTS, i])  # a slot of several spans was noted for the first of them
        w[STARTS, i] = slot + before
        w[ENDS, i] = slot + before + w[ORDER, i]
        before += w[ORDER, i] if uniform else w[ORDER, i] + 1


@njit(nogil=True, error_model="numpy")
def _tokens_to_cut(n, count, available):
    """By how much a text of n tokens (CLS counted) with `count` spans exceeds the available row tokens."""
    return max(0, n + 2 * count - available)


@njit(nogil=True, error_model="numpy")
def _draw_token_spans(stream, w, n, maskable, available, single, fewest, cumulative, s):
    """Short spans that mask the ratio of n, or as much as the gaps allow. Returns their count, -1: failed.

    Where they need more than the `available` row tokens, they are placed in a text that is as much shorter.
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
    cut = _tokens_to_cut(n, count, available)
    maskable = min(maskable, n - 1 - cut)
    if cut > (n - 1) // MOST_CUT or total + count - 1 > maskable:
        return -1
    shuffle(stream, w[ORDER], count)  # the last length drawn is larger than the others on average
    _place_spans(stream, w, count, total, maskable, s.uniform_placement)
    return count


@njit(nogil=True, error_model="numpy")
def _find_sentences(w, text, start, maskable, sentence_end, s):
    """Sentences partition the maskable text; their ends go to `w[ENDS]`. Returns their number."""
    count = 0
    for i in range(maskable):
        token = text[start + i]
        known = 0 <= token < len(sentence_end)
        if token == s.eos or i == maskable - 1 or (known and sentence_end[token]):
            w[ENDS, count] = i + 1
            count += 1
    return count


@njit(nogil=True, error_model="numpy")
def _draw_sentences(stream, w, text, start, n, maskable, fewest, sentence_end, s):
    """Whole sentences at random until the ratio of n is masked. Fewest: a run of them as one span."""
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


@njit(nogil=True, error_model="numpy")
def _draw_document_span(stream, w, n, length, maskable, tail, s):
    """One long span: the tail of the text with its eos, or anywhere in the maskable text."""
    most = length if tail else min(maskable, s.longest_span)
    if most == 0:
        return 0
    high = max(1, min(most, int(s.document_max_ratio * n), n - s.document_min_context))
    low = min(high, max(1, int(s.document_min_ratio * n)))
    span = low + below(stream, high - low + 1)
    w[STARTS, 0] = length - span if tail else below(stream, maskable - span + 1)
    w[ENDS, 0] = w[STARTS, 0] + span
    return 1


@njit(nogil=True, error_model="numpy")
def _write_in_place(row, used, text, start, length, count, w, s):
    """masked_lm: CLS + text with the spans masked and predicted where they stand. Returns the new end."""
    row[TOKENS, used] = s.cls
    first = used + 1
    _copy(row, TOKENS, first, text, start, length)
    for span in range(count):
        begin, end = w[STARTS, span], w[ENDS, span]
        _set(row, TOKENS, first + begin, first + end, s.mask)
        _copy(row, TARGETS, first + begin, text, start + begin, end - begin)
        _set(row, WEIGHTS, first + begin, first + end, ONE_AS_INT32)
    return first + length


@njit(nogil=True, error_model="numpy")
def _write_part_a(row, used, text, start, length, count, objective, w, s):
    """CLS and the text with one mask per span; notes where each mask is. Returns the end of part A."""
    mask = s.mask if objective == TOKEN else s.smask if objective == SENTENCE else s.gmask
    row[TOKENS, used] = s.cls
    at, last = used + 1, 0
    for i in range(count):
        between = w[STARTS, i] - last
        _copy(row, TOKENS, at, text, start + last, between)
        at += between
        row[TOKENS, at] = mask
        w[MASK_AT, i] = at - used
        at += 1
        last = w[ENDS, i]
    _copy(row, TOKENS, at, text, start + last, length - last)
    return at + length - last


@njit(nogil=True, error_model="numpy")
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
        _copy(row, TOKENS, at + 1, text, begin, length)  # of a tail the last one is overwritten: not an input
        _copy(row, TARGETS, at, text, begin, length)
        end = at + length
        if not tail:
            row[TARGETS, end] = s.eop
            end += 1
        _set(row, POSITION_IDS, at, end, position)
        _count(row, BLOCK_POSITION_IDS, at, end, 1)
        at = end
        if objective == TOKEN and s.block_mask_below > 0:
            for j in range(at - length, at):
                if chance(stream, s.block_mask_below):
                    tokens[j] = s.dblock
    _set(row, WEIGHTS, part_b, at, ONE_AS_INT32)
    _count(row, ORD, part_b, at, 1)
    return at


@njit(nogil=True, error_model="numpy")
def _mask_context(row, used, part_b, count, stream, w, s, n):
    """Replace int(ratio * n) tokens of part A within range of a mask by dBLOCK; CLS, eos and masks stay."""
    size = part_b - used
    near = w[MARKS]
    _set(w, MARKS, 0, size, 0)
    for i in range(count):
        at = w[MASK_AT, i]
        _set(w, MARKS, max(1, at - s.context_mask_range), min(size, at + s.context_mask_range + 1), 1)
    for i in range(count):
        near[w[MASK_AT, i]] = 0
    candidates = w[STARTS]  # no longer needed: the spans are written
    found = 0
    for i in range(size):
        if near[i] and row[TOKENS, used + i] != s.eos:
            candidates[found] = i
            found += 1
    for i in range(min(found, int(s.context_mask_ratio * n))):
        j = i + below(stream, found - i)
        row[TOKENS, used + candidates[j]] = s.dblock
        candidates[j] = candidates[i]


@_inlined
def _write_example(row, used, document, text, start, length, count, objective, tail, stream, w, s):
    """Write the Example with the spans in hand to `row` from `used` on, but for what is 0. Returns the new end."""
    if s.masked_lm:
        part_b = end = _write_in_place(row, used, text, start, length, count, w, s)
    else:
        part_b = _write_part_a(row, used, text, start, length, count, objective, w, s)
        end = _write_part_b(row, part_b, used, text, start, count, objective, tail, stream, w, s)
        if objective == TOKEN and s.context_mask_ratio > 0:
            _mask_context(row, used, part_b, count, stream, w, s, length + 1)
    _count(row, POSITION_IDS, used, part_b, 0)
    if s.random_position:
        shift = below(stream, s.sequence_length + 1 - (part_b - used - 1))
        stop = part_b if s.sentinel_first >= 0 else end
        for i in range(used, stop):
            row[POSITION_IDS, i] += shift
    _set(row, DOC, used, end, document)
    _set(row, OBJECTIVE, used, end, objective)
    return end


@_inlined
def _fill_example(
    row, used, limit, text, start, length, sample, piece, stream, w, sentence_end, cumulative, s
):
    """Draw and write the Example of one piece at row[used:limit]. Returns the new end.

    What is decided once (attempt 0) does not depend on whether the spans fit, so a crowded row does not
    change the mix of objectives.
    """
    open_stream(stream, s.key, sample, piece, 0)
    short = chance(stream, s.short_below)
    single = chance(stream, s.single_below)
    mode = next_word(stream)
    tail = chance(stream, s.tail_below)
    objective = TOKEN
    if not single and mode >= s.token_below:
        objective = SENTENCE if mode < s.token_or_sentence_below else DOCUMENT
    tail = tail and objective == DOCUMENT
    if short and length > SHORTEST_CROP:
        crop = SHORTEST_CROP + below(stream, length - SHORTEST_CROP + 1)
        start += below(stream, length - crop + 1)
        length = crop
    n = length + 1
    maskable = length - 1 if length > 0 and text[start + length - 1] == s.eos else length
    available = 3 * n if s.masked_lm else limit - used
    count, cut = 0, 0
    for attempt in range(1, ATTEMPTS + 2):
        open_stream(stream, s.key, sample, piece, attempt)
        fewest, cut = attempt > ATTEMPTS, 0
        if objective == DOCUMENT:
            count = _draw_document_span(stream, w, n, length, maskable, tail, s)
        elif maskable == 0:
            count = 0
        elif objective == SENTENCE:
            count = _draw_sentences(stream, w, text, start, n, maskable, fewest, sentence_end, s)
        else:
            count = _draw_token_spans(stream, w, n, maskable, available, single, fewest, cumulative, s)
            cut = _tokens_to_cut(n, count, available)
        if count >= 0 and n + 2 * count - cut <= available:
            break
    length -= cut
    for i in range(count):
        w[ORDER, i] = i
    if s.shuffle_spans:
        shuffle(stream, w[ORDER], count)
    return _write_example(row, used, piece, text, start, length, count, objective, tail, stream, w, s)


@_inlined
def _fill_row(row, text, start, lengths, sample, first_piece, stream, w, sentence_end, cumulative, s):
    """Write one sample, its pieces from number `first_piece` on, then padding. False: it can not fit."""
    needed = 0
    for length in lengths:
        needed += _least_length(length, s)
    row_length = row.shape[1]
    if needed > row_length or lengths.sum() > s.sequence_length:
        return False
    for plane in range(len(FIELDS)):
        if plane != TOKENS and plane != POSITION_IDS:  # those are written everywhere
            _set(row, plane, 0, row_length, 0)
    used = 0
    piece = first_piece
    for length in lengths:
        needed -= _least_length(length, s)  # what the pieces after this one need
        limit = row_length - needed
        used = _fill_example(
            row, used, limit, text, start, length, sample, piece, stream, w, sentence_end, cumulative, s
        )
        piece += 1
        start += length
    _set(row, TOKENS, used, row_length, s.pad)
    _set(row, POSITION_IDS, used, row_length, 0)
    _set(row, DOC, used, row_length, PADDING_DOC)
    return True


def _cached_entry_points(digest: int):
    """The functions called from Python, compiled and cached under a digest of all sources they use."""

    @njit(cache=True, nogil=True)
    def fill_rows(
        batch,
        text,
        piece_lengths,
        pieces_per_sample,
        sample_indices,
        first_piece,
        sentence_end,
        cumulative,
        settings,
        stream,
    ):
        _ = digest  # part of the cache key
        w, s = _new_work(batch.shape[2]), settings[0]
        piece, start = 0, 0
        joined = np.zeros(1, np.int64)
        for i in range(len(batch)):
            lengths = piece_lengths[piece : piece + pieces_per_sample[i]]
            total = lengths.sum()
            if s.cross_document_attention and len(lengths) > 0:
                lengths = joined
                joined[0] = total
            sample = sample_indices[i]
            row = batch[i]
            if not _fill_row(
                row, text, start, lengths, sample, first_piece, stream, w, sentence_end, cumulative, s
            ):
                return i
            piece += pieces_per_sample[i]
            start += total
        return -1

    @njit(cache=True, nogil=True)
    def write_given(row, text, starts, ends, order, objective, tail, settings, stream):
        _ = digest
        w, s = _new_work(row.shape[1]), settings[0]
        count = len(starts)
        for i in range(count):
            w[STARTS, i] = starts[i]
            w[ENDS, i] = ends[i]
            w[ORDER, i] = order[i]
        open_stream(stream, s.key, 0, 0, 1)
        return _write_example(row, 0, 0, text, 0, len(text), count, objective, tail, stream, w, s)

    return fill_rows, write_given


_fill_rows, _write_given = _cached_entry_points(
    random_streams.source_digest(
        random_streams.__file__, planes.__file__, masking.__file__, str(Path(__file__))
    )
)


class BlankInfilling:
    """The objective for one config, vocabulary and seed.

    Args:
        config: what is masked, and how.
        special: ids of the special tokens.
        sentence_end: bool `[vocabulary]`, True for tokens that end a sentence; needed if sentence_prob > 0.
        seed: 64-bit key of all draws, for example `derive_seed(run_seed, "masking")`.
        sequence_length: source tokens per sample, at most.
        row_length: tokens per row of the batch; None: `config.row_length_for(sequence_length)`.
    Raises: ConfigError when they do not go together.
    """

    def __init__(
        self,
        config: BlankInfillingConfig,
        special: SpecialTokens,
        sentence_end: np.ndarray | None,
        seed: int,
        sequence_length: int,
        row_length: int | None = None,
    ) -> None:
        check(sequence_length >= 2, f"sequence_length is {sequence_length}; it must be at least 2.")
        least = config.least_row_length(sequence_length)
        self.config = config
        self.sequence_length = sequence_length
        self.row_length = config.row_length_for(sequence_length) if row_length is None else row_length
        check(
            self.row_length >= least,
            f"row_length {self.row_length} is too short for sequence_length {sequence_length} and its masks; "
            f"it must be at least {least} ({config.row_length_for(sequence_length)} is recommended).",
        )
        check(
            sentence_end is not None or config.sentence_prob == 0,
            f"blank_infilling.sentence_prob is {config.sentence_prob}, but no sentence ends are known for "
            "this vocabulary; set it to 0.",
        )
        ends = np.zeros(0) if sentence_end is None else sentence_end
        longest = min(config.max_span_length, sequence_length - 1)
        self._tables = (
            np.ascontiguousarray(ends, np.bool_),
            _length_cumulative(config.mean_span_length, longest),
        )
        self._settings = _make_settings(config, special, seed, sequence_length)

    def fill(
        self,
        batch: np.ndarray,
        tokens: np.ndarray,
        piece_lengths: np.ndarray,
        pieces_per_sample: np.ndarray,
        sample_indices: np.ndarray,
    ) -> None:
        """See `Objective.fill`. The `doc` plane numbers the pieces of a sample from 0."""
        failed = self._fill(batch, tokens, piece_lengths, pieces_per_sample, sample_indices, 0)
        if failed >= 0:
            first = int(pieces_per_sample[:failed].sum())
            lengths = piece_lengths[first : first + int(pieces_per_sample[failed])]
            raise DataError(
                f"sample {sample_indices[failed]} has {len(lengths)} pieces with {lengths.sum()} tokens, too "
                f"many for sequence_length {self.sequence_length} and rows of {batch.shape[2]}; a window "
                f"must keep its tokens and {DOCUMENT_OVERHEAD} more for each document within sequence_length."
            )

    def example(self, piece: np.ndarray, sample_index: int, piece_index: int = 0) -> Example:
        """The Example of one piece (int32 tokens without CLS) as `fill` draws it where space is ample."""
        text = np.ascontiguousarray(piece, np.int32)
        check(
            len(text) <= self.sequence_length,
            f"the piece has {len(text)} tokens; a sample may have sequence_length {self.sequence_length}.",
        )
        batch = np.empty((1, len(FIELDS), 3 * len(text) + 8), np.int32)
        one = np.ones(1, np.int64)
        self._fill(batch, text, one * len(text), one, one * sample_index, piece_index)
        return Example.from_planes(batch[0][:, batch[0, DOC] >= 0])

    def _fill(self, batch, tokens, piece_lengths, pieces_per_sample, sample_indices, first_piece) -> int:
        """Fill the rows; returns the index of the first sample that can not fit, or -1."""
        sources = (tokens, piece_lengths, pieces_per_sample, sample_indices, first_piece)
        return _fill_rows(batch, *sources, *self._tables, self._settings, new_stream())

    def build(
        self,
        piece: np.ndarray,
        spans: list[tuple[int, int]],
        order: list[int],
        objective: int = TOKEN,
        tail: bool = False,
    ) -> Example:
        """The Example for given spans of `piece` (`[start, end)`, in text order) in a given part-B order."""
        text = np.ascontiguousarray(piece, np.int32)
        starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
        row = np.zeros((len(FIELDS), 3 * len(text) + 8), np.int32)
        given = (np.ascontiguousarray(starts), np.ascontiguousarray(ends), np.array(order, np.int64))
        end = _write_given(row, text, *given, objective, tail, self._settings, new_stream())
        return Example.from_planes(row[:, :end])


def _make_settings(
    config: BlankInfillingConfig, special: SpecialTokens, seed: int, sequence_length: int
) -> np.ndarray:
    """The `_SETTINGS` record, as an array of one."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values |= {field.name: getattr(special, field.name) for field in dataclasses.fields(special)}
    values |= {
        "key": np.uint64(seed),
        "token_below": chance_threshold(config.token_prob),
        "token_or_sentence_below": chance_threshold(1.0 - config.document_prob),
        "tail_below": chance_threshold(config.document_tail_prob),
        "single_below": chance_threshold(config.single_span_prob),
        "short_below": chance_threshold(config.short_seq_prob),
        "block_mask_below": chance_threshold(config.block_mask_prob),
        "longest_span": sequence_length - 1,
        "longest_token_span": min(config.max_span_length, sequence_length - 1),
        "sequence_length": sequence_length,
        "sentinel_first": -1 if config.sentinel_first is None else config.sentinel_first,
        "uniform_placement": config.placement == "uniform",
    }
    settings = np.recarray(1, _SETTINGS)
    for name in _SETTINGS.names or ():
        settings[name] = values[name]
    return settings
