"""Short samples: a share of the chunks is cropped to a uniform length, anywhere in them (`data.short_prob`).

BERT's and GLM's recipes have them, so that models meet lengths other than that of a row. A crop of n tokens has 2, 3,
... or n, all equally likely, and so has its position. Which chunks and which crop is a pure function of (seed, sample,
number of the chunk). The rest of the text is left out in this epoch, and the rest of the row is padding: rows have one
length. BERT's code cuts the rest into further samples; here a window is one sample.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_utils.common import random_streams
from data_utils.common.compiler import njit
from data_utils.common.random_streams import (
    below,
    chance,
    chance_threshold,
    new_rng,
    seed_rng,
    source_digest,
)
from data_utils.common.seeds import derive_seed

SHORTEST = 2  # tokens


def _entry_point(digest: int):
    @njit(cache=True, nogil=True)
    def crop(chunk_lengths, counts, samples, threshold, key, rng, is_kept):
        _ = digest  # part of the cache key
        chunk, start = 0, 0
        for i in range(len(samples)):
            for number in range(counts[i]):
                length = chunk_lengths[chunk]
                seed_rng(rng, key, samples[i], number, 0)
                if chance(rng, threshold) and length > SHORTEST:
                    size = SHORTEST + below(rng, length - SHORTEST + 1)
                    # Cropped, not cut into further chunks: each would need room for special tokens in a row of
                    # fixed length.
                    first = start + below(rng, length - size + 1)
                    for k in range(start, start + length):
                        is_kept[k] = first <= k < first + size
                    chunk_lengths[chunk] = size
                start += length
                chunk += 1

    return crop


_crop = _entry_point(source_digest(random_streams.__file__, str(Path(__file__))))


class Shortener:
    """Crops the chunks of samples with a probability. Args: seed: the run's."""

    def __init__(self, probability: float, seed: int) -> None:
        self._threshold = chance_threshold(probability)
        self._key = np.uint64(derive_seed(seed, "short samples"))

    def __call__(
        self, tokens: np.ndarray, chunk_lengths: np.ndarray, counts: np.ndarray, samples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same with shorter chunks. Args: as `collate` in loader.py takes them."""
        lengths, is_kept = chunk_lengths.astype(np.int64), np.ones(tokens.shape[-1], np.bool_)
        counts, samples = np.ascontiguousarray(counts, np.int64), np.ascontiguousarray(samples, np.int64)
        _crop(lengths, counts, samples, self._threshold, self._key, new_rng(), is_kept)
        return tokens[..., is_kept], lengths, counts
