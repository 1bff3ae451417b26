"""Text with tokens masked in place: the common base of BERT, RoBERTa, SpanBERT, ALBERT, ERNIE and UniLM v1.

An Example is `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`. About 15 % of its tokens are chosen and predicted at their own
positions; in the input 80 % of these become [MASK], 10 % a random token, 10 % stay (`_mask_spans`, with masking.py).
The recipes differ in the mask unit (tokens, or whole words with `whole_words`), in the pairs of texts and, for UniLM,
in the attention. All of these are settings of one compiled function, `_fill_rows`.

Pairs are made by pairs.py. For next-sentence prediction, the chunks that get a wrong second half exchange them; if
there is only one such chunk, its two halves are swapped. The label is the target of CLS, whose entry in the
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
from data_utils.common.random_streams import chance, chance_threshold, next_word, seed_rng
from data_utils.common.settings import fraction
from data_utils.objectives.base import RowSizes
from data_utils.objectives.compiled import (
    ENDS,
    FREE,
    STARTS,
    UNIT_START,
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
)
from data_utils.objectives.masking import (
    check_corruption,
    corrupted_token,
    corruption_thresholds,
    draw_corruption,
    draw_spans,
    masked_target,
)
from data_utils.objectives.pairs import (
    A_END,
    B_END,
    CUSTOM,
    WRONG,
    A,
    B,
    PairedRows,
    exchange_second_texts,
    split_point,
)

BIDIRECTIONAL, SEQ2SEQ, LEFT_TO_RIGHT, RIGHT_TO_LEFT = range(4)  # types of language model
NO_PAIR, NEXT_SENTENCE, SENTENCE_ORDER, PAIR_ONLY, DISTANCE, FROM_CORPUS = range(6)
# Where texts are cut in two; AT_UNITS: before a mask unit; AT_MARKS: where `unit_start` is above 1.
ANYWHERE, AT_UNITS, AT_MARKS = range(3)
_LABELS = {
    NEXT_SENTENCE: NEXT_SENTENCE_LOSS,
    SENTENCE_ORDER: SENTENCE_ORDER_LOSS,
    DISTANCE: Loss("sentence_distance", 33),
}
_TRIES = 16  # draws of a second split point that differs from the first

# Columns of a pair: with FROM_CORPUS the length of A, before the chunk is planned; then the type of language model.
LENGTH_OF_A = LM_TYPE = CUSTOM


@compiled
def _sample_counter(text, start, length, sample, settings):
    """The `sample` of `seed_rng`: the sample number; with `static_copies`, a hash of the text and a copy number.

    BERT masks each text in `static_copies` fixed ways: a later sample with the same text and copy draws the same masks.
    """
    if settings.static_copies == 0:
        return sample
    digest = np.uint64(0x811C9DC5)  # FNV-1a of 32 bits, token by token
    for i in range(start, start + length):
        digest = ((digest ^ np.uint64(text[i])) * np.uint64(0x01000193)) & np.uint64(0xFFFFFFFF)
    return np.int64(digest) + ((sample % settings.static_copies) << 32)


@compiled
def _next_unit_start(split, unit_start, start, length):
    """The next position where a mask unit begins, else the last one, else `length`: the text is not cut then."""
    end = split
    while end < length and not unit_start[start + end]:
        end += 1
    if end < length:
        return end
    while split > 0 and not unit_start[start + split]:
        split -= 1
    return split if split > 0 else length


@compiled
def _marked_split(unit_start, start, length):
    """The marked position (`unit_start` above 1), else `length`: the text is not cut then."""
    for i in range(1, length):
        if unit_start[start + i] > 1:
            return i
    return length


@inlined
def _plan_pairs(
    pairs, text, unit_start, lengths, start, sample, first_chunk, rng, scratch, sentence_end, settings
):
    """Type of language model and halves A, B of every chunk of a sample, with wrong second halves exchanged."""
    for number in range(len(lengths)):
        length = length_in_row(text, start, lengths[number], settings)
        pair = pairs[number]
        if length > 0:
            counter = _sample_counter(text, start, length, sample, settings)
            seed_rng(rng, settings.key, counter, first_chunk + number, 0)
        # One number for each chunk whether it is needed or not: a setting does not change the numbers after it.
        word = next_word(rng)
        lm_type = BIDIRECTIONAL
        if word >= settings.bidirectional_below:
            lm_type = SEQ2SEQ
            if word >= settings.seq2seq_below:
                lm_type = LEFT_TO_RIGHT if word < settings.left_to_right_below else RIGHT_TO_LEFT
        split = length
        if settings.splits == AT_MARKS:
            split = _marked_split(unit_start, start, length)
        elif settings.pairing == FROM_CORPUS:
            split = min(pair[LENGTH_OF_A], length)
        elif settings.pairing != NO_PAIR and length > 1:
            split = split_point(rng, scratch, text, start, length, sentence_end)
            if settings.splits == AT_UNITS:
                split = _next_unit_start(split, unit_start, start, length)
        pair[LM_TYPE] = lm_type
        pair[A], pair[A_END] = start, start + split
        pair[B], pair[B_END] = start + split, start + length
        # Only bidirectional Examples have a label: CLS of the others does not see both texts.
        pairing = settings.pairing
        has_label = pairing in (NEXT_SENTENCE, SENTENCE_ORDER, DISTANCE)
        is_wrong = (
            has_label and lm_type == BIDIRECTIONAL and split < length and chance(rng, settings.wrong_below)
        )
        pair[WRONG] = is_wrong
        if is_wrong and pairing == SENTENCE_ORDER:
            _swap_halves(pair)
        if pairing == DISTANCE and not is_wrong and split < length and chance(rng, settings.far_below):
            for _ in range(_TRIES):
                other = split_point(rng, scratch, text, start, length, sentence_end)
                if other != split:
                    pair[A_END], pair[B] = start + min(split, other), start + max(split, other)
                    break
        start += lengths[number]
    # A wrong second text comes from the same window, so that a sample stays a function of its own text. Two
    # chunks are needed for an exchange; ALBERT's swap needs one and is done above.
    if settings.pairing == NEXT_SENTENCE or settings.pairing == DISTANCE:
        only = exchange_second_texts(pairs, len(lengths))
        if only >= 0 and settings.pairing == NEXT_SENTENCE:
            _swap_halves(pairs[only])
        elif only >= 0:
            # Swapped halves would be a fourth class here, which the distance task does not have: the chunk stays right.
            pairs[only, WRONG] = 0


@compiled
def _swap_halves(pair):
    pair[A], pair[A_END], pair[B], pair[B_END] = pair[B], pair[B_END], pair[A], pair[A_END]


@compiled
def _write_text(row, scratch, offset, at, text, unit_start, begin, end, settings):
    """Text and [SEP] at row[at:], and for `draw_spans` what may be masked. Returns the end."""
    length = end - begin
    maskable = maskable_length(text, begin, length, settings)
    first = at - offset
    copy_range(row, TOKENS, at, at + length, text, begin)
    if settings.stores_text_positions:  # from 1
        count_up(row, BLOCK_POSITION_IDS, at, at + length, begin + 1)
    copy_range(scratch, UNIT_START, first, first + length, unit_start, begin)
    set_range(scratch, FREE, first, first + maskable, 1)
    # The first token begins a unit even where the cut is inside a word. `|=` keeps the mark or length above bit 0.
    scratch[UNIT_START, first] |= 1
    # Separators within a text are neither masked nor joined to a unit, so that no span crosses two documents.
    for i in range(maskable if settings.joins_documents else 0):
        if text[begin + i] == settings.sep or text[begin + i] == settings.eos:
            scratch[FREE, first + i] = 0
            scratch[UNIT_START, first + i] = scratch[UNIT_START, first + i + 1] = 1
    for i in range(maskable, length + 1):  # eos and [SEP]
        scratch[FREE, first + i] = 0
        scratch[UNIT_START, first + i] = 1
    row[TOKENS, at + length] = settings.sep
    return at + length + 1


@compiled
def _write_structure(row, offset, middle, end, lm_type, settings):
    """Positions, order and segments of `[CLS] A [SEP]` at row[offset:middle] and `B [SEP]` at [middle:end]."""
    count_up(row, POSITION_IDS, offset, end, 0)
    segment_a, segment_b = 0, 1
    if lm_type == SEQ2SEQ:
        # Segment ids tell UniLM's model which of the four language models the Example is for, as in its code.
        segment_a, segment_b = 4, 5
        count_up(row, ORD, middle, end, 1)
    elif lm_type == LEFT_TO_RIGHT:
        segment_a, segment_b = 2, 2
        count_up(row, ORD, offset, end, 0)
    elif lm_type == RIGHT_TO_LEFT:
        segment_a, segment_b = 3, 3
        for i in range(offset, end):
            # A token sees those with at most its order, so falling orders read from right to left.
            row[ORD, i] = end - 1 - i
    set_range(row, SEGMENT_IDS, offset, middle, segment_a)
    set_range(row, SEGMENT_IDS, middle, end, segment_b)


@inlined
def _mask_spans(row, offset, size, rng, scratch, length_table, settings):
    """Choose spans, predict their tokens, and corrupt the input 80/10/10.

    The corruption (MASK, RANDOM_TOKEN, KEEP) is drawn for each token, as in BERT, or once for a span, as in SpanBERT.
    """
    target = masked_target(settings.masked_ratio, size)
    count = draw_spans(rng, scratch, size, target, settings.gap, length_table, settings.listed_below)
    for span in range(count):
        corruption = draw_corruption(rng, settings)
        for i in range(offset + scratch[STARTS, span], offset + scratch[ENDS, span]):
            if not settings.one_corruption_per_span and i > offset + scratch[STARTS, span]:
                corruption = draw_corruption(rng, settings)
            # The target is read before the input is overwritten.
            token = np.int64(row[TOKENS, i])
            predict(row, i, token)
            row[TOKENS, i] = corrupted_token(rng, token, corruption, settings)


@inlined
def _fill_pair(row, offset, document, text, unit_start, pair, rng, scratch, length_table, settings):
    """Write the Example of one pair at `offset`. Returns its end."""
    row[TOKENS, offset] = settings.cls
    scratch[FREE, 0] = 0
    scratch[UNIT_START, 0] = 1
    middle = _write_text(row, scratch, offset, offset + 1, text, unit_start, pair[A], pair[A_END], settings)
    end = middle
    if pair[B] < pair[B_END]:
        end = _write_text(row, scratch, offset, middle, text, unit_start, pair[B], pair[B_END], settings)
    lm_type = pair[LM_TYPE]
    if lm_type == SEQ2SEQ and end == middle:
        lm_type = BIDIRECTIONAL  # a chunk of one token has no second half
    _write_structure(row, offset, middle, end, lm_type, settings)
    mark_document(row, offset, end, document, settings.loss + lm_type)
    _mask_spans(row, offset, end - offset, rng, scratch, length_table, settings)
    if settings.label_objective > 0 and lm_type == BIDIRECTIONAL and end > middle:
        label = pair[WRONG]
        if settings.pairing == DISTANCE:
            # 0: B follows A. 1: from the same document, with text between. 2: from another document.
            label = 2 if label else 1 if pair[B] > pair[A_END] else 0
        predict(row, offset, label)
        row[OBJECTIVE, offset] = settings.label_objective
    return end


@entry_point
def _fill_rows(batch, chunks, tables, pairs, sentence_end, record):
    text, unit_start, chunk_lengths, chunks_per_sample, sample_indices, first_chunk = chunks
    length_table, rng, scratch = tables
    settings = record[0]
    chunk, start = 0, 0
    for i in range(len(batch)):
        row, offset = batch[i], 0
        begin_row(row, settings.pad)
        lengths = chunk_lengths[chunk : chunk + chunks_per_sample[i]]
        sample = sample_indices[i]
        # Pairs from a corpus are one for each chunk of the batch; others are scratch space that every sample
        # uses again.
        sample_pairs = pairs[chunk if settings.pairing == FROM_CORPUS else 0 :]
        _plan_pairs(
            sample_pairs, text, unit_start, lengths, start, sample, first_chunk, rng, scratch, sentence_end, settings
        )  # fmt: skip
        for number in range(len(lengths)):
            document = first_chunk + number
            length = length_in_row(text, start, lengths[number], settings)
            if length > 0:
                counter = _sample_counter(text, start, length, sample, settings)
                seed_rng(rng, settings.key, counter, document, 1)  # 0: the pairs, 1: the masks
                pair = sample_pairs[number]
                offset = _fill_pair(
                    row, offset, document, text, unit_start, pair, rng, scratch, length_table, settings
                )
            start += lengths[number]
        chunk += len(lengths)


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
    splits = ANYWHERE
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
    def pairing(self) -> int:
        """NO_PAIR, NEXT_SENTENCE, SENTENCE_ORDER, PAIR_ONLY (two texts without a label), DISTANCE or FROM_CORPUS."""
        return NO_PAIR

    @property
    def lm_type_probs(self) -> tuple[float, float, float, float]:
        """Probabilities of BIDIRECTIONAL, SEQ2SEQ, LEFT_TO_RIGHT and RIGHT_TO_LEFT."""
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
        lm_type_thresholds = [
            chance_threshold(min(1.0, sum(config.lm_type_probs[: i + 1]))) for i in range(3)
        ]
        label = _LABELS.get(config.pairing)
        return {
            **corruption_thresholds(config.mask_token_prob, config.random_token_prob),
            "masked_ratio": float(config.masked_ratio),
            "label_objective": 0 if label is None else label.number,
            "pairing": config.pairing,
            "wrong_below": chance_threshold(config.wrong_prob),
            # Conditional on the pair not being wrong, which is drawn first.
            "far_below": chance_threshold(min(1.0, config.far_prob / max(1e-9, 1.0 - config.wrong_prob))),
            "bidirectional_below": lm_type_thresholds[0],
            "seq2seq_below": lm_type_thresholds[1],
            "left_to_right_below": lm_type_thresholds[2],
            "gap": bool(config.gap),
            "one_corruption_per_span": bool(config.one_corruption_per_span),
            "static_copies": int(config.static_copies),
            "listed_below": chance_threshold(config.listed_prob),
            "splits": config.splits,
            "joins_documents": bool(config.joins_documents),
            "stores_text_positions": self.stores_text_positions,
        }


class NumberedText(MaskedText):
    """Masked text with one number for each token: block_position_ids is the number + 1, or 0 for special tokens."""

    stores_text_positions = True

    def _fill(self, batch, tokens, chunk_lengths, chunks_per_sample, sample_indices, first_chunk) -> None:
        text, numbers = tokens if tokens.ndim == 2 else (tokens, np.full_like(tokens, -1))
        super()._fill(batch, text, chunk_lengths, chunks_per_sample, sample_indices, first_chunk)
        text_positions = batch[:, BLOCK_POSITION_IDS]
        # The compiled code wrote positions in the text (0: none), since it may exchange halves of pairs; here
        # they become the numbers.
        text_positions[:] = np.r_[np.int32(0), numbers + 1][text_positions]
