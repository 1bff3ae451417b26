"""Masked diffusion of texts: LLaDA (arXiv:2502.09992). A text is written by putting words in place of masks.

Each chunk draws t, uniform in [0, 1), and each of its tokens, eos included, becomes [MASK] with the probability
p = least_share + (1 - least_share) t, independently; none is replaced by another token or kept. Masked tokens are
predicted at their own places by a model that sees the whole text, and their losses have the weight 1 / p. The sum is
divided by all tokens of the texts, masked or not (`BY_TOKENS` in common/losses.py): so it estimates a bound of the
negative log likelihood of a token, in nats.

The source draws one t for a row of 4096 tokens; here documents of one row have a t each. Its rows of random length, one
in a hundred, have no counterpart: documents have lengths of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_utils.common.batch_fields import POSITION_IDS, TARGETS, TOKENS, WEIGHTS
from data_utils.common.losses import MASKED_DIFFUSION
from data_utils.common.random_streams import uniform
from data_utils.common.settings import checked, setting
from data_utils.objectives.base import RowObjective, RowSizes
from data_utils.objectives.compiled import (
    copy_range,
    count_up,
    entry_point,
    fill_chunks,
    inlined,
    mark_document,
)
from data_utils.objectives.interface import TextFormat
from data_utils.objectives.registry import register


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("masked_diffusion")
class MaskedDiffusionConfig(RowSizes):
    """The least part of a text that is masked."""

    needed_roles = ("mask",)

    least_share: float = setting(
        0.001,
        "Minimum masking probability; its inverse is the largest loss weight of a token.",
        above=0,
        at_most=1,
    )

    @property
    def loss_share(self) -> float:
        return (1.0 + self.least_share) / 2

    @property
    def overhead(self) -> int:
        """Row tokens of a chunk beyond its text: none."""
        return 0


@inlined
def _fill_chunk(row, chunk, tables, settings):
    text, offset, rng = chunk.text, chunk.offset, tables.rng
    end = offset + len(text)
    share = settings.least_share + (1.0 - settings.least_share) * uniform(rng)
    copy_range(row[TOKENS], offset, end, text, 0)
    weights = row[WEIGHTS, offset:end].view(np.float32)
    for i in range(len(text)):
        if uniform(rng) < share:
            row[TOKENS, offset + i] = settings.mask
            row[TARGETS, offset + i] = text[i]
            weights[i] = np.float32(1.0 / share)
    count_up(row[POSITION_IDS], offset, end, 0)
    mark_document(row, offset, end, chunk.document, settings.loss)
    return end


@entry_point
def _fill_rows(batch, chunks, tables, record):
    fill_chunks(_fill_chunk, batch, chunks, tables, record)


@register
class MaskedDiffusion(RowObjective):
    name = "masked_diffusion"
    config_class = MaskedDiffusionConfig
    losses = (MASKED_DIFFUSION,)
    text_format = TextFormat("bert", "unmasking", ends=("eos",))
    entry = staticmethod(_fill_rows)
