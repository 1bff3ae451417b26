"""Rows of whole documents: consecutive sentences packed into rows, each sentence in exactly one row.

A document goes into the row of the one before if there is room, else it begins the next. A row is known by the number
of the document that begins it, 8 bytes; the others follow from the lengths of documents, which are mapped. So an
index of 65 million sentences has tens of megabytes, and no file. Documents without text, or longer than the longest
sentence, are in no row: they are counted and left out, never cut.

The sentences may be in two datasets, the same texts by two tokenizers. A document is then left out if either of its
lengths is out of range, and its two chunks follow each other.

The price: rows are not full. Each lacks about half of a sentence, so they should hold several.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.common.compiler import njit
from data_utils.common.errors import DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.sources import sources_of

_CHUNK = 1 << 20  # documents
_ROWS, _USED, _EMPTY, _TOO_LONG = range(4)  # of the state of `_pack_chunk`

# Numba's cache notices changes in a function's own file only: these functions call into no other one.
#
# `lengths` below is, for both vocabularies, the lengths of documents and how many of the tokens are no text (the eos at
# their ends). With one vocabulary both are the same. `longest` counts tokens of text, `overhead` what a row adds to
# them. A batch has rows `windows` of the dataset, and row windows[i] is its sample samples[i].


@njit(cache=True, error_model="numpy", nogil=True)
def _cost(lengths, document, longest, overhead):
    """Row tokens of a document; 0 for one without text, -1 for one that is too long."""
    first_lengths, first_ends, second_lengths, second_ends = lengths
    first = np.int64(first_lengths[document]) - first_ends
    second = np.int64(second_lengths[document]) - second_ends
    # Both lengths decide together, so that the two datasets keep the same documents.
    if first <= 0 or second <= 0:
        return np.int64(0)
    if first > longest or second > longest:
        return np.int64(-1)
    return first + second + overhead


@njit(cache=True, error_model="numpy", nogil=True)
def _pack_chunk(lengths, first_document, longest, overhead, row_length, state, begins):
    """Continue the rows with a chunk of documents; write which documents begin one. Returns how many do."""
    count = 0
    for document in range(len(lengths[0])):
        cost = _cost(lengths, document, longest, overhead)
        if cost <= 0:
            state[_EMPTY if cost == 0 else _TOO_LONG] += 1
            continue
        # Greedy and sequential: where a row begins depends on all rows before it, so that rows cannot be found
        # by a search as windows are. The pass takes about half a second for 65 million documents.
        if state[_ROWS] == 0 or state[_USED] + cost > row_length:
            begins[count] = first_document + document
            count += 1
            state[_ROWS] += 1
            state[_USED] = 0
        state[_USED] += cost
    return count


@njit(cache=True, error_model="numpy", nogil=True)
def _count_sentences(lengths, longest, overhead, begins, windows, samples, counts):
    """Add the number of sentences of row windows[i] to counts[samples[i]]."""
    for i in range(windows.shape[0]):
        for document in range(begins[windows[i]], begins[windows[i] + 1]):
            counts[samples[i]] += _cost(lengths, document, longest, overhead) > 0


@njit(cache=True, error_model="numpy", nogil=True)
def _list_chunks(
    pointers, shifts, texts, lengths, longest, overhead, begins, windows, samples, first_chunks, chunks
):
    """First token and length of each chunk of row windows[i], into chunks [2, *] from first_chunks[samples[i]] on."""
    for i in range(windows.shape[0]):
        chunk = first_chunks[samples[i]]
        for document in range(begins[windows[i]], begins[windows[i] + 1]):
            if _cost(lengths, document, longest, overhead) <= 0:
                continue
            chunks[0, chunk] = pointers[0][document] >> shifts[0]
            chunks[1, chunk] = np.int64(lengths[0][document]) - lengths[1]
            if texts > 1:
                chunks[0, chunk + 1] = pointers[1][document] >> shifts[1]
                chunks[1, chunk + 1] = np.int64(lengths[2][document]) - lengths[3]
            chunk += texts


@njit(cache=True, error_model="numpy", nogil=True)
def _copy_chunks(tokens, numbers, chunks, positions, out):
    """Copy the tokens of chunks."""
    for i in range(numbers.shape[0]):
        number = numbers[i]
        first, start, length = chunks[0, number], positions[number], chunks[1, number]
        source, target = tokens[first : first + length], out[start : start + length]
        for k in range(len(source)):  # shorter than the chunk only where the index is damaged
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
        self._ends = [_end_length(dataset) for dataset in self.datasets]
        shifts = [np.int64(dataset.dtype.itemsize.bit_length() - 1) for dataset in self.datasets]
        self._shifts = shifts[0], shifts[-1]
        self.num_tokens = 0
        self._begins, state = self._pack()
        self.num_windows = len(self._begins) - 1
        self.empty, self.too_long = int(state[_EMPTY]), int(state[_TOO_LONG])
        self.num_sentences = len(dataset) - self.empty - self.too_long
        if not self.num_sentences:
            raise DataError(
                f"dataset {dataset.prefix} has no sentence: of {len(dataset)} documents, {self.too_long} have more "
                f"than {longest} tokens and {self.empty} have none; raise data.sequence_length, or rebuild the "
                "dataset with one sentence per document."
            )

    def __reduce__(self) -> tuple[type, tuple[IndexedDataset, int, int, int, IndexedDataset | None]]:
        # Reopen the arrays instead of copying them.
        sizes = self.longest, self.overhead, self.row_length
        return type(self), (self.dataset, *sizes, self.decoder_dataset)

    def __str__(self) -> str:
        """Number of sentences and rows, and of the documents left out, for the log."""
        skipped = self.empty + self.too_long
        return (
            f"{self.dataset.prefix}: {self.num_sentences} sentences in {self.num_windows} rows of {self.row_length} "
            f"tokens ({self.num_sentences / self.num_windows:.1f} per row); skipped: {self.too_long} documents with "
            f"more than {self.longest} tokens and {self.empty} without text, {skipped / len(self.dataset):.3%} of "
            "all"
        )

    def _pack(self) -> tuple[np.ndarray, np.ndarray]:
        """The first document of each row and the number of all documents, int64 [rows + 1], and the last state."""
        # By chunks, so that the lengths of the whole corpus are never in memory.
        state, scratch, begins = np.zeros(4, np.int64), np.empty(_CHUNK, np.int64), []
        for first in range(0, len(self.dataset), _CHUNK):
            lengths = [dataset.read_lengths(first, first + _CHUNK) for dataset in self.datasets]
            texts = [length.astype(np.int64) - end for length, end in zip(lengths, self._ends, strict=True)]
            is_used = np.logical_and.reduce([(text > 0) & (text <= self.longest) for text in texts])
            self.num_tokens += int(lengths[0][is_used].sum(dtype=np.int64))
            sizes = self.longest, self.overhead, self.row_length
            count = _pack_chunk(self._with_ends(lengths), first, *sizes, state, scratch)
            begins.append(scratch[:count].copy())
        # The end of the last row closes the list, so that row w is always begins[w] to begins[w + 1].
        return np.concatenate([*begins, [len(self.dataset)]]).astype(np.int64, copy=False), state

    def _with_ends(self, lengths: Sequence[np.ndarray]) -> tuple[np.ndarray, int, np.ndarray, int]:
        return lengths[0], self._ends[0], lengths[-1], self._ends[-1]

    def _geometry(self) -> tuple[tuple[np.ndarray, int, np.ndarray, int], int, int, np.ndarray]:
        """Arguments of compiled functions: lengths and ends of the texts, longest document, overhead, rows' begins."""
        lengths = self._with_ends([dataset.lengths for dataset in self.datasets])
        return lengths, self.longest, self.overhead, self._begins

    def prefetch(self, windows: np.ndarray) -> None:
        """Ask the kernel to read rows, int64 [k], that will be gathered soon."""
        begins = self._begins[windows]
        for dataset, shift in zip(self.datasets, self._shifts, strict=False):
            dataset.prefetch(dataset.pointers[begins] >> shift, self.row_length // 2)

    @staticmethod
    def gather_all(
        requests: Sequence[tuple[Any, np.ndarray, np.ndarray]],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The sentences of rows of one or several datasets, as `gather` in sampler.py gives the chunks of windows.

        Args: requests: a SentenceIndex, its rows int64 [k], and the samples int64 [k] that they are, by their position
            in the result; together every sample once.
        Returns: tokens int32 [all chunks], chunk lengths int64 [chunks], chunks of each sample int64. With two datasets
            the chunks are the encoder's and the decoder's by turns.
        """
        index: SentenceIndex
        counts = np.zeros(sum(len(samples) for _, _, samples in requests), np.int64)
        for index, windows, samples in requests:
            assert not len(windows) or (windows.min() >= 0 and windows.max() < index.num_windows)
            _count_sentences(*index._geometry(), windows, samples, counts)
        texts = len(requests[0][0].datasets)
        counts *= texts
        first_chunks = np.cumsum(counts) - counts
        chunks = np.empty((2, counts.sum()), np.int64)
        for index, windows, samples in requests:
            pointers = index.datasets[0].pointers, index.datasets[-1].pointers
            _list_chunks(
                pointers, index._shifts, texts, *index._geometry(), windows, samples, first_chunks, chunks
            )
        positions = np.concatenate([[0], np.cumsum(chunks[1])])
        out = np.empty(positions[-1], np.int32)
        for index, _, samples in requests:
            numbers = _ranges(first_chunks[samples], counts[samples])
            for text, dataset in enumerate(index.datasets):
                _copy(dataset, numbers[text::texts], chunks, positions, out)
        return out, chunks[1], counts


def _require_same_documents(first: IndexedDataset, second: IndexedDataset) -> None:
    """Raise DataError unless two datasets have as many documents, of sources that are named and sized alike.

    Paths may differ, since a build may have been made elsewhere. An adopted dataset names no sources.
    """
    difference = _first_difference(first.manifest, second.manifest)
    if len(first) == len(second) and difference is None:
        return
    raise DataError(
        f"dataset {first.prefix} has {len(first)} documents but its decoder's dataset {second.prefix} has "
        f"{len(second)} ({difference or 'from the same sources'}); build both from the same files with the same "
        "options, except for the tokenizer."
    )


def _first_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """The first difference between the sources of two manifests, in words; None if they are of the same texts."""
    # Tokens of two tokenizers cannot be compared, so sources and options are; an adopted dataset records neither.
    if first.get("adopted") or second.get("adopted"):
        return None
    sources = [
        [f"{Path(path).name} ({size} bytes)" for path, size in sources_of(manifest)]
        for manifest in (first, second)
    ]
    for number, (a, b) in enumerate(zip_longest(*sources, fillvalue="none")):
        if a != b:
            return f"source {number} is {a} in one and {b} in the other"
    for key in ("split", "text_key", "text_split"):
        a, b = json.dumps(first.get(key)), json.dumps(second.get(key))
        if a != b:
            return f"{key} is {a} in one and {b} in the other"
    return None


def _end_length(dataset: IndexedDataset) -> int:
    """1 if the documents end with eos. Those of an adopted dataset may; then eos counts, and the objective drops it."""
    return int(bool(dataset.manifest.get("documents_end_with_eos")))


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The integers starts[i], ..., starts[i] + counts[i] - 1 for each i, one after the other."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def _copy(
    dataset: IndexedDataset, numbers: np.ndarray, chunks: np.ndarray, positions: np.ndarray, out: np.ndarray
) -> None:
    """Copy the chunks of these numbers, int64 [k], from their dataset."""
    if isinstance(dataset.tokens, np.ndarray):
        _copy_chunks(dataset.tokens, numbers, chunks, positions, out)
        return
    for number in numbers.tolist():  # not mapped: one read for each sentence
        first, length = chunks[:, number].tolist()
        out[positions[number] : positions[number] + length] = dataset.tokens[first : first + length]
