"""Building blocks of compiled objectives: numba's decorators, tables of span lengths, the functions that write the
fields of a row, and the loop over the chunks of a batch (`fill_chunks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
# the time to compile: numba optimises all the code below a function again at each level of calls.
_BORROWING: dict[str, Any] = {"nogil": True, "_nrt": False}
# A function that compiled code calls.
compiled = njit(**_BORROWING)
# The `fill_chunk` of an objective: its code is put into the entry point's.
inlined = njit(**_BORROWING, inline="always")
# The function that Python calls, one in an objective's file: its machine code is kept in numba's cache on disk.
entry_point = njit(**_BORROWING, cache=True)

# Lines of the scratch array, int64 [WORK_LINES, row_length + 2]. FREE and UNIT_START are inputs of `draw_spans`.
# UNIT_START is 1 where a mask unit (masking.py) begins, plus twice the length of a listed span that begins there.
FREE, UNIT_START, TAKEN, POSITIONS, STARTS, ENDS, TEXT = range(7)
WORK_LINES = 7


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


# Loops run over a slice from 0 on: only those are vectorised, because elsewhere numba allows for negative indices.


@compiled
def set_range(row, field, start, end, value):
    """row[field, start:end] = value; numba would take ten times as long to compile it in this form."""
    line = row[field, start:end]
    for i in range(len(line)):
        line[i] = value


@compiled
def count_up(row, field, start, end, first):
    """row[field, start:end] = first, first + 1, ..."""
    line = row[field, start:end]
    for i in range(len(line)):
        line[i] = first + i


@compiled
def copy_range(row, field, start, end, source, first):
    """row[field, start:end] = the elements of `source` from `first` on."""
    line = row[field, start:end]
    copied = source[first : first + len(line)]
    for i in range(len(line)):
        line[i] = copied[i]


@compiled
def predict_range(row, start, end, source, first):
    """Give row[:, start:end] the elements of `source` from `first` on as targets, with weight 1."""
    copy_range(row, TARGETS, start, end, source, first)
    set_range(row, WEIGHTS, start, end, ONE_AS_INT32)


@compiled
def mark_document(row, offset, end, document, objective):
    """The doc and objective fields of an Example at row[offset:end]."""
    set_range(row, DOC, offset, end, document)
    set_range(row, OBJECTIVE, offset, end, objective)


@compiled
def begin_row(row, pad):
    """Fill a row with padding."""
    for field in range(len(FIELDS)):
        value = pad if field == TOKENS else PADDING_DOC if field == DOC else 0
        set_range(row, field, 0, row.shape[1], value)


@compiled
def maskable_length(text, start, length, settings):
    """Tokens of a chunk without the eos at its end."""
    return length - 1 if text[start + length - 1] == settings.eos else length


@compiled
def length_in_row(text, start, length, settings):
    """Tokens of a chunk that go into a row.

    An eos that is [SEP] or [PAD] itself does not, where [SEP] follows the text: BERT's rows have one [SEP] there, and
    no padding within the text. A chunk that is nothing else keeps it: every chunk has an Example.
    """
    return (
        length - 1
        if settings.drops_eos and length > 1 and text[start + length - 1] == settings.eos
        else length
    )


# Inlined also because numba cannot cache a function that takes another one as an argument.
@inlined
def fill_chunks(fill_chunk, batch, chunks, tables, record):
    """Write the Examples of all chunks of a batch, those of a sample one after another into its row.

    Args:
        fill_chunk: writes the Example of one chunk and returns its end in the row, called as `fill_chunk(row, offset,
            limit, document, text, unit_start, start, length, rng, scratch, length_table, settings)`:
            row: int32 [len(FIELDS), row_length], padding from `offset` on.
            offset, limit: the Example begins at `offset` and must end at or before `limit`: later chunks need what
                follows. Where rows hold every draw, `limit` can be ignored.
            document: the number for the field `doc`.
            text, start, length: the chunk is text[start : start + length], int32.
            unit_start: as long as `text`, marks the tokens at which mask units begin.
            rng: seeded with (key, sample, chunk, attempt 0), so an Example does not depend on the batch.
            scratch: int64 [WORK_LINES, row_length + 2], for any use.
            length_table: what the objective's method of this name returns.
            settings: the objective's `values`, and the special tokens.
        batch: int32 [samples, len(FIELDS), row_length], written.
        chunks, tables, record: the other arguments of the entry point, as they are.
    """
    text, unit_start, chunk_lengths, chunks_per_sample, sample_indices, first_chunk = chunks
    length_table, rng, scratch = tables
    settings = record[0]
    chunk, start = 0, 0
    for i in range(len(batch)):
        row, offset = batch[i], 0
        begin_row(row, settings.pad)
        # Row tokens that later chunks may need; a chunk whose spans vary may use all that is left before them.
        reserved = 0
        for k in range(chunk, chunk + chunks_per_sample[i]):
            reserved += np.int64(settings.growth * chunk_lengths[k] + 1e-9) + settings.overhead
        for number in range(first_chunk, first_chunk + chunks_per_sample[i]):
            reserved -= np.int64(settings.growth * chunk_lengths[chunk] + 1e-9) + settings.overhead
            length = length_in_row(text, start, chunk_lengths[chunk], settings)
            if length > 0:
                seed_rng(rng, settings.key, sample_indices[i], number, 0)
                limit = row.shape[1] - reserved
                offset = fill_chunk(
                    row, offset, limit, number, text, unit_start, start, length, rng, scratch, length_table, settings
                )  # fmt: skip
            start += chunk_lengths[chunk]
            chunk += 1
