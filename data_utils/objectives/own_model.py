"""Checks of the other settings of a run whose objective trains its own model (`model_module`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data_utils.common.settings import check, to_yaml_scalar

# Options of training that are defined for losses of tokens only.
NO_OPTIONS = {"label_smoothing": 0.0, "z_loss": 0.0, "loss_rows": 0, "eval_fillings": 0}


def require_alone(config: Any, why: str, solves_tasks: bool = False) -> None:
    """Raise ConfigError if the run has another objective or a task. Args: why: subject and verb before "alone"."""
    names = ", ".join(choice.name for choice in config.objective_choices)
    check(
        len(config.objective_choices) == 1 and (solves_tasks or config.task is None),
        f"objectives has {names}{' and a task' * (config.task is not None)}; {why} alone; remove the others.",
    )


def require(section: Any, path: str, wanted: Mapping[str, Any], why: str) -> None:
    """Raise ConfigError for a setting that is not as wanted. Args: path: of the section. why: follows the value."""
    for name, value in wanted.items():
        actual = getattr(section, name)
        check(
            actual == value,
            f"{path}.{name} is {to_yaml_scalar(actual)}, {why}; set it to {to_yaml_scalar(value)}.",
        )
