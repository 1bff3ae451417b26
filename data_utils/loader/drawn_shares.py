"""Which share of the tokens the objectives predict, and at which share words begin, measured on samples as drawn.

A run whose words are wrong trains on: the masks look like masks. These two figures show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from data_utils.common.batch_fields import DOC, OBJECTIVE, WEIGHTS
from data_utils.common.errors import UserError
from data_utils.common.losses import CLASS_LEVEL
from data_utils.loader.loader import SampleLoader
from data_utils.objectives.masked_text import MaskedTextConfig
from data_utils.objectives.mixed import Mixed
from data_utils.tokenizers.vocabulary import Vocabulary

_TOKENS, _MOST_SAMPLES = 2**17, 256  # drawn at most
_ENOUGH = 2000  # tokens, below which chance decides
FEW_STARTS, MANY_STARTS = 0.1, 0.98  # prose has 0.6 to 0.9, Chinese and WordLevel models 1
MANY_UNKNOWN = 0.05  # of the tokens; emoji and rare scripts make less than 0.01 in prose


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
        shares.append(f"{one.name} {_percent(share)}" + f" (masked_ratio {intended:g})" * has_ratio)
        if tokens.sum() >= _ENOUGH and not 0.5 * intended <= share <= 2 * intended:
            warnings.append(
                f"warning: {one.name} predicts {_percent(share)} of the tokens instead of the intended "
                f"{_percent(intended)}. Are words or documents very short or very long? scripts/inspect_batch.py shows "
                "samples."
            )
    yield f"share of predicted tokens in the first {len(indices):,} samples: {', '.join(shares)}"
    if not objectives[0].config.whole_documents:  # OPTIMUS's text is of two vocabularies
        text = text if text.ndim == 1 else text[0]
        objectives_of_words = [one.name for one in objectives if one.mask_units == "words"]
        yield from word_shares(text, objectives[0].vocabulary, "their", objectives_of_words)
    yield from warnings


def word_shares(
    tokens: np.ndarray, vocabulary: Vocabulary, whose: str, objectives_of_words: Sequence[str] = ()
) -> Iterator[str]:
    """A line on where words begin in a text, then a warning. Args: objectives_of_words: their names."""
    if vocabulary.word_start is None:
        yield f"no word boundaries: {vocabulary.words_unknown}; objectives can mask single tokens only"
        return
    share = float(vocabulary.word_starts(tokens).mean()) if len(tokens) else 1.0
    note = ": each token is a word, so that hiding whole words hides single tokens" if share == 1.0 else ""
    yield f"words begin at {_percent(share)} of {whose} tokens{note}"
    if objectives_of_words and len(tokens) >= _ENOUGH and not FEW_STARTS <= share <= MANY_STARTS:
        reason = (
            "a word is a long text that is masked as a whole" if share < FEW_STARTS else "a word is one token"
        )
        yield (
            f"warning: {', '.join(objectives_of_words)} masks whole words, but {_percent(share)} of the tokens begin "
            f"a word: {reason}. Unless this is expected (proteins, Chinese), check the tokenizer."
        )


def unknown_share(tokens: np.ndarray, vocabulary: Vocabulary, whose: str) -> Iterator[str]:
    """A warning if much of a text is the token for what the vocabulary cannot write."""
    share = (
        0.0 if "unk" in vocabulary.lacking or not len(tokens) else np.mean(tokens == vocabulary.special.unk)
    )
    if share >= MANY_UNKNOWN:
        yield (
            f"warning: {_percent(float(share))} of {whose} tokens are the unknown token, so their text is lost. "
            "Does the tokenizer fit the language, script and letter case of the text?"
        )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
