"""Shares of the samples of each corpus, where some objectives read corpora of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.settings import check
from data_utils.objectives import ObjectiveChoice

LABELLED_PAIRS, TEXT_PAIRS = "labelled pairs", "text pairs"


def pair_objective(choice: ObjectiveChoice) -> str | None:
    """The name of an objective that reads corpora of its own; None for one that reads text."""
    return None if choice.section.own_corpora is None else choice.name


def shares(
    corpora: Sequence[Any], objectives: Sequence[ObjectiveChoice], weights: Sequence[float]
) -> list[float]:
    """The share of the samples that each corpus has. Raises ConfigError for an objective without a corpus.

    Args: weights: of the corpora, among those of one objective.
    """
    total = sum(choice.weight for choice in objectives)
    # By the objective that owns the corpora, None for all objectives of text.
    sample_shares: dict[str | None, float] = {}
    corpus_weights: dict[str | None, float] = {}
    for choice in objectives:
        owner = pair_objective(choice)
        sample_shares[owner] = sample_shares.get(owner, 0.0) + choice.weight / total
    for corpus, weight in zip(corpora, weights, strict=True):
        corpus_weights[corpus.objective] = corpus_weights.get(corpus.objective, 0.0) + weight
    for owner in sample_shares:
        if not corpus_weights.get(owner):
            names = ", ".join(choice.name for choice in objectives if pair_objective(choice) == owner)
            which = "without an objective of its own" if owner is None else f"with objective: {owner}"
            raise ConfigError(
                f"{names} has a positive weight, but no corpus {which} has one; add such a corpus to data.train "
                "(and to data.validation, if set), or remove the objective."
            )
    return [
        weight * sample_shares.get(corpus.objective, 0.0) / (corpus_weights[corpus.objective] or 1.0)
        for corpus, weight in zip(corpora, weights, strict=True)
    ]


def check_corpora(config: Any) -> None:
    """Raise ConfigError unless a run's corpora suit its objectives that read pairs. Args: config: a Config."""
    for corpora in (config.data.train, config.data.validation):
        if corpora:
            shares(corpora, config.objective_choices, [corpus.share for corpus in corpora])
    for name in ("region", "short_prob"):
        value = getattr(config.data, name)
        check(value == 0, f"data.{name} is {value}, but pairs are no windows of text; set it to 0.")
