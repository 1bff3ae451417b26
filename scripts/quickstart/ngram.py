"""A smoothed n-gram model of the next token: the baseline for filled blanks.

Source: interpolated Kneser-Ney smoothing, Chen and Goodman 1998. Lower orders count the different tokens before an
n-gram, not how often it occurs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ORDER = 5
DISCOUNT = 0.75


class NGram:
    """Args: tokens: int [n], one after another. vocab_size: at most 6208, so that five tokens fit into 63 bits."""

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int = ORDER):
        assert vocab_size**order < 2**63, "n-grams are numbers to the base of the vocabulary"
        self.vocab_size, self.order = vocab_size, order
        tokens = tokens.astype(np.int64)
        codes = np.zeros(max(0, len(tokens) - order + 1), np.int64)
        for place in range(order):
            codes = codes * vocab_size + tokens[place : place + len(codes)]
        self._tables: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # sorted n-grams and their counts, the longest first
        for length in range(order, 0, -1):
            grams, counts = np.unique(codes, return_counts=True)
            self._tables.append((grams, counts))
            codes = grams % vocab_size ** (length - 1)  # without the first token, once for each such token
        self._tables.reverse()

    def probabilities(self, before: Sequence[int]) -> np.ndarray:
        """float64 [vocab_size]: of each token after the tokens `before`."""
        p = np.full(self.vocab_size, 1.0 / self.vocab_size)
        context = 0
        for length, (grams, counts) in enumerate(self._tables):
            if length > len(before):
                break
            if length:
                context += int(before[-length]) * self.vocab_size ** (length - 1)
            first, last = np.searchsorted(grams, [context * self.vocab_size, (context + 1) * self.vocab_size])
            if first == last:
                break
            some, total = counts[first:last], counts[first:last].sum()
            p *= DISCOUNT * len(some) / total
            p[grams[first:last] % self.vocab_size] += (some - DISCOUNT) / total
        return p

    def continued(self, before: Sequence[int], length: int) -> list[int]:
        """The likeliest token, `length` times."""
        text = list(before)
        for _ in range(length):
            text.append(int(self.probabilities(text[-(self.order - 1) :]).argmax()))
        return text[len(before) :]
