"""GLM's autoregressive blank infilling (arXiv:2103.10360): token, sentence and document objectives, mixed.

An Example is `[part A | part B]`: the text with each span replaced by one mask token, then the spans in shuffled
order, each as `sop + span` predicting `span + eop`. Its random numbers are a pure function of (seed, sample index,
chunk number, attempt), so they do not depend on batch size, position in the batch, worker or history.
docs/blank_infilling.md explains the options and the differences from the reference implementation.

A row has a fixed length near the mean: room for the mean number of spans and one standard deviation. Where the spans of
a chunk do not fit, it loses its last tokens: a few in one row of ten, about one token of text in 2,500. So spans keep
their distribution and rows are full. If the cut exceeded 1 / MOST_CUT of the chunk, spans are drawn again; after
`ATTEMPTS` draws the fewest spans that mask enough are used, and those always fit. With a longer `row_length` nothing is
lost, but rows have more padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from data_utils.common.batch_fields import DOC, FIELDS, PADDING_DOC, POSITION_IDS, TOKENS, Example
from data_utils.common.errors import DataError
from data_utils.common.losses import Loss
from data_utils.common.random_streams import chance, chance_threshold, next_word, seed_rng, shuffle
from data_utils.common.settings import check
from data_utils.objectives.base import RowObjective, numeric_settings
from data_utils.objectives.blank_infilling import config, spans
from data_utils.objectives.blank_infilling.config import (
    DOCUMENT,
    SENTENCE,
    TOKEN,
    BlankInfillingConfig,
    poisson_length_table,
)
from data_utils.objectives.blank_infilling.spans import (
    Drawn,
    SpanScratch,
    draw_document_span,
    draw_sentences,
    draw_token_spans,
    least_tokens,
    tokens_to_cut,
    with_scratch,
    write_example,
)
from data_utils.objectives.compiled import Chunk, Chunks, entry_point, inlined, set_range
from data_utils.objectives.interface import DOCUMENT_OVERHEAD, TextFormat
from data_utils.objectives.registry import register

ATTEMPTS = 16  # draws of spans before the fewest are used


@inlined
def _fill_example(row, chunk, sample, tables, settings):
    """Draw and write the Example of one chunk. Returns its end.

    Attempt 0 decides what must not depend on whether the spans fit, so that a full row does not change the mix of
    objectives.
    """
    rng, scratch, text = tables.rng, tables.scratch, chunk.text
    seed_rng(rng, settings.key, sample, chunk.document, 0)
    next_word(rng)  # unused: so masks are those of the runs that drew a length here
    is_single = chance(rng, settings.single_below)
    word = next_word(rng)
    is_tail = chance(rng, settings.tail_below)
    objective = TOKEN
    if not is_single and word >= settings.token_below:
        objective = SENTENCE if word < settings.token_or_sentence_below else DOCUMENT
    is_tail = is_tail and objective == DOCUMENT
    n = len(text) + 1
    # masked_lm predicts in place and adds no token; 3 n never limits.
    available = 3 * n if settings.masked_lm else chunk.limit - chunk.offset
    count, cut = 0, 0
    for attempt in range(1, ATTEMPTS + 2):
        # Numbers of its own for each attempt: how many numbers a failed one consumed does not matter.
        seed_rng(rng, settings.key, sample, chunk.document, attempt)
        use_fewest, cut = attempt > ATTEMPTS, 0
        if objective == DOCUMENT:
            count = draw_document_span(tables, text, is_tail, settings)
        elif objective == SENTENCE:
            count = draw_sentences(tables, text, use_fewest, settings)
        else:
            count = draw_token_spans(tables, chunk, available, is_single, use_fewest, settings)
            cut = tokens_to_cut(text, count, available)
        # Each span adds a mask to part A and a sop to part B.
        if count >= 0 and n + 2 * count - cut <= available:
            break
    for i in range(count):
        scratch.order[i] = i
    # The model learns to fill a span whatever spans it has seen before.
    if settings.shuffle_spans:
        shuffle(rng, scratch.order, count)
    rest = Chunk(text[: len(text) - cut], chunk.unit_start, chunk.document, chunk.offset, chunk.limit)
    return write_example(row, rest, Drawn(objective, is_tail, count), tables, settings)


@entry_point
def _fill_rows(batch, chunks, tables, record):
    """Write the Examples of all chunks, then padding. Returns the index of the first sample that cannot fit, or -1."""
    settings, chunks, tables = record[0], Chunks(*chunks), with_scratch(tables)
    row_length = batch.shape[2]
    k, start = 0, 0  # the chunk, and where its text begins
    for i in range(len(batch)):
        row, offset = batch[i], 0
        lengths = chunks.lengths[k : k + chunks.counts[i]]
        needed, total = 0, 0
        for length in lengths:
            needed += least_tokens(length, settings)
            total += length
        if needed > row_length or total > settings.sequence_length:
            return i
        for field in range(len(FIELDS)):
            if field != TOKENS and field != POSITION_IDS:  # these two are written everywhere
                set_range(row[field], 0, row_length, 0)
        document = chunks.first_document
        for length in lengths:
            # A chunk may use what later ones do not need at least, so that none of them is left without room.
            needed -= least_tokens(length, settings)  # what the chunks after this one need
            text, words = chunks.tokens[start : start + length], chunks.unit_start[start : start + length]
            chunk = Chunk(text, words, document, offset, row_length - needed)
            offset = _fill_example(row, chunk, chunks.samples[i], tables, settings)
            document += 1
            start += length
        set_range(row[TOKENS], offset, row_length, settings.pad)
        set_range(row[POSITION_IDS], offset, row_length, 0)
        set_range(row[DOC], offset, row_length, PADDING_DOC)
        k += chunks.counts[i]
    return -1


@entry_point
def _write_example_with(row, text, starts, ends, order, objective, is_tail, tables, record):
    """Write the Example with these spans, `order` their order in part B. Returns its end."""
    settings, tables = record[0], with_scratch(tables)
    scratch, count = tables.scratch, len(starts)
    for i in range(count):
        scratch.starts[i] = starts[i]
        scratch.ends[i] = ends[i]
        scratch.order[i] = order[i]
    seed_rng(tables.rng, settings.key, 0, 0, 1)
    chunk = Chunk(text, tables.sentence_end, 0, 0, row.shape[1])
    return write_example(row, chunk, Drawn(objective, is_tail, count), tables, settings)


@register
class BlankInfilling(RowObjective):
    name = "blank_infilling"
    config_class = BlankInfillingConfig
    losses = (Loss("token", 0), Loss("sentence", 1), Loss("document", 2))  # TOKEN, SENTENCE, DOCUMENT
    text_format = TextFormat("glm", "blanks")
    entry = staticmethod(_fill_rows)
    scratch_type = SpanScratch
    compiled_files = (config.__file__, spans.__file__)

    def values(self) -> dict[str, Any]:
        config = self.config
        return numeric_settings(config) | {
            "token_below": chance_threshold(config.token_prob),
            "token_or_sentence_below": chance_threshold(1.0 - config.document_prob),
            "tail_below": chance_threshold(config.document_tail_prob),
            "single_below": chance_threshold(config.single_span_prob),
            "block_mask_below": chance_threshold(config.block_mask_prob),
            "longest_span": self.sequence_length - 1,
            "longest_token_span": self._longest_token_span,
            "sentinel_first": -1 if config.sentinel_first is None else config.sentinel_first,
            "uniform_placement": config.placement == "uniform",
        }

    @property
    def _longest_token_span(self) -> int:
        return min(self.config.max_span_length, self.sequence_length - 1)

    @classmethod
    def text_format_for(cls, config: BlankInfillingConfig) -> TextFormat:
        shares = {
            "mask": config.token_prob + config.single_span_prob,
            "smask": config.sentence_prob,
            "gmask": config.document_prob,
        }
        masks = tuple(mask for mask, share in shares.items() if share > 1e-9)
        if config.masked_lm:
            return TextFormat("bert")
        generation = "blanks" if config.sentinel_first is None else None  # sentinels are no blanks
        return replace(cls.text_format, generation=generation, masks=masks)

    def length_table(self) -> np.ndarray:
        return poisson_length_table(self.config.mean_span_length, self._longest_token_span)

    def choose_mask_units(self) -> str | None:
        """Whole words or tokens; the compiled code finds the sentences."""
        return "words" if self.config.whole_words else None

    def fill(
        self,
        batch: np.ndarray,
        tokens: np.ndarray,
        chunk_lengths: np.ndarray,
        chunks_per_sample: np.ndarray,
        sample_indices: np.ndarray,
    ) -> None:
        """See `Objective.fill`. The `doc` field numbers the chunks of a sample from 0."""
        tokens = tokens if tokens.ndim == 1 else tokens[0]
        too_long = self._fill(batch, Chunks(tokens, chunk_lengths, chunks_per_sample, sample_indices, 0))
        if too_long >= 0:
            first = int(chunks_per_sample[:too_long].sum())
            lengths = chunk_lengths[first : first + int(chunks_per_sample[too_long])]
            raise DataError(
                f"sample {sample_indices[too_long]} has {len(lengths)} chunks with {lengths.sum()} tokens, too many "
                f"for sequence_length {self.sequence_length} and rows of {batch.shape[2]}; the tokens of a window "
                f"plus {DOCUMENT_OVERHEAD} for each document must not exceed sequence_length."
            )

    def example(self, chunk: np.ndarray, sample_index: int, chunk_index: int = 0) -> Example:
        """The Example of one chunk (int32 tokens without CLS) as `fill` draws it in a long enough row."""
        check(
            len(chunk) <= self.sequence_length,
            f"the chunk has {len(chunk)} tokens, more than sequence_length ({self.sequence_length}).",
        )
        return super().example(chunk, sample_index, chunk_index)

    def _fill(self, batch: np.ndarray, chunks: Chunks) -> int:
        """Fill the rows; returns the index of the first sample that cannot fit, or -1."""
        if self.config.cross_document_attention:  # the chunks of a row are one text
            token_ends, chunk_ends = (
                np.concatenate([[0], np.cumsum(chunks.lengths)]),
                np.cumsum(chunks.counts),
            )
            not_empty = chunks.counts > 0
            lengths = (token_ends[chunk_ends] - token_ends[chunk_ends - chunks.counts])[not_empty]
            chunks = chunks._replace(lengths=lengths, counts=not_empty.astype(np.int64))
        return super()._fill(batch, chunks)

    def build(
        self,
        chunk: np.ndarray,
        spans: list[tuple[int, int]],
        order: list[int],
        objective: int = TOKEN,
        tail: bool = False,
    ) -> Example:
        """The Example for given spans of `chunk` (`[start, end)`, in text order) in a given part-B order."""
        text = np.ascontiguousarray(chunk, np.int32)
        starts, ends = (
            np.array(bounds, np.int64) for bounds in (zip(*spans, strict=True) if spans else ([], []))
        )
        batch = np.zeros((1, len(FIELDS), self.config.most_tokens(len(text))), np.int32)
        end = _write_example_with(
            batch[0],
            text,
            starts,
            ends,
            np.array(order, np.int64),
            objective,
            tail,
            self._tables(batch.shape[2]),
            self._record,
        )
        return Example.from_fields(batch[0, :, :end])
