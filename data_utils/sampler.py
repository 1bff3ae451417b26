"""Shuffled windows over a dataset without shuffle arrays: every sample is a pure function of its number.

Two parts. `permute` is a keyed permutation of [0, n) computed point by point, so that "the i-th sample of
this epoch" needs no array, no index file and no state. `WindowIndex` cuts a document stream into windows of
equal cost and finds the documents of a window by binary search in the mapped index.

Costs: an access takes O(log documents) page reads from the index and O(1) memory. Windows are fixed by
position, so epochs visit the same windows in another order; they do not re-cut the documents.

Source of the permutation: generalised Feistel rounds over [0, a) x [0, b) and cycle walking, Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from data_utils.indexed_dataset import IndexedDataset
from megatron_lite.errors import ConfigError

_U64 = np.uint64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 4  # pairs of half rounds

# All compiled functions of sampling live in this file: numba notices a change of the file that holds a cached
# function, but not of another file that it calls into, and would go on with the old code.
#
# The integer functions have explicit signatures: a key beyond 2^63 that comes from Python is a uint64.


@njit("uint64(uint64)", cache=True, error_model="numpy")
def _mix(x):
    """SplitMix64's finaliser: uint64 -> uint64, a bijection that spreads every bit."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


@njit("uint64(uint64, uint64)", cache=True, error_model="numpy")
def _below(limit, bits):
    """Random bits scaled to [0, limit) for limit < 2^32, without a slow division."""
    return ((bits >> _U64(32)) * limit) >> _U64(32)


@njit("uint64(uint64, uint64, uint64)", cache=True, error_model="numpy")
def derive_key(seed, stream, number):
    """A uint64 key for `permute` from three integers in [0, 2^64); different triples give unrelated keys."""
    key = _mix(_U64(seed) + _GOLDEN)
    key = _mix(key ^ _U64(stream))
    return _mix((key + _GOLDEN) ^ _U64(number))


@njit("int64(int64, int64, uint64)", cache=True, error_model="numpy")
def permute(index, n, key):
    """The image of `index` under the permutation of [0, n) that `key` (uint64) selects, int64.

    Requires 0 <= index < n < 2^62. The domain rows x columns barely exceeds n, so cycle walking is rare.
    """
    size = _U64(n)
    rows = _U64(np.sqrt(np.float64(n)))
    while rows * rows < size:
        rows += _U64(1)
    columns = (size + rows - _U64(1)) // rows
    value = _U64(index)
    while True:
        left = value // columns
        right = value % columns
        round_key = _U64(key)
        for _ in range(_ROUNDS):
            round_key += _GOLDEN
            left += _below(rows, _mix(right ^ round_key))
            left -= rows if left >= rows else _U64(0)
            round_key += _GOLDEN
            right += _below(columns, _mix(left ^ round_key))
            right -= columns if right >= columns else _U64(0)
        value = left * columns + right
        if value < size:
            return np.int64(value)


@njit(cache=True, error_model="numpy", nogil=True)
def block_table(starts, block_size, key):
    """The corpus of each place of a block, and how many of its places come before: two int64 [block_size]."""
    corpora = np.empty(block_size, np.int64)
    ranks = np.empty(block_size, np.int64)
    seen = np.zeros(starts.shape[0] - 1, np.int64)
    for place in range(block_size):
        slot = permute(place, block_size, key)
        corpus = np.searchsorted(starts, slot, side="right") - 1
        corpora[place] = corpus
        ranks[place] = seen[corpus]
        seen[corpus] += 1
    return corpora, ranks


@njit(cache=True, error_model="numpy", nogil=True)
def epochs_and_windows(seed, corpora, ordinals, num_windows):
    """Epoch and window, two int64 [B], of the samples `ordinals` [B] of `corpora` [B]; see mixture.py."""
    epochs = np.empty(ordinals.shape[0], np.int64)
    windows = np.empty(ordinals.shape[0], np.int64)
    for i in range(ordinals.shape[0]):
        corpus = corpora[i]
        epochs[i] = ordinals[i] // num_windows[corpus]
        key = derive_key(seed, corpus + 1, epochs[i])
        windows[i] = permute(ordinals[i] % num_windows[corpus], num_windows[corpus], key)
    return epochs, windows


@njit(cache=True, error_model="numpy", nogil=True)
def _window_pieces(pointers, shift, num_tokens, overhead, start, stop, pieces):
    """Write the token ranges of the cost range [start, stop) into pieces [*, 2]; return their number."""
    num_documents = pointers.shape[0]
    low, high = np.int64(0), np.int64(num_documents)
    while high - low > 1:  # the last document that begins at or before `start`
        middle = (low + high) >> 1
        if (pointers[middle] >> shift) + overhead * middle <= start:
            low = middle
        else:
            high = middle
    count = 0
    document = low
    begin = pointers[document] >> shift
    while document < num_documents and begin + overhead * document < stop:
        end = pointers[document + 1] >> shift if document + 1 < num_documents else num_tokens
        lag = overhead * (document + 1)  # cost minus token offset, for the tokens of this document
        piece_start = max(begin, start - lag)
        piece_stop = min(end, stop - lag)
        if piece_stop > piece_start:
            pieces[count, 0] = piece_start
            pieces[count, 1] = piece_stop
            count += 1
        document += 1
        begin = end
    return count


@njit(cache=True, error_model="numpy", nogil=True)
def _gather_rows(
    tokens,
    pointers,
    shift,
    overhead,
    window_length,
    windows,
    rows,
    out_tokens,
    out_lengths,
    out_counts,
    pieces,
):
    """Fill row rows[i] of the outputs from window windows[i]."""
    num_tokens = np.int64(tokens.shape[0])
    for i in range(windows.shape[0]):
        row = rows[i]
        start = windows[i] * window_length
        count = _window_pieces(pointers, shift, num_tokens, overhead, start, start + window_length, pieces)
        position = 0
        for piece in range(count):
            first, last = pieces[piece, 0], pieces[piece, 1]
            for token in range(first, last):
                out_tokens[row, position] = tokens[token]
                position += 1
            out_lengths[row, piece] = last - first
        out_counts[row] = count


@njit(cache=True, error_model="numpy", nogil=True)
def _pack_rows(row_tokens, row_lengths, counts):
    """Drop the unused ends of the rows: (tokens, piece lengths), each one-dimensional."""
    num_pieces = counts.sum()
    lengths = np.empty(num_pieces, np.int64)
    piece = 0
    for row in range(counts.shape[0]):
        for i in range(counts[row]):
            lengths[piece] = row_lengths[row, i]
            piece += 1
    tokens = np.empty(lengths.sum(), np.int32)
    position = 0
    for row in range(counts.shape[0]):
        length = row_lengths[row, : counts[row]].sum()
        tokens[position : position + length] = row_tokens[row, :length]
        position += length
    return tokens, lengths


class GatherBuffer:
    """Rows of scratch space into which windows of several datasets are gathered before they are packed."""

    def __init__(self, num_rows: int, window_length: int, max_pieces: int) -> None:
        self.tokens = np.empty((num_rows, window_length), np.int32)
        self.lengths = np.empty((num_rows, max_pieces), np.int64)
        self.counts = np.zeros(num_rows, np.int64)
        self.pieces = np.empty((max_pieces, 2), np.int64)

    def pack(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens int32, piece lengths int64, pieces of each row int64), row after row."""
        tokens, lengths = _pack_rows(self.tokens, self.lengths, self.counts)
        return tokens, lengths, self.counts


class WindowIndex:
    """The windows of a dataset: window w covers the costs [w * window_length, (w + 1) * window_length).

    A document costs its tokens plus `document_overhead` positions before them, which stand for what an
    objective adds to each document ([CLS] and the like), so that the pieces of a window with their
    additions fit `window_length`. A document that does not fit is cut and goes on in the next window; each
    token lies in exactly one window. Only the last window may be shorter.

    Raises: ConfigError for lengths that are out of range.
    """

    def __init__(self, dataset: IndexedDataset, window_length: int, document_overhead: int = 0) -> None:
        if document_overhead < 0 or window_length <= document_overhead:
            raise ConfigError(
                f"window_length ({window_length}) must exceed document_overhead ({document_overhead}), which "
                f"must not be negative; choose a longer sequence."
            )
        self.dataset = dataset
        self.window_length = window_length
        self.document_overhead = document_overhead
        cost = dataset.num_tokens + document_overhead * dataset.num_documents
        self.num_windows = -(-cost // window_length)
        self.max_pieces = min(dataset.num_documents, window_length // (document_overhead + 1) + 2)
        self._shift = np.int64(dataset.dtype.itemsize.bit_length() - 1)

    def __reduce__(self) -> tuple[type, tuple[IndexedDataset, int, int]]:
        return type(self), (
            self.dataset,
            self.window_length,
            self.document_overhead,
        )  # arrays reopen, never copy

    def pieces(self, window: int) -> np.ndarray:
        """The token ranges of one window, int64 [pieces, 2], each [start, stop) within one document."""
        assert 0 <= window < self.num_windows
        pieces = np.empty((self.max_pieces, 2), np.int64)
        start = window * self.window_length
        stop = start + self.window_length
        dataset = self.dataset
        count = _window_pieces(
            dataset.pointers, self._shift, dataset.num_tokens, self.document_overhead, start, stop, pieces
        )
        return pieces[:count]

    def gather(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens of windows, int64 [B], one after the other.

        Returns: tokens int32 [all pieces], piece lengths int64 [pieces], pieces per window int64 [B].
        """
        windows = np.asarray(windows, np.int64)
        buffer = GatherBuffer(len(windows), self.window_length, self.max_pieces)
        self.gather_into(buffer, windows, np.arange(len(windows)))
        return buffer.pack()

    def gather_into(self, buffer: GatherBuffer, windows: np.ndarray, rows: np.ndarray) -> None:
        """Gather windows, int64 [k], into the given rows, int64 [k], of a buffer that is large enough."""
        assert not len(windows) or (windows.min() >= 0 and windows.max() < self.num_windows)
        _gather_rows(
            self.dataset.tokens,
            self.dataset.pointers,
            self._shift,
            np.int64(self.document_overhead),
            np.int64(self.window_length),
            windows,
            rows,
            buffer.tokens,
            buffer.lengths,
            buffer.counts,
            buffer.pieces,
        )
