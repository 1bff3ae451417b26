"""RoBERTa's formats of inputs (arXiv:1907.11692, section 4.2), SEGMENT-PAIR aside: chunks of a window, cut or joined.

    sentences  SENTENCE-PAIR: two sentences of a document an Example, and one alone where their number is odd
    full       FULL-SENTENCES: all documents of a window in one Example, [SEP] between them
    document   DOC-SENTENCES: each document of a window an Example

In the last two an Example ends where a sentence does. A window ends anywhere, so the sentence that it cuts is an
Example of its own: no text is lost. In `sentences` one with few tokens joins a neighbour, such as the "e.g." that only
looks like one; this also bounds the special tokens of a row.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from data_utils.objectives.compiled import compiled, copy_range, entry_point


class Format(IntEnum):
    SENTENCES = 0
    FULL = 1
    DOCUMENT = 2


class Rule(NamedTuple):
    format: Format
    shortest: int  # tokens of a sentence that stands alone
    eos: int
    sep: int
    drops_eos: bool  # where SEP follows


class Output(NamedTuple):
    """The chunks as they are written. To an entry point it goes as a plain tuple, as in compiled.py."""

    tokens: np.ndarray  # int32
    marks: np.ndarray  # int32 [tokens]: 1 where the second sentence of a pair begins
    ends: np.ndarray  # int64: of each chunk
    written: np.ndarray  # int64 [2]: number of tokens, of chunks


@compiled
def _append(out, text):
    length = out.written[0]
    copy_range(out.tokens, length, length + len(text), text, 0)
    out.written[0] = length + len(text)


@compiled
def _end_chunk(out):
    """A chunk ends here, unless nothing has been written since the one before."""
    length, count = out.written
    if length > (out.ends[count - 1] if count > 0 else 0):
        out.ends[count] = length
        out.written[1] = count + 1


@compiled
def _last_end(text, eos, sentence_end):
    """The end of the last sentence; all of the text where it is not cut, 0 without one."""
    end = len(text)
    if text[end - 1] == eos:
        return end
    while end > 0 and not sentence_end[text[end - 1]]:
        end -= 1
    return end


@compiled
def _write_pairs(text, rule, sentence_end, out):
    """Two sentences a chunk."""
    base, begin, sentence, is_second = out.written[0], 0, 0, False
    for i in range(len(text)):
        if sentence_end[text[i]] and i + 1 - sentence >= rule.shortest and len(text) - i - 1 >= rule.shortest:
            sentence = i + 1
            is_second = not is_second
            if is_second:
                out.marks[base + sentence] = 1
            else:
                _append(out, text[begin:sentence])
                _end_chunk(out)
                begin = sentence
    _append(out, text[begin:])
    _end_chunk(out)


@compiled
def _write_document(text, rule, sentence_end, out):
    """A chunk up to the last end of a sentence, and one of the rest."""
    stop = _last_end(text, rule.eos, sentence_end)
    _append(out, text[:stop])
    _end_chunk(out)
    _append(out, text[stop:])
    _end_chunk(out)


@compiled
def _join_document(text, is_first, is_last, rule, sentence_end, out):
    """Go on with the chunk of the sample, after SEP; what the window's end cuts off is a chunk of its own."""
    stop = _last_end(text, rule.eos, sentence_end) if is_last else len(text)
    if not is_first and stop > 0:
        out.tokens[out.written[0]] = rule.sep
        out.written[0] += 1
    has_eos = rule.drops_eos and stop > 1 and text[stop - 1] == rule.eos
    _append(out, text[: stop - 1 if has_eos else stop])
    if stop < len(text):
        _end_chunk(out)
        _append(out, text[stop:])


@entry_point
def _recut(tokens, chunk_lengths, counts, rule, sentence_end, out, new_counts):
    """Write the chunks of all samples, and their number in each."""
    rule, out = Rule(*rule), Output(*out)
    chunk, start = 0, 0
    for i in range(len(counts)):
        before, is_first = out.written[1], True
        for number in range(counts[i]):
            text = tokens[start : start + chunk_lengths[chunk]]
            if len(text) > 0 and rule.format == Format.SENTENCES:
                _write_pairs(text, rule, sentence_end, out)
            elif len(text) > 0 and rule.format == Format.DOCUMENT:
                _write_document(text, rule, sentence_end, out)
            elif len(text) > 0:
                _join_document(text, is_first, number == counts[i] - 1, rule, sentence_end, out)
                is_first = False
            start += len(text)
            chunk += 1
        _end_chunk(out)
        new_counts[i] = out.written[1] - before


def recut(
    name: str,
    shortest: int,
    tokens: np.ndarray,
    chunk_lengths: np.ndarray,
    counts: np.ndarray,
    special: tuple[int, int],
    drops_eos: bool,
    sentence_end: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The chunks of samples in a format.

    Args: shortest: tokens of a sentence that stands alone. counts: chunks of each sample. special: the ids of eos and
        SEP. drops_eos: where SEP follows. sentence_end: bool, of each token of the vocabulary.
    Returns: int32 [2, tokens], the text and 1 where the second sentence of a pair begins; lengths and number of chunks.
    """
    longest = len(tokens) + len(chunk_lengths)  # a SEP for each chunk
    text, new_counts = np.zeros((2, longest), np.int32), np.empty(len(counts), np.int64)
    rule = Rule(Format[name.upper()], shortest, *special, drops_eos)
    out = Output(text[0], text[1], np.empty(longest, np.int64), np.zeros(2, np.int64))
    _recut(tokens, chunk_lengths, counts, tuple(rule), sentence_end, tuple(out), new_counts)
    length, count = out.written
    return np.ascontiguousarray(text[:, :length]), np.diff(out.ends[:count], prepend=0), new_counts
