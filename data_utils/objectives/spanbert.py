"""SpanBERT (arXiv:1907.10529): spans of whole words, predicted in place and from their borders.

Span lengths are geometric in words (p = 0.2, at most 10: mean 3.8), and 80/10/10 is drawn once per span. The
span-boundary objective predicts every token of a span from the hidden states just outside it and from its place in the
span. A token always stays between two spans, so the heads read the spans off the weights, and the Example
needs no further arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_utils.base.losses import MASKED_SPANS, SPAN_BOUNDARY
from data_utils.base.settings import checked, setting
from data_utils.objectives.interface import Writing
from data_utils.objectives.masked_text import MaskedText, MaskedTextConfig
from data_utils.objectives.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("spanbert")
class SpanBertConfig(MaskedTextConfig):
    """Spans and treatment. A single text, no next-sentence label."""

    has_span_boundaries = True
    gap = True
    treat_spans_alike = True

    geometric_p: float = setting(
        0.2, "parameter of the geometric distribution of span lengths, words", above=0, below=1
    )
    max_span_length: int = setting(10, "longest span, words", at_least=1)
    whole_words: bool = setting(True, "count and mask words; false: tokens")

    @property
    def length_weights(self) -> np.ndarray:
        """Weights of the lengths 1..max_span_length, not normalised: longer spans are drawn again."""
        return (1 - self.geometric_p) ** np.arange(self.max_span_length)


@register
class SpanBert(MaskedText):
    name = "spanbert"
    config_class = SpanBertConfig
    losses = (MASKED_SPANS, SPAN_BOUNDARY)
    writing = Writing("bert")
