"""The list `phases` of the settings: the length of each phase, and what it sets in place of the run's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_utils.common.setting_files import shown
from data_utils.common.settings import (
    check,
    checked,
    inline_sections,
    merge,
    setting,
    setting_mapping,
    to_tree,
)
from data_utils.objectives import OBJECTIVES

_LENGTHS = ("steps", "samples", "tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("phases")
class PhaseConfig:
    steps: int | None = setting(
        None, "length in optimizer steps; the last phase may have no length: to training.steps", at_least=1
    )
    samples: int | None = setting(None, "length in samples instead, rounded up to whole steps", at_least=1)
    tokens: int | None = setting(
        None, "length in tokens instead: sequence_length for each sample", at_least=1
    )
    sequence_length: int | None = setting(None, "instead of data.sequence_length", at_least=16)
    row_length: int | None = setting(
        None, "instead of data.row_length, null = derived where a sequence_length is given", at_least=1
    )
    weights: dict[str, Any] = setting_mapping("name of a corpus -> its weight; not named = no part")
    batch: dict[str, Any] = setting_mapping("what of the section batch differs")
    objectives: dict[str, Any] = setting_mapping("instead of the run's objectives, among which they must be")
    loss_weights: dict[str, Any] = setting_mapping("instead of training.loss_weights")
    embedding_gradient_shrink: float | None = setting(None, "instead of that of model", above=0, at_most=1)
    objective_settings: dict[str, Any] = inline_sections(
        OBJECTIVES, lambda name: dict[str, Any], "what of it differs"
    )

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _LENGTHS if getattr(self, name) is not None}
        check(
            len(given) <= 1,
            f"a phase has {' and '.join(f'{name} {value}' for name, value in given.items())}; give one of them.",
        )

    @property
    def has_length(self) -> bool:
        return any(getattr(self, name) is not None for name in _LENGTHS)

    def settings(self, tree: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """A configuration's tree with this phase's settings. Args: names: of its training corpora."""
        own = {"batch": self.batch, **self.objective_settings}
        merged = merge(tree, {"phases": [], "schedule": {"parts": []}, **own})
        if self.weights:
            train = zip(tree["data"]["train"], names, strict=True)
            with_weights = [{**corpus, "weight": self.weights.get(name, 0)} for corpus, name in train]
            merged["data"] = {**merged["data"], "train": with_weights}
        if self.sequence_length is not None or self.row_length is not None:
            length = self.sequence_length or tree["data"]["sequence_length"]
            merged["data"] = {**merged["data"], "sequence_length": length, "row_length": self.row_length}
        if self.objectives:
            merged["objectives"], merged["objective_starts"] = self.objectives, {}
        if self.loss_weights:
            merged["training"] = {**merged["training"], "loss_weights": self.loss_weights}
        if self.embedding_gradient_shrink is not None:
            shrink = {"embedding_gradient_shrink": self.embedding_gradient_shrink}
            merged["model"] = {**merged["model"], **shrink}
        return merged

    def __str__(self) -> str:
        settings = {key: value for key, value in to_tree(self).items() if value and key not in _LENGTHS}
        return ", ".join(f"{key} {shown(value)}" for key, value in settings.items()) or "as the run"
