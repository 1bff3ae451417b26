"""A smoothed n-gram model of the next token: the baseline for filled blanks.

Source: interpolated Kneser-Ney smoothing, Chen and Goodman 1998. Lower orders count the different tokens before an
n-gram, not how often it occurs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ORDER = 5
DISCOUNT = 0.75
BEAMS = 32  # beginnings of a blank that are kept


class NGram:
    """Args: tokens: int [n], one after another. vocab_size: at most 6208, so that five tokens fit into 63 bits."""

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int = ORDER):
        assert vocab_size**order < 2**63, "n-grams are numbers to the base of the vocabulary"
        self.vocab_size, self.order = vocab_size, order
        tokens = tokens.astype(np.int64)
        codes = np.zeros(max(0, len(tokens) - order + 1), np.int64)
        for place in range(order):
            codes = codes * vocab_size + tokens[place : place + len(codes)]
        # Sorted n-grams and the sums of the counts before each, the longest first.
        self._tables: list[tuple[np.ndarray, np.ndarray]] = []
        for length in range(order, 0, -1):
            grams, counts = np.unique(codes, return_counts=True)
            self._tables.append((grams, np.concatenate([[0], np.cumsum(counts)])))
            codes = grams % vocab_size ** (length - 1)  # without the first token, once for each such token
        self._tables.reverse()

    def likelihoods(self, texts: np.ndarray) -> np.ndarray:
        """float64 [n]: of the last token of each row, given those before it. Args: texts: int [n, m >= 1]."""
        texts = texts.astype(np.int64)
        p = np.full(len(texts), 1.0 / self.vocab_size)
        context, is_known = np.zeros(len(texts), np.int64), np.ones(len(texts), bool)
        for length, (grams, sums) in enumerate(self._tables):
            if length >= texts.shape[1] or not len(grams):
                break
            if length:
                context += texts[:, -1 - length] * self.vocab_size ** (length - 1)
            code = context * self.vocab_size
            first, last = np.searchsorted(grams, code), np.searchsorted(grams, code + self.vocab_size)
            is_known &= last > first
            at = np.minimum(np.searchsorted(grams, code + texts[:, -1]), len(grams) - 1)
            count = np.where(grams[at] == code + texts[:, -1], sums[at + 1] - sums[at], 0)
            total = np.maximum(sums[last] - sums[first], 1)
            longer = (np.maximum(count - DISCOUNT, 0) + p * DISCOUNT * (last - first)) / total
            p = np.where(is_known, longer, p)
        return p

    def probabilities(self, before: Sequence[int]) -> np.ndarray:
        """float64 [vocab_size]: of each token after the tokens `before`. As `likelihoods`, with one search for all."""
        p = np.full(self.vocab_size, 1.0 / self.vocab_size)
        context = 0
        for length, (grams, sums) in enumerate(self._tables):
            if length > len(before):
                break
            if length:
                context += int(before[-length]) * self.vocab_size ** (length - 1)
            first, last = np.searchsorted(grams, [context * self.vocab_size, (context + 1) * self.vocab_size])
            if first == last:
                break
            total = sums[last] - sums[first]
            p *= DISCOUNT * (last - first) / total
            p[grams[first:last] % self.vocab_size] += (np.diff(sums[first : last + 1]) - DISCOUNT) / total
        return p

    def between(self, before: Sequence[int], after: Sequence[int]) -> np.ndarray:
        """float64 [vocab_size]: of each token in a gap of one token, by the text on both sides."""
        p = self.probabilities(before) * self._continuations(
            [[*before, t] for t in range(self.vocab_size)], after
        )
        return p / p.sum()

    def filled(self, before: Sequence[int], length: int, after: Sequence[int] = ()) -> list[int]:
        """The likeliest of the BEAMS sequences of `length` tokens that beam search finds, the text after it counted."""
        beams, scores = [list(before)], np.zeros(1)
        for _ in range(length):
            extended = scores[:, None] + np.log([self.probabilities(beam) for beam in beams])
            best = np.argsort(-extended, axis=None, kind="stable")[:BEAMS]
            rows, tokens = np.unravel_index(best, extended.shape)
            beams = [[*beams[row], int(token)] for row, token in zip(rows, tokens, strict=True)]
            scores = extended.ravel()[best]
        scores = scores + np.log(self._continuations(beams, after))
        return beams[int(scores.argmax())][len(before) :]

    def _continuations(self, texts: Sequence[Sequence[int]], after: Sequence[int]) -> np.ndarray:
        """float64 [n]: of those tokens `after` that see the end of each text. Texts are equally long."""
        window = np.array([text[-(self.order - 1) :] for text in texts], np.int64)
        p = np.ones(len(texts))
        for token in after[: self.order - 1]:
            window = np.column_stack([window, np.full(len(window), token)])[:, -self.order :]
            p *= self.likelihoods(window)
        return p
