"""What several tests use around recipes."""

from __future__ import annotations

import numpy as np

from data_utils.objectives.planes import DOCUMENT_OVERHEAD
from data_utils.samples.loader import collate as fill_rows
from support.recipes import FIRST_TEXT_TOKEN, text_of


def windows(rows: int, sequence_length: int, seed: int) -> list[list[np.ndarray]]:
    """Random windows of pieces with distinct tokens; half of them begin with the rest of a document."""
    rng = np.random.default_rng(seed)
    made = []
    for row in range(rows):
        pieces, room, first = [], sequence_length, FIRST_TEXT_TOKEN
        while True:
            reserve = 0 if not pieces and row % 2 else DOCUMENT_OVERHEAD
            if room - reserve < 1 or (pieces and rng.random() < 0.1):
                break
            length = int(rng.integers(1, room - reserve + 1))
            pieces.append(text_of(length, bool(rng.random() < 0.7), first))
            first += length
            room -= length + reserve
        made.append(pieces)
    return made


def collate(made, samples: list[list[np.ndarray]], first_index: int = 0) -> np.ndarray:
    pieces = [piece for sample in samples for piece in sample]
    lengths = np.array([len(piece) for piece in pieces])
    counts = np.array([len(sample) for sample in samples])
    return fill_rows(made, np.concatenate(pieces), lengths, counts, np.arange(len(samples)) + first_index)
