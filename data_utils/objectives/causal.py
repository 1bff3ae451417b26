"""Causal language modelling: GPT, GPT-2, Llama. Every token is predicted from those before it in its document.

Position i holds token i - 1 and predicts token i. Position 0 holds eos, as in GPT-2's training, where eos separates
documents, or CLS. So every token of the text is predicted exactly once, without an additional position. Without such a
token (GPT, Qwen) position i holds token i and predicts the next one, and the first token of a chunk is not predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from data_utils.common.batch_fields import ORD, POSITION_IDS, TOKENS
from data_utils.common.losses import MTP, Loss
from data_utils.common.settings import checked, setting
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
from data_utils.tokenizers.special_tokens import NO_TOKEN


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("causal")
class CausalConfig(RowSizes):
    """The token before a text."""

    begin: str = setting(
        "eos",
        "Token before a text, from which its first token is predicted: eos (GPT-2), cls (BOS of Llama and "
        "Mistral) or none (Qwen; the first token is not predicted).",
        one_of=("eos", "cls", "none"),
    )

    @property
    def before(self) -> tuple[str, ...]:
        """The role of that token."""
        return () if self.begin == "none" else (self.begin,)

    @property
    def needed_roles(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("cls",) if self.begin == "cls" else ()

    @property
    def loss_share(self) -> float:
        return 1.0

    @property
    def overhead(self) -> int:
        """Row tokens of a chunk beyond its text: none."""
        return 0


@inlined
def _fill_chunk(row, chunk, tables, settings):
    text, offset = chunk.text, chunk.offset
    end = offset + len(text)
    if settings.begin >= 0:
        row[TOKENS, offset] = settings.begin
        copy_range(row[TOKENS], offset + 1, end, text, 0)
        predict_range(row, offset, end, text, 0)
    else:
        copy_range(row[TOKENS], offset, end, text, 0)
        predict_range(row, offset, end - 1, text, 1)
    count_up(row[POSITION_IDS], offset, end, 0)
    count_up(row[ORD], offset, end, 0)
    mark_document(row, offset, end, chunk.document, settings.loss)
    return end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    fill_chunks(_fill_chunk, batch, chunks, tables, record)


@register
class Causal(RowObjective):
    name = "causal"
    config_class = CausalConfig
    losses = (Loss("causal", 3), MTP)
    text_format = TextFormat("causal", "left_to_right", before=("eos",), ends=("eos",), is_causal=True)
    entry = staticmethod(_fill_rows)

    def values(self) -> dict[str, Any]:
        begin = [getattr(self.vocabulary.special, role) for role in self.config.before]
        return super().values() | {"begin": int(begin[0]) if begin else NO_TOKEN}

    @classmethod
    def text_format_for(cls, config: CausalConfig) -> TextFormat:
        return replace(cls.text_format, before=config.before)
