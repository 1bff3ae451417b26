"""Objectives by name: one file per system, one class per name. See planes.py for what a class must offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_utils.objectives.albert import Albert, AlbertConfig
from data_utils.objectives.bart import Bart, BartConfig
from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from data_utils.objectives.causal import Causal, CausalConfig
from data_utils.objectives.ernie import Ernie, ErnieConfig
from data_utils.objectives.masked_lm import MaskedLm, MaskedLmConfig
from data_utils.objectives.mass import Mass, MassConfig
from data_utils.objectives.mixed import Mixed
from data_utils.objectives.planes import Example, Objective, SpecialTokens, Vocabulary
from data_utils.objectives.prefix_lm import PrefixLm, PrefixLmConfig
from data_utils.objectives.spanbert import SpanBert, SpanBertConfig
from data_utils.objectives.t5 import T5, T5Config
from data_utils.objectives.unilm import UniLm, UniLmConfig
from data_utils.objectives.unilmv2 import UniLmV2, UniLmV2Config
from data_utils.objectives.xlnet import Xlnet, XlnetConfig
from data_utils.random_streams import derive_seed
from megatron_lite.errors import ConfigError

# name in the configuration -> (section class, objective class); the section has the same name
OBJECTIVES: dict[str, tuple[type, type]] = {
    "blank_infilling": (BlankInfillingConfig, BlankInfilling),
    "causal": (CausalConfig, Causal),
    "prefix_lm": (PrefixLmConfig, PrefixLm),
    "masked_lm": (MaskedLmConfig, MaskedLm),
    "spanbert": (SpanBertConfig, SpanBert),
    "albert": (AlbertConfig, Albert),
    "ernie": (ErnieConfig, Ernie),
    "t5": (T5Config, T5),
    "bart": (BartConfig, Bart),
    "mass": (MassConfig, Mass),
    "unilm": (UniLmConfig, UniLm),
    "unilmv2": (UniLmV2Config, UniLmV2),
    "xlnet": (XlnetConfig, Xlnet),
}

__all__ = [
    "OBJECTIVES",
    "BlankInfilling",
    "BlankInfillingConfig",
    "Example",
    "Objective",
    "ObjectiveChoice",
    "SpecialTokens",
    "Vocabulary",
    "make_objective",
    "make_one",
    "objective_classes",
]


@dataclass(frozen=True)
class ObjectiveChoice:
    """One objective of a run."""

    name: str
    section: Any  # its config section
    weight: float = 1.0  # share of the samples, relative to the others
    first_sample: int = 0  # it takes part from this sample on


def objective_classes(name: str) -> tuple[type, type]:
    """The configuration section and the objective of a name. Raises ConfigError for an unknown one."""
    if name not in OBJECTIVES:
        raise ConfigError(f"objective is {name!r}; it must be one of {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]


def make_one(
    name: str,
    section: Any,
    vocabulary: Vocabulary,
    seed: int,
    sequence_length: int,
    row_length: int | None = None,
) -> Objective:
    """The objective of a name with its section. Raises ConfigError when they do not go together."""
    _, cls = objective_classes(name)
    if cls is BlankInfilling:
        words = (vocabulary.special, vocabulary.sentence_end)
        return BlankInfilling(section, *words, seed, sequence_length, row_length)
    return cls(section, vocabulary, seed, sequence_length, row_length)


def make_objective(
    choices: Sequence[ObjectiveChoice],
    vocabulary: Vocabulary,
    seed: int,
    sequence_length: int,
    row_length: int | None = None,
) -> Objective:
    """The objective of a run: the only one chosen, or a mixture.

    Args:
        seed: that of the run.
        sequence_length: source tokens per sample, at most. row_length: None = what the longest needs.
    Raises: ConfigError when the settings do not go together.
    """
    key = derive_seed(seed, "objective")
    made = [
        make_one(choice.name, choice.section, vocabulary, key, sequence_length, row_length)
        for choice in choices
    ]
    if len(made) == 1:
        return made[0]
    weights = [choice.weight for choice in choices]
    first_samples = [choice.first_sample for choice in choices]
    return Mixed(made, weights, first_samples, derive_seed(seed, "objective mixture"))
