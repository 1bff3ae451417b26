"""Labelled pairs of texts, along with masked words: discourse relation and relevance of search results.

A chunk is a pair of a corpus of pairs (data_utils/build/labelled_pairs.py): A, then B, whose first token has the label
beside it. The Example is `[CLS] A [SEP] B [SEP]` with whole words masked, and CLS predicts the label. The samples of
such an objective come from corpora that name it, and from no others (data_utils/loader/pair_corpora.py).

Source: ERNIE 2.0, arXiv:1907.12412, sections 4.2.2 and 4.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data_utils.common.losses import CLASS_HEADS, Loss
from data_utils.common.settings import checked, setting
from data_utils.objectives.compiled import Chunks
from data_utils.objectives.cut_pairs import PAIR
from data_utils.objectives.labelled_text import LabelledText, LabelledTextConfig, label_documents
from data_utils.objectives.masked_text import Pairing
from data_utils.objectives.own_corpora import LABELLED_PAIRS, check_corpora
from data_utils.objectives.registry import register

MARKERS = 78  # lines of configs/labels/markers.txt


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledPairsConfig(LabelledTextConfig):
    classes: int = setting(2, "Number of labels in its corpora.", at_least=2)

    token_annotation = "labels"
    own_corpora = LABELLED_PAIRS

    @property
    def pairing(self) -> Pairing:
        return Pairing.FROM_CORPUS

    @property
    def class_heads(self) -> dict[str, int]:
        return {self.section_key: self.classes}

    def check_run(self, config: Any) -> None:
        check_corpora(config)


class LabelledPairs(LabelledText):
    def _fill(self, batch: np.ndarray, chunks: Chunks) -> None:
        if not len(batch):
            return
        text, lengths = chunks.tokens, chunks.lengths
        # token_labels: the label at the first token of each B, -1 at all other tokens.
        text, token_labels = text if text.ndim == 2 else (text, np.full_like(text, -1))
        labels, pairs = np.full(len(lengths), -1), np.empty(len(lengths), PAIR)
        length_of_a = pairs["length_of_a"]
        length_of_a[:] = lengths  # all of a chunk without a label is one text
        chunk_ends, b_starts = np.cumsum(lengths), np.flatnonzero(token_labels >= 0)
        chunk = np.searchsorted(chunk_ends, b_starts, side="right")
        labels[chunk] = token_labels[b_starts]
        length_of_a[chunk] = b_starts - (chunk_ends - lengths)[chunk]
        self._fill_pairs(batch, chunks._replace(tokens=text), pairs)
        label_documents(batch, chunks.counts, labels, chunks.first_document, CLASS_HEADS[self.name])


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("discourse_relation")
class DiscourseRelationConfig(LabelledPairsConfig):
    classes: int = setting(MARKERS, "Number of labels (discourse markers) in its corpora.", at_least=2)


@register
class DiscourseRelation(LabelledPairs):
    name = "discourse_relation"
    config_class = DiscourseRelationConfig
    losses = (Loss("masked_discourse", 39), Loss("discourse_relation", 40))


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("relevance")
class RelevanceConfig(LabelledPairsConfig):
    classes: int = setting(
        3, "Number of labels in its corpora: clicked, shown but not clicked, neither.", at_least=2
    )


@register
class Relevance(LabelledPairs):
    name = "relevance"
    config_class = RelevanceConfig
    losses = (Loss("masked_relevance", 41), Loss("relevance", 42))
