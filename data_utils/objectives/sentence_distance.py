"""Sentence distance, along with masked words: how far apart were two texts?

CLS predicts one of three classes: 0, B follows A; 1, both are of one document and text between them is left out; 2, B
is of another document, with which it was exchanged (cut_pairs.py). Texts are cut at ends of sentences. A document that
is alone in its window has no class 2, one without two places to cut at no class 1.

Source: ERNIE 2.0, arXiv:1907.12412, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.common.losses import Loss
from data_utils.common.settings import check, checked, fraction
from data_utils.objectives.labelled_text import LabelledText, LabelledTextConfig
from data_utils.objectives.masked_text import Pairing
from data_utils.objectives.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("sentence_distance")
class SentenceDistanceConfig(LabelledTextConfig):
    far_prob: float = fraction(1 / 3, "Probability of two non-adjacent texts of one document.")
    wrong_prob: float = fraction(1 / 3, "Probability of texts of two documents.")

    def __post_init__(self) -> None:
        super(SentenceDistanceConfig, self).__post_init__()
        check(
            self.far_prob + self.wrong_prob <= 1,
            f"sentence_distance has far_prob {self.far_prob:g} and wrong_prob {self.wrong_prob:g}; their sum must "
            "be at most 1.",
        )

    @property
    def pairing(self) -> Pairing:
        return Pairing.DISTANCE

    @property
    def class_heads(self) -> dict[str, int]:
        return {"sentence_distance": 3}


@register
class SentenceDistance(LabelledText):
    name = "sentence_distance"
    config_class = SentenceDistanceConfig
    losses = (Loss("masked_distant", 32), Loss("sentence_distance", 33))
