"""Weighted corpora: global sample number -> (corpus, epoch, window), a pure function of seed and number.

Samples form blocks of BLOCK_SIZE. In every block each corpus has an exact quota of the samples (largest remainder), and
a keyed permutation, different for each block, decides which. The j-th sample of a corpus is window
`permute(j % num_windows)` of epoch `j // num_windows`. So each window comes exactly once in an epoch, for any batch
size, any number of ranks and any point of resumption. The state of a loader is one integer.

Where weights change with a phase of the run, blocks count from its first sample, and each corpus goes on with the
ordinal that the phases before it left: a corpus is one stream over all phases, and its epochs have no gap.

Where a batch must be of one corpus, samples are dealt as units of one batch each: sample s is in unit s // unit, blocks
are of units, and quotas are exact over units.

The price of exact quotas: weights are rounded to 1/BLOCK_SIZE, and a weight that rounds to 0 is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from data_utils.common.errors import ConfigError, DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.loader.corpus_streams import Axis, Stream
from data_utils.loader.sampler import (
    BLOCK_ORDER,
    PHASE_BITS,
    WindowIndex,
    block_table,
    deal_samples,
    derive_key,
    gather,
    place_windows,
)
from data_utils.loader.sentences import SentenceIndex

Index: TypeAlias = WindowIndex | SentenceIndex

BLOCK_SIZE = 4096
_MASK_64 = (1 << 64) - 1


def quotas(weights: Sequence[float], names: Sequence[object] = ()) -> np.ndarray:
    """Samples of each corpus in a block, int64 [corpora], by largest remainder; their sum is BLOCK_SIZE.

    Args: names: of the corpora, for errors.
    Raises: ConfigError for a weight that is negative or not finite, or too small for one sample, and if all are 0.
    """
    shares = np.asarray(weights, np.float64)
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(shares.sum())
    if not np.any(shares) or not is_finite or np.any(shares < 0):
        raise ConfigError(
            f"corpus weights are {list(weights)}; give numbers >= 0 with a finite sum, at least one of them positive."
        )
    takes_part = shares > 0
    shares = shares / shares.sum() * BLOCK_SIZE
    counts = np.floor(shares).astype(np.int64)
    largest_remainders = np.argsort(counts - shares, kind="stable")  # stable: ties go to the earlier corpus
    counts[largest_remainders[: BLOCK_SIZE - int(counts.sum())]] += 1
    if not counts[takes_part].all():
        corpus = int(np.argmin(np.where(takes_part, shares, np.inf)))
        name = f"the corpus {names[corpus]}" if names else f"a corpus of weight {weights[corpus]}"
        raise ConfigError(
            f"{name} has {shares[corpus] / BLOCK_SIZE:.2g} of the samples, but 1/{BLOCK_SIZE} is the least; raise its "
            "weight or its share of the tokens, or set it to 0."
        )
    return counts


def samples_of_corpora(seed: int, weights: Sequence[float], count: int, phase: int = 0) -> np.ndarray:
    """How many of a phase's first `count` samples are of each corpus, int64 [corpora]. Args: seed: of the mixture."""
    starts = np.concatenate([[0], np.cumsum(quotas(weights))])
    return np.diff(dealt_samples(seed, count, phase)[starts])


def dealt_samples(seed: int, count: int, phase: int = 0) -> np.ndarray:
    """How many of a phase's first `count` samples are in the first b slots of their block, int64 [BLOCK_SIZE + 1].

    The slots of a corpus are a range of as many as its quota, in the order of the corpora.
    """
    blocks, remaining = divmod(count, BLOCK_SIZE)
    # Whole blocks have all slots, so only the last, partial block needs its table.
    key = derive_key(np.uint64(seed & _MASK_64), BLOCK_ORDER, phase << PHASE_BITS | blocks)
    slots, _ = block_table(np.arange(BLOCK_SIZE + 1), BLOCK_SIZE, np.uint64(key))
    last = np.bincount(slots[:remaining], minlength=BLOCK_SIZE)
    return np.concatenate([[0], np.cumsum(blocks + last)])


def _epoch_key(seed: np.uint64, purpose: int, epoch: int) -> np.uint64:
    return np.uint64(derive_key(seed, purpose, epoch))


def epoch_tokens(index: Index) -> int:
    """Tokens that an epoch reads; for rows of sentences, without the documents that are left out."""
    return getattr(index, "num_tokens", index.dataset.num_tokens)


def epoch_windows(index: Index, length: int | None = None) -> int:
    """Samples that an epoch has, at another length of a window where one is given."""
    if length is None or not isinstance(index, WindowIndex) or index.window_length == length:
        return index.num_windows
    return -(-index.cost // length)


class Start(NamedTuple):
    """Where a phase of the run begins."""

    phase: int = 0  # phases before it
    first_sample: int = 0
    samples_before: tuple[int, ...] = ()  # of each corpus; () = none


_RUN_START = Start()


class Mixture:
    """Corpora mixed by weight (samples, not tokens), without end, from the start of a phase. Weight 0 = no samples.

    Args:
        corpora: each with its weight.
        seed: of the order of all samples.
        start: of the phase; by default that of the run.
        streams: of the corpora, where they have regions or the length changes: then no windows are read.
        unit: consecutive samples that are of one corpus; a phase begins with a whole one.
    Raises: ConfigError for bad weights; DataError for a corpus without windows, or for corpora whose
        manifests name different tokenizers.
    """

    def __init__(
        self,
        corpora: Sequence[tuple[Index, float]],
        seed: int,
        start: Start = _RUN_START,
        streams: Sequence[Stream] = (),
        unit: int = 1,
    ) -> None:
        self.corpora = list(corpora)
        self.unit = unit
        self.seed = seed
        self.start = start
        self.streams = list(streams)
        self.indexes = [index for index, _ in self.corpora]
        names = [index.dataset.prefix for index in self.indexes]
        self.quotas = quotas([weight for _, weight in self.corpora], names)
        for index in self.indexes:
            if not index.num_windows:
                raise DataError(
                    f"dataset {index.dataset.prefix} is too small for one sample; remove it or lower "
                    "data.sequence_length."
                )
        _require_one_tokenizer([index.dataset for index in self.indexes])
        self._starts = np.concatenate([[0], np.cumsum(self.quotas)])
        self._num_windows = np.array([index.num_windows for index in self.indexes], np.int64)
        self._samples_before = np.array(start.samples_before or [0] * len(self.corpora), np.int64)
        self._key_seed = np.uint64(seed & _MASK_64)
        key = derive_key(self._key_seed, BLOCK_ORDER, start.phase << PHASE_BITS)
        self._table = (0, *block_table(self._starts, BLOCK_SIZE, np.uint64(key)))  # of the last block used

    def __reduce__(self) -> tuple[type, tuple[list[tuple[Index, float]], int, Start, list[Stream], int]]:
        return type(self), (self.corpora, self.seed, self.start, self.streams, self.unit)

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where samples are: indices int64 [B], each of the phase -> corpus, epoch, window, each int64 [B]."""
        corpora, ordinals = self.deal(indices)
        return corpora, *place_windows(self._key_seed, corpora, ordinals, self._num_windows)

    def deal(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The corpus of each sample, and how many of its samples come before: int64 [B] each."""
        units, places = np.divmod(np.asarray(indices, np.int64) - self.start.first_sample, self.unit)
        assert not len(units) or units.min() >= 0
        table = self._table  # one read: another thread may replace it
        units_before = self._samples_before // self.unit
        corpora, ordinals, *table = deal_samples(
            self._key_seed, units, self.start.phase, 0, units_before, self._starts, *table
        )
        self._table = tuple(table)
        return corpora, ordinals * self.unit + places

    def after(self, count: int) -> tuple[int, ...]:
        """Samples of each corpus before the sample `count` of the phase, with those of former phases of its length."""
        return tuple((self._samples_before + self.dealt(count)).tolist())

    def dealt(self, count: int) -> np.ndarray:
        """How many of the phase's first `count` samples are of each corpus, int64 [corpora]."""
        weights = [weight for _, weight in self.corpora]
        units, rest = divmod(count, self.unit)
        samples = samples_of_corpora(self.seed, weights, units, self.start.phase) * self.unit
        if rest:  # of a unit that is not whole
            samples[self.deal(np.array([self.start.first_sample + count - 1]))[0]] += rest
        return samples

    def epochs(self, count: int) -> list[float]:
        """How often each corpus was read before the sample `count` of the phase, former phases included."""
        samples = self.after(count)
        if self.streams:
            return [stream.epochs(count) for stream, count in zip(self.streams, samples, strict=True)]
        return (np.array(samples) / self._num_windows).tolist()

    def following(self, first_sample: int, weights: Sequence[float], length: int | None = None) -> Mixture:
        """The mixture of the next phase, which begins at `first_sample`; its weights and its length may differ."""
        samples_before = self.after(first_sample - self.start.first_sample)
        indexes, streams = self.indexes, self.streams
        if streams and length not in (None, streams[0].length):
            streams = [
                stream.following(count, length) for stream, count in zip(streams, samples_before, strict=True)
            ]
            indexes = [
                WindowIndex(index.dataset, stream.length, stream.axis.overhead, index.has_entities)  # type: ignore[union-attr]
                for index, stream in zip(indexes, streams, strict=True)
            ]
            # Streams carry on where they are by position, so ordinals count from 0 again.
            samples_before = ()
        start = Start(self.start.phase + 1, first_sample, samples_before)
        return Mixture(list(zip(indexes, weights, strict=True)), self.seed, start, streams, self.unit)

    def as_streams(self, region: int) -> Mixture:
        """The same corpora with regions of `region` costs, 0 = none, and lengths that may change."""
        streams = []
        for corpus, index in enumerate(self.indexes):
            assert isinstance(index, WindowIndex)
            key = functools.partial(_epoch_key, self._key_seed, corpus + 1)
            axis = Axis(index.cost, region, index.document_overhead, key, index.text_end)
            streams.append(Stream(axis, index.window_length))
        return Mixture(self.corpora, self.seed, self.start, streams, self.unit)

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens of samples, indices int64 [B], in their order.

        Returns: tokens int32 [all chunks], chunk lengths int64 [chunks], chunks per sample int64 [B].
        """
        if self.streams:
            return self._fetch_ranges(indices)
        corpora, _, windows = self.locate(indices)
        return type(self.indexes[0]).gather_all(self._by_corpus(corpora, windows))

    def _ranges(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ranges of the corpora, int64 [ranges, 3]: corpus, start, stop; how many each sample has, int64 [B]."""
        corpora, ordinals = self.deal(indices)
        samples = [
            [(corpus, start, stop) for start, stop in self.streams[corpus].sample(ordinal)[1]]
            for corpus, ordinal in zip(corpora.tolist(), ordinals.tolist(), strict=True)
        ]
        ranges = np.array([row for ranges in samples for row in ranges], np.int64).reshape(-1, 3)
        return ranges, np.array([len(ranges) for ranges in samples], np.int64)

    def _fetch_ranges(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ranges, counts = self._ranges(indices)
        requests = []
        for corpus, index in enumerate(self.indexes):
            numbers = np.flatnonzero(ranges[:, 0] == corpus)
            if len(numbers):
                requests.append((index, *np.ascontiguousarray(ranges[numbers, 1:].T), numbers))
        tokens, chunk_lengths, chunks = gather(requests)
        # A sample may lie in several ranges (at the boundary of regions); their chunks are added up.
        return tokens, chunk_lengths, np.add.reduceat(chunks, np.cumsum(counts) - counts)

    def prefetch(self, indices: np.ndarray) -> None:
        """Ask the kernel to read samples, indices int64 [B], that will be fetched soon.

        Worth its few microseconds a sample where the corpora do not fit in memory.
        """
        if self.streams:
            ranges, _ = self._ranges(indices)
            for corpus, index in enumerate(self.indexes):
                assert isinstance(index, WindowIndex)
                index.prefetch_from(np.ascontiguousarray(ranges[ranges[:, 0] == corpus, 1]))
            return
        corpora, _, windows = self.locate(indices)
        for index, corpus_windows, _ in self._by_corpus(corpora, windows):
            index.prefetch(corpus_windows)

    def _by_corpus(
        self, corpora: np.ndarray, windows: np.ndarray
    ) -> list[tuple[Index, np.ndarray, np.ndarray]]:
        """For each corpus: its index, its windows, and their samples, by position in the batch."""
        if len(self.indexes) == 1:
            return [(self.indexes[0], windows, np.arange(len(windows)))]
        by_corpus = []
        for corpus, index in enumerate(self.indexes):
            samples = np.flatnonzero(corpora == corpus)
            if len(samples):
                by_corpus.append((index, windows[samples], samples))
        return by_corpus


def _require_one_tokenizer(datasets: Sequence[IndexedDataset]) -> None:
    first: tuple[IndexedDataset, tuple[Any, Any]] | None = None
    for dataset in datasets:
        # An adopted dataset does not know its tokenizer.
        if dataset.manifest.get("adopted"):
            continue
        tokenizer = dataset.manifest.get("tokenizer") or {}
        identity = tokenizer.get("fingerprint"), dataset.manifest.get("eos")
        first = first or (dataset, identity)
        if identity != first[1]:
            raise DataError(
                f"datasets {first[0].prefix} and {dataset.prefix} were built with different tokenizers; "
                f"rebuild one of them."
            )


def batch_indices(
    consumed_samples: int, *, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> np.ndarray:
    """The samples of one data-parallel rank in one step, int64 [micro-batches, micro_batch_size].

    All ranks together take [consumed_samples, consumed_samples + global_batch_size), each sample once:
    micro-batch m of rank r starts at consumed_samples + (m * dp_size + r) * micro_batch_size.
    Raises: ConfigError if the global batch is not a whole number of micro-batches for every rank.
    """
    per_micro_batch = micro_batch_size * dp_size
    if per_micro_batch < 1 or global_batch_size < 1 or global_batch_size % per_micro_batch:
        raise ConfigError(
            f"global_batch_size ({global_batch_size}) must be a positive multiple of micro_batch_size "
            f"({micro_batch_size}) x data-parallel size ({dp_size}); choose a multiple of {per_micro_batch}."
        )
    assert 0 <= dp_rank < dp_size
    samples = np.arange(consumed_samples, consumed_samples + global_batch_size, dtype=np.int64)
    # [micro-batches, ranks, micro_batch_size]: a step has the same samples for any number of ranks.
    return samples.reshape(-1, dp_size, micro_batch_size)[:, dp_rank]
