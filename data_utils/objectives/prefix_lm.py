"""Prefix language modelling: the start of a document is bidirectional, the rest is predicted from left to right.

`[CLS] prefix` has order 0, `sop` (eos in a vocabulary without it) and the rest 1, 2, ...; `sop` predicts the first
token after the prefix. The length of the prefix is uniform (T5's prefix objective, arXiv:1910.10683, section 3.3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.common.batch_fields import ORD, POSITION_IDS, TOKENS
from data_utils.common.losses import Loss
from data_utils.common.random_streams import below
from data_utils.common.settings import checked
from data_utils.objectives.base import RowObjective, RowSizes
from data_utils.objectives.compiled import (
    copy_range,
    count_up,
    entry_point,
    fill_chunks,
    inlined,
    mark_document,
    predict_range,
)
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("prefix_lm")
class PrefixLmConfig(RowSizes):
    needed_roles = ("cls", "eos")

    @property
    def has_target(self) -> bool:
        return True

    @property
    def loss_share(self) -> float:
        return 0.5

    @property
    def overhead(self) -> int:
        """CLS; sop takes the place of the last token, which is never an input."""
        return 1


@inlined
def _fill_chunk(row, chunk, tables, settings):
    text, offset = chunk.text, chunk.offset
    length = len(text)
    prefix = below(tables.rng, length)
    target, end = offset + 1 + prefix, offset + 1 + length
    row[TOKENS, offset] = settings.cls
    copy_range(row[TOKENS], offset + 1, target, text, 0)
    # The target is shifted right by sop; the last token of the text is never an input.
    row[TOKENS, target] = settings.sop
    copy_range(row[TOKENS], target + 1, end, text, prefix)
    count_up(row[POSITION_IDS], offset, end, 0)
    count_up(row[ORD], target, end, 1)
    predict_range(row, target, end, text, prefix)
    mark_document(row, offset, end, chunk.document, settings.loss)
    return end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    fill_chunks(_fill_chunk, batch, chunks, tables, record)


@register
class PrefixLm(RowObjective):
    name = "prefix_lm"
    config_class = PrefixLmConfig
    losses = (Loss("prefix", 4),)
    text_format = TextFormat("prefix", "left_to_right", before=("cls",), start=("sop",), ends=("eos",))
    entry = staticmethod(_fill_rows)
