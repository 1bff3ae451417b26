"""Building blocks of compiled objectives: numba's decorators, tables of span lengths, the functions that write the
fields of a row, and the loop over the chunks of a batch (`fill_chunks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from data_utils.common.batch_fields import (
    DOC,
    FIELDS,
    OBJECTIVE,
    ONE_AS_INT32,
    ORD,
    PADDING_DOC,
    POSITION_IDS,
    TARGETS,
    TOKENS,
    WEIGHTS,
)
from data_utils.common.compiler import njit
from data_utils.common.random_streams import below, seed_rng

# Without `_nrt`, numba's memory management, functions borrow their caller's arrays and can make none: counting
# references, atomically at every call, took a quarter of the time. The upper levels are inlined, which saves a third of
# the time to compile: numba optimizes all the code below a function again at each level of calls.
_BORROWING: dict[str, Any] = {"nogil": True, "_nrt": False}
# A function that compiled code calls.
compiled = njit(**_BORROWING)
# The `fill_chunk` of an objective: its code is put into the entry point's.
inlined = njit(**_BORROWING, inline="always")
# The function that Python calls, one in an objective's file: its machine code is kept in numba's cache on disk.
entry_point = njit(**_BORROWING, cache=True)


class Chunks(NamedTuple):
    """The chunks of a batch, those of a sample one after another. To an entry point it goes as a plain tuple: the
    types of arguments are in numba's cache on disk, which cannot be read where a class is gone.
    """

    tokens: (
        np.ndarray
    )  # int32 [tokens]; with an annotation [2, tokens] in Python, and the first line in compiled code
    lengths: np.ndarray  # int64 [chunks]
    counts: np.ndarray  # int64 [samples]: the chunks of each
    samples: np.ndarray  # int64 [samples]: their numbers
    first_document: int  # the number of the first chunk of each sample
    unit_start: np.ndarray = np.zeros(0, np.bool_)  # as long as the text: where mask units (masking.py) begin


class Chunk(NamedTuple):
    """One chunk, and the place of its Example in the row."""

    text: np.ndarray  # int32 [length]
    unit_start: np.ndarray  # [length], see Chunks
    document: int  # its number, for the field `doc`
    offset: int  # where its Example begins
    # Where it must end at the latest: later chunks need what follows. Where rows hold every draw, this can be ignored.
    limit: int


class Scratch(NamedTuple):
    """Work space for one chunk: int64 [row_length + 2] each. A new chunk finds what the one before has left.

    Python makes one array of all (`with_scratch`): passing each by itself takes more time than a short chunk.
    """

    free: np.ndarray  # 1 where a token may be chosen
    unit_start: (
        np.ndarray
    )  # 1 where a mask unit begins, plus twice the length of a listed span that begins there
    taken: np.ndarray  # 1 where a token is chosen
    positions: np.ndarray  # candidates
    starts: np.ndarray  # of the spans, in the order in which they were drawn
    ends: np.ndarray
    # BART's: its sentences in their drawn order, the text in that order, and the masks inserted before each token.
    order: np.ndarray
    text: np.ndarray
    inserted: np.ndarray
    # T5's: its text and its noise in alternating parts, text first.
    text_lengths: np.ndarray
    span_lengths: np.ndarray


class Tables(NamedTuple):
    """What the draws of an objective need beside its settings. To an entry point it goes as a plain tuple."""

    length_table: np.ndarray  # what the objective's method of this name returns
    rng: (
        np.record
    )  # seeded with (key, sample, chunk, attempt 0), so that an Example does not depend on the batch
    scratch: Any  # Scratch, or the objective's own
    sentence_end: np.ndarray  # bool [vocabulary]: whether a sentence ends with the token


def cumulative_table(weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """A distribution over lengths 1, 2, ... for `draw_length`: int64 `[len(weights) + 1]`, from 0 to 2**32.

    Entry k is the weight of lengths 1..k, so a random number below entry k draws from the distribution
    restricted to 1..k. Every length keeps a weight of at least 2**-32.
    """
    shares = np.asarray(weights, np.float64)
    # The reserve of len(shares) goes back as 1 for each length: a weight that rounds to 0 would make a length
    # impossible.
    cumulative = np.cumsum(shares) / shares.sum() * (2**32 - len(shares))
    return np.concatenate([[0], np.round(cumulative).astype(np.int64) + np.arange(1, len(shares) + 1)])


def span_count_moments(weights: np.ndarray, target: int) -> tuple[float, float]:
    """Exact mean and standard deviation of the number of spans drawn until their lengths add up to `target`.

    Args: weights: probabilities of the lengths 1, 2, ...
    """
    first, second = np.zeros(target + 1), np.zeros(target + 1)
    for missing in range(1, target + 1):
        reach = min(missing - 1, len(weights))  # lengths that leave something missing
        later_first = np.dot(weights[:reach], first[missing - reach : missing][::-1])
        later_second = np.dot(weights[:reach], second[missing - reach : missing][::-1])
        first[missing] = 1 + later_first
        second[missing] = 1 + 2 * later_first + later_second
    return float(first[target]), math.sqrt(max(0.0, second[target] - first[target] ** 2))


@compiled
def draw_length(rng, longest, length_table):
    """A length from the distribution of `length_table`, restricted to 1..longest. See `cumulative_table`."""
    number = below(rng, length_table[longest])
    length = 1
    while number >= length_table[length]:
        length += 1
    return length


@compiled
def put(row, at, token, position, order):
    """Write one row token. Fields not written are 0."""
    row[TOKENS, at] = token
    row[POSITION_IDS, at] = position
    row[ORD, at] = order


@compiled
def predict(row, at, target):
    """Give a row token a target with weight 1."""
    row[TARGETS, at] = target
    row[WEIGHTS, at] = ONE_AS_INT32


# Loops run over a slice from 0 on: only those are vectorized, because elsewhere numba allows for negative indices.


@compiled
def set_range(line, start, end, value):
    """line[start:end] = value; numba would take ten times as long to compile it in this form."""
    part = line[start:end]
    for i in range(len(part)):
        part[i] = value


@compiled
def count_up(line, start, end, first):
    """line[start:end] = first, first + 1, ..."""
    part = line[start:end]
    for i in range(len(part)):
        part[i] = first + i


@compiled
def copy_range(line, start, end, source, first):
    """line[start:end] = the elements of `source` from `first` on."""
    part = line[start:end]
    copied = source[first : first + len(part)]
    for i in range(len(part)):
        part[i] = copied[i]


@compiled
def predict_range(row, start, end, source, first):
    """Give row[:, start:end] the elements of `source` from `first` on as targets, with weight 1."""
    copy_range(row[TARGETS], start, end, source, first)
    set_range(row[WEIGHTS], start, end, ONE_AS_INT32)


@compiled
def mark_document(row, offset, end, document, objective):
    """The doc and objective fields of an Example at row[offset:end]."""
    set_range(row[DOC], offset, end, document)
    set_range(row[OBJECTIVE], offset, end, objective)


@compiled
def begin_row(row, pad):
    """Fill a row with padding."""
    for field in range(len(FIELDS)):
        value = pad if field == TOKENS else PADDING_DOC if field == DOC else 0
        set_range(row[field], 0, row.shape[1], value)


@compiled
def maskable_length(text, settings):
    """Tokens of a text without the eos at its end."""
    length = len(text)
    return length - 1 if length > 0 and text[length - 1] == settings.eos else length


@compiled
def length_in_row(text, settings):
    """Tokens of a chunk that go into a row.

    An eos that is [SEP] or [PAD] itself does not, where [SEP] follows the text: BERT's rows have one [SEP] there, and
    no padding within the text. A chunk that is nothing else keeps it: every chunk has an Example.
    """
    length = len(text)
    return length - 1 if settings.drops_eos and length > 1 and text[length - 1] == settings.eos else length


@inlined
def with_scratch(tables):
    """Tables from the tuple of an entry point, which has one array [arrays of the Scratch, row_length + 2]."""
    length_table, rng, lines, sentence_end = tables
    scratch = Scratch(
        *(lines[0], lines[1], lines[2], lines[3], lines[4], lines[5]),
        *(lines[6], lines[7], lines[8], lines[9], lines[10]),
    )
    return Tables(length_table, rng, scratch, sentence_end)


# Inlined also because numba cannot cache a function that takes another one as an argument.
@inlined
def fill_chunks(fill_chunk, batch, chunks, tables, record):
    """Write the Examples of all chunks of a batch, those of a sample one after another into its row.

    Args:
        fill_chunk: called as `fill_chunk(row, chunk, tables, settings)`; writes the Example of one Chunk from
            `chunk.offset` on to `row` (int32 [len(FIELDS), row_length], with padding there) and returns its end.
            `settings` are the objective's `values`, and the special tokens.
        batch: int32 [samples, len(FIELDS), row_length], written.
        chunks, tables, record: the other arguments of the entry point, as they are.
    """
    settings, chunks, tables = record[0], Chunks(*chunks), with_scratch(tables)
    k, start = 0, 0  # the chunk, and where its text begins
    for i in range(len(batch)):
        row, offset = batch[i], 0
        begin_row(row, settings.pad)
        # Row tokens that later chunks may need; a chunk whose spans vary may use all that is left before them.
        reserved = 0
        for later in range(k, k + chunks.counts[i]):
            reserved += np.int64(settings.growth * chunks.lengths[later] + 1e-9) + settings.overhead
        for document in range(chunks.first_document, chunks.first_document + chunks.counts[i]):
            reserved -= np.int64(settings.growth * chunks.lengths[k] + 1e-9) + settings.overhead
            end = start + chunks.lengths[k]
            length = length_in_row(chunks.tokens[start:end], settings)
            if length > 0:
                seed_rng(tables.rng, settings.key, chunks.samples[i], document, 0)
                text, unit_start = (
                    chunks.tokens[start : start + length],
                    chunks.unit_start[start : start + length],
                )
                chunk = Chunk(text, unit_start, document, offset, row.shape[1] - reserved)
                offset = fill_chunk(row, chunk, tables, settings)
            start = end
            k += 1
