"""Several objectives in one run. The objective of a sample is drawn from the sample's random numbers.

The choice depends on (seed, sample index) alone, so it is the same for any batch size and after any restart.

Price: the rows of a batch are made objective by objective and copied once more. Rows have the length of the longest
objective; mixing BART, which doubles its text, with BERT wastes half of BERT's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_utils.common import random_streams
from data_utils.common.batch_fields import FIELDS
from data_utils.common.compiler import njit
from data_utils.common.random_streams import new_rng, seed_rng, source_digest, uniform
from data_utils.common.settings import check
from data_utils.objectives.interface import Objective


def _entry_point(digest: int):
    @njit(cache=True, nogil=True)
    def choose(samples, weights, key, rng, chosen):
        _ = digest  # part of the cache key
        total = 0.0
        for k in range(len(weights)):
            total += weights[k]
        for i in range(len(samples)):
            seed_rng(rng, key, samples[i], 0, 0)
            remaining = uniform(rng) * total
            for k in range(len(weights)):
                if weights[k] > 0:
                    chosen[i] = k
                    remaining -= weights[k]
                    if remaining < 0:
                        break

    return choose


_choose = _entry_point(source_digest(random_streams.__file__, str(Path(__file__))))


class Mixed:
    """Objectives mixed by weight.

    Args:
        objectives: with one sequence_length.
        weights: shares of the samples, relative to each other; at least one is positive.
        seed: key of the choices.
    Raises: ConfigError for weights that are negative, or all 0.
    """

    def __init__(
        self,
        objectives: Sequence[Objective],
        weights: Sequence[float],
        seed: int,
    ) -> None:
        self.objectives = list(objectives)
        self.weights = np.array(weights, np.float64)
        self.row_length = max(objective.row_length for objective in objectives)
        (self.sequence_length,) = {objective.sequence_length for objective in objectives}
        check(
            bool(np.isfinite(self.weights).all() and (self.weights >= 0).all()),
            f"objective weights are {list(weights)}; they must be numbers >= 0.",
        )
        check(
            bool(self.weights.sum() > 0),
            "the weights of all objectives are 0; give one a positive weight.",
        )
        self._key = np.uint64(seed)

    def choose(self, sample_indices: np.ndarray) -> np.ndarray:
        """The objective of each sample, int64 [B], as an index into `objectives`."""
        chosen = np.empty(len(sample_indices), np.int64)
        samples = np.ascontiguousarray(sample_indices, np.int64)
        _choose(samples, self.weights, self._key, new_rng(), chosen)
        return chosen

    def fill(
        self,
        batch: np.ndarray,
        tokens: np.ndarray,
        chunk_lengths: np.ndarray,
        chunks_per_sample: np.ndarray,
        sample_indices: np.ndarray,
    ) -> None:
        """See `Objective.fill`."""
        chosen = self.choose(sample_indices)
        chunk_sample = np.repeat(np.arange(len(sample_indices)), chunks_per_sample)
        token_sample = np.repeat(chunk_sample, chunk_lengths)
        for k, objective in enumerate(self.objectives):
            samples = np.flatnonzero(chosen == k)
            if not len(samples):
                continue
            rows = np.empty((len(samples), len(FIELDS), batch.shape[2]), np.int32)
            objective.fill(
                rows,
                np.ascontiguousarray(tokens[..., chosen[token_sample] == k]),
                chunk_lengths[chosen[chunk_sample] == k],
                chunks_per_sample[samples],
                sample_indices[samples],
            )
            batch[samples] = rows
