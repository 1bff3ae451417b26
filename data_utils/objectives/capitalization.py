"""Capitalization, along with masked words: did the text write this word with a capital?

The first token of each word that is not masked predicts it, 0 or 1. A vocabulary without capitals has lost them, so a
build with `--capitals` stores them along with the tokens.

Source: ERNIE 2.0, arXiv:1907.12412, section 4.2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, OBJECTIVE, TARGETS, WEIGHTS
from data_utils.common.losses import CLASS_HEADS, Loss
from data_utils.common.settings import checked
from data_utils.objectives.compiled import Chunks
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.labelled_text import LabelledTextConfig
from data_utils.objectives.masked_text import NumberedText
from data_utils.objectives.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("capitalization")
class CapitalizationConfig(LabelledTextConfig):
    token_annotation = "capitals"

    @property
    def loss_share(self) -> float:
        return 1.0

    @property
    def class_heads(self) -> dict[str, int]:
        return {"capitalization": 2}


@register
class Capitalization(NumberedText):
    name = "capitalization"
    config_class = CapitalizationConfig
    text_format = TextFormat("bert")
    losses = (Loss("masked_cased", 37), Loss("capitalization", 38))

    def _fill(self, batch: np.ndarray, chunks: Chunks) -> None:
        super()._fill(batch, chunks)
        # NumberedText writes the capitals there, 0 or 1 plus 1; the model does not read them.
        capitals = batch[:, BLOCK_POSITION_IDS] - 1
        batch[:, BLOCK_POSITION_IDS] = 0
        labelled = (capitals >= 0) & (batch[:, WEIGHTS] == 0)
        batch[:, TARGETS][labelled] = capitals[labelled]
        batch[:, WEIGHTS][labelled] = np.float32(1).view(np.int32)
        batch[:, OBJECTIVE][labelled] = CLASS_HEADS["capitalization"]
