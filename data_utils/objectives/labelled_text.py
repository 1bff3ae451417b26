"""Masked text with a class label: the common base of objectives whose labels follow from plain text.

The text is masked as masked_text.py does it, whole words by default; then each document's CLS, or its tokens, get
labels, which heads of their own predict (`model.class_heads`).
"""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.common.batch_fields import DOC, OBJECTIVE, POSITION_IDS
from data_utils.common.settings import setting
from data_utils.objectives.compiled import entry_point, predict
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.masked_text import MaskedText, MaskedTextConfig


@entry_point
def label_documents(batch, counts, labels, first_chunk, objective):
    """Make the labels of chunks, int64 and -1 for none, the targets of their first tokens, CLS."""
    chunk = 0
    for i in range(len(batch)):
        row = batch[i]
        for at in range(row.shape[1]):
            if row[DOC, at] >= 0 and row[POSITION_IDS, at] == 0:
                label = labels[chunk + row[DOC, at] - first_chunk]
                if label >= 0:
                    predict(row, at, label)
                    row[OBJECTIVE, at] = objective
        chunk += counts[i]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledTextConfig(MaskedTextConfig):
    whole_words: bool = setting(True, "Mask whole words.")

    @property
    def has_sentence_label(self) -> bool:
        return True


class LabelledText(MaskedText):
    text_format = TextFormat("bert")
