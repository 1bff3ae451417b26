"""The register of objectives: each module of this folder registers its class when it is imported."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeVar

from data_utils.base.losses import MOST_LOSSES, Loss
from data_utils.objectives.rows import RowObjective

OBJECTIVES: dict[str, type[RowObjective]] = {}  # by name

Declared = TypeVar("Declared", bound=type[RowObjective])


def register(cls: Declared) -> Declared:
    """Class decorator of an objective. Raises ValueError for a name that another one has."""
    other = OBJECTIVES.setdefault(cls.name, cls)
    if other is not cls:
        raise ValueError(
            f"the objectives of {other.__module__} and {cls.__module__} have the same name {cls.name!r}; choose "
            "another one for the new objective."
        )
    return cls


def losses_by_number(objectives: Iterable[type[RowObjective]]) -> tuple[Loss, ...]:
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
