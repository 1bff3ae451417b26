"""Hashes of documents by their tokens, to count duplicates."""

from __future__ import annotations

import numpy as np
from numba import njit

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


@njit(cache=True, error_model="numpy", nogil=True)
def document_hashes(tokens, lengths):
    """A hash of the tokens of each document, uint64 [documents]."""
    hashes = np.empty(lengths.shape[0], np.uint64)
    start = 0
    for document in range(lengths.shape[0]):
        value = np.uint64(lengths[document] + 1) * _MULTIPLIER  # spread: tokens are small numbers
        for i in range(start, start + lengths[document]):
            value = (value ^ np.uint64(tokens[i])) * _MULTIPLIER
            value ^= value >> _SHIFT
        start += lengths[document]
        hashes[document] = value * _MULTIPLIER
    return hashes
