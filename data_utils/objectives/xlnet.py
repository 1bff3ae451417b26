"""XLNet (arXiv:1906.08237): permutation language modelling with a content and a query stream.

The text is cut in two halves, each with its own order; the second half sees all of the first. In each half 1/6 of the
tokens are targets (K = 6), chosen as n-grams of up to 5 tokens, n with probability ~ 1/n, in windows of K n tokens.
The other tokens come first in the order, and the targets follow in random order. The query stream has a token for each
target: [MASK] at the target's position, which sees what precedes the target in the order and predicts it. XLNet's own
model (`model.relative: xlnet`) begins these rows from one learned vector, the paper's w, instead of [MASK]'s embedding.

Differences: the recurrence over segments belongs to the model and is not there; SEP and CLS are context, where the
paper's code gives them a random place in the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_utils.base.random_streams import below, shuffle
from data_utils.base.settings import checked, setting
from data_utils.objectives.masking import (
    PLACES,
    STARTS,
    TAKEN,
    compiled,
    draw_length,
    entry_point,
    inlined,
)
from data_utils.objectives.planes import ORD, Loss
from data_utils.objectives.registry import register
from data_utils.objectives.rows import (
    RowObjective,
    RowSizes,
    fill_pieces,
    mark_document,
    maskable_length,
    predict,
    put,
)


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("xlnet")
class XlnetConfig(RowSizes):
    """How many targets, in which n-grams, and how many orders a piece has."""

    needed_roles = ("cls", "sep", "mask")

    tokens_per_target: int = setting(6, "one token in so many is a target (K of the paper)", at_least=1)
    max_ngram: int = setting(5, "longest n-gram of targets, tokens; n has probability ~ 1/n", at_least=1)
    orders: int = setting(
        2, "equal parts of a piece, each with its own order; a part sees those before it", at_least=1
    )

    @property
    def growth(self) -> float:
        """A query token for each target."""
        return 1.0 + 1.0 / self.tokens_per_target

    @property
    def loss_share(self) -> float:
        return 1.0 / (self.tokens_per_target + 1)

    @property
    def length_weights(self) -> np.ndarray:
        return 1.0 / np.arange(1, self.max_ngram + 1)

    @property
    def overhead(self) -> int:
        """CLS, SEP, and the target that even the shortest piece has."""
        return 3

    def max_position_needed(self, sequence_length: int) -> int:
        """Positions count the text with SEP and CLS."""
        return sequence_length + 1


@compiled
def _draw_targets(stream, w, first, last, goal, cumulative, s):
    """Mark `goal` of the text positions first..last - 1 in w[TAKEN]: n-grams in windows, then singles."""
    spare = last - first - goal * s.tokens_per_target  # tokens that no window covers
    at, chosen = first, 0
    if spare > 0:
        at += below(stream, spare + 1)
    while chosen < goal:
        longest = min(cumulative.shape[0] - 1, goal - chosen, (last - at) // s.tokens_per_target)
        if longest < 1:
            break
        ngram = draw_length(stream, longest, cumulative)
        window = ngram * s.tokens_per_target
        begin = at + below(stream, window - ngram + 1)
        for i in range(begin, begin + ngram):
            w[TAKEN, i] = 1
        chosen += ngram
        at += window
    while chosen < goal:
        i = first + below(stream, last - first)
        if not w[TAKEN, i]:
            w[TAKEN, i] = 1
            chosen += 1


@inlined
def _fill_piece(row, used, limit, document, text, units, start, length, stream, w, cumulative, s):
    maskable = maskable_length(text, start, length, s)
    size = length + 2  # the text, then SEP and CLS, as in XLNet
    for i in range(length):
        put(row, used + i, text[start + i], i, 0)
        w[TAKEN, i] = 0
    put(row, used + length, s.sep, length, 0)
    put(row, used + length + 1, s.cls, length + 1, 0)
    goal = min(max(1, length // s.tokens_per_target), maskable)
    query, done, order, begin = used + size, 0, 0, 0
    for part in range(s.orders):
        last_part = part == s.orders - 1
        end = length * (part + 1) // s.orders
        last = min(end, maskable)
        shared = (goal * (part + 1) + s.orders - 1) // s.orders - done
        goal_here = min(shared, max(0, last - begin))
        _draw_targets(stream, w, begin, last, goal_here, cumulative, s)
        for i in range(begin, size if last_part else end):
            row[ORD, used + i] = order
        count = 0
        for i in range(begin, last):
            if w[TAKEN, i]:
                w[PLACES, count] = i
                count += 1
        for i in range(count):
            w[STARTS, i] = i + 1
        shuffle(stream, w[STARTS], count)
        for i in range(count):
            at = w[PLACES, i]
            rank = order + w[STARTS, i]
            row[ORD, used + at] = rank
            put(row, query + i, s.mask, at, -rank)
            predict(row, query + i, text[start + at])
        query += count
        done += count
        order += count + 1
        begin = end
    mark_document(row, used, query, document, s.loss)
    return query


@entry_point
def _fill_rows(batch, pieces, tables, settings):
    fill_pieces(_fill_piece, batch, pieces, tables, settings)


@register
class Xlnet(RowObjective):
    name = "xlnet"
    config_class = XlnetConfig
    losses = (Loss("permutation", 20),)
    entry = staticmethod(_fill_rows)
    ends_with_sep = True
