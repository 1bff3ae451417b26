"""Rows of whole documents: consecutive sentences packed into rows, each sentence in exactly one row.

A document goes into the row of the one before if there is room, else it begins the next. A row is known by the number
of the document that begins it, 8 bytes; the others follow from the lengths of documents, which are mapped. So an
index of 65 million sentences has tens of megabytes, and no file. Documents without text, or longer than the longest
sentence, are in no row: they are counted and left out, never cut.

The sentences may be in two datasets, the same texts by two tokenizers. A document is then left out if either of its
lengths is out of range, and its two pieces follow each other.

The price: rows are not full. Each lacks about half of a sentence, so they should hold several.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from data_utils.common.errors import DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.sources import sources_of

_CHUNK = 1 << 20  # documents
_ROWS, _USED, _EMPTY, _TOO_LONG = range(4)  # of the state of `_pack_chunk`

# Numba's cache notices changes in a function's own file only: these functions call into no other one.
#
# `sides` below is the lengths of documents in both vocabularies, and of what in them is no text (the eos at their
# ends). With one vocabulary both are the same. `longest` counts tokens of text, `overhead` what a row adds to them.


@njit(cache=True, error_model="numpy", nogil=True)
def _cost(sides, document, longest, overhead):
    """Row tokens of a document; 0 for one without text, -1 for one that is too long."""
    first_lengths, first_ends, second_lengths, second_ends = sides
    first = np.int64(first_lengths[document]) - first_ends
    second = np.int64(second_lengths[document]) - second_ends
    if first <= 0 or second <= 0:
        return np.int64(0)
    if first > longest or second > longest:
        return np.int64(-1)
    return first + second + overhead


@njit(cache=True, error_model="numpy", nogil=True)
def _pack_chunk(sides, first_document, longest, overhead, row_length, state, begins):
    """Continue the rows with a chunk of documents; write which documents begin one. Returns how many do."""
    count = 0
    for document in range(len(sides[0])):
        cost = _cost(sides, document, longest, overhead)
        if cost <= 0:
            state[_EMPTY if cost == 0 else _TOO_LONG] += 1
            continue
        if state[_ROWS] == 0 or state[_USED] + cost > row_length:
            begins[count] = first_document + document
            count += 1
            state[_ROWS] += 1
            state[_USED] = 0
        state[_USED] += cost
    return count


@njit(cache=True, error_model="numpy", nogil=True)
def _count_sentences(sides, longest, overhead, begins, windows, rows, counts):
    """The sentences of row windows[i], in counts[rows[i]]."""
    for i in range(windows.shape[0]):
        for document in range(begins[windows[i]], begins[windows[i] + 1]):
            counts[rows[i]] += _cost(sides, document, longest, overhead) > 0


@njit(cache=True, error_model="numpy", nogil=True)
def _list_pieces(pointers, shifts, texts, sides, longest, overhead, begins, windows, rows, places, pieces):
    """First token and length of each piece of row windows[i], into pieces [2, *] from places[rows[i]] on."""
    for i in range(windows.shape[0]):
        at = places[rows[i]]
        for document in range(begins[windows[i]], begins[windows[i] + 1]):
            if _cost(sides, document, longest, overhead) <= 0:
                continue
            pieces[0, at] = pointers[0][document] >> shifts[0]
            pieces[1, at] = np.int64(sides[0][document]) - sides[1]
            if texts > 1:
                pieces[0, at + 1] = pointers[1][document] >> shifts[1]
                pieces[1, at + 1] = np.int64(sides[2][document]) - sides[3]
            at += texts


@njit(cache=True, error_model="numpy", nogil=True)
def _copy_pieces(tokens, numbers, pieces, positions, out):
    """Copy the tokens of pieces."""
    for i in range(numbers.shape[0]):
        number = numbers[i]
        first, start, length = pieces[0, number], positions[number], pieces[1, number]
        source, target = tokens[first : first + length], out[start : start + length]
        for k in range(len(source)):  # shorter than the piece only where the index is damaged
            target[k] = source[k]


class SentenceIndex:
    """The rows of a dataset, or of a pair of datasets with the same documents. See the top of this file.

    Args:
        longest: tokens of text of a sentence, at most, in either dataset.
        overhead: tokens of a row that a sentence needs beyond its text in both vocabularies.
        row_length: tokens of a row; the longest sentence fits.
        decoder_dataset: the same texts by the decoder's tokenizer; None: one dataset serves both.
    Attributes:
        num_windows: rows. num_sentences: documents in them. num_tokens: their tokens, of `dataset`.
        empty, too_long: documents left out.
    Raises: DataError if no document is left, or the two datasets do not hold the same texts.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        longest: int,
        overhead: int,
        row_length: int,
        decoder_dataset: IndexedDataset | None = None,
    ) -> None:
        assert 2 * longest + overhead <= row_length
        if decoder_dataset is not None:
            _require_same_documents(dataset, decoder_dataset)
        self.dataset = dataset
        self.decoder_dataset = decoder_dataset
        self.longest, self.overhead, self.row_length = longest, overhead, row_length
        self.datasets = (dataset,) if decoder_dataset is None else (dataset, decoder_dataset)
        self._ends = [_end_length(each) for each in self.datasets]
        shifts = [np.int64(each.dtype.itemsize.bit_length() - 1) for each in self.datasets]
        self._shifts = shifts[0], shifts[-1]
        self.num_tokens = 0
        self._begins, state = self._pack()
        self.num_windows = len(self._begins) - 1
        self.empty, self.too_long = int(state[_EMPTY]), int(state[_TOO_LONG])
        self.num_sentences = len(dataset) - self.empty - self.too_long
        if not self.num_sentences:
            raise DataError(
                f"dataset {dataset.prefix} has no sentence: of {len(dataset)} documents {self.too_long} have more than "
                f"{longest} tokens and {self.empty} none; raise data.sequence_length, or build it with one sentence as "
                "a document."
            )

    def __reduce__(self) -> tuple[type, tuple[IndexedDataset, int, int, int, IndexedDataset | None]]:
        # Reopen the arrays instead of copying them.
        sizes = self.longest, self.overhead, self.row_length
        return type(self), (self.dataset, *sizes, self.decoder_dataset)

    def __str__(self) -> str:
        """Number of sentences and rows, and of the documents left out, for the log."""
        left_out = self.empty + self.too_long
        return (
            f"{self.dataset.prefix}: {self.num_sentences} sentences in {self.num_windows} rows of {self.row_length} "
            f"tokens ({self.num_sentences / self.num_windows:.1f} a row); left out: {self.too_long} documents of more "
            f"than {self.longest} tokens and {self.empty} without text, {left_out / len(self.dataset):.3%} of all"
        )

    def _pack(self) -> tuple[np.ndarray, np.ndarray]:
        """The first document of each row and the number of all documents, int64 [rows + 1], and the last state."""
        state, scratch, begins = np.zeros(4, np.int64), np.empty(_CHUNK, np.int64), []
        for first in range(0, len(self.dataset), _CHUNK):
            lengths = [each.read_lengths(first, first + _CHUNK) for each in self.datasets]
            sides = self._sides(lengths)
            texts = [side.astype(np.int64) - end for side, end in zip(lengths, self._ends, strict=True)]
            kept = np.logical_and.reduce([(text > 0) & (text <= self.longest) for text in texts])
            self.num_tokens += int(lengths[0][kept].sum(dtype=np.int64))
            sizes = self.longest, self.overhead, self.row_length
            begins.append(scratch[: _pack_chunk(sides, first, *sizes, state, scratch)].copy())
        return np.concatenate([*begins, [len(self.dataset)]]).astype(np.int64, copy=False), state

    def _sides(self, lengths: Sequence[np.ndarray]) -> tuple[np.ndarray, int, np.ndarray, int]:
        return lengths[0], self._ends[0], lengths[-1], self._ends[-1]

    def _geometry(self) -> tuple[tuple[np.ndarray, int, np.ndarray, int], int, int, np.ndarray]:
        """Arguments of compiled functions: lengths and ends of the texts, longest document, overhead, rows' begins."""
        sides = self._sides([each.lengths for each in self.datasets])
        return sides, self.longest, self.overhead, self._begins

    def prefetch(self, windows: np.ndarray) -> None:
        """Let the kernel start to read rows, int64 [k], that will be gathered soon."""
        begins = self._begins[windows]
        for each, shift in zip(self.datasets, self._shifts, strict=False):
            each.prefetch(each.pointers[begins] >> shift, self.row_length // 2)

    @staticmethod
    def gather_all(
        parts: Sequence[tuple[Any, np.ndarray, np.ndarray]],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The sentences of rows of one or several datasets, as `gather` in sampler.py gives the pieces of windows.

        Args: parts: a SentenceIndex, its rows int64 [k], their places int64 [k] in the batch; together all once.
        Returns: tokens int32 [all pieces], piece lengths int64 [pieces], pieces of each place int64. With two datasets
            the pieces are the encoder's and the decoder's by turns.
        """
        index: SentenceIndex
        counts = np.zeros(sum(len(rows) for _, _, rows in parts), np.int64)
        for index, windows, rows in parts:
            assert not len(windows) or (windows.min() >= 0 and windows.max() < index.num_windows)
            _count_sentences(*index._geometry(), windows, rows, counts)
        texts = len(parts[0][0].datasets)
        counts *= texts
        places = np.cumsum(counts) - counts
        pieces = np.empty((2, counts.sum()), np.int64)
        for index, windows, rows in parts:
            pointers = index.datasets[0].pointers, index.datasets[-1].pointers
            where = windows, rows, places, pieces
            _list_pieces(pointers, index._shifts, texts, *index._geometry(), *where)
        positions = np.concatenate([[0], np.cumsum(pieces[1])])
        out = np.empty(positions[-1], np.int32)
        for index, _, rows in parts:
            numbers = _ranges(places[rows], counts[rows])
            for text, each in enumerate(index.datasets):
                _copy(each, numbers[text::texts], pieces, positions, out)
        return out, pieces[1], counts


def _require_same_documents(first: IndexedDataset, second: IndexedDataset) -> None:
    """Raise DataError unless two datasets have as many documents, of sources that are named and sized alike.

    Paths may differ, since a build may have been made elsewhere. An adopted dataset names no sources.
    """
    difference = _first_difference(first.manifest, second.manifest)
    if len(first) == len(second) and difference is None:
        return
    raise DataError(
        f"dataset {first.prefix} has {len(first)} documents and its decoder's {second.prefix} {len(second)}, "
        f"{difference or 'of equal sources'}; both must hold the same texts: build them from the same files with the "
        "same options, the tokenizer apart."
    )


def _first_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """The first difference between the sources of two manifests, in words; None if they are of the same texts."""
    if first.get("adopted") or second.get("adopted"):
        return None
    sources = [
        [f"{Path(path).name} ({size} bytes)" for path, size in sources_of(manifest)]
        for manifest in (first, second)
    ]
    for number, (a, b) in enumerate(zip_longest(*sources, fillvalue="none")):
        if a != b:
            return f"and source {number} is {a} of the one and {b} of the other"
    for key in ("split", "text_key", "text_split"):
        a, b = json.dumps(first.get(key)), json.dumps(second.get(key))
        if a != b:
            return f"and {key} is {a} of the one and {b} of the other"
    return None


def _end_length(dataset: IndexedDataset) -> int:
    """1 if the documents end with eos. Those of an adopted dataset may; then eos counts, and the objective drops it."""
    return int(bool(dataset.manifest.get("documents_end_with_eos")))


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The integers starts[i], ..., starts[i] + counts[i] - 1 for each i, one after the other."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def _copy(
    dataset: IndexedDataset, numbers: np.ndarray, pieces: np.ndarray, positions: np.ndarray, out: np.ndarray
) -> None:
    """Copy the pieces of these numbers, int64 [k], from their dataset."""
    if isinstance(dataset.tokens, np.ndarray):
        _copy_pieces(dataset.tokens, numbers, pieces, positions, out)
        return
    for number in numbers.tolist():  # not mapped: one read for each sentence
        first, length = pieces[:, number].tolist()
        out[positions[number] : positions[number] + length] = dataset.tokens[first : first + length]
