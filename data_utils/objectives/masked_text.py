"""Text with tokens masked in place: the common base of BERT, RoBERTa, SpanBERT, ALBERT, ERNIE and UniLM v1.

An Example is `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`. About 15 % of its tokens are chosen and predicted at their own
positions; in the input 80 % of these become [MASK], 10 % a random token, 10 % stay (`_mask_spans`, with masking.py).
The recipes differ in the mask unit (tokens, or whole words with `whole_words`), in the pairs of texts and, for UniLM,
in the attention. All of these are settings of one compiled function, `_fill_rows`.

Pairs are made by cut_pairs.py. For next-sentence prediction, the chunks that get a wrong second text exchange them; if
there is only one such chunk, its two texts are swapped. The label is the target of CLS, whose entry in the
`objective` field sends it to a two-class head.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
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
from data_utils.common.random_streams import chance, chance_threshold, next_word, seed_rng
from data_utils.common.settings import fraction
from data_utils.objectives.base import RowSizes
from data_utils.objectives.compiled import (
    Chunks,
    begin_row,
    compiled,
    copy_range,
    count_up,
    entry_point,
    inlined,
    length_in_row,
    mark_document,
    maskable_length,
    predict,
    set_range,
    with_scratch,
)
from data_utils.objectives.cut_pairs import PairedRows, exchange_second_texts, split_point
from data_utils.objectives.masking import (
    check_corruption,
    corrupted_token,
    corruption_thresholds,
    draw_corruption,
    draw_spans,
    masked_target,
)


class LanguageModel(IntEnum):
    """UniLM's types; the others of this family are bidirectional. Losses are numbered in this order."""

    BIDIRECTIONAL = 0
    SEQ2SEQ = 1
    LEFT_TO_RIGHT = 2
    RIGHT_TO_LEFT = 3


class Pairing(IntEnum):
    """What the two texts of an Example are, and so the label of CLS."""

    NO_PAIR = 0
    NEXT_SENTENCE = 1
    SENTENCE_ORDER = 2
    PAIR_ONLY = 3  # two texts without a label
    DISTANCE = 4
    FROM_CORPUS = 5


class Split(IntEnum):
    """Where a chunk is cut into two texts."""

    ANYWHERE = 0
    AT_UNITS = 1  # before a mask unit
    AT_MARKS = 2  # where `unit_start` is above 1


_LABELS = {
    Pairing.NEXT_SENTENCE: NEXT_SENTENCE_LOSS,
    Pairing.SENTENCE_ORDER: SENTENCE_ORDER_LOSS,
    Pairing.DISTANCE: Loss("sentence_distance", 33),
}
_TRIES = 16  # draws of a second split point that differs from the first


@compiled
def _sample_counter(text, sample, settings):
    """The `sample` of `seed_rng`: the sample number; with `static_copies`, a hash of the text and a copy number.

    BERT masks each text in `static_copies` fixed ways: a later sample with the same text and copy draws the same masks.
    """
    if settings.static_copies == 0:
        return sample
    digest = np.uint64(0x811C9DC5)  # FNV-1a of 32 bits, token by token
    for i in range(len(text)):
        digest = ((digest ^ np.uint64(text[i])) * np.uint64(0x01000193)) & np.uint64(0xFFFFFFFF)
    return np.int64(digest) + ((sample % settings.static_copies) << 32)


@compiled
def _next_unit_start(split, unit_start):
    """The next position where a mask unit begins, else the last one, else the end: the text is not cut then."""
    end = split
    while end < len(unit_start) and not unit_start[end]:
        end += 1
    if end < len(unit_start):
        return end
    while split > 0 and not unit_start[split]:
        split -= 1
    return split if split > 0 else len(unit_start)


@compiled
def _marked_split(unit_start):
    """The marked position (`unit_start` above 1), else the end: the text is not cut then."""
    for i in range(1, len(unit_start)):
        if unit_start[i] > 1:
            return i
    return len(unit_start)


@compiled
def _draw_language_model(rng, settings):
    word = next_word(rng)
    if word < settings.bidirectional_below:
        return LanguageModel.BIDIRECTIONAL
    if word < settings.seq2seq_below:
        return LanguageModel.SEQ2SEQ
    return LanguageModel.LEFT_TO_RIGHT if word < settings.left_to_right_below else LanguageModel.RIGHT_TO_LEFT


@compiled
def _draw_split(pair, text, unit_start, tables, settings):
    """Where the first text ends; len(text): there is no second."""
    if settings.splits == Split.AT_MARKS:
        return _marked_split(unit_start)
    if settings.pairing == Pairing.FROM_CORPUS:
        return min(pair.length_of_a, len(text))
    if settings.pairing == Pairing.NO_PAIR or len(text) <= 1:
        return len(text)
    split = split_point(tables.rng, tables.scratch.positions, text, tables.sentence_end)
    return _next_unit_start(split, unit_start) if settings.splits == Split.AT_UNITS else split


@inlined
def _plan_pairs(pairs, chunks, first_chunk, count, start, sample, tables, settings):
    """Type of language model and texts A, B of every chunk of a sample, with wrong second texts exchanged.

    Args: first_chunk, count: of the sample. start: where its text begins.
    """
    rng, pairing = tables.rng, settings.pairing
    for number in range(count):
        end = start + chunks.lengths[first_chunk + number]
        end = start + length_in_row(chunks.tokens[start:end], settings)
        text, unit_start = chunks.tokens[start:end], chunks.unit_start[start:end]
        pair = pairs[number]
        if len(text) > 0:
            counter = _sample_counter(text, sample, settings)
            seed_rng(rng, settings.key, counter, chunks.first_document + number, 0)
        # One number for each chunk whether it is needed or not: a setting does not change the numbers after it.
        pair.language_model = _draw_language_model(rng, settings)
        split = _draw_split(pair, text, unit_start, tables, settings)
        pair.a_start, pair.a_end, pair.b_start, pair.b_end = start, start + split, start + split, end
        # Only bidirectional Examples have a label: CLS of the others does not see both texts.
        has_label = settings.label_objective > 0 and pair.language_model == LanguageModel.BIDIRECTIONAL
        can_be_wrong = has_label and split < len(text)
        pair.is_wrong = can_be_wrong and chance(rng, settings.wrong_below)
        if pair.is_wrong and pairing == Pairing.SENTENCE_ORDER:
            _swap_texts(pair)
        if (
            pairing == Pairing.DISTANCE
            and not pair.is_wrong
            and split < len(text)
            and chance(rng, settings.far_below)
        ):
            for _ in range(_TRIES):
                other = split_point(rng, tables.scratch.positions, text, tables.sentence_end)
                if other != split:
                    pair.a_end, pair.b_start = start + min(split, other), start + max(split, other)
                    break
        start += chunks.lengths[first_chunk + number]
    # A wrong second text comes from the same window, so that a sample stays a function of its own text. Two
    # chunks are needed for an exchange; ALBERT's swap needs one and is done above.
    if pairing == Pairing.NEXT_SENTENCE or pairing == Pairing.DISTANCE:
        only = exchange_second_texts(pairs, count)
        if only >= 0 and pairing == Pairing.NEXT_SENTENCE:
            _swap_texts(pairs[only])
        elif only >= 0:
            # Swapped texts would be a fourth class here, which the distance task does not have: the chunk stays right.
            pairs[only].is_wrong = False


@compiled
def _swap_texts(pair):
    pair.a_start, pair.b_start = pair.b_start, pair.a_start
    pair.a_end, pair.b_end = pair.b_end, pair.a_end


@compiled
def _write_text(row, offset, at, text, unit_start, first_position, scratch, settings):
    """Text and [SEP] at row[at:], and for `draw_spans` what may be masked. Returns the end.

    Args: first_position: of the text in that of the batch.
    """
    length, maskable, first = len(text), maskable_length(text, settings), at - offset
    copy_range(row[TOKENS], at, at + length, text, 0)
    if settings.stores_text_positions:  # from 1
        count_up(row[BLOCK_POSITION_IDS], at, at + length, first_position + 1)
    copy_range(scratch.unit_start, first, first + length, unit_start, 0)
    set_range(scratch.free, first, first + maskable, 1)
    # The first token begins a unit even where the cut is inside a word. `|=` keeps the mark or length above bit 0.
    scratch.unit_start[first] |= 1
    # Separators within a text are neither masked nor joined to a unit, so that no span crosses two documents.
    for i in range(maskable if settings.joins_documents else 0):
        if text[i] == settings.sep or text[i] == settings.eos:
            scratch.free[first + i] = 0
            scratch.unit_start[first + i] = scratch.unit_start[first + i + 1] = 1
    for i in range(maskable, length + 1):  # eos and [SEP]
        scratch.free[first + i] = 0
        scratch.unit_start[first + i] = 1
    row[TOKENS, at + length] = settings.sep
    return at + length + 1


@compiled
def _write_structure(row, offset, middle, end, language_model):
    """Positions, order and segments of `[CLS] A [SEP]` at row[offset:middle] and `B [SEP]` at [middle:end]."""
    count_up(row[POSITION_IDS], offset, end, 0)
    segment_a, segment_b = 0, 1
    if language_model == LanguageModel.SEQ2SEQ:
        # Segment ids tell UniLM's model which of the four language models the Example is for, as in its code.
        segment_a, segment_b = 4, 5
        count_up(row[ORD], middle, end, 1)
    elif language_model == LanguageModel.LEFT_TO_RIGHT:
        segment_a, segment_b = 2, 2
        count_up(row[ORD], offset, end, 0)
    elif language_model == LanguageModel.RIGHT_TO_LEFT:
        segment_a, segment_b = 3, 3
        for i in range(offset, end):
            # A token sees those with at most its order, so falling orders read from right to left.
            row[ORD, i] = end - 1 - i
    set_range(row[SEGMENT_IDS], offset, middle, segment_a)
    set_range(row[SEGMENT_IDS], middle, end, segment_b)


@inlined
def _mask_spans(row, offset, size, tables, settings):
    """Choose spans, predict their tokens, and corrupt the input 80/10/10.

    The corruption (MASK, RANDOM_TOKEN, KEEP) is drawn for each token, as in BERT, or once for a span, as in SpanBERT.
    """
    rng, scratch = tables.rng, tables.scratch
    target = masked_target(settings.masked_ratio, size)
    count = draw_spans(tables, size, target, settings.gap, settings.listed_below)
    for span in range(count):
        corruption = draw_corruption(rng, settings)
        for i in range(offset + scratch.starts[span], offset + scratch.ends[span]):
            if not settings.one_corruption_per_span and i > offset + scratch.starts[span]:
                corruption = draw_corruption(rng, settings)
            # The target is read before the input is overwritten.
            token = np.int64(row[TOKENS, i])
            predict(row, i, token)
            row[TOKENS, i] = corrupted_token(rng, token, corruption, settings)


@inlined
def _fill_pair(row, offset, document, chunks, pair, tables, settings):
    """Write the Example of one pair at `offset`. Returns its end."""
    tokens, unit_start, scratch = chunks.tokens, chunks.unit_start, tables.scratch
    row[TOKENS, offset] = settings.cls
    scratch.free[0] = 0
    scratch.unit_start[0] = 1
    first, last = pair.a_start, pair.a_end
    middle = end = _write_text(
        row, offset, offset + 1, tokens[first:last], unit_start[first:last], first, scratch, settings
    )
    first, last = pair.b_start, pair.b_end
    if first < last:
        end = _write_text(
            row, offset, middle, tokens[first:last], unit_start[first:last], first, scratch, settings
        )
    language_model = pair.language_model
    if language_model == LanguageModel.SEQ2SEQ and end == middle:
        language_model = np.int64(LanguageModel.BIDIRECTIONAL)  # a chunk of one token has no second text
    _write_structure(row, offset, middle, end, language_model)
    mark_document(row, offset, end, document, settings.loss + language_model)
    _mask_spans(row, offset, end - offset, tables, settings)
    if settings.label_objective > 0 and language_model == LanguageModel.BIDIRECTIONAL and end > middle:
        label = 1 if pair.is_wrong else 0
        if settings.pairing == Pairing.DISTANCE:
            # 0: B follows A. 1: from the same document, with text between. 2: from another document.
            label = 2 if pair.is_wrong else 1 if pair.b_start > pair.a_end else 0
        predict(row, offset, label)
        row[OBJECTIVE, offset] = settings.label_objective
    return end


@entry_point
def _fill_rows(batch, chunks, tables, pairs, record):
    settings, chunks, tables = record[0], Chunks(*chunks), with_scratch(tables)
    first_chunk, start = 0, 0  # of the sample, and where its text begins
    for i in range(len(batch)):
        row, offset = batch[i], 0
        begin_row(row, settings.pad)
        count, sample = chunks.counts[i], chunks.samples[i]
        # Pairs from a corpus are one for each chunk of the batch; others are scratch space that every sample
        # uses again.
        sample_pairs = pairs[first_chunk if settings.pairing == Pairing.FROM_CORPUS else 0 :]
        _plan_pairs(sample_pairs, chunks, first_chunk, count, start, sample, tables, settings)
        for number in range(count):
            document, end = chunks.first_document + number, start + chunks.lengths[first_chunk + number]
            text = chunks.tokens[start : start + length_in_row(chunks.tokens[start:end], settings)]
            if len(text) > 0:
                counter = _sample_counter(text, sample, settings)
                seed_rng(tables.rng, settings.key, counter, document, 1)  # 0: the pairs, 1: the masks
                offset = _fill_pair(row, offset, document, chunks, sample_pairs[number], tables, settings)
            start = end
        first_chunk += count


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedTextConfig(RowSizes):
    """Common settings and sizes of the objectives of this family; the class attributes are what a recipe may change."""

    masked_ratio: float = fraction(0.15, "Fraction of the tokens, CLS and SEP included, that is predicted.")
    mask_token_prob: float = fraction(0.8, "Probability that a selected token becomes [MASK].")
    random_token_prob: float = fraction(
        0.1, "Probability that a selected token becomes a random token; otherwise it is kept."
    )

    section_key: ClassVar[str]
    needed_roles = ("cls", "sep", "mask")
    gap = False  # keep a token between masked spans
    one_corruption_per_span = False  # 80/10/10 is drawn once per span (SpanBERT), not per token
    whole_words = False  # mask units are whole words, see `mask_units`
    # Probability of a wrong second text; of a second text that does not follow the first one directly.
    wrong_prob, far_prob = 0.5, 0.0
    static_copies = 0  # number of fixed maskings of each text; 0: each sample has its own
    listed_prob = 0.0  # probability of a listed span, where one fits, instead of a span of drawn length
    splits = Split.ANYWHERE
    joins_documents = False  # whether an Example may have several, with [SEP] between them

    def __post_init__(self) -> None:
        check_corruption(self.section_key, self.mask_token_prob, self.random_token_prob)

    @property
    def overhead(self) -> int:
        """CLS and two SEP."""
        return 3

    @property
    def loss_share(self) -> float:
        return self.masked_ratio

    @property
    def mask_units(self) -> str | None:
        """Whole words, or single tokens."""
        return "words" if self.whole_words else None

    @property
    def pairing(self) -> Pairing:
        return Pairing.NO_PAIR

    @property
    def language_model_probs(self) -> tuple[float, float, float, float]:
        """Probabilities of the types of LanguageModel, in its order."""
        return 1.0, 0.0, 0.0, 0.0

    @property
    def has_sentence_label(self) -> bool:
        return self.pairing in _LABELS


class MaskedText(PairedRows):
    """An objective of this family. `losses` begins with one loss for each type of language model, numbered in order."""

    entry = staticmethod(_fill_rows)
    ends_with_sep = True
    stores_text_positions = False  # whether block_position_ids counts the tokens of the text, from 1

    def values(self) -> dict[str, Any]:
        """The same names for the whole family, so that all share one compiled function."""
        config = self.config
        thresholds = [chance_threshold(min(1.0, sum(config.language_model_probs[: i + 1]))) for i in range(3)]
        label = _LABELS.get(config.pairing)
        return {
            **corruption_thresholds(config.mask_token_prob, config.random_token_prob),
            "masked_ratio": float(config.masked_ratio),
            "label_objective": 0 if label is None else label.number,
            "pairing": int(config.pairing),
            "wrong_below": chance_threshold(config.wrong_prob),
            # Conditional on the pair not being wrong, which is drawn first.
            "far_below": chance_threshold(min(1.0, config.far_prob / max(1e-9, 1.0 - config.wrong_prob))),
            "bidirectional_below": thresholds[0],
            "seq2seq_below": thresholds[1],
            "left_to_right_below": thresholds[2],
            "gap": bool(config.gap),
            "one_corruption_per_span": bool(config.one_corruption_per_span),
            "static_copies": int(config.static_copies),
            "listed_below": chance_threshold(config.listed_prob),
            "splits": int(config.splits),
            "joins_documents": bool(config.joins_documents),
            "stores_text_positions": self.stores_text_positions,
        }


class NumberedText(MaskedText):
    """Masked text with one number for each token: block_position_ids is the number + 1, or 0 for special tokens."""

    stores_text_positions = True

    def _fill(self, batch: np.ndarray, chunks: Chunks) -> None:
        text, numbers = chunks.tokens, np.full_like(chunks.tokens, -1)
        if text.ndim == 2:
            text, numbers = text
        super()._fill(batch, chunks._replace(tokens=text))
        text_positions = batch[:, BLOCK_POSITION_IDS]
        # The compiled code wrote positions in the text (0: none), since it may exchange texts of pairs; here
        # they become the numbers.
        text_positions[:] = np.r_[np.int32(0), numbers + 1][text_positions]
