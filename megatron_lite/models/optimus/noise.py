"""Noise of latent vectors: a pure function of (seed, purpose, row, place); no batch size or order changes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from data_utils.common.random_streams import derive_seed

_PER_BLOCK = 4  # words of NumPy's Philox


def normals(seed: int, purpose: str, rows: Sequence[int], first: int, count: int, size: int) -> torch.Tensor:
    """Vectors `first` to `first + count` of each row's stream: fp64 [rows, count, size], of N(0, I).

    Each begins a block of Philox, so that it is the same in chunks of any size. Only raw words are taken, whose order
    NumPy keeps in all versions.
    """
    blocks = -(-size // _PER_BLOCK)
    key, words = (
        derive_seed(seed, "latent", purpose),
        np.empty((len(rows), count, blocks * _PER_BLOCK), np.uint64),
    )
    for place, row in enumerate(rows):
        philox = np.random.Philox(key=key, counter=[first * blocks, row, 0, 0])
        words[place] = philox.random_raw(words[place].shape)
    # The middles of 2**53 equal parts of (0, 1): never 0 or 1.
    uniform = ((words[:, :, :size] >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    return torch.special.ndtri(torch.from_numpy(uniform))
