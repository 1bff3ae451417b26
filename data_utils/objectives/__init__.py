"""Objectives by name. A new one is one file, found by itself: see docs/own_objective.md.

Which file does what: `masking` chooses the spans to mask and corrupts them 80/10/10, in whole words or tokens.
`masked_text` builds BERT-like samples with it: CLS and SEP, sentence pairs, labels (masked_lm, spanbert, albert, ernie,
unilm). `base` has the base class of an objective (`RowObjective`) and of its section (`RowSizes`), which says how long
rows are and whether words are masked whole. `compiled` has the compiled loop over samples and chunks, and the functions
that write a row's fields. `blank_infilling/spans` draws GLM's spans and writes its parts A and B. `interface` and
`registry` define and find objectives. The random numbers of a sample are in data_utils/common/random_streams.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_utils.common.errors import ConfigError
from data_utils.common.seeds import derive_seed
from data_utils.common.setting_files import shown
from data_utils.objectives.declared import declared_in
from data_utils.objectives.interface import Objective, ObjectiveConfig
from data_utils.objectives.packages import GROUP
from data_utils.objectives.registry import Objectives
from data_utils.tokenizers.vocabulary import Vocabulary

if TYPE_CHECKING:
    from data_utils.objectives.base import RowObjective

OBJECTIVES = Objectives(declared_in(Path(__file__).parent, __name__), with_packages=True)
LOSSES = OBJECTIVES.losses  # the `objective` field holds an index into these
LOSS_NAMES = tuple(loss.name for loss in LOSSES)
SENTENCE_LEVEL = tuple(loss.name for loss in LOSSES if loss.sentence_level)


@dataclass(frozen=True)
class ObjectiveChoice:
    """One objective of a run."""

    name: str
    section: Any  # its config section
    weight: float = 1.0  # share of the samples, relative to the others


def objective_class(name: str) -> type[RowObjective]:
    """The objective of a name. Raises ConfigError for an unknown one."""
    if name not in OBJECTIVES:
        raise ConfigError(
            f"objective is {shown(name)}; it must be one of {', '.join(OBJECTIVES)}, or the objective of an "
            f"installed package (entry point group {GROUP}); install the package that provides it."
        )
    return OBJECTIVES[name]


def section_class(name: str) -> Any:
    """The class of an objective's section; a mapping for one of a package that is not loaded."""
    return objective_class(name).config_class if OBJECTIVES.is_loaded(name) else dict[str, Any]


def sections_with_models() -> list[type[ObjectiveConfig]]:
    """Sections of the objectives that train a model with a spec. Packages that are not loaded are left out."""
    sections = [OBJECTIVES[name].config_class for name in OBJECTIVES if OBJECTIVES.is_loaded(name)]
    return [section for section in sections if section.model_module is not None]


def loss_share(choices: Sequence[ObjectiveChoice]) -> float:
    """Part of a run's row tokens that is predicted, on average and without padding."""
    total = sum(choice.weight for choice in choices)
    return sum(choice.weight * choice.section.loss_share for choice in choices) / total


def make_one(
    name: str,
    section: Any,
    vocabulary: Vocabulary,
    seed: int,
    sequence_length: int,
    row_length: int | None = None,
) -> RowObjective:
    """The objective of a name with its section. Raises ConfigError when they do not go together."""
    return objective_class(name)(section, vocabulary, seed, sequence_length, row_length)


def make_objective(
    choices: Sequence[ObjectiveChoice],
    vocabulary: Vocabulary,
    seed: int,
    sequence_length: int,
    row_length: int | None = None,
) -> Objective:
    """The objective of a run: the only one chosen, or a mixture.

    Args:
        seed: the run's seed.
        sequence_length: source tokens per sample, at most. row_length: None = what the longest needs.
    Raises: ConfigError when the settings do not go together.
    """
    key = derive_seed(seed, "objective")
    objectives = [
        make_one(choice.name, choice.section, vocabulary, key, sequence_length, row_length)
        for choice in choices
    ]
    if len(objectives) == 1:
        return objectives[0]
    unmixable = [choice.name for choice in choices if choice.section.whole_documents]
    if unmixable:
        raise ConfigError(
            f"{unmixable[0]} cannot be mixed with other objectives, because its samples are whole documents; use it "
            "alone."
        )
    from data_utils.objectives.mixed import Mixed  # loads numba, which names and sections do not need

    weights = [choice.weight for choice in choices]
    return Mixed(objectives, weights, derive_seed(seed, "objective mixture"))
