"""GLM's autoregressive blank infilling (arXiv:2103.10360): token, sentence and document objectives, mixed.

An Example is `[part A | part B]`: the text with each span replaced by one mask token, then the spans in
shuffled order, each as `sop + span` predicting `span + eop`. Everything random about it is a pure
function of (seed, sample index, piece index, attempt), so it does not depend on batch size, position in
the batch, worker or history. docs/objectives.md explains the options and the differences from the
reference implementation.

A row has a fixed length below the worst case: room for the mean number of spans and four standard
deviations. Spans that do not fit are drawn again; after `ATTEMPTS` draws the fewest spans that still mask
enough are used, and those always fit. So no text is dropped and no row overflows, at the price of
slightly fewer spans in the rarest rows.

The compiled part works on flat integer arrays, one pass per row, no allocation per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

from data_utils import random_streams
from data_utils.objectives import base
from data_utils.objectives.base import (
    BLOCK_POSITION_IDS,
    DOC,
    DOCUMENT,
    FIELDS,
    GRP,
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

DOCUMENT_OVERHEAD = 4  # row tokens that a window reserves for each document: CLS and one span need 3
ATTEMPTS = 16  # draws of spans before falling back to the fewest
EXPECTED_SENTENCE_LENGTH = 8  # tokens; shorter than real text, only sizes rows without the token objective
SHORTEST_CROP = 32  # tokens
PLACEMENTS = ("uniform", "reference")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlankInfillingConfig:
    """What is masked, and how. Probabilities are per Example; ratios are of n, the text with its CLS."""

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
            "token_prob sentence_prob masked_ratio sentence_ratio document_min_ratio document_max_ratio "
            "document_tail_prob single_span_prob short_seq_prob block_mask_prob context_mask_ratio"
        ).split():
            value = getattr(self, name)
            check(0.0 <= value <= 1.0, f"blank_infilling.{name} is {value}; it must be between 0 and 1.")
        for name in ("max_span_length", "document_min_context", "context_mask_range", "sentinel_count"):
            value = getattr(self, name)
            check(value >= 1, f"blank_infilling.{name} is {value}; it must be at least 1.")
        mean = self.mean_span_length
        check(0.0 < mean < math.inf, f"blank_infilling.mean_span_length is {mean}; it must be positive.")
        choice("blank_infilling.placement", self.placement, PLACEMENTS)
        check(
            self.token_prob + self.sentence_prob <= 1.0 + 1e-9,
            f"blank_infilling.token_prob ({self.token_prob}) + sentence_prob ({self.sentence_prob}) exceed 1; "
            "lower one of them (the rest is the document objective).",
        )
        check(
            self.document_min_ratio <= self.document_max_ratio,
            f"blank_infilling.document_min_ratio ({self.document_min_ratio}) exceeds document_max_ratio "
            f"({self.document_max_ratio}); swap them.",
        )
        check(
            not self.masked_lm or self.token_prob == 1.0,
            f"blank_infilling.masked_lm needs token_prob 1.0, not {self.token_prob}; spans are masked in place.",
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
        """Row length for windows of `sequence_length` source tokens: four sigma of room, a multiple of 8."""
        length = max(
            sequence_length + 1 + self._room(sequence_length + 1), self.least_row_length(sequence_length)
        )
        return -(-length // 8) * 8

    def _room(self, n: int) -> int:
        """Tokens that the spans of a text of n tokens add, mean + 4 sigma, for the busiest objective."""
        room = 2
        if self.sentence_prob > 0:
            room = 2 * (int(self.sentence_ratio * n) // EXPECTED_SENTENCE_LENGTH + 1)
        if self.token_prob > 0 and not self.masked_lm:
            weights = np.diff(_length_cumulative(self.mean_span_length, self.max_span_length)) / 2.0**32
            mean, deviation = _span_count_moments(weights, int(self.masked_ratio * n))
            room = max(room, math.ceil(2 * (mean + 4 * deviation)))
        return room

    def max_position_needed(self, sequence_length: int) -> int:
        """Largest position id and block position id that can occur; the model needs one row more.

        Part A counts at most CLS + sequence_length tokens from 0. A block position is at most the span
        with its sop, and no span but a document's tail (which has no eop) exceeds sequence_length - 1.
        """
        return sequence_length


def _length_cumulative(mean: float, longest: int) -> np.ndarray:
    """Truncated Poisson of span lengths, cumulative in units of 2**-32: int64 `[longest + 1]`, from 0.

    Entry k is the weight of lengths 1..k, so a draw below entry k is a draw from the distribution
    restricted to 1..k. Every length keeps a weight, or nothing could be drawn where only it fits.
    """
    lengths = np.arange(1, longest + 1)
    log_weights = lengths * math.log(mean) - np.array([math.lgamma(length + 1) for length in lengths])
    weights = np.exp(log_weights - log_weights.max())
    cumulative = np.cumsum(weights) / weights.sum() * (2**32 - longest)
    return np.concatenate([[0], np.round(cumulative).astype(np.int64) + lengths])


def _span_count_moments(weights: np.ndarray, target: int) -> tuple[float, float]:
    """Mean and standard deviation of the number of spans drawn until their sum reaches `target`, exactly."""
    first, second = np.zeros(target + 1), np.zeros(target + 1)
    for missing in range(1, target + 1):
        reach = min(missing - 1, len(weights))  # lengths that leave something missing
        later_first = np.dot(weights[:reach], first[missing - reach : missing][::-1])
        later_second = np.dot(weights[:reach], second[missing - reach : missing][::-1])
        first[missing] = 1 + later_first
        second[missing] = 1 + 2 * later_first + later_second
    return float(first[target]), math.sqrt(max(0.0, second[target] - first[target] ** 2))


class _Settings(NamedTuple):
    """The config as the compiled code reads it; `*_below` are thresholds for `chance`."""

    key: np.uint64
    cls: int
    sop: int
    eop: int
    eos: int
    pad: int
    dblock: int
    mask_ids: np.ndarray  # by objective
    sentence_end: np.ndarray  # bool [vocabulary]
    length_cumulative: np.ndarray
    token_below: np.uint64
    token_or_sentence_below: np.uint64
    tail_below: np.uint64
    single_below: np.uint64
    short_below: np.uint64
    block_mask_below: np.uint64
    masked_ratio: float
    sentence_ratio: float
    document_min_ratio: float
    document_max_ratio: float
    context_mask_ratio: float
    document_min_context: int
    context_mask_range: int
    longest_span: int
    longest_token_span: int
    sequence_length: int
    sentinel_first: int  # -1: none
    sentinel_count: int
    uniform_placement: bool
    random_position: bool
    masked_lm: bool
    shuffle_spans: bool
    cross_document_attention: bool


class _Work(NamedTuple):
    """Scratch arrays of one call; the spans of the Example in hand, in text order, and their part-B order."""

    stream: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    order: np.ndarray
    mask_at: np.ndarray  # position of each span's mask token in part A
    marks: np.ndarray


@njit(cache=True, nogil=True)
def _new_work(longest_text):
    size = longest_text + 2
    return _Work(
        new_stream(),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
    )


@njit(cache=True, nogil=True)
def _least_length(length, s):
    """Row tokens that a piece of `length` tokens needs with the fewest spans."""
    target = max(1, int(s.masked_ratio * (length + 1)))
    return length + 1 + 2 * ((target + s.longest_token_span - 1) // s.longest_token_span)


@njit(cache=True, nogil=True)
def _draw_length(stream, longest, cumulative):
    """A span length from the truncated Poisson, restricted to 1..longest."""
    draw = below(stream, cumulative[longest])
    length = 1
    while draw >= cumulative[length]:
        length += 1
    return length


@njit(cache=True, nogil=True)
def _place_spans(w, count, total, maskable, uniform):
    """Turn the lengths in `w.order` into spans with at least one token between them.

    The gaps beyond that token are what is free. Uniform: choose which `count` of `free + count` slots
    hold a span (Floyd's algorithm), every choice equally likely. Reference: an offset per span,
    independent in 0..free, sorted; several spans may share one, so tight clusters come too often.
    """
    free = maskable - total - (count - 1)
    slots = free + count if uniform else free + 1
    marks = w.marks
    marks[:slots] = 0
    for i in range(count):
        if uniform:
            last = free + i
            slot = below(w.stream, last + 1)
            marks[last if marks[slot] else slot] = 1
        else:
            marks[below(w.stream, slots)] += 1
    placed, position, slot = 0, 0, 0
    while placed < count:
        for _ in range(marks[slot]):
            w.starts[placed] = position
            w.ends[placed] = position + w.order[placed]
            position = w.ends[placed] + 1
            placed += 1
        if not uniform or marks[slot] == 0:
            position += 1
        slot += 1


@njit(cache=True, nogil=True)
def _draw_token_spans(w, n, maskable, single, fewest, s):
    """Short spans that mask the ratio of n, or as much as the gaps allow. Returns their count, -1: failed."""
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
            length = _draw_length(w.stream, min(longest, room), s.length_cumulative)
        w.order[count] = length
        count += 1
        total += length
        if single:
            break
    shuffle(w.stream, w.order, count)  # the last length drawn is larger than the others on average
    _place_spans(w, count, total, maskable, s.uniform_placement)
    return count


@njit(cache=True, nogil=True)
def _find_sentences(w, text, start, maskable, s):
    """Sentences partition the maskable text; their ends go to `w.ends`. Returns their number."""
    count = 0
    for i in range(maskable):
        token = text[start + i]
        known = 0 <= token < len(s.sentence_end)
        if token == s.eos or i == maskable - 1 or (known and s.sentence_end[token]):
            w.ends[count] = i + 1
            count += 1
    return count


@njit(cache=True, nogil=True)
def _draw_sentences(w, text, start, n, maskable, fewest, s):
    """Whole sentences at random until the ratio of n is masked. Fewest: a run of them as one span."""
    number = _find_sentences(w, text, start, maskable, s)
    target = min(max(1, int(s.sentence_ratio * n)), maskable)
    if fewest:
        first = last = below(w.stream, number)
        while True:
            begin = w.ends[first - 1] if first > 0 else 0
            if w.ends[last] - begin >= target:
                break
            if last < number - 1:
                last += 1
            else:
                first -= 1
        end = w.ends[last]
        w.starts[0] = max(begin, end - s.longest_span)
        w.ends[0] = end
        return 1
    for i in range(number):
        w.order[i] = i
        w.marks[i] = 0
    total = 0
    for i in range(number):
        j = i + below(w.stream, number - i)
        chosen = w.order[j]
        w.order[j] = w.order[i]
        w.marks[chosen] = 1
        total += w.ends[chosen] - (w.ends[chosen - 1] if chosen > 0 else 0)
        if total >= target:
            break
    count, begin = 0, 0
    for i in range(number):
        end = w.ends[i]
        if w.marks[i]:
            w.starts[count] = max(begin, end - s.longest_span)
            w.ends[count] = end  # count <= i, so no end is overwritten before it is read
            count += 1
        begin = end
    return count


@njit(cache=True, nogil=True)
def _draw_document_span(w, n, length, maskable, tail, s):
    """One long span: the tail of the text with its eos, or anywhere in the maskable text."""
    most = length if tail else min(maskable, s.longest_span)
    if most == 0:
        return 0
    high = max(1, min(most, int(s.document_max_ratio * n), n - s.document_min_context))
    low = min(high, max(1, int(s.document_min_ratio * n)))
    span = low + below(w.stream, high - low + 1)
    w.starts[0] = length - span if tail else below(w.stream, maskable - span + 1)
    w.ends[0] = w.starts[0] + span
    return 1


@njit(cache=True, nogil=True)
def _write_in_place(row, used, text, start, length, count, w, s):
    """masked_lm: CLS + text with the spans masked and predicted where they stand. Returns the new end."""
    row[TOKENS, used] = s.cls
    end = used + 1 + length
    for i in range(length):
        row[TOKENS, used + 1 + i] = text[start + i]
    row[TARGETS, used:end] = 0
    row[WEIGHTS, used:end] = 0
    row[ORD, used:end] = 0
    for span in range(count):
        for i in range(w.starts[span], w.ends[span]):
            row[TOKENS, used + 1 + i] = s.mask_ids[TOKEN]
            row[TARGETS, used + 1 + i] = text[start + i]
            row[WEIGHTS, used + 1 + i] = ONE_AS_INT32
    row[BLOCK_POSITION_IDS, used:end] = 0
    return end


@njit(cache=True, nogil=True)
def _write_part_a(row, used, text, start, length, count, objective, w, s):
    """CLS and the text with one mask per span; notes where each mask is. Returns the end of part A."""
    tokens = row[TOKENS]
    tokens[used] = s.cls
    at, last = used + 1, 0
    for i in range(count):
        for j in range(last, w.starts[i]):
            tokens[at + j - last] = text[start + j]
        at += w.starts[i] - last
        tokens[at] = s.mask_ids[objective]
        w.mask_at[i] = at - used
        at += 1
        last = w.ends[i]
    for j in range(last, length):
        tokens[at + j - last] = text[start + j]
    at += length - last
    row[BLOCK_POSITION_IDS, used:at] = 0
    row[TARGETS, used:at] = 0
    row[WEIGHTS, used:at] = 0
    row[ORD, used:at] = 0
    return at


@njit(cache=True, nogil=True)
def _write_part_b(row, part_b, used, text, start, count, objective, tail, w, s):
    """The spans in `w.order`: sop + span -> span + eop; a tail has no eop. Returns the end."""
    tokens, targets = row[TOKENS], row[TARGETS]
    positions, block_positions = row[POSITION_IDS], row[BLOCK_POSITION_IDS]
    at = part_b
    for k in range(count):
        span = w.order[k]
        begin = start + w.starts[span]
        length = w.ends[span] - w.starts[span]
        position = w.mask_at[span]
        sop = s.sop
        if s.sentinel_first >= 0:
            position = s.sequence_length
            if k > 0:
                pair = s.sentinel_first + 2 * ((k - 1) % s.sentinel_count)
                tokens[used + w.mask_at[span]] = pair
                sop = pair + 1
        tokens[at] = sop
        for j in range(length):
            token = text[begin + j]
            tokens[at + 1 + j] = token  # of a tail the last one is overwritten: not an input
            targets[at + j] = token
            positions[at + j] = position
            block_positions[at + j] = j + 1
        at += length
        if not tail:
            targets[at] = s.eop
            positions[at] = position
            block_positions[at] = length + 1
            at += 1
        if objective == TOKEN and s.block_mask_below > 0:
            for j in range(at - length, at):
                if chance(w.stream, s.block_mask_below):
                    tokens[j] = s.dblock
    for j in range(part_b, at):
        row[WEIGHTS, j] = ONE_AS_INT32
        row[ORD, j] = j - part_b + 1
    return at


@njit(cache=True, nogil=True)
def _mask_context(row, used, part_b, count, w, s, n):
    """Replace int(ratio * n) tokens of part A within range of a mask by dBLOCK; CLS, eos and masks stay."""
    size = part_b - used
    near = w.marks
    near[:size] = 0
    for i in range(count):
        at = w.mask_at[i]
        near[max(1, at - s.context_mask_range) : min(size, at + s.context_mask_range + 1)] = 1
    for i in range(count):
        near[w.mask_at[i]] = 0
    candidates = w.starts  # no longer needed: the spans are written
    found = 0
    for i in range(size):
        if near[i] and row[TOKENS, used + i] != s.eos:
            candidates[found] = i
            found += 1
    for i in range(min(found, int(s.context_mask_ratio * n))):
        j = i + below(w.stream, found - i)
        row[TOKENS, used + candidates[j]] = s.dblock
        candidates[j] = candidates[i]


@njit(cache=True, nogil=True)
def _write_example(row, used, document, text, start, length, count, objective, tail, w, s):
    """Write the Example with the spans in hand to `row` from `used` on. Returns the new end."""
    if s.masked_lm:
        part_b = end = _write_in_place(row, used, text, start, length, count, w, s)
    else:
        part_b = _write_part_a(row, used, text, start, length, count, objective, w, s)
        end = _write_part_b(row, part_b, used, text, start, count, objective, tail, w, s)
        if objective == TOKEN and s.context_mask_ratio > 0:
            _mask_context(row, used, part_b, count, w, s, length + 1)
    for i in range(used, part_b):
        row[POSITION_IDS, i] = i - used
    if s.random_position:
        shift = below(w.stream, s.sequence_length + 1 - (part_b - used - 1))
        stop = part_b if s.sentinel_first >= 0 else end
        row[POSITION_IDS, used:stop] += shift
    row[DOC, used:end] = document
    row[GRP, used:end] = 0
    row[OBJECTIVE, used:end] = objective
    return end


@njit(cache=True, nogil=True)
def _fill_example(row, used, limit, text, start, length, sample, piece, w, s):
    """Draw and write the Example of one piece at row[used:limit]. Returns the new end.

    What is decided once (attempt 0) does not depend on whether the spans fit, so a crowded row does not
    change the mix of objectives.
    """
    open_stream(w.stream, s.key, sample, piece, 0)
    short = chance(w.stream, s.short_below)
    single = chance(w.stream, s.single_below)
    mode = next_word(w.stream)
    tail = chance(w.stream, s.tail_below)
    objective = TOKEN
    if not single and mode >= s.token_below:
        objective = SENTENCE if mode < s.token_or_sentence_below else DOCUMENT
    tail = tail and objective == DOCUMENT
    if short and length > SHORTEST_CROP:
        crop = SHORTEST_CROP + below(w.stream, length - SHORTEST_CROP + 1)
        start += below(w.stream, length - crop + 1)
        length = crop
    n = length + 1
    maskable = length - 1 if length > 0 and text[start + length - 1] == s.eos else length
    count = 0
    for attempt in range(1, ATTEMPTS + 2):
        open_stream(w.stream, s.key, sample, piece, attempt)
        if objective == DOCUMENT:
            count = _draw_document_span(w, n, length, maskable, tail, s)
        elif maskable == 0:
            count = 0
        elif objective == SENTENCE:
            count = _draw_sentences(w, text, start, n, maskable, attempt > ATTEMPTS, s)
        else:
            count = _draw_token_spans(w, n, maskable, single, attempt > ATTEMPTS, s)
        if count >= 0 and used + n + 2 * count <= limit:
            break
    for i in range(count):
        w.order[i] = i
    if s.shuffle_spans:
        shuffle(w.stream, w.order, count)
    return _write_example(row, used, piece, text, start, length, count, objective, tail, w, s)


@njit(cache=True, nogil=True)
def _fill_row(row, text, start, lengths, sample, w, s):
    """Write one sample, its pieces one after the other, then padding. Returns False if it can not fit."""
    needed = 0
    for length in lengths:
        needed += _least_length(length, s)
    row_length = row.shape[1]
    if needed > row_length or lengths.sum() > s.sequence_length:
        return False
    used = 0
    for piece in range(len(lengths)):
        length = lengths[piece]
        needed -= _least_length(length, s)  # what the pieces after this one need
        used = _fill_example(row, used, row_length - needed, text, start, length, sample, piece, w, s)
        start += length
    for plane in range(len(FIELDS)):
        row[plane, used:] = 0
    row[TOKENS, used:] = s.pad
    row[DOC, used:] = PADDING_DOC
    return True


def _cached_entry_points(digest: int):
    """The functions called from Python, compiled and cached under a digest of all sources they use."""

    @njit(cache=True, nogil=True)
    def fill_rows(batch, text, piece_lengths, pieces_per_sample, sample_indices, s):
        _ = digest  # part of the cache key
        w = _new_work(max(s.sequence_length + 1, batch.shape[2]))
        piece, start = 0, 0
        one = np.zeros(1, np.int64)
        for i in range(len(batch)):
            lengths = piece_lengths[piece : piece + pieces_per_sample[i]]
            total = lengths.sum()
            if s.cross_document_attention and len(lengths) > 0:
                one[0] = total
                filled = _fill_row(batch[i], text, start, one, sample_indices[i], w, s)
            else:
                filled = _fill_row(batch[i], text, start, lengths, sample_indices[i], w, s)
            if not filled:
                return i
            piece += pieces_per_sample[i]
            start += total
        return -1

    @njit(cache=True, nogil=True)
    def fill_one(row, text, sample, piece, s):
        _ = digest
        w = _new_work(row.shape[1])
        return _fill_example(row, 0, row.shape[1], text, 0, len(text), sample, piece, w, s)

    @njit(cache=True, nogil=True)
    def write_given(row, text, starts, ends, order, objective, tail, s):
        _ = digest
        w = _new_work(row.shape[1])
        count = len(starts)
        w.starts[:count] = starts
        w.ends[:count] = ends
        w.order[:count] = order
        open_stream(w.stream, s.key, 0, 0, 1)
        return _write_example(row, 0, 0, text, 0, len(text), count, objective, tail, w, s)

    return fill_rows, fill_one, write_given


_fill_rows, _fill_one, _write_given = _cached_entry_points(
    random_streams.source_digest(random_streams.__file__, base.__file__, str(Path(__file__)))
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
            f"blank_infilling.sentence_prob is {config.sentence_prob}, but no sentence ends are known for this "
            "vocabulary; set it to 0.",
        )
        self._settings = _make_settings(config, special, sentence_end, seed, sequence_length)

    def fill(
        self,
        batch: np.ndarray,
        tokens: np.ndarray,
        piece_lengths: np.ndarray,
        pieces_per_sample: np.ndarray,
        sample_indices: np.ndarray,
    ) -> None:
        """See `Objective.fill`. The `doc` plane numbers the pieces of a sample from 0."""
        failed = _fill_rows(batch, tokens, piece_lengths, pieces_per_sample, sample_indices, self._settings)
        if failed >= 0:
            first = int(pieces_per_sample[:failed].sum())
            lengths = piece_lengths[first : first + int(pieces_per_sample[failed])]
            raise DataError(
                f"sample {sample_indices[failed]} has {len(lengths)} pieces with {lengths.sum()} tokens, too many "
                f"for sequence_length {self.sequence_length} and rows of {batch.shape[2]}; a window must keep the "
                f"sum of its pieces and {DOCUMENT_OVERHEAD} more for each document within sequence_length."
            )

    def example(self, piece: np.ndarray, sample_index: int, piece_index: int = 0) -> Example:
        """The Example of one piece (int32 tokens without CLS) as `fill` draws it where space is ample."""
        text = np.ascontiguousarray(piece, np.int32)
        row = np.zeros((len(FIELDS), 3 * len(text) + 8), np.int32)
        end = _fill_one(row, text, sample_index, piece_index, self._settings)
        return Example.from_planes(row[:, :end])

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
        end = _write_given(row, text, *given, objective, tail, self._settings)
        return Example.from_planes(row[:, :end])


def _make_settings(
    config: BlankInfillingConfig,
    special: SpecialTokens,
    sentence_end: np.ndarray | None,
    seed: int,
    sequence_length: int,
) -> _Settings:
    longest = min(config.max_span_length, sequence_length - 1)
    return _Settings(
        key=np.uint64(seed),
        cls=special.cls,
        sop=special.sop,
        eop=special.eop,
        eos=special.eos,
        pad=special.pad,
        dblock=special.dblock,
        mask_ids=np.array([special.mask, special.smask, special.gmask], np.int64),
        sentence_end=np.zeros(0, np.bool_) if sentence_end is None else np.asarray(sentence_end, np.bool_),
        length_cumulative=_length_cumulative(config.mean_span_length, longest),
        token_below=chance_threshold(config.token_prob),
        token_or_sentence_below=chance_threshold(1.0 - config.document_prob),
        tail_below=chance_threshold(config.document_tail_prob),
        single_below=chance_threshold(config.single_span_prob),
        short_below=chance_threshold(config.short_seq_prob),
        block_mask_below=chance_threshold(config.block_mask_prob),
        masked_ratio=config.masked_ratio,
        sentence_ratio=config.sentence_ratio,
        document_min_ratio=config.document_min_ratio,
        document_max_ratio=config.document_max_ratio,
        context_mask_ratio=config.context_mask_ratio,
        document_min_context=config.document_min_context,
        context_mask_range=config.context_mask_range,
        longest_span=sequence_length - 1,
        longest_token_span=longest,
        sequence_length=sequence_length,
        sentinel_first=-1 if config.sentinel_first is None else config.sentinel_first,
        sentinel_count=config.sentinel_count,
        uniform_placement=config.placement == "uniform",
        random_position=config.random_position,
        masked_lm=config.masked_lm,
        shuffle_spans=config.shuffle_spans,
        cross_document_attention=config.cross_document_attention,
    )
