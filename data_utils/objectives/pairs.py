"""Pairs of texts A and B in one Example: cut chunks in two, and exchange second halves.

A pair is one chunk (the part of a document that lies in the window) cut in two. Where B is not to continue A, the
chunks of a window exchange their second halves in a circle. So no text is lost or used twice, and no second document is
needed.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import numpy as np

from data_utils.common.random_streams import below
from data_utils.objectives.base import RowObjective
from data_utils.objectives.compiled import POSITIONS, compiled

# Columns of a pair, int64: a number that each objective uses as it needs, whether B is to be another chunk's, start and
# end of A and of B.
CUSTOM, WRONG, A, A_END, B, B_END = range(6)


@compiled
def split_point(rng, scratch, text, start, length, sentence_end):
    """Tokens of A, 1..length - 1: up to a random end of a sentence, or anywhere where there is none."""
    ends = 0
    for i in range(length - 1):
        # Overwritten unless a sentence ends here: avoids a mispredicted branch.
        scratch[POSITIONS, ends] = i + 1
        ends += sentence_end[text[start + i]]
    if ends == 0:
        return 1 + below(rng, length - 1)
    return scratch[POSITIONS, below(rng, ends)]


@compiled
def exchange_second_texts(pairs, count):
    """Give each of the WRONG pairs the B of the next one, and the last one the B of the first.

    Returns: the number of the only WRONG pair, which has no other to exchange with; else -1.
    """
    first, last = -1, -1
    for number in range(count):
        if pairs[number, WRONG]:
            if first < 0:
                first = number
            else:
                for column in (B, B_END):
                    # Swaps along the chain move every B by one pair, so that each is another chunk's and none is lost.
                    swapped = pairs[last, column]
                    pairs[last, column] = pairs[number, column]
                    pairs[number, column] = swapped
            last = number
    return first if first == last else -1


class PairedRows(RowObjective):
    """An objective whose entry point also takes scratch for the pairs of a sample, and which tokens end a sentence."""

    compiled_files: ClassVar[tuple[str, ...]] = (__file__,)

    def _fill(self, batch, tokens, chunk_lengths, chunks_per_sample, sample_indices, first_chunk) -> None:
        if not len(batch):
            return
        unit_start = self._unit_starts(tokens, chunk_lengths)
        chunks = (
            tokens if tokens.ndim == 1 else tokens[0],
            unit_start,
            chunk_lengths,
            chunks_per_sample,
            sample_indices,
            first_chunk,
        )
        pairs = np.empty((max(1, chunks_per_sample.max()), 6), np.int64)
        self.entry(batch, chunks, self._tables(batch), pairs, self._sentence_end, self._record)

    @functools.cached_property
    def _sentence_end(self) -> np.ndarray:
        ends = self.vocabulary.sentence_end
        return np.zeros(self.vocabulary.size, np.bool_) if ends is None else np.array(ends, np.bool_)
