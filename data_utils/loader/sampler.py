"""Shuffled windows over a dataset without shuffle arrays: every sample is a pure function of its number.

`permute` is a keyed permutation of [0, n) computed point by point, so that "the i-th sample of this epoch" needs no
array, no index file and no state. `WindowIndex` is the plan of sequence packing: it cuts a document stream
into windows of equal cost and finds the documents of a window by a search in the mapped index; objectives write them
into a row (`fill_chunks`).

An access takes O(1) memory. Where long and short documents are mixed, it takes two or three page reads from the index;
in an index sorted by length, O(log documents). Windows are fixed by position, so every epoch has the same windows in
another order.

Source of the permutation: generalized Feistel rounds over [0, a) x [0, b) and cycle walking, Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from data_utils.common.compiler import njit
from data_utils.common.errors import ConfigError
from data_utils.dataset.indexed_dataset import IndexedDataset

_U64 = np.uint64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 4  # pairs of half rounds
_GUESSES = 3  # each about as far off as the square root of the one before
PHASE_BITS = 40  # of a block's number in a key; the number of its phase is in the bits above
BLOCK_ORDER = 0  # purpose of keys for the order within blocks; the windows of corpus c have the purpose c + 1

# All compiled functions of sampling are in this file: numba's cache notices a change of the file of a cached function,
# but not of another file that it calls into. None has a signature: it would be compiled, or its code loaded, when this
# file is imported, by commands that read no sample too. So Python passes keys and seeds as np.uint64: without a
# signature an int is an int64.


# ---- keyed permutation ----
@njit(error_model="numpy")
def _mix(x):
    """SplitMix64's finaliser: uint64 -> uint64, a bijection that spreads every bit."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


@njit(error_model="numpy")
def _below(limit, bits):
    """Random bits scaled to [0, limit) for limit < 2^32, without a slow division."""
    return ((bits >> _U64(32)) * limit) >> _U64(32)


@njit(cache=True, error_model="numpy")
def derive_key(seed, purpose, number):
    """A key for `permute` from a uint64 and two integers in [0, 2^63); different triples give unrelated keys."""
    key = _mix(_U64(seed) + _GOLDEN)
    key = _mix(key ^ _U64(purpose))
    return _mix((key + _GOLDEN) ^ _U64(number))


@njit(error_model="numpy")
def _domain(size):
    """Rows and columns of the smallest domain near a square that holds [0, size)."""
    rows = _U64(np.sqrt(np.float64(size)))
    # The square root in float64 may be too small. Both factors stay near sqrt(size) < 2^31, as `_below` requires.
    while rows * rows < size:
        rows += _U64(1)
    return rows, (size + rows - _U64(1)) // rows


@njit(cache=True, error_model="numpy")
def permute(index, n, key):
    """The image of `index` under the permutation of [0, n) that `key` (uint64) selects, int64.

    Requires 0 <= index < n < 2^62. The domain barely exceeds n, so cycle walking is rare.
    """
    size = _U64(n)
    rows, columns = _domain(size)
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
        # Cycle walking: a value outside [0, n) is permuted again. The walk ends, since its cycle comes back to `index`.
        if value < size:
            return np.int64(value)


@njit(cache=True, error_model="numpy")
def unpermute(image, n, key):
    """The inverse of `permute`: the index of which `image` is the image, int64."""
    size = _U64(n)
    rows, columns = _domain(size)
    value = _U64(image)
    while True:
        left = value // columns
        right = value % columns
        round_key = _U64(key) + _U64(2 * _ROUNDS) * _GOLDEN
        for _ in range(_ROUNDS):
            # Unsigned numbers wrap below zero, so the modulus is added first where the difference would be negative.
            shift = _below(columns, _mix(left ^ round_key))
            right = right - shift if right >= shift else right + columns - shift
            round_key -= _GOLDEN
            shift = _below(rows, _mix(right ^ round_key))
            left = left - shift if left >= shift else left + rows - shift
            round_key -= _GOLDEN
        value = left * columns + right
        if value < size:
            return np.int64(value)


@njit(cache=True, error_model="numpy", nogil=True)
def block_table(starts, block_size, key):
    """The corpus of each sample of a block, and how many samples of that corpus precede it: two int64 [block_size]."""
    corpora = np.empty(block_size, np.int64)
    ranks = np.empty(block_size, np.int64)
    seen = np.zeros(starts.shape[0] - 1, np.int64)
    # The slots of corpus c are starts[c] to starts[c + 1] of a block, so every block has exact quotas, in a
    # shuffled order.
    for position in range(block_size):
        slot = permute(position, block_size, key)
        corpus = np.searchsorted(starts, slot, side="right") - 1
        corpora[position] = corpus
        ranks[position] = seen[corpus]
        seen[corpus] += 1
    return corpora, ranks


@njit(cache=True, error_model="numpy", nogil=True)
def deal_samples(
    seed, indices, phase, first_sample, samples_before, starts, block, block_corpora, block_ranks
):
    """Corpus and ordinal in it, each int64 [B], of a phase's samples; see mixture.py.

    Args:
        phase, first_sample: the phase's number and its first sample, from which its blocks count.
        samples_before: int64 [corpora], samples of each corpus in the phases before it.
        block: the one whose table `block_table` made; it serves the samples of that block.
    Returns: corpora, ordinals, and number and table of the last block.
    """
    corpora = np.empty(indices.shape[0], np.int64)
    ordinals = np.empty(indices.shape[0], np.int64)
    block_size = starts[starts.shape[0] - 1]
    for i in range(indices.shape[0]):
        index = indices[i] - first_sample
        if index // block_size != block:
            block = index // block_size
            # Phase 0 leaves the key as it is without phases, so a run that gets a second phase keeps the
            # samples of its first.
            key = derive_key(seed, BLOCK_ORDER, phase << PHASE_BITS | block)
            block_corpora, block_ranks = block_table(starts, block_size, key)
        position = index - block * block_size
        corpus = block_corpora[position]
        corpora[i] = corpus
        # A closed form instead of counters: a run resumes at any sample without state.
        ordinals[i] = (
            samples_before[corpus] + block * (starts[corpus + 1] - starts[corpus]) + block_ranks[position]
        )
    return corpora, ordinals, block, block_corpora, block_ranks


@njit(cache=True, error_model="numpy", nogil=True)
def place_windows(seed, corpora, ordinals, num_windows):
    """Epoch and window, each int64 [B], of samples by corpus and ordinal; num_windows: int64 [corpora]."""
    epochs = np.empty(corpora.shape[0], np.int64)
    windows = np.empty(corpora.shape[0], np.int64)
    for i in range(corpora.shape[0]):
        corpus, count = corpora[i], num_windows[corpora[i]]
        epochs[i] = ordinals[i] // count
        windows[i] = permute(ordinals[i] % count, count, derive_key(seed, corpus + 1, epochs[i]))
    return epochs, windows


@njit(cache=True, error_model="numpy", nogil=True)
def _cost(pointers, shift, overhead, document):
    """The summed cost of all documents before this one, in tokens; see `WindowIndex`."""
    return (pointers[document] >> shift) + overhead * document


@njit(cache=True, error_model="numpy", nogil=True)
def _guess_document(pointers, shift, num_tokens, overhead, start):
    """A document near the cost `start`: guessed from the mean cost of a document, then corrected."""
    num_documents = pointers.shape[0]
    # A guess and its corrections touch one or two pages of the mapped index, where a binary search touches
    # about twenty.
    mean = (num_tokens + overhead * num_documents) / num_documents
    document = np.int64(0)
    for _ in range(_GUESSES):
        document += np.int64((start - _cost(pointers, shift, overhead, document)) / mean)
        document = min(max(document, np.int64(0)), np.int64(num_documents - 1))
    return document


@njit(cache=True, error_model="numpy", nogil=True)
def _first_document(pointers, shift, num_tokens, overhead, start):
    """The last document that begins at or before the cost `start`.

    Searches outward from a guess in doubling steps, then by halves. This is nearly always within one page of the
    index; a search by halves from the ends would read another page at almost every step.
    """
    low = _guess_document(pointers, shift, num_tokens, overhead, start)
    high = low + 1
    step = np.int64(1)
    while low > 0 and _cost(pointers, shift, overhead, low) > start:
        high = low
        low = max(low - step, np.int64(0))
        step *= 2
    while high < pointers.shape[0] and _cost(pointers, shift, overhead, high) <= start:
        low = high
        high = min(high + step, pointers.shape[0])
        step *= 2
    while high - low > 1:
        middle = (low + high) >> 1
        if _cost(pointers, shift, overhead, middle) <= start:
            low = middle
        else:
            high = middle
    return low


@njit(cache=True, error_model="numpy", nogil=True)
def _first_tokens(pointers, shift, num_tokens, overhead, starts):
    """A token at or shortly before the first one after each cost of starts, int64 [B]."""
    tokens = np.empty(starts.shape[0], np.int64)
    for i in range(starts.shape[0]):
        start = starts[i]
        document = _first_document(pointers, shift, num_tokens, overhead, start)
        tokens[i] = max(pointers[document] >> shift, start - overhead * (document + 1))
    return tokens


@njit(cache=True, error_model="numpy", nogil=True)
def _window_chunks(pointers, shift, num_tokens, overhead, start, stop, chunks):
    """Write the token ranges of the cost range [start, stop) into chunks [*, 2]; return their number."""
    num_documents = pointers.shape[0]
    count = 0
    document = _first_document(pointers, shift, num_tokens, overhead, start)
    begin = pointers[document] >> shift
    while document < num_documents and begin + overhead * document < stop:
        end = pointers[document + 1] >> shift if document + 1 < num_documents else num_tokens
        lag = overhead * (document + 1)  # cost minus token offset, for the tokens of this document
        chunk_start = max(begin, start - lag)
        chunk_stop = min(end, stop - lag)
        if chunk_stop > chunk_start:
            chunks[count, 0] = chunk_start
            chunks[count, 1] = chunk_stop
            count += 1
        document += 1
        begin = end
    return count


@njit(cache=True, error_model="numpy", nogil=True)
def _plan_chunks(
    pointers, shift, num_tokens, overhead, starts, stops, samples, first_tokens, chunk_lengths, counts
):
    """Where the tokens of the costs [starts[i], stops[i]) begin and how long their chunks are, of sample samples[i]."""
    chunks = np.empty((chunk_lengths.shape[1], 2), np.int64)
    for i in range(starts.shape[0]):
        sample = samples[i]
        count = _window_chunks(pointers, shift, num_tokens, overhead, starts[i], stops[i], chunks)
        # A window that lies within a document's overhead has no token.
        first_tokens[sample] = chunks[0, 0] if count else 0
        for chunk in range(count):
            chunk_lengths[sample, chunk] = chunks[chunk, 1] - chunks[chunk, 0]
        counts[sample] = count


@njit(cache=True, error_model="numpy", nogil=True)
def _concatenated_lengths(chunk_lengths, counts):
    """Chunk lengths one after the other, and the position of each sample's tokens, int64 [samples + 1]."""
    packed = np.empty(counts.sum(), np.int64)
    positions = np.zeros(counts.shape[0] + 1, np.int64)
    number = 0
    for sample in range(counts.shape[0]):
        total = np.int64(0)
        for chunk in range(counts[sample]):
            packed[number] = chunk_lengths[sample, chunk]
            total += packed[number]
            number += 1
        positions[sample + 1] = positions[sample] + total
    return packed, positions


@njit(cache=True, error_model="numpy", nogil=True)
def _copy_tokens(tokens, first_tokens, positions, samples, out):
    """Copy the tokens of samples. The chunks of a window adjoin, so a sample is one range of the dataset."""
    for i in range(samples.shape[0]):
        start, stop = positions[samples[i]], positions[samples[i] + 1]
        first = first_tokens[samples[i]]
        source, target = tokens[first : first + stop - start], out[start:stop]
        # A loop over two slices from 0 on vectorizes; indices that begin elsewhere do not, and a slice
        # assignment counts references.
        for k in range(stop - start):
            target[k] = source[k]


class WindowIndex:
    """The windows of a dataset: window w covers the costs [w * window_length, (w + 1) * window_length).

    A document costs its tokens plus `document_overhead` positions before them for what an objective adds to each
    document ([CLS] and others), so that the chunks of a window with their additions fit `window_length`. A
    document that does not fit is cut and continues in the next window; each token is in exactly one window. Only
    the last window may be shorter.

    Raises: ConfigError for lengths that are out of range.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        window_length: int,
        document_overhead: int = 0,
        has_entities: bool = False,
    ) -> None:
        if document_overhead < 0 or window_length <= document_overhead:
            raise ConfigError(
                f"window_length ({window_length}) must exceed document_overhead ({document_overhead}), which must "
                "be >= 0; raise data.sequence_length."
            )
        self.dataset, self.has_entities = dataset, has_entities
        self.window_length = window_length
        self.document_overhead = document_overhead
        self.cost = dataset.num_tokens + document_overhead * dataset.num_documents
        self.num_windows = -(-self.cost // window_length)
        # A document has at least one token; the two more are those that the edges of the window cut.
        self.max_chunks = min(dataset.num_documents, window_length // (document_overhead + 1) + 2)
        self._shift = np.int64(dataset.dtype.itemsize.bit_length() - 1)

    def __reduce__(self) -> tuple[type, tuple[IndexedDataset, int, int, bool]]:
        # Reopen the arrays instead of copying them.
        return type(self), (self.dataset, self.window_length, self.document_overhead, self.has_entities)

    @property
    def _geometry(self) -> tuple[np.ndarray, np.int64, int, int]:
        """The arguments of the compiled search that describe the documents."""
        dataset = self.dataset
        return dataset.pointers, self._shift, dataset.num_tokens, self.document_overhead

    def costs(self, windows: Any) -> tuple[Any, Any]:
        """Where windows begin and end."""
        return windows * self.window_length, (windows + 1) * self.window_length

    def chunks(self, window: int) -> np.ndarray:
        """The token ranges of one window, int64 [chunks, 2], each [start, stop) within one document."""
        assert 0 <= window < self.num_windows
        chunks = np.empty((self.max_chunks, 2), np.int64)
        return chunks[: _window_chunks(*self._geometry, *self.costs(window), chunks)]

    def plan(
        self,
        starts: np.ndarray,
        stops: np.ndarray,
        samples: np.ndarray,
        first_tokens: np.ndarray,
        chunk_lengths: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """Write where the tokens of costs [starts[i], stops[i]) begin, and their chunks, for sample samples[i].

        Args: first_tokens, counts: int64 [samples]; chunk_lengths: int32 [samples, most chunks].
        """
        _plan_chunks(*self._geometry, starts, stops, samples, first_tokens, chunk_lengths, counts)

    def gather(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens of windows, int64 [B]; see `gather`."""
        windows = np.asarray(windows, np.int64)
        return self.gather_all([(self, windows, np.arange(len(windows)))])

    @staticmethod
    def gather_all(
        requests: Sequence[tuple[Any, np.ndarray, np.ndarray]],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `gather`, for several datasets: of each its index, windows int64 [k] and their samples int64 [k]."""
        for index, windows, _ in requests:
            assert not len(windows) or (windows.min() >= 0 and windows.max() < index.num_windows)
        return gather([(index, *index.costs(windows), samples) for index, windows, samples in requests])

    def prefetch(self, windows: np.ndarray) -> None:
        """Ask the kernel to read windows, int64 [k], that will be gathered soon."""
        self.prefetch_from(self.costs(windows)[0])

    def prefetch_from(self, starts: np.ndarray) -> None:
        """As `prefetch`, for a window's length from each of the costs `starts`, int64 [k]."""
        self.dataset.prefetch(_first_tokens(*self._geometry, starts), self.window_length)

    def text_end(self, start: int, stop: int) -> int:
        """The end of the last token in the costs [start, stop); start if there is none."""
        while stop > start:
            document = _first_document(*self._geometry, stop - 1)
            begin = int(self.dataset.pointers[document] >> self._shift) + self.document_overhead * document
            if stop > begin + self.document_overhead:
                return stop
            stop = begin
        return start


def gather(
    requests: Sequence[tuple[WindowIndex, np.ndarray, np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of ranges of one or several datasets, one after the other; each token is copied once.

    Args: requests: an index, starts and stops int64 [k] of costs at most a window apart, and the samples int64 [k] that
        they are, by their position in the result; together every sample once.
    Returns: tokens int32 [all chunks], chunk lengths int64 [chunks], chunks of each sample int64. Where the indexes
        have entities, [2, all chunks]: the tokens and their annotations, -1 = none.
    """
    num_samples = sum(len(request[-1]) for request in requests)
    first_tokens = np.empty(num_samples, np.int64)
    chunk_lengths = np.empty(
        (num_samples, max((request[0].max_chunks for request in requests), default=0)), np.int32
    )
    counts = np.zeros(num_samples, np.int64)
    for index, starts, stops, samples in requests:
        index.plan(starts, stops, samples, first_tokens, chunk_lengths, counts)
    packed, positions = _concatenated_lengths(chunk_lengths, counts)
    out = np.full((1 + any(request[0].has_entities for request in requests), positions[-1]), -1, np.int32)
    for index, _, _, samples in requests:
        for source, field in zip((index.dataset.tokens, index.dataset.entities), out, strict=False):
            if isinstance(source, np.ndarray):
                _copy_tokens(source, first_tokens, positions, samples, field)
                continue
            # Not mapped: one read for each window.
            for sample in samples.tolist() if source is not None else ():
                start, stop, first = (
                    int(positions[sample]),
                    int(positions[sample + 1]),
                    int(first_tokens[sample]),
                )
                field[start:stop] = source[first : first + stop - start]
    return out if len(out) > 1 else out[0], packed, counts
