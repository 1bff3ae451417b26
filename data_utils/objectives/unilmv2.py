"""UniLMv2's pseudo-masked language model (arXiv:2002.12804): autoencoding and autoregression in one pass.

15 % of the tokens are chosen in blocks: with probability 0.4 a span of 2..6 tokens, else a single token. The order in
which blocks are drawn is the order of factorisation. One pass holds three kinds of tokens:

    context and [M]   order 0. The text with [M] for the chosen tokens, which it predicts (autoencoding)
    originals         order t for block t = 1, 2, ...; at the positions of their [M]
    pseudo masks [P]  order -t, group t; at the same positions, predict block t from the blocks before it

[M] and [P] are the same token, as in the paper's code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_utils.common.batch_fields import GRP, TOKENS
from data_utils.common.losses import Loss
from data_utils.common.settings import checked, fraction, setting
from data_utils.objectives.base import RowObjective, RowSizes
from data_utils.objectives.compiled import (
    entry_point,
    fill_chunks,
    inlined,
    mark_document,
    maskable_length,
    predict,
    put,
)
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.masking import draw_spans, masked_target
from data_utils.objectives.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("unilmv2")
class UniLmV2Config(RowSizes):
    """Settings of the predicted blocks."""

    needed_roles = ("cls", "sep", "mask")

    masked_ratio: float = fraction(0.15, "Fraction of the tokens, CLS and SEP included, that is predicted.")
    span_prob: float = fraction(
        0.4, "Probability that a masked block is a span; otherwise it is a single token."
    )
    max_span_length: int = setting(
        6, "Longest span, in tokens; lengths 2..max_span_length are equally likely.", at_least=2
    )

    @property
    def length_weights(self) -> list[float]:
        """Probabilities of blocks of 1, 2, ... tokens."""
        spans = self.max_span_length - 1
        return [1.0 - self.span_prob, *([self.span_prob / spans] * spans)]

    @property
    def growth(self) -> float:
        """Row tokens per token of text: every chosen token adds its original and a pseudo mask."""
        return 1.0 + 2.0 * self.masked_ratio

    @property
    def loss_share(self) -> float:
        return 2.0 * self.masked_ratio / self.growth

    @property
    def overhead(self) -> int:
        """CLS, SEP, their share of the chosen tokens, and rounding."""
        return 4 if self.masked_ratio <= 0.25 else 4 + int(4 * self.masked_ratio)

    def max_position_needed(self, sequence_length: int) -> int:
        """Positions count the text with CLS and SEP."""
        return sequence_length + 1


@inlined
def _fill_chunk(row, chunk, tables, settings):
    text, offset, scratch = chunk.text, chunk.offset, tables.scratch
    size = len(text) + 2
    maskable = maskable_length(text, settings)
    for i in range(size):
        token = settings.cls if i == 0 else settings.sep if i == size - 1 else text[i - 1]
        put(row, offset + i, token, i, 0)
        scratch.free[i] = 1 <= i <= maskable
        scratch.unit_start[i] = 1
    target = min(masked_target(settings.masked_ratio, size), len(text))
    blocks = draw_spans(tables, size, target, False, 0)
    chosen = 0
    for block in range(blocks):
        chosen += scratch.ends[block] - scratch.starts[block]
    end = offset + size + 2 * chosen
    mark_document(row, offset, offset + size, chunk.document, settings.loss)
    mark_document(row, offset + size, end, chunk.document, settings.second_loss)
    original, pseudo = offset + size, offset + size + chosen
    for block in range(blocks):
        step = block + 1
        for i in range(scratch.starts[block], scratch.ends[block]):
            token = text[i - 1]
            # Each chosen position is there three times: [MASK] in the text (autoencoding), its original, which
            # later steps read, and a pseudo mask, which predicts it from the text and the originals of earlier steps.
            row[TOKENS, offset + i] = settings.mask
            predict(row, offset + i, token)
            put(row, original, token, i, step)
            # A negative order: it sees what is before its step, and only the pseudo masks of its own block
            # (GRP) see it.
            put(row, pseudo, settings.mask, i, -step)
            row[GRP, pseudo] = step
            predict(row, pseudo, token)
            original += 1
            pseudo += 1
    return end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    fill_chunks(_fill_chunk, batch, chunks, tables, record)


@register
class UniLmV2(RowObjective):
    name = "unilmv2"
    config_class = UniLmV2Config
    losses = (Loss("autoencoding", 18), Loss("partially_autoregressive", 19))
    text_format = TextFormat(
        "unilmv2", "masks", before=("cls",), after=("sep",), ends=("sep",), segments=(0, 1)
    )
    entry = staticmethod(_fill_rows)
    ends_with_sep = True

    def values(self) -> dict[str, Any]:
        return super().values() | {"second_loss": self.losses[1].number}
