"""The list `phases` of the settings: the length of each phase, and what it sets in place of the run's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
    on_resume: ClassVar[str] = "phase"

    steps: int | None = setting(
        None,
        "Length in optimizer steps; the last phase may leave out its length and then runs to training.steps.",
        at_least=1,
    )
    samples: int | None = setting(None, "Length in samples, rounded up to whole steps.", at_least=1)
    tokens: int | None = setting(
        None, "Length in tokens (sequence_length per sample), rounded up to whole steps.", at_least=1
    )
    sequence_length: int | None = setting(None, "Replaces data.sequence_length.", at_least=16)
    row_length: int | None = setting(
        None, "Replaces data.row_length; null = derived if the phase sets sequence_length.", at_least=1
    )
    weights: dict[str, Any] = setting_mapping(
        "Corpus name -> sampling weight, in tokens where data.train has tokens; corpora not listed are not sampled."
    )
    batch: dict[str, Any] = setting_mapping("Overrides of the section batch.")
    objectives: dict[str, Any] = setting_mapping("Replaces objectives; a subset of the run's objectives.")
    loss_weights: dict[str, Any] = setting_mapping("Replaces training.loss_weights.")
    mtp_weight: float | None = setting(None, "Replaces training.mtp_weight.", at_least=0)
    skip_samples: int = setting(
        0, "Samples that are left out before the phase, such as those around a loss spike.", at_least=0
    )
    lr: float | None = setting(None, "Replaces optimizer.lr, the peak of the schedule.", above=0)
    embedding_gradient_shrink: float | None = setting(
        None, "Replaces model.embedding_gradient_shrink.", above=0, at_most=1
    )
    rotary_base: float | None = setting(
        None, "Replaces model.rotary_base, as where a run goes on with longer texts.", above=1
    )
    objective_settings: dict[str, Any] = inline_sections(
        OBJECTIVES, lambda name: dict[str, Any], "Overrides of this objective's section."
    )

    def __post_init__(self) -> None:
        lengths = {name: getattr(self, name) for name in _LENGTHS if getattr(self, name) is not None}
        check(
            len(lengths) <= 1,
            f"a phase has {' and '.join(f'{name} {value}' for name, value in lengths.items())}; set only one of "
            "them.",
        )

    @property
    def has_length(self) -> bool:
        return any(getattr(self, name) is not None for name in _LENGTHS)

    def settings(self, tree: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """A configuration's tree with this phase's settings. Args: names: of its training corpora."""
        overrides = {"batch": self.batch, **self.objective_settings}
        merged = merge(tree, {"phases": [], "schedule": {"parts": []}, **overrides})
        if self.weights:
            corpora = tree["data"]["train"]
            unit = "weight" if all(corpus.get("tokens") is None for corpus in corpora) else "tokens"
            train = zip(corpora, names, strict=True)
            with_weights = [{**corpus, unit: self.weights.get(name, 0)} for corpus, name in train]
            merged["data"] = {**merged["data"], "train": with_weights}
        if self.sequence_length is not None or self.row_length is not None:
            length = self.sequence_length or tree["data"]["sequence_length"]
            merged["data"] = {**merged["data"], "sequence_length": length, "row_length": self.row_length}
        if self.objectives:
            merged["objectives"] = self.objectives
        if self.loss_weights:
            merged["training"] = {**merged["training"], "loss_weights": self.loss_weights}
        if self.mtp_weight is not None:
            merged["training"] = {**merged["training"], "mtp_weight": self.mtp_weight}
        if self.lr is not None:
            merged["optimizer"] = {**merged["optimizer"], "lr": self.lr}
        of_model = {name: getattr(self, name) for name in ("embedding_gradient_shrink", "rotary_base")}
        merged["model"] = merged["model"] | {
            key: value for key, value in of_model.items() if value is not None
        }
        return merged

    def __str__(self) -> str:
        settings = {key: value for key, value in to_tree(self).items() if value and key not in _LENGTHS}
        return ", ".join(f"{key} {shown(value)}" for key, value in settings.items()) or "as the run"
