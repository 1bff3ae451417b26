"""Spans that the corpus lists along with its tokens (data_utils/build/annotations.py), as mask units (masking.py).

A span begins and ends mask units. A span that the window cuts is ignored: its words are masked as words.
"""

from __future__ import annotations

import numpy as np

from data_utils.objectives.compiled import entry_point


@entry_point
def _mark(unit_start, spans, chunk_lengths, as_units):
    """Mark the listed spans in `unit_start`. Args: as for `with_listed`."""
    start = 0
    for length in chunk_lengths:
        end = start + length
        i = start
        while i < end:
            size = max(1, spans[i])
            if spans[i] > 0 and i + size <= end:
                unit_start[i] = 1 if as_units else 1 + 2 * size
                for inner in range(i + 1, i + size if as_units else i):
                    unit_start[inner] = 0
                if i + size < end:
                    unit_start[i + size] = 1
            else:
                size = 1
            i += size
        start = end


def with_listed(
    words: np.ndarray, spans: np.ndarray, chunk_lengths: np.ndarray, as_units: bool
) -> np.ndarray:
    """Where mask units begin, int32 [tokens], with the listed spans among them.

    Args:
        words: bool, where words begin. spans: int32, the length of the span that begins at each token, -1 = none.
        as_units: a span is one mask unit; else it is marked by twice its length, see UNIT_START in compiled.py.
    """
    unit_start = words.astype(np.int32)
    _mark(unit_start, np.ascontiguousarray(spans), chunk_lengths, as_units)
    return unit_start
