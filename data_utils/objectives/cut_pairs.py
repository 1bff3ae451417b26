"""Pairs of texts A and B in one Example: cut chunks in two, and exchange second halves.

A pair is one chunk (the part of a document that lies in the window) cut in two. Where B is not to continue A, the
chunks of a window exchange their second halves in a circle. So no text is lost or used twice, and no second document is
needed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from data_utils.common.random_streams import below
from data_utils.objectives.base import RowObjective
from data_utils.objectives.compiled import Chunks, compiled

# Starts and ends are in the text of the batch.
PAIR = np.dtype(
    (
        np.record,
        [
            ("a_start", np.int64),
            ("a_end", np.int64),
            ("b_start", np.int64),
            ("b_end", np.int64),
            ("is_wrong", np.bool_),  # whether B is to be another chunk's
            ("length_of_a", np.int64),  # of a pair that a corpus gives, before it is planned
            ("language_model", np.int64),  # see LanguageModel in masked_text.py
            ("length", np.int64),  # XLNet: of the chunk after its memory
        ],
    )
)


@compiled
def split_point(rng, positions, text, sentence_end):
    """Tokens of A, 1..len(text) - 1: up to a random end of a sentence, or anywhere where there is none.

    Args: positions: scratch.
    """
    ends = 0
    for i in range(len(text) - 1):
        # Overwritten unless a sentence ends here: avoids a mispredicted branch.
        positions[ends] = i + 1
        ends += sentence_end[text[i]]
    if ends == 0:
        return 1 + below(rng, len(text) - 1)
    return positions[below(rng, ends)]


@compiled
def exchange_second_texts(pairs, count):
    """Give each of the wrong pairs the B of the next one, and the last one the B of the first.

    Returns: the number of the only wrong pair, which has no other to exchange with; else -1.
    """
    first, last = -1, -1
    for number in range(count):
        if pairs[number].is_wrong:
            if first < 0:
                first = number
            else:
                # Swaps along the chain move every B by one pair, so that each is another chunk's and none is lost.
                one, other = pairs[last], pairs[number]
                one.b_start, other.b_start = other.b_start, one.b_start
                one.b_end, other.b_end = other.b_end, one.b_end
            last = number
    return first if first == last else -1


class PairedRows(RowObjective):
    """An objective whose entry point also takes scratch for the pairs of a sample."""

    compiled_files: ClassVar[tuple[str, ...]] = (__file__,)

    def _fill(self, batch: np.ndarray, chunks: Chunks) -> Any:
        if not len(batch):
            return
        self._fill_pairs(batch, chunks, np.empty(max(1, chunks.counts.max()), PAIR))

    def _fill_pairs(self, batch: np.ndarray, chunks: Chunks, pairs: np.ndarray) -> None:
        # One type for all, so that the machine code is one: marks of annotated text exceed a bool.
        unit_start = self._unit_starts(chunks.tokens, chunks.lengths).astype(np.int32, copy=False)
        tokens = chunks.tokens if chunks.tokens.ndim == 1 else chunks.tokens[0]
        chunks = chunks._replace(tokens=tokens, unit_start=unit_start)
        self.entry(batch, tuple(chunks), self._tables(batch.shape[2]), pairs, self._record)
