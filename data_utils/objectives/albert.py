"""ALBERT (arXiv:1909.11942): n-grams of whole words with p(n) ~ 1/n, and sentence-order prediction.

Both halves of a chunk keep their text. With probability one half they change places, and CLS predicts whether they did.
ALBERT's factorised embedding and cross-layer sharing belong to the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_utils.common.losses import SENTENCE_ORDER_LOSS, Loss
from data_utils.common.settings import checked, setting
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.masked_text import MaskedText, MaskedTextConfig, Pairing
from data_utils.objectives.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("albert")
class AlbertConfig(MaskedTextConfig):
    """N-grams and the sentence-order label."""

    max_ngram: int = setting(
        3, "Longest masked n-gram, in words; n is drawn with probability proportional to 1/n.", at_least=1
    )
    whole_words: bool = setting(True, "Count and mask whole words; false = tokens.")
    sentence_order: bool = setting(True, "Two segments per sample and a sentence-order label on CLS.")

    @property
    def length_weights(self) -> np.ndarray:
        return 1.0 / np.arange(1, self.max_ngram + 1)

    @property
    def pairing(self) -> Pairing:
        return Pairing.SENTENCE_ORDER if self.sentence_order else Pairing.NO_PAIR


@register
class Albert(MaskedText):
    name = "albert"
    config_class = AlbertConfig
    losses = (Loss("masked_ngrams", 7), SENTENCE_ORDER_LOSS)
    text_format = TextFormat("bert")
