"""Objectives by name: one file per family, one class per name. See base.py for what a class must offer."""

from __future__ import annotations

from data_utils.objectives.base import Example, Objective, SpecialTokens
from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from megatron_lite.errors import ConfigError

# name in the configuration -> (section class, objective class); the section has the same name
OBJECTIVES = {"blank_infilling": (BlankInfillingConfig, BlankInfilling)}

__all__ = ["OBJECTIVES", "Example", "Objective", "SpecialTokens", "objective_classes"]


def objective_classes(name: str) -> tuple[type, type]:
    """The configuration section and the objective of a name. Raises ConfigError for an unknown one."""
    if name not in OBJECTIVES:
        raise ConfigError(f"objective is {name!r}; it must be one of {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[name]
