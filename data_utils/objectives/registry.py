"""The registry of objectives, also of packages. Files declare them (declared.py), and a class is imported on first use.

So a run imports only the objectives that it chose, but knows the names and losses of all.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from data_utils.common.errors import ConfigError
from data_utils.common.losses import MOST_LOSSES, Loss
from data_utils.common.setting_files import one_line
from data_utils.objectives.declared import Declared
from data_utils.objectives.packages import package_objectives

if TYPE_CHECKING:
    from data_utils.objectives.base import RowObjective

ObjectiveType = TypeVar("ObjectiveType", bound="type[RowObjective]")


def register(cls: ObjectiveType) -> ObjectiveType:
    """The class decorator of an objective, by which declared.py finds it."""
    return cls


class Objectives(Mapping[str, "type[RowObjective]"]):
    """Classes by name. The names are known at once, packages' too; looking one up imports its module.

    Args: with_packages: look for objectives of installed packages.
    Raises: ConfigError for two objectives of this project with one name, and what `losses_by_number` raises.
    """

    def __init__(self, declared: Iterable[Declared], with_packages: bool = False) -> None:
        self._own: dict[str, Declared] = {}
        # In the order of the numbers of their losses, so that no file name matters.
        for objective in sorted(declared, key=lambda objective: objective.losses[0].number):
            other = self._own.setdefault(objective.name, objective)
            if other is not objective:
                raise ConfigError(
                    f"the objectives of {other.module} and {objective.module} both have the name {objective.name!r}; "
                    "rename the new objective."
                )
        from_packages, self._problems = package_objectives(self._own) if with_packages else ([], {})
        self._declared = self._own | {objective.name: objective for objective in from_packages}
        self.losses = _with_package_losses(losses_by_number(self._own.values()), from_packages)

    @property
    def own(self) -> tuple[str, ...]:
        """The names of this project's objectives."""
        return tuple(self._own)

    def package(self, name: str) -> str:
        """Name and version of the package that brings an objective; "" = this project."""
        return self._declared[name].package if name in self._declared else ""

    def is_loaded(self, name: str) -> bool:
        """Whether looking a name up imports no package."""
        return name in self._own or (name in self._declared and self._declared[name].module in sys.modules)

    def __getitem__(self, name: str) -> type[RowObjective]:
        """Raises: ConfigError for an objective that cannot be imported, or whose name or losses two claim."""
        if name in self._problems:
            raise ConfigError(self._problems[name])
        declared = self._declared[name]
        try:
            return getattr(importlib.import_module(declared.module), declared.class_name)
        except SyntaxError as error:
            raise ConfigError(f"{error.filename}:{error.lineno}: {error.msg}; correct the file.") from None
        except Exception as error:
            if not declared.package:
                raise
            raise ConfigError(
                f"the objective {name} of the package {declared.package} cannot be imported "
                f"({type(error).__name__}: {one_line(error)}); repair the package."
            ) from error

    def __contains__(self, name: object) -> bool:
        return name in self._declared or name in self._problems

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._declared, *self._problems)))

    def __len__(self) -> int:
        return len(list(iter(self)))


def _with_package_losses(own: tuple[Loss, ...], packages: Iterable[Declared]) -> tuple[Loss, ...]:
    """The losses of this project and of packages, each at the index of its number; unused numbers lie between."""
    others = {loss.number: loss for objective in packages for loss in objective.losses if not loss.is_shared}
    numbers = range(len(own), max(others, default=-1) + 1)
    return (*own, *(others.get(number) or Loss(f"unused_{number}", number) for number in numbers))


def losses_by_number(objectives: Iterable[Declared]) -> tuple[Loss, ...]:
    """The losses of the objectives, each at the index of its number.

    Raises: ConfigError for two losses with one number or name, and for numbers that are not 0, 1, 2, ... below
        MOST_LOSSES.
    """
    losses = list(dict.fromkeys(loss for objective in objectives for loss in objective.losses))
    numbers = {loss.number for loss in losses}
    free = next(number for number in itertools.count() if number not in numbers)
    for field in ("number", "name"):
        owners: dict[object, Loss] = {}
        for loss in losses:
            owner = owners.setdefault(getattr(loss, field), loss)
            if owner is not loss:
                raise ConfigError(
                    f"the losses {owner.name} ({owner.number}) and {loss.name} ({loss.number}) have the same "
                    f"{field}; change that of the new one. The next free number is {free}."
                )
    if numbers != set(range(len(losses))):
        raise ConfigError(
            f"the numbers of the losses are {sorted(numbers)}; {free} is missing: give the new loss that number."
        )
    if len(losses) > MOST_LOSSES:
        raise ConfigError(
            f"there are {len(losses)} losses, but the task embedding has {MOST_LOSSES} rows; raise MOST_LOSSES in "
            "data_utils/common/losses.py."
        )
    return tuple(sorted(losses, key=lambda loss: loss.number))
