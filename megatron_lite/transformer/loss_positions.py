"""Which tokens of a batch have a loss, and which head computes it.

Shapes: T tokens; K positions whose token is predicted from their own hidden state, P of them once more from the
boundaries of their span (SpanBERT), M positions of CLS that predict a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from data_utils.common.losses import CLASS_LEVEL, MASKED_SPANS, SPAN_BOUNDARY
from megatron_lite.config.model import ModelConfig

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array", np.ndarray, "torch.Tensor")


@dataclass(frozen=True)
class LossPositions(Generic[Array]):
    """Positions with a loss, by the head that predicts them: indices into [T], of the decoder's tokens if there is one.

    On the host int64 arrays, on the device int32 tensors.
    """

    tokens: Array  # [K]
    boundaries: Array  # [P, 3]: the token before a span, the token after it, the position in the span from 0
    sentences: Array  # [M]
    objectives: Array  # [K + P + M]: the loss under which each is reported


def find_loss_positions(
    weights: np.ndarray, objectives: np.ndarray, config: ModelConfig, *, few_counts: bool = False
) -> tuple[LossPositions[np.ndarray], np.ndarray]:
    """The loss positions of a batch, and the token whose target and weight each has: int64 [K + P + M], into [T].

    Args:
        weights: fp32 [T], of each token's loss.
        objectives: int [T], the number of each token's loss.
        few_counts: pad K, P and M to one of few counts, see `few_count`. Padding has the token -1 and computes on the
            first token; its weight has to be 0.
    """
    tokens = np.flatnonzero(weights)
    empty = tokens[:0]
    sentences, boundaries, in_spans = empty, np.stack([empty] * 3, axis=1), empty
    if config.sentence_classes:
        is_sentence = np.isin(objectives[tokens], CLASS_LEVEL)
        sentences, tokens = tokens[is_sentence], tokens[~is_sentence]
    if config.span_boundary_places:
        is_predicted = (weights != 0) & (objectives == MASKED_SPANS.number)
        boundaries, in_spans = _span_boundaries(is_predicted, config.span_boundary_places)
    if few_counts:
        tokens, in_spans, sentences = (
            np.pad(x, (0, few_count(len(x)) - len(x)), constant_values=-1)
            for x in (tokens, in_spans, sentences)
        )
        boundaries = np.pad(boundaries, ((0, len(in_spans) - len(boundaries)), (0, 0)))
    losses = (objectives[tokens], np.full_like(in_spans, SPAN_BOUNDARY.number), objectives[sentences])
    positions = LossPositions(tokens.clip(0), boundaries, sentences.clip(0), np.concatenate(losses))
    return positions, np.concatenate([tokens, in_spans, sentences])


def few_count(count: int) -> int:
    """The next of the few counts: up to 256 the multiples of 16, above that 16 for each power of two."""
    # 16 counts in each power of two: at most 1/16 of the positions are padding, and oneDNN builds few kernels.
    step = max(16, 1 << count.bit_length() >> 5)
    return -(-count // step) * step


def _span_boundaries(is_predicted: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """For each True in [T]: its boundaries, int64 [P, 3] as in LossPositions, and its own index [P].

    On both sides of every span is a token that is not predicted (data_utils/objectives/spanbert.py). Tokens beyond the
    first `longest` of their span are left out: the table of positions in a span ends there.
    """
    index = np.arange(len(is_predicted))
    before = np.maximum.accumulate(np.where(is_predicted, -1, index))
    after = np.minimum.accumulate(np.where(is_predicted, len(is_predicted), index)[::-1])[::-1]
    tokens = np.flatnonzero(is_predicted)
    in_span = tokens - before[tokens] - 1
    tokens, in_span = tokens[in_span < longest], in_span[in_span < longest]
    return np.stack([before[tokens], after[tokens], in_span], axis=1), tokens
