"""Text with tokens masked in place: the machinery of BERT, RoBERTa, SpanBERT, ALBERT, ERNIE and UniLM v1.

An Example is `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]` with some tokens masked, replaced or kept, each
predicted at its own position. The recipes differ in what is masked together, in the pairs of texts and, for
UniLM, in who sees whom. All of these are settings of one compiled function.

Pairs are made by pairs.py. For next-sentence prediction, the chunks that get a wrong second half exchange them; if
there is only one such chunk, its own halves change places. The label is the target of CLS, whose entry in the
`objective` field sends it to a two-class head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from data_utils.common.batch_fields import (
    BLOCK_POSITION_IDS,
    OBJECTIVE,
    ORD,
    POSITION_IDS,
    SEGMENT_IDS,
    TOKENS,
)
from data_utils.common.losses import NEXT_SENTENCE_LOSS, SENTENCE_ORDER_LOSS, Loss
from data_utils.common.random_streams import chance, chance_threshold, next_word, open_stream
from data_utils.common.settings import fraction
from data_utils.objectives.masking import draw_spans, draw_treatment, masked_target, treated
from data_utils.objectives.pairs import (
    A_END,
    B_END,
    OWN,
    WRONG,
    A,
    B,
    PairedRows,
    exchange_seconds,
    split_point,
)
from data_utils.objectives.row_loops import (
    ENDS,
    FREE,
    STARTS,
    UNIT,
    begin_row,
    compiled,
    copy_range,
    count_up,
    entry_point,
    inlined,
    kept_length,
    mark_document,
    maskable_length,
    predict,
    set_range,
)
from data_utils.objectives.rows import RowSizes, check_treatment, treatment_thresholds

BIDIRECTIONAL, SEQ2SEQ, LEFT_TO_RIGHT, RIGHT_TO_LEFT = range(4)
NO_PAIR, NEXT_SENTENCE, SENTENCE_ORDER, PAIR_ONLY, DISTANCE, GIVEN = range(6)
ANYWHERE, AT_UNITS, AT_MARKS = range(3)  # where texts are cut in two; a mark is 2 in `unit_start`
_LABELS = {
    NEXT_SENTENCE: NEXT_SENTENCE_LOSS,
    SENTENCE_ORDER: SENTENCE_ORDER_LOSS,
    DISTANCE: Loss("sentence_distance", 33),
}
_TRIES = 16  # of a second place to cut at, other than the first

KIND = OWN  # column of a pair: the kind of language model


@compiled
def _address(text, start, length, sample, s):
    """The sample number; for static masks one of `static_copies` numbers that depend on the text alone."""
    if s.static_copies == 0:
        return sample
    digest = np.uint64(0x811C9DC5)  # FNV-1a of 32 bits, token by token
    for i in range(start, start + length):
        digest = ((digest ^ np.uint64(text[i])) * np.uint64(0x01000193)) & np.uint64(0xFFFFFFFF)
    return np.int64(digest) + ((sample % s.static_copies) << 32)


@compiled
def _at_units(split, unit_start, start, length):
    """The next place at which a unit begins, else the last one, else the end of the text: then it is not cut."""
    end = split
    while end < length and not unit_start[start + end]:
        end += 1
    if end < length:
        return end
    while split > 0 and not unit_start[start + split]:
        split -= 1
    return split if split > 0 else length


@compiled
def _at_mark(unit_start, start, length):
    """The place of the mark, else the end of the text."""
    for i in range(1, length):
        if unit_start[start + i] > 1:
            return i
    return length


@inlined
def _plan_pairs(pairs, text, unit_start, lengths, start, sample, first_chunk, stream, w, sentence_end, s):
    """Kind and halves of every chunk of a sample, wrong second halves exchanged."""
    for number in range(len(lengths)):
        length = kept_length(text, start, lengths[number], s)
        pair = pairs[number]
        if length > 0:
            open_stream(stream, s.key, _address(text, start, length, sample, s), first_chunk + number, 0)
        draw = next_word(stream)
        kind = BIDIRECTIONAL
        if draw >= s.bidirectional_below:
            kind = SEQ2SEQ
            if draw >= s.seq2seq_below:
                kind = LEFT_TO_RIGHT if draw < s.left_to_right_below else RIGHT_TO_LEFT
        split = length
        if s.splits == AT_MARKS:
            split = _at_mark(unit_start, start, length)
        elif s.pairing == GIVEN:
            split = min(pair[OWN], length)
        elif s.pairing != NO_PAIR and length > 1:
            split = split_point(stream, w, text, start, length, sentence_end)
            if s.splits == AT_UNITS:
                split = _at_units(split, unit_start, start, length)
        pair[KIND] = kind
        pair[A], pair[A_END] = start, start + split
        pair[B], pair[B_END] = start + split, start + length
        labelled = s.pairing == NEXT_SENTENCE or s.pairing == SENTENCE_ORDER or s.pairing == DISTANCE
        wrong = labelled and kind == BIDIRECTIONAL and split < length and chance(stream, s.wrong_below)
        pair[WRONG] = wrong
        if wrong and s.pairing == SENTENCE_ORDER:
            _swap_halves(pair)
        if s.pairing == DISTANCE and not wrong and split < length and chance(stream, s.far_below):
            for _ in range(_TRIES):
                other = split_point(stream, w, text, start, length, sentence_end)
                if other != split:
                    pair[A_END], pair[B] = start + min(split, other), start + max(split, other)
                    break
        start += lengths[number]
    if s.pairing == NEXT_SENTENCE or s.pairing == DISTANCE:
        only = exchange_seconds(pairs, len(lengths))
        if only >= 0 and s.pairing == NEXT_SENTENCE:
            _swap_halves(pairs[only])
        elif only >= 0:
            pairs[only, WRONG] = 0


@compiled
def _swap_halves(pair):
    pair[A], pair[A_END], pair[B], pair[B_END] = pair[B], pair[B_END], pair[A], pair[A_END]


@compiled
def _copy_text(row, w, used, at, text, unit_start, begin, end, s):
    """Text and [SEP] at row[at:], and for `draw_spans` what may be masked. Returns the end."""
    length = end - begin
    maskable = maskable_length(text, begin, length, s)
    place = at - used
    copy_range(row, TOKENS, at, at + length, text, begin)
    if s.keeps_places:  # in the text, from 1
        count_up(row, BLOCK_POSITION_IDS, at, at + length, begin + 1)
    copy_range(w, UNIT, place, place + length, unit_start, begin)
    set_range(w, FREE, place, place + maskable, 1)
    w[UNIT, place] |= 1
    for i in range(maskable if s.joins_documents else 0):
        if text[begin + i] == s.sep or text[begin + i] == s.eos:
            w[FREE, place + i] = 0
            w[UNIT, place + i] = w[UNIT, place + i + 1] = 1
    for i in range(maskable, length + 1):  # eos and [SEP]
        w[FREE, place + i] = 0
        w[UNIT, place + i] = 1
    row[TOKENS, at + length] = s.sep
    return at + length + 1


@compiled
def _write_structure(row, used, middle, end, kind, s):
    """Positions, order and segments of `[CLS] A [SEP]` at row[used:middle] and `B [SEP]` at [middle:end]."""
    count_up(row, POSITION_IDS, used, end, 0)
    segment_a, segment_b = 0, 1
    if kind == SEQ2SEQ:
        segment_a, segment_b = 4, 5
        count_up(row, ORD, middle, end, 1)
    elif kind == LEFT_TO_RIGHT:
        segment_a, segment_b = 2, 2
        count_up(row, ORD, used, end, 0)
    elif kind == RIGHT_TO_LEFT:
        segment_a, segment_b = 3, 3
        for i in range(used, end):
            row[ORD, i] = end - 1 - i
    set_range(row, SEGMENT_IDS, used, middle, segment_a)
    set_range(row, SEGMENT_IDS, middle, end, segment_b)


@inlined
def _mask_spans(row, used, size, stream, w, cumulative, s):
    """Choose spans and treat their tokens, each by itself or all of a span alike."""
    target = masked_target(s.masked_ratio, size)
    count = draw_spans(stream, w, size, target, s.gap, cumulative, s.listed_below)
    for span in range(count):
        treatment = draw_treatment(stream, s)
        for i in range(used + w[STARTS, span], used + w[ENDS, span]):
            if not s.treat_spans_alike and i > used + w[STARTS, span]:
                treatment = draw_treatment(stream, s)
            token = np.int64(row[TOKENS, i])
            predict(row, i, token)
            row[TOKENS, i] = treated(stream, token, treatment, s)


@inlined
def _fill_pair(row, used, document, text, unit_start, pair, stream, w, cumulative, s):
    """Write the Example of one pair at `used`. Returns its end."""
    row[TOKENS, used] = s.cls
    w[FREE, 0] = 0
    w[UNIT, 0] = 1
    middle = _copy_text(row, w, used, used + 1, text, unit_start, pair[A], pair[A_END], s)
    end = middle
    if pair[B] < pair[B_END]:
        end = _copy_text(row, w, used, middle, text, unit_start, pair[B], pair[B_END], s)
    kind = pair[KIND]
    if kind == SEQ2SEQ and end == middle:
        kind = BIDIRECTIONAL  # a chunk of one token has no second half
    _write_structure(row, used, middle, end, kind, s)
    mark_document(row, used, end, document, s.loss + kind)
    _mask_spans(row, used, end - used, stream, w, cumulative, s)
    if s.label_objective > 0 and kind == BIDIRECTIONAL and end > middle:
        label = pair[WRONG]
        if s.pairing == DISTANCE:
            label = 2 if label else 1 if pair[B] > pair[A_END] else 0
        predict(row, used, label)
        row[OBJECTIVE, used] = s.label_objective
    return end


@entry_point
def _fill_rows(batch, chunks, tables, pairs, sentence_end, settings):
    text, unit_start, chunk_lengths, chunks_per_sample, sample_indices, first_chunk = chunks
    cumulative, stream, w = tables
    s = settings[0]
    chunk, start = 0, 0
    for i in range(len(batch)):
        row, used = batch[i], 0
        begin_row(row, s.pad)
        lengths = chunk_lengths[chunk : chunk + chunks_per_sample[i]]
        sample = sample_indices[i]
        own = pairs[chunk if s.pairing == GIVEN else 0 :]
        _plan_pairs(own, text, unit_start, lengths, start, sample, first_chunk, stream, w, sentence_end, s)
        for number in range(len(lengths)):
            length = kept_length(text, start, lengths[number], s)
            if length > 0:
                address = _address(text, start, length, sample, s)
                open_stream(stream, s.key, address, first_chunk + number, 1)
                pair = own[number]
                used = _fill_pair(
                    row, used, first_chunk + number, text, unit_start, pair, stream, w, cumulative, s
                )
            start += lengths[number]
        chunk += len(lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedTextConfig(RowSizes):
    """Common settings and sizes of the objectives of this family; the class attributes are what a recipe may change."""

    masked_ratio: float = fraction(0.15, "fraction of the tokens (including CLS and SEP) that is predicted")
    mask_token_prob: float = fraction(0.8, "probability that a selected token becomes [MASK]")
    random_token_prob: float = fraction(
        0.1, "probability that a selected token becomes a random one; the remaining ones are kept"
    )

    section_key: ClassVar[str]
    needed_roles = ("cls", "sep", "mask")
    gap = False  # keep a token between masked spans
    treat_spans_alike = False  # draw mask, random token or kept token once per span, not per token
    whole_words = False  # units are words
    wrong_prob, far_prob = 0.5, 0.0  # of a wrong second text, and of one with text left out before it
    static_copies = 0  # number of fixed maskings of each text; 0: each sample has its own
    listed_prob = 0.0  # of a listed span, where one fits, instead of one drawn in units
    splits = ANYWHERE
    joins_documents = False  # whether an Example may have several, with [SEP] between them

    def __post_init__(self) -> None:
        check_treatment(self.section_key, self.mask_token_prob, self.random_token_prob)

    @property
    def overhead(self) -> int:
        """CLS and two SEP."""
        return 3

    @property
    def loss_share(self) -> float:
        return self.masked_ratio

    @property
    def units(self) -> str | None:
        return "words" if self.whole_words else None

    @property
    def pairing(self) -> int:
        """NO_PAIR, NEXT_SENTENCE, SENTENCE_ORDER, PAIR_ONLY (two texts without a label), or GIVEN (by the corpus)."""
        return NO_PAIR

    @property
    def kind_probs(self) -> tuple[float, float, float, float]:
        """Probabilities of the four kinds of language model."""
        return 1.0, 0.0, 0.0, 0.0

    @property
    def has_sentence_label(self) -> bool:
        return self.pairing in _LABELS


class MaskedText(PairedRows):
    """An objective of this family. Its first losses are those of its kinds of model, with consecutive numbers."""

    entry = staticmethod(_fill_rows)
    ends_with_sep = True
    keeps_places = False  # whether block_position_ids is the place of each token in the text

    def values(self) -> dict[str, Any]:
        """The same names for the whole family, so that all share one compiled function."""
        config = self.config
        upto = [min(1.0, sum(config.kind_probs[: i + 1])) for i in range(3)]
        label = _LABELS.get(config.pairing)
        return {
            **treatment_thresholds(config.mask_token_prob, config.random_token_prob),
            "masked_ratio": float(config.masked_ratio),
            "label_objective": 0 if label is None else label.number,
            "pairing": config.pairing,
            "wrong_below": chance_threshold(config.wrong_prob),
            "far_below": chance_threshold(min(1.0, config.far_prob / max(1e-9, 1.0 - config.wrong_prob))),
            "bidirectional_below": chance_threshold(upto[0]),
            "seq2seq_below": chance_threshold(upto[1]),
            "left_to_right_below": chance_threshold(upto[2]),
            "gap": bool(config.gap),
            "treat_spans_alike": bool(config.treat_spans_alike),
            "static_copies": int(config.static_copies),
            "listed_below": chance_threshold(config.listed_prob),
            "splits": config.splits,
            "joins_documents": bool(config.joins_documents),
            "keeps_places": self.keeps_places,
        }


class NumberedText(MaskedText):
    """Text whose tokens have numbers beside them: block_position_ids is that of a text's token plus 1, else 0."""

    keeps_places = True

    def _fill(self, batch, tokens, chunk_lengths, chunks_per_sample, sample_indices, first_chunk) -> None:
        text, numbers = tokens if tokens.ndim == 2 else (tokens, np.full_like(tokens, -1))
        super()._fill(batch, text, chunk_lengths, chunks_per_sample, sample_indices, first_chunk)
        places = batch[:, BLOCK_POSITION_IDS]
        places[:] = np.r_[np.int32(0), numbers + 1][places]
