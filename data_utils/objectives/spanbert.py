"""SpanBERT (arXiv:1907.10529): spans of whole words, predicted in place and from their boundaries.

Span lengths are geometric in words (p = 0.2, at most 10: mean 3.8), and 80/10/10 is drawn once per span. The
span-boundary objective predicts every token of a span from the hidden states just outside it and from its place in the
span. A token always stays between two spans, so the heads read the spans off the weights, and the Example
needs no further arrays.

With `spans: listed`, the paper's named entities or noun phrases, a draw is a span that the corpus lists with
probability `span_prob`, one of those that fit into the rest of the 15 % alike, and a geometric one else. The authors'
code draws among all, masked or not, and cuts the last; here none is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_utils.common.losses import MASKED_SPANS, SPAN_BOUNDARY
from data_utils.common.settings import checked, fraction, setting
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.listed_spans import with_listed
from data_utils.objectives.masked_text import MaskedText, MaskedTextConfig
from data_utils.objectives.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("spanbert")
class SpanBertConfig(MaskedTextConfig):
    """Spans of whole words with one corruption per span. A single text, no next-sentence label."""

    has_span_boundaries = True
    gap = True
    one_corruption_per_span = True

    geometric_p: float = setting(
        0.2, "Parameter of the geometric distribution of span lengths, in words.", above=0, below=1
    )
    max_span_length: int = setting(10, "Longest span, in words.", at_least=1)
    whole_words: bool = setting(True, "Count and mask whole words; false = tokens.")
    spans: str = setting(
        "words",
        "words = spans of words; listed = also the spans listed by a corpus built with --spans-key.",
        one_of=("words", "listed"),
    )
    span_prob: float = fraction(
        0.5,
        "spans listed: probability of drawing a listed span, if one still fits, instead of a span of words.",
    )

    @property
    def token_annotation(self) -> str | None:  # type: ignore[override]
        return "spans" if self.spans == "listed" else None

    @property
    def listed_prob(self) -> float:  # type: ignore[override]
        return self.span_prob if self.spans == "listed" else 0.0

    @property
    def length_weights(self) -> np.ndarray:
        """Weights of the lengths 1..max_span_length, not normalized: longer spans are drawn again."""
        return (1 - self.geometric_p) ** np.arange(self.max_span_length)


@register
class SpanBert(MaskedText):
    name = "spanbert"
    config_class = SpanBertConfig
    losses = (MASKED_SPANS, SPAN_BOUNDARY)
    text_format = TextFormat("bert")

    def _unit_starts(self, tokens, chunk_lengths):  # type: ignore[no-untyped-def]
        if tokens.ndim == 1:
            return super()._unit_starts(tokens, chunk_lengths)
        words = super()._unit_starts(tokens[0], chunk_lengths)
        return with_listed(words, tokens[1], chunk_lengths, as_units=False)
