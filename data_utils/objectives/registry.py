"""The register of objectives: what the files of this folder declare, read as text; a class is imported when it is used.

So a run loads the objectives that it chose, and yet knows the names and the losses of all.
"""

from __future__ import annotations

import ast
import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from data_utils.base import losses as known
from data_utils.base.losses import MOST_LOSSES, Loss

if TYPE_CHECKING:
    from data_utils.objectives.rows import RowObjective

Made = TypeVar("Made", bound="type[RowObjective]")


class Declared(NamedTuple):
    """An objective, as its file declares it below `@register`."""

    name: str
    losses: tuple[Loss, ...]
    module: str
    class_name: str


def register(cls: Made) -> Made:
    """The mark of an objective's class, by which `declared_in` finds it."""
    return cls


def declared_in(folder: Path, package: str) -> Iterator[Declared]:
    """The objectives of a folder, without an import. Raises: ValueError for one whose name or losses are computed."""
    for path in sorted(folder.rglob("*.py")):
        module = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
        for text in path.read_text(encoding="utf-8").split("\n@register\n")[1:]:
            cls: ast.ClassDef = ast.parse(text).body[0]  # type: ignore[assignment]
            lines = [line for line in cls.body if isinstance(line, ast.Assign)]
            values: dict[str, Any] = {ast.unparse(line.targets[0]): line.value for line in lines}
            try:
                losses = tuple(map(_loss, values["losses"].elts))
                yield Declared(ast.literal_eval(values["name"]), losses, module, cls.name)
            except (KeyError, AttributeError, TypeError, ValueError):
                raise ValueError(
                    f"{path}: class {cls.name} is an objective whose name or losses cannot be read without an import; "
                    'write name = "..." and losses = (Loss("...", NUMBER),) in it.'
                ) from None


def _loss(value: Any) -> Loss:
    """`Loss("name", number)`, or the name of one in base/losses.py."""
    if isinstance(value, ast.Name):
        return getattr(known, value.id)
    return Loss(*map(ast.literal_eval, value.args))


class Objectives(Mapping[str, "type[RowObjective]"]):
    """Classes by name. The names are known at once; looking one up imports its module.

    Raises: ValueError for two objectives with one name, and what `losses_by_number` raises.
    """

    def __init__(self, declared: Iterable[Declared]) -> None:
        self._declared: dict[str, Declared] = {}
        # In the order of the numbers of their losses, so that no file name matters.
        for one in sorted(declared, key=lambda one: one.losses[0].number):
            other = self._declared.setdefault(one.name, one)
            if other is not one:
                raise ValueError(
                    f"the objectives of {other.module} and {one.module} have the same name {one.name!r}; choose "
                    "another one for the new objective."
                )
        self.losses = losses_by_number(self._declared.values())

    def __getitem__(self, name: str) -> type[RowObjective]:
        declared = self._declared[name]
        return getattr(importlib.import_module(declared.module), declared.class_name)

    def __contains__(self, name: object) -> bool:
        return name in self._declared

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)


def losses_by_number(objectives: Iterable[Declared]) -> tuple[Loss, ...]:
    """The losses of the objectives, each at the place of its number.

    Raises: ValueError for two losses with one number or name, and for numbers that are not 0, 1, 2, ... below
        MOST_LOSSES.
    """
    losses = list(dict.fromkeys(loss for objective in objectives for loss in objective.losses))
    numbers = {loss.number for loss in losses}
    free = next(number for number in itertools.count() if number not in numbers)
    for what in ("number", "name"):
        owners: dict[object, Loss] = {}
        for loss in losses:
            owner = owners.setdefault(getattr(loss, what), loss)
            if owner is not loss:
                raise ValueError(
                    f"the losses {owner.name} ({owner.number}) and {loss.name} ({loss.number}) have the same {what}; "
                    f"give the new one another. The next free number is {free}."
                )
    if numbers != set(range(len(losses))):
        raise ValueError(
            f"the numbers of the losses are {sorted(numbers)}, which leaves out {free}; give the new loss "
            "that number."
        )
    if len(losses) > MOST_LOSSES:
        raise ValueError(
            f"there are {len(losses)} losses, but the task embedding has {MOST_LOSSES} rows; raise MOST_LOSSES in "
            "data_utils/base/losses.py."
        )
    return tuple(sorted(losses, key=lambda loss: loss.number))
