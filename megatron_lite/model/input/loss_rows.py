"""Which tokens of a batch have a loss, and which head predicts each: found on the host, before the model runs.

Shapes: T tokens; K loss rows that predict their token, P of them once more from the borders of their span, M loss rows
of CLS that predict a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data_utils.base.losses import MASKED_SPANS, SENTENCE_LEVEL, SPAN_BOUNDARY
from megatron_lite.config.model import ModelConfig


@dataclass(frozen=True)
class LossRows:
    """Loss rows by the head that predicts them, and what they predict: indices into [T].

    On the host int64 arrays, on the device int32 tensors.
    """

    tokens: Any  # [K]
    borders: Any  # [P, 3]: the token before a span, the token after it, place in it from 0
    sentences: Any  # [M]
    objectives: Any  # [K + P + M]: which loss each belongs to


def find_loss_rows(
    weights: np.ndarray, objectives: np.ndarray, config: ModelConfig, *, few_counts: bool = False
) -> tuple[LossRows, np.ndarray]:
    """The loss rows of a batch, and where their targets and weights are: int64 [K + P + M], indices into [T].

    Args:
        weights: fp32 [T].
        objectives: int [T].
        few_counts: K, P and M are filled up to one of few counts, see `few_count`. Rows that fill have the index -1:
            their weight is 0. They compute on the first token.
    """
    rows = np.flatnonzero(weights)
    empty = rows[:0]
    sentences, borders, spans = empty, np.stack([empty] * 3, axis=1), empty
    if config.sentence_classes:
        is_sentence = np.isin(objectives[rows], SENTENCE_LEVEL)
        sentences, rows = rows[is_sentence], rows[~is_sentence]
    if config.span_boundary_places:
        predicted = (weights != 0) & (objectives == MASKED_SPANS.number)
        borders, spans = _span_borders(predicted, config.span_boundary_places)
    if few_counts:
        rows, spans, sentences = (
            np.pad(x, (0, few_count(len(x)) - len(x)), constant_values=-1) for x in (rows, spans, sentences)
        )
        borders = np.pad(borders, ((0, len(spans) - len(borders)), (0, 0)))
    losses = (objectives[rows], np.full_like(spans, SPAN_BOUNDARY.number), objectives[sentences])
    found = LossRows(rows.clip(0), borders, sentences.clip(0), np.concatenate(losses))
    return found, np.concatenate([rows, spans, sentences])


def few_count(count: int) -> int:
    """The next of the few counts: up to 256 the multiples of 16, above that 16 for each power of two."""
    step = max(16, 1 << count.bit_length() >> 5)
    return -(-count // step) * step


def _span_borders(predicted: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray]:
    """For each True in [T]: its borders, int64 [P, 3] as in LossRows, and its own index [P].

    On both sides of every span is a token that is not predicted (data_utils/objectives/spanbert.py). Tokens at places
    beyond the table are left out.
    """
    index = np.arange(len(predicted))
    before = np.maximum.accumulate(np.where(predicted, -1, index))
    after = np.minimum.accumulate(np.where(predicted, len(predicted), index)[::-1])[::-1]
    rows = np.flatnonzero(predicted)
    place = rows - before[rows] - 1
    rows, place = rows[place < places], place[place < places]
    return np.stack([before[rows], after[rows], place], axis=1), rows
