"""ERNIE 1.0 (arXiv:1904.09223): whole words, phrases and entities are masked as one unit.

A segmenter decides where mask units begin: "words" takes whole words from the vocabulary, "listed" also the phrases and
entities that the corpus lists, "jieba" cuts the text of a chunk with the package of that name (Chinese), and any
function of a chunk can be set as `mask_units` of an `Ernie`. A segmenter in Python costs far more time than the rest of
a sample; the others cost next to nothing.

ERNIE 2.0's task embedding reads the `objective` field, which names the task of every token; its cumulative
schedule of tasks (arXiv:1907.12412) is a list of phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from data_utils.common.errors import ConfigError
from data_utils.common.losses import NEXT_SENTENCE_LOSS, Loss
from data_utils.common.settings import checked, setting
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.listed_spans import with_listed
from data_utils.objectives.masked_text import (
    MaskedText,
    MaskedTextConfig,
    Pairing,
    Split,
)
from data_utils.objectives.registry import register
from data_utils.tokenizers.vocabulary import Vocabulary

SEGMENTERS = ("tokens", "words", "jieba", "listed")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("ernie")
class ErnieConfig(MaskedTextConfig):
    """Settings of the masked units."""

    segmenter: str = setting(
        "words",
        "Unit of masking: tokens, words, jieba (Chinese words; needs the package jieba) or listed (spans of"
        " a corpus built with --spans-key, otherwise words).",
        one_of=SEGMENTERS,
    )
    next_sentence: bool = setting(
        False, "Two segments per sample and a next-sentence label on CLS (ERNIE 1.0)."
    )

    token_units_setting = "segmenter=tokens"

    @property
    def token_annotation(self) -> str | None:  # type: ignore[override]
        return "spans" if self.segmenter == "listed" else None

    @property
    def splits(self) -> Split:  # type: ignore[override]
        return Split.AT_UNITS if self.segmenter == "listed" else Split.ANYWHERE

    @property
    def pairing(self) -> Pairing:
        return Pairing.NEXT_SENTENCE if self.next_sentence else Pairing.NO_PAIR


@register
class Ernie(MaskedText):
    name = "ernie"
    config_class = ErnieConfig
    losses = (Loss("masked_units", 8), NEXT_SENTENCE_LOSS)
    text_format = TextFormat("bert")

    def choose_mask_units(self) -> str | Callable[[np.ndarray], np.ndarray] | None:
        if self.config.segmenter == "jieba":
            return jieba_segmenter(self.vocabulary)
        return None if self.config.segmenter == "tokens" else "words"

    def _unit_starts(self, tokens, chunk_lengths):  # type: ignore[no-untyped-def]
        if tokens.ndim == 1:
            return super()._unit_starts(tokens, chunk_lengths)
        words = super()._unit_starts(tokens[0], chunk_lengths)
        return with_listed(words, tokens[1], chunk_lengths, as_units=True)


class TextSegmenter:
    """Mask units of a chunk from a segmenter of text.

    Args:
        token_texts: the text of every token id, spaces included, without the marks of word chunks.
        cut: text -> its segments, in order and without loss, for example `jieba.cut`.
    """

    def __init__(self, token_texts: Sequence[str], cut: Callable[[str], Iterable[str]]) -> None:
        self.token_texts = token_texts
        self.cut = cut

    def __call__(self, chunk: np.ndarray) -> np.ndarray:
        """Bool for each token of the chunk: does a mask unit begin there? Only where a segment does."""
        texts = [self.token_texts[token] for token in chunk.tolist()]
        segments = [len(segment) for segment in self.cut("".join(texts))]
        starts = np.cumsum([0, *segments])
        offsets = np.cumsum([0, *map(len, texts)])[:-1]
        return np.isin(offsets, starts)


def jieba_segmenter(vocabulary: Vocabulary) -> TextSegmenter:
    """Chinese words by jieba. Raises: ConfigError if it is not installed or the token texts are not known."""
    if vocabulary.token_texts is None:
        raise ConfigError(
            "ernie.segmenter is jieba, which needs the text of every token, but this vocabulary does not have it; "
            "choose words or tokens."
        )
    try:
        import jieba
    except ImportError:
        raise ConfigError(
            "ernie.segmenter is jieba, but the package jieba is not installed; run pip install jieba or choose "
            "words."
        ) from None
    return TextSegmenter(vocabulary.token_texts, jieba.cut)
