"""Random batches in the layout of collation, for tests that need no text."""

from __future__ import annotations

import numpy as np

from data_utils.common.batch_fields import (
    BLOCK_POSITION_IDS,
    DOC,
    FIELDS,
    OBJECTIVE,
    ORD,
    POSITION_IDS,
    TARGETS,
    TOKENS,
    WEIGHTS,
)


def prefix_batch(
    seed: int, rows: int = 3, length: int = 48, vocab: int = 100, documents: int = 2
) -> np.ndarray:
    """int32 [rows, fields, length]: every row packs `documents` of random [part A | part B] sizes, then padding."""
    rng = np.random.default_rng(seed)
    batch = np.zeros((rows, len(FIELDS), length), np.int32)
    batch[:, DOC] = -1
    weights = batch[:, WEIGHTS].view(np.float32)
    for row in range(rows):
        end = 0
        for document in range(documents):
            a, b = rng.integers(1, length // documents - 6), rng.integers(0, 6)
            start, middle, end = end, end + a, end + a + b
            here, part_b = slice(start, end), slice(middle, end)
            batch[row, TOKENS, here] = rng.integers(0, vocab, a + b)
            batch[row, POSITION_IDS, here] = np.r_[np.arange(a), rng.integers(0, a, b)]
            batch[row, BLOCK_POSITION_IDS, part_b] = np.arange(1, b + 1)
            batch[row, TARGETS, part_b] = rng.integers(0, vocab, b)
            batch[row, DOC, here] = document
            batch[row, ORD, part_b] = np.arange(1, b + 1)
            batch[row, OBJECTIVE, here] = document % 3
            weights[row, part_b] = 1.0
    return batch
