"""BART's denoising (arXiv:1910.13461): corrupted text as context, the whole text as target.

Part A (order 0) is the text with its sentences in random order and with spans of Poisson(3) tokens, each replaced by
one [MASK]; a span of length 0 inserts a [MASK]. Part B (order 1, 2, ...) is the text itself after a `sop` (eos in a
vocabulary without it). The published model also predicts CLS before the text (`predict_cls`). Positions of part B count
from 0 again, as in a separate text.

Rows are sized near the mean length (`ROOM_DEVIATIONS`). Where the masks do not fit, the text is cut by a few tokens and
the same random numbers are drawn for it again.

Differences from the paper: a token stays between two spans, so that each mask stands for one span; no more masks are
inserted than tokens are removed, so that part A is never longer than the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_utils.common.batch_fields import ORD, POSITION_IDS, SEGMENT_IDS, TOKENS
from data_utils.common.losses import Loss
from data_utils.common.random_streams import below, chance, chance_threshold, rewind, shuffle
from data_utils.common.settings import check, checked, fraction, setting
from data_utils.objectives.base import RowObjective, RowSizes
from data_utils.objectives.compiled import (
    copy_range,
    count_up,
    entry_point,
    fill_chunks,
    inlined,
    mark_document,
    maskable_length,
    predict,
    predict_range,
    set_range,
    span_count_moments,
)
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.masking import draw_spans, masked_target
from data_utils.objectives.registry import register
from data_utils.tokenizers.vocabulary import Vocabulary

LONGEST_SPAN = 39  # tokens; the Poisson distribution is cut there, as in blank infilling
ROOM_DEVIATIONS = 1.0  # a row has room for the mean number of masks and this many standard deviations


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("bart")
class BartConfig(RowSizes):
    """Text infilling and sentence permutation."""

    needed_roles = ("cls", "mask", "eos")

    masked_ratio: float = fraction(
        0.3, "Fraction of the tokens removed by text infilling; each removed span becomes one [MASK]."
    )
    mean_span_length: float = setting(
        3.0, "Mean of the Poisson distribution of span lengths, in tokens.", above=0
    )
    permute_sentences: bool = setting(True, "Shuffle the sentences of the encoder input.")
    predict_cls: bool = setting(False, "Predict CLS before the text, as the published model does.")

    @property
    def length_weights(self) -> np.ndarray:
        """Probabilities of spans of 1, 2, ... tokens."""
        weights = np.cumprod(self.mean_span_length / np.arange(1, LONGEST_SPAN + 1))
        return weights / weights.sum()

    @property
    def masks_per_span(self) -> float:
        """Mean number of masks per span: one for the span, and one for each span of length 0 drawn with it."""
        return 1.0 / (1.0 - math.exp(-self.mean_span_length))

    @property
    def growth(self) -> float:
        """Mean row tokens per token of text: the context, with masks in place of its spans, and the target."""
        # No matrix product: in every batch, it would slow the processor down for a tenth of a millisecond.
        length = float((self.length_weights * np.arange(1, LONGEST_SPAN + 1)).sum())
        # 1 for the target and 1 for the context, of which each span of mean length leaves its masks.
        return 2.0 - self.masked_ratio * max(0.0, 1.0 - self.masks_per_span / length)

    @property
    def has_target(self) -> bool:
        return True

    @property
    def loss_share(self) -> float:
        """Share of the target, which is the whole text, in the row tokens."""
        return 1.0 / self.growth

    @property
    def mask_units(self) -> str | None:
        return "sentences" if self.permute_sentences else None

    def check_vocabulary(self, vocabulary: Vocabulary) -> None:
        check(
            not self.permute_sentences or vocabulary.sentence_end is not None,
            "bart.permute_sentences needs the tokens that end a sentence, but they are unknown for this "
            "vocabulary; set it to false.",
        )

    @property
    def overhead(self) -> int:
        """CLS (sop takes the place of the last token, which is never an input), and 2 more for the shortest chunks."""
        return 3 + self.predict_cls

    def most_tokens(self, length: int) -> int:
        """Row tokens of a chunk if no token is removed, which is the most."""
        return 2 * length + 1 + self.predict_cls

    def row_length_for(self, sequence_length: int) -> int:
        """Mean and ROOM_DEVIATIONS of the number of masks, as a multiple of 8."""
        removed = max(1, int(self.masked_ratio * sequence_length + 0.5))
        mean, deviation = span_count_moments(self.length_weights, removed)
        # Spans of length 0, a geometric number for each other span; the two lines approximate their mean and spread.
        inserted = mean * (self.masks_per_span - 1.0)
        deviation = math.sqrt(deviation**2 + inserted * self.masks_per_span)
        masks = min(float(removed), mean + inserted + ROOM_DEVIATIONS * deviation)
        length = max(
            math.ceil(2 * sequence_length + 1 + self.predict_cls - removed + masks),
            self.least_row_length(sequence_length),
        )
        return -(-length // 8) * 8

    def max_position_needed(self, sequence_length: int) -> int:
        """Positions count the context, CLS included."""
        return sequence_length


@inlined
def _permute_sentences(text, sentence_start, maskable, rng, scratch, settings):
    """Write the text, its sentences in random order, to scratch.text. Args: sentence_start: bool of each token."""
    sentences = 1
    scratch.starts[0] = 0
    if settings.permute_sentences:
        for i in range(1, maskable):
            scratch.starts[sentences] = i  # overwritten unless a sentence begins here
            sentences += sentence_start[i]
    scratch.starts[sentences] = maskable
    for k in range(sentences):
        scratch.order[k] = k
    shuffle(rng, scratch.order, sentences)
    at = 0
    for k in range(sentences):
        sentence = scratch.order[k]
        first, end = scratch.starts[sentence], scratch.starts[sentence + 1]
        copy_range(scratch.text, at, at + end - first, text, first)
        at += end - first
    copy_range(scratch.text, maskable, len(text), text, maskable)


@inlined
def _draw_masks(maskable, tables, settings):
    """Mark the tokens that go in scratch.taken (one mask for each span), and count scratch.inserted.

    Spans of length 0 are drawn along with every other span; each inserts a mask.
    """
    rng, scratch = tables.rng, tables.scratch
    set_range(scratch.free, 0, maskable, 1)
    set_range(scratch.unit_start, 0, maskable, 1)
    target = masked_target(settings.masked_ratio, maskable)
    count = draw_spans(tables, maskable, target, True, 0)
    removed, inserted = 0, 0
    for i in range(maskable):
        removed += scratch.taken[i]
    set_range(scratch.inserted, 0, maskable, 0)
    # A Poisson length may be 0: such a span removes nothing and inserts a mask. Their number is bounded by the
    # tokens removed, so that a row never grows.
    for _ in range(count):
        while inserted < removed - count and chance(rng, settings.empty_below):
            scratch.inserted[below(rng, maskable)] += 1
            inserted += 1


@inlined
def _write_context(row, offset, maskable, length, scratch, settings):
    """CLS and the text of scratch.text with its masks. Returns the end."""
    tokens = row[TOKENS, offset:]
    tokens[0] = settings.cls
    at, inside = 1, 0
    for i in range(maskable):
        for _ in range(scratch.inserted[i]):
            tokens[at] = settings.mask
            at += 1
        taken = scratch.taken[i]
        at -= taken & inside  # the span's mask is there already: overwrite it
        tokens[at] = settings.mask if taken else scratch.text[i]
        at += 1
        inside = taken
    for i in range(maskable, length):
        tokens[at] = scratch.text[i]
        at += 1
    count_up(row[POSITION_IDS], offset, offset + at, 0)
    return offset + at


@inlined
def _write_target(row, part_b, text, settings):
    """The text itself, after CLS if that is predicted, shifted by sop. Returns the end."""
    first, end = part_b + settings.predict_cls, part_b + settings.predict_cls + len(text)
    row[TOKENS, part_b] = settings.sop
    if settings.predict_cls:
        row[TOKENS, first] = settings.cls
        predict(row, part_b, settings.cls)
    copy_range(row[TOKENS], first + 1, end, text, 0)
    predict_range(row, first, end, text, 0)
    count_up(row[POSITION_IDS], part_b, end, 0)
    count_up(row[ORD], part_b, end, 1)
    set_range(row[SEGMENT_IDS], part_b, end, 1)
    return end


@inlined
def _fill_chunk(row, chunk, tables, settings):
    text, offset, scratch = chunk.text, chunk.offset, tables.scratch
    while True:
        maskable = maskable_length(text, settings)
        _permute_sentences(text, chunk.unit_start, maskable, tables.rng, scratch, settings)
        if maskable > 0:
            _draw_masks(maskable, tables, settings)
        part_b = _write_context(row, offset, maskable, len(text), scratch, settings)
        over = part_b + settings.predict_cls + len(text) - chunk.limit
        if over <= 0:
            break
        # A token less shortens context and target, hence the half.
        text = text[: len(text) - (over + 1) // 2]
        # The same random numbers again: drawing new ones until it fits would favour draws with few masks.
        rewind(tables.rng)
    end = _write_target(row, part_b, text, settings)
    mark_document(row, offset, end, chunk.document, settings.loss)
    return end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    fill_chunks(_fill_chunk, batch, chunks, tables, record)


@register
class Bart(RowObjective):
    name = "bart"
    config_class = BartConfig
    losses = (Loss("denoising", 16),)
    text_format = TextFormat(
        "encoder_decoder",
        "encoder_decoder",
        before=("cls",),
        after=("eos",),
        start=("sop",),
        ends=("eos",),
        segments=(0, 1),
    )
    entry = staticmethod(_fill_rows)

    def values(self) -> dict[str, Any]:
        return super().values() | {
            "empty_below": chance_threshold(math.exp(-self.config.mean_span_length)),
            "predict_cls": int(self.config.predict_cls),
        }

    @classmethod
    def text_format_for(cls, config: BartConfig) -> TextFormat:
        return replace(cls.text_format, forced=("cls",)) if config.predict_cls else cls.text_format
