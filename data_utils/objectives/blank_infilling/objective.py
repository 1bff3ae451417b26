"""GLM's autoregressive blank infilling (arXiv:2103.10360): token, sentence and document objectives, mixed.

An Example is `[part A | part B]`: the text with each span replaced by one mask token, then the spans in shuffled
order, each as `sop + span` predicting `span + eop`. Its random numbers are a pure function of (seed, sample index,
piece index, attempt), so they do not depend on batch size, place in the batch, worker or history.
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
from data_utils.objectives.blank_infilling import config, spans
from data_utils.objectives.blank_infilling.config import (
    DOCUMENT,
    SENTENCE,
    TOKEN,
    BlankInfillingConfig,
    length_table,
)
from data_utils.objectives.blank_infilling.spans import (
    ENDS,
    ORDER,
    STARTS,
    draw_document_span,
    draw_sentences,
    draw_token_spans,
    find_words,
    least_tokens,
    tokens_to_cut,
    write_example,
)
from data_utils.objectives.interface import DOCUMENT_OVERHEAD, Writing
from data_utils.objectives.registry import register
from data_utils.objectives.row_loops import entry_point, inlined, set_range
from data_utils.objectives.rows import RowObjective, numbers_of

_NO_WORDS = np.zeros(0, np.bool_)
ATTEMPTS = 16  # draws of spans before the fewest are used


@inlined
def _fill_example(
    row, used, limit, text, words, start, length, sample, chunk, rng, w, sentence_end, cumulative, s
):
    """Draw and write the Example of one chunk at row[used:limit]. Returns the new end.

    Attempt 0 decides what must not depend on whether the spans fit, so that a full row does not change the mix of
    objectives.
    """
    seed_rng(rng, s.key, sample, chunk, 0)
    next_word(rng)  # unused: so masks are those of the runs that drew a length here
    single = chance(rng, s.single_below)
    mode = next_word(rng)
    tail = chance(rng, s.tail_below)
    objective = TOKEN
    if not single and mode >= s.token_below:
        objective = SENTENCE if mode < s.token_or_sentence_below else DOCUMENT
    tail = tail and objective == DOCUMENT
    n = length + 1
    maskable = length - 1 if length > 0 and text[start + length - 1] == s.eos else length
    # masked_lm predicts in place and adds no token; 3 n never limits.
    available = 3 * n if s.masked_lm else limit - used
    count, cut = 0, 0
    for attempt in range(1, ATTEMPTS + 2):
        # Numbers of its own for each attempt: how many numbers a failed one consumed does not matter.
        seed_rng(rng, s.key, sample, chunk, attempt)
        fewest, cut = attempt > ATTEMPTS, 0
        if objective == DOCUMENT:
            count = draw_document_span(rng, w, n, length, maskable, tail, s)
        elif maskable == 0:
            count = 0
        elif objective == SENTENCE:
            count = draw_sentences(rng, w, text, start, n, maskable, fewest, sentence_end, s)
        else:
            units = find_words(w, words, start, maskable) if s.whole_words else maskable
            count = draw_token_spans(rng, w, n, maskable, units, available, single, fewest, cumulative, s)
            cut = tokens_to_cut(n, count, available)
        # Each span adds a mask to part A and a sop to part B.
        if count >= 0 and n + 2 * count - cut <= available:
            break
    length -= cut
    for i in range(count):
        w[ORDER, i] = i
    # The model learns to fill a span whatever spans it has seen before.
    if s.shuffle_spans:
        shuffle(rng, w[ORDER], count)
    return write_example(row, used, chunk, text, start, length, count, objective, tail, rng, w, s)


@inlined
def _fill_row(row, text, words, start, lengths, sample, first_chunk, rng, w, sentence_end, cumulative, s):
    """Write one sample, its chunks from number `first_chunk` on, then padding. False: it cannot fit."""
    needed, total = 0, 0
    for length in lengths:
        needed += least_tokens(length, s)
        total += length
    row_length = row.shape[1]
    if needed > row_length or total > s.sequence_length:
        return False
    for field in range(len(FIELDS)):
        if field != TOKENS and field != POSITION_IDS:  # these two are written everywhere
            set_range(row, field, 0, row_length, 0)
    used = 0
    chunk = first_chunk
    for length in lengths:
        # A chunk may use what later ones do not need at least, so that none of them is left without room.
        needed -= least_tokens(length, s)  # what the chunks after this one need
        limit = row_length - needed
        used = _fill_example(
            row, used, limit, text, words, start, length, sample, chunk, rng, w, sentence_end, cumulative, s
        )  # fmt: skip
        chunk += 1
        start += length
    set_range(row, TOKENS, used, row_length, s.pad)
    set_range(row, POSITION_IDS, used, row_length, 0)
    set_range(row, DOC, used, row_length, PADDING_DOC)
    return True


@entry_point
def _fill_rows(batch, chunks, tables, sentence_end, settings):
    """Returns the index of the first sample that cannot fit, or -1."""
    text, words, chunk_lengths, chunks_per_sample, sample_indices, first_chunk = chunks
    cumulative, rng, w = tables
    s = settings[0]
    chunk, start = 0, 0
    for i in range(len(batch)):
        lengths = chunk_lengths[chunk : chunk + chunks_per_sample[i]]
        row, sample = batch[i], sample_indices[i]
        if not _fill_row(
            row, text, words, start, lengths, sample, first_chunk, rng, w, sentence_end, cumulative, s
        ):
            return i
        chunk += chunks_per_sample[i]
        for length in lengths:
            start += length
    return -1


@entry_point
def _write_given(row, text, starts, ends, order, objective, tail, tables, settings):
    _, rng, w = tables
    s = settings[0]
    count = len(starts)
    for i in range(count):
        w[STARTS, i] = starts[i]
        w[ENDS, i] = ends[i]
        w[ORDER, i] = order[i]
    seed_rng(rng, s.key, 0, 0, 1)
    return write_example(row, 0, 0, text, 0, len(text), count, objective, tail, rng, w, s)


@register
class BlankInfilling(RowObjective):
    name = "blank_infilling"
    config_class = BlankInfillingConfig
    losses = (Loss("token", 0), Loss("sentence", 1), Loss("document", 2))  # TOKEN, SENTENCE, DOCUMENT
    writing = Writing("glm", "blanks")
    entry = staticmethod(_fill_rows)
    compiled_files = (config.__file__, spans.__file__)

    def values(self) -> dict[str, Any]:
        config = self.config
        return numbers_of(config) | {
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
    def writing_of(cls, config: BlankInfillingConfig) -> Writing:
        shares = {
            "mask": config.token_prob + config.single_span_prob,
            "smask": config.sentence_prob,
            "gmask": config.document_prob,
        }
        masks = tuple(mask for mask, share in shares.items() if share > 1e-9)
        if config.masked_lm:
            return Writing("bert")
        way = "blanks" if config.sentinel_first is None else None  # sentinels are no blanks
        return replace(cls.writing, way=way, masks=masks)

    def length_table(self) -> np.ndarray:
        return length_table(self.config.mean_span_length, self._longest_token_span)

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
        failed = self._fill(batch, tokens, chunk_lengths, chunks_per_sample, sample_indices, 0)
        if failed >= 0:
            first = int(chunks_per_sample[:failed].sum())
            lengths = chunk_lengths[first : first + int(chunks_per_sample[failed])]
            raise DataError(
                f"sample {sample_indices[failed]} has {len(lengths)} chunks with {lengths.sum()} tokens, too many "
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

    def _fill(self, batch, tokens, chunk_lengths, chunks_per_sample, sample_indices, first_chunk) -> int:
        """Fill the rows; returns the index of the first sample that cannot fit, or -1."""
        if self.config.cross_document_attention:  # the chunks of a row are one text
            sums, ends = np.concatenate([[0], np.cumsum(chunk_lengths)]), np.cumsum(chunks_per_sample)
            not_empty = chunks_per_sample > 0
            chunk_lengths = (sums[ends] - sums[ends - chunks_per_sample])[not_empty]
            chunks_per_sample = not_empty.astype(np.int64)
        sentence_end = self.vocabulary.sentence_end
        sentence_end = np.ascontiguousarray([] if sentence_end is None else sentence_end, np.bool_)
        words = self._unit_starts(tokens, chunk_lengths) if self.mask_units else _NO_WORDS
        chunks = (tokens, words, chunk_lengths, chunks_per_sample, sample_indices, first_chunk)
        return self.entry(batch, chunks, self._tables(batch), sentence_end, self._settings)

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
        starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
        batch = np.zeros((1, len(FIELDS), self.config.most_tokens(len(text))), np.int32)
        given = (np.ascontiguousarray(starts), np.ascontiguousarray(ends), np.array(order, np.int64))
        end = _write_given(batch[0], text, *given, objective, tail, self._tables(batch), self._settings)
        return Example.from_fields(batch[0, :, :end])
