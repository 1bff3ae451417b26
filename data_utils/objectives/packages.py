"""Objectives of other packages: entry points of the group `megatron_lite.objectives`, read as text like our own files.

Nothing is imported here, so that an installed package costs and breaks only the runs that choose its objective. What is
wrong with one is kept as a sentence, and said to whoever chooses it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from data_utils.common.errors import ConfigError
from data_utils.common.losses import MOST_LOSSES, Loss
from data_utils.objectives.declared import Declared, declared_class

GROUP = "megatron_lite.objectives"
FIRST_NUMBER = 48  # of losses of packages, up to MOST_LOSSES: the numbers below are this project's
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def package_objectives(own: Mapping[str, Declared]) -> tuple[list[Declared], dict[str, str]]:
    """The objectives of the installed packages, and what is wrong with the names that cannot be used.

    Args: own: this project's objectives.
    """
    declared, problems = [], {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        package = "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        try:
            declared.append(_declared(entry, package))
        except (ConfigError, OSError, UnicodeError) as error:
            problems[entry.name] = (
                f"the objective {entry.name} of the package {package} cannot be used: {error}"
            )
    claims: dict[tuple[str, object], Declared] = {
        claim: objective for objective in own.values() for claim in _claimed(objective.name, objective.losses)
    }
    for objective in declared:
        for claim in _claimed(objective.name, objective.losses):
            other = claims.setdefault(claim, objective)
            if other is not objective and not (claim[0] != "name" and _is_shared(claim, objective, other)):
                text = (
                    f"{_owner(other)} and {_owner(objective)} claim the same {claim[0]} {claim[1]}; uninstall or "
                    "change one of them."
                )
                problems.setdefault(objective.name, text)
                if other.package:
                    problems.setdefault(other.name, text)
    return [objective for objective in declared if objective.name not in problems], problems


def _declared(entry: importlib.metadata.EntryPoint, package: str) -> Declared:
    if not _NAME.fullmatch(entry.name) or not entry.attr or not entry.attr.isidentifier():
        raise ConfigError(
            f"its entry point {entry.name!r} = {entry.value!r} must have the form lower_case_name = module:Class."
        )
    path = _source(entry.module)
    if path is None:
        raise ConfigError(f"the module {entry.module} has no Python source file.")
    declared = declared_class(path, entry.module, entry.attr, package)
    if declared.name != entry.name:
        raise ConfigError(
            f"its entry point has the name {entry.name!r}, but its class has the name {declared.name!r}."
        )
    numbers = [loss.number for loss in declared.losses if not loss.is_shared]
    if any(not FIRST_NUMBER <= number < MOST_LOSSES for number in numbers):
        raise ConfigError(
            f"its losses have the numbers {numbers}; losses of packages must have numbers from {FIRST_NUMBER} to "
            f"{MOST_LOSSES - 1}."
        )
    return declared


def _source(module: str) -> Path | None:
    """The file of a module, without an import of it or of the packages that it is in."""
    first, *children = module.split(".")
    spec: ModuleSpec | None = importlib.util.find_spec(first)
    full_name = first
    for name in children:
        if spec is None or spec.submodule_search_locations is None:
            return None
        full_name = f"{full_name}.{name}"
        spec = PathFinder.find_spec(full_name, spec.submodule_search_locations)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def _claimed(name: str, losses: Iterable[Loss]) -> Iterable[tuple[str, object]]:
    yield "name", name
    for loss in losses:
        yield "loss", loss.name
        yield "number of a loss", loss.number


def _is_shared(claim: tuple[str, object], objective: Declared, other: Declared) -> bool:
    """Whether both take a loss of common/losses.py."""
    field = "name" if claim[0] == "loss" else "number"
    return any(loss.is_shared and getattr(loss, field) == claim[1] for loss in objective.losses)


def _owner(objective: Declared) -> str:
    owner = f"the package {objective.package}" if objective.package else "this project"
    return f"the objective {objective.name} of {owner}"
