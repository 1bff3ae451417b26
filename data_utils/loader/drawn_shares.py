"""Which share of the tokens the objectives predict, and at which share words begin, measured on samples as drawn.

A run whose words are wrong trains on: the masks look like masks. These two figures show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from data_utils.common.batch_fields import DOC, OBJECTIVE, WEIGHTS
from data_utils.common.errors import UserError
from data_utils.common.losses import CLASS_LEVEL
from data_utils.loader.loader import SampleLoader
from data_utils.objectives.masked_text import MaskedTextConfig
from data_utils.objectives.mixed import Mixed
from data_utils.tokenizers.word_shares import ENOUGH, percent, word_shares

_TOKENS, _MOST_SAMPLES = 2**17, 256  # drawn at most


def drawn_shares(loader: SampleLoader) -> Iterator[str]:
    """Lines on the first samples of a run, those of its first phase at most, then warnings."""
    objective: Any = loader.objective
    second_phase = [mixture.start.first_sample for mixture in loader.mixtures[1:2]]
    indices = np.arange(min([max(4, min(_MOST_SAMPLES, _TOKENS // objective.row_length)), *second_phase]))
    try:
        batch, text = loader.batch(indices), loader.mixture.fetch(indices)[0]
    except UserError:  # training says it where it comes to it, on every rank
        return
    is_mixed = isinstance(objective, Mixed)
    objectives = objective.objectives if is_mixed else [objective]
    chosen = objective.choose(indices) if is_mixed else np.zeros(len(indices), np.int64)
    shares, warnings = [], []
    for number, one in enumerate(objectives):
        rows, config = batch[chosen == number], one.config
        tokens = rows[:, DOC] >= 0
        if not tokens.any():
            continue
        predicted = tokens & (rows[:, WEIGHTS] != 0) & ~np.isin(rows[:, OBJECTIVE], CLASS_LEVEL)
        share = float(predicted.sum() / tokens.sum())
        has_ratio = isinstance(config, MaskedTextConfig)
        intended = config.masked_ratio if has_ratio else config.loss_share
        shares.append(f"{one.name} {percent(share)}" + f" (masked_ratio {intended:g})" * has_ratio)
        if tokens.sum() >= ENOUGH and not 0.5 * intended <= share <= 2 * intended:
            warnings.append(
                f"warning: {one.name} predicts {percent(share)} of the tokens instead of the intended "
                f"{percent(intended)}. Are words or documents very short or very long? scripts/inspect_batch.py shows "
                "samples."
            )
    yield f"share of predicted tokens in the first {len(indices):,} samples: {', '.join(shares)}"
    if not objectives[0].config.whole_documents:  # OPTIMUS's text is of two vocabularies
        text = text if text.ndim == 1 else text[0]
        objectives_of_words = [one.name for one in objectives if one.mask_units == "words"]
        yield from word_shares(text, objectives[0].vocabulary, "their", objectives_of_words)
    yield from warnings
