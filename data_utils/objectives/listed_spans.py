"""Spans that the corpus lists beside its tokens (data_utils/build/spans.py), in the units that are masked.

A span begins and ends units. One that the window or its document's part cuts is no span: its words are words.
"""

from __future__ import annotations

import numpy as np

from data_utils.objectives.row_loops import entry_point


@entry_point
def _mark(units, spans, chunk_lengths, as_units):
    start = 0
    for length in chunk_lengths:
        end = start + length
        i = start
        while i < end:
            size = max(1, spans[i])
            if spans[i] > 0 and i + size <= end:
                units[i] = 1 if as_units else 1 + 2 * size
                for inner in range(i + 1, i + size if as_units else i):
                    units[inner] = 0
                if i + size < end:
                    units[i + size] = 1
            else:
                size = 1
            i += size
        start = end


def with_listed(
    words: np.ndarray, spans: np.ndarray, chunk_lengths: np.ndarray, as_units: bool
) -> np.ndarray:
    """Where units begin, int32 [tokens], with the listed spans among them.

    Args:
        words: bool, where words begin. spans: int32, the length of the span that begins at each token, -1 = none.
        as_units: a span is one unit; else it is marked by twice its length, see UNIT in row_loops.py.
    """
    units = words.astype(np.int32)
    _mark(units, np.ascontiguousarray(spans), chunk_lengths, as_units)
    return units
