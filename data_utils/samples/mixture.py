"""Weighted corpora: global sample number -> (corpus, epoch, window), a pure function of seed and number.

Samples form blocks of BLOCK_SIZE. In every block each corpus has an exact quota of the places (largest remainder), and
a keyed permutation, different for each block, decides which. The j-th sample of a corpus is window
`permute(j % num_windows)` of epoch `j // num_windows`. So each window comes exactly once in an epoch, for any batch
size, any number of ranks and any point of resumption. The state of a loader is one integer.

The price of exact quotas: weights are rounded to 1/BLOCK_SIZE, and a weight that rounds to 0 is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from data_utils.base.errors import ConfigError, DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.samples.sampler import (
    CHOICE_STREAM,
    WindowIndex,
    block_table,
    derive_key,
    locate_samples,
)
from data_utils.samples.sentences import SentenceIndex

Index = WindowIndex | SentenceIndex

BLOCK_SIZE = 4096
_MASK_64 = (1 << 64) - 1


def quotas(weights: Sequence[float], block_size: int = BLOCK_SIZE) -> np.ndarray:
    """Places of each corpus in a block, int64 [corpora], by largest remainder; their sum is `block_size`.

    Raises: ConfigError for a weight that is not positive and finite, or too small for one place.
    """
    shares = np.asarray(weights, np.float64)
    if not len(shares) or not np.all(np.isfinite(shares) & (shares > 0)):
        raise ConfigError(f"corpus weights are {list(weights)}; give at least one, each a positive number.")
    shares = shares / shares.sum() * block_size
    places = np.floor(shares).astype(np.int64)
    largest_remainders = np.argsort(places - shares, kind="stable")  # stable: ties go to the earlier corpus
    places[largest_remainders[: block_size - int(places.sum())]] += 1
    if not places.all():
        raise ConfigError(
            f"corpus weight {weights[int(np.argmin(places))]} is below 1/{block_size} of the total; raise "
            f"it or leave the corpus out."
        )
    return places


def samples_of_corpora(seed: int, weights: Sequence[float], count: int) -> np.ndarray:
    """How many of the first `count` samples are of each corpus, int64 [corpora]. Args: seed: of the mixture."""
    places = quotas(weights)
    blocks, rest = divmod(count, BLOCK_SIZE)
    key = np.uint64(derive_key(np.uint64(seed & _MASK_64), CHOICE_STREAM, blocks))
    corpora, _ = block_table(np.concatenate([[0], np.cumsum(places)]), BLOCK_SIZE, key)
    return blocks * places + np.bincount(corpora[:rest], minlength=len(places))


class Mixture:
    """Corpora mixed by weight (samples, not tokens), without end.

    Raises: ConfigError for bad weights; DataError for a corpus without windows, or for corpora whose
    manifests name different tokenizers.
    """

    def __init__(self, corpora: Sequence[tuple[Index, float]], seed: int) -> None:
        self.corpora = list(corpora)
        self.seed = seed
        self.quotas = quotas([weight for _, weight in self.corpora])
        self.indexes = [index for index, _ in self.corpora]
        for index in self.indexes:
            if not index.num_windows:
                raise DataError(f"dataset {index.dataset.prefix} has no window; leave it out.")
        _require_one_tokenizer([index.dataset for index in self.indexes])
        self._starts = np.concatenate([[0], np.cumsum(self.quotas)])
        self._num_windows = np.array([index.num_windows for index in self.indexes], np.int64)
        self._key_seed = np.uint64(seed & _MASK_64)
        key = derive_key(self._key_seed, CHOICE_STREAM, 0)
        self._table = (0, *block_table(self._starts, BLOCK_SIZE, np.uint64(key)))  # of the last block used

    def __reduce__(self) -> tuple[type, tuple[list[tuple[Index, float]], int]]:
        return type(self), (self.corpora, self.seed)

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The places of samples: indices int64 [B], each >= 0 -> corpus, epoch, window, each int64 [B]."""
        indices = np.ascontiguousarray(indices, np.int64)
        assert not len(indices) or indices.min() >= 0
        table = self._table  # one read: another thread may replace it
        *located, block, corpora, ranks = locate_samples(
            self._key_seed, indices, self._starts, self._num_windows, *table
        )
        self._table = (block, corpora, ranks)
        return tuple(located)

    def fetch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens of samples, indices int64 [B], in their order.

        Returns: tokens int32 [all pieces], piece lengths int64 [pieces], pieces per sample int64 [B].
        """
        corpora, _, windows = self.locate(indices)
        return type(self.indexes[0]).gather_all(self._by_corpus(corpora, windows))

    def prefetch(self, indices: np.ndarray) -> None:
        """Let the kernel start to read samples, indices int64 [B], that will be fetched soon.

        Worth its few microseconds a sample where the corpora do not fit in memory.
        """
        corpora, _, windows = self.locate(indices)
        for index, its_windows, _ in self._by_corpus(corpora, windows):
            index.prefetch(its_windows)

    def _by_corpus(
        self, corpora: np.ndarray, windows: np.ndarray
    ) -> list[tuple[Index, np.ndarray, np.ndarray]]:
        """For each corpus: its index, its windows and their rows."""
        if len(self.indexes) == 1:
            return [(self.indexes[0], windows, np.arange(len(windows)))]
        rows = [np.flatnonzero(corpora == corpus) for corpus in range(len(self.indexes))]
        return [(index, windows[its], its) for index, its in zip(self.indexes, rows, strict=True) if len(its)]


def _require_one_tokenizer(datasets: Sequence[IndexedDataset]) -> None:
    first: tuple[IndexedDataset, tuple[Any, Any]] | None = None
    for dataset in datasets:
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
    return samples.reshape(-1, dp_size, micro_batch_size)[:, dp_rank]
