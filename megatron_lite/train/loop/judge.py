"""The interface of judges, which evaluate a run by other scores than the validation loss."""

from __future__ import annotations

from typing import Protocol


class Judge(Protocol):
    """Called by every rank at the same point; every rank gets the same answers."""

    @property
    def ends_training(self) -> bool:
        """Whether no better score is to be expected."""
        ...

    def resume(self, step: int) -> int:
        """The run goes on after this step: what was found later is forgotten. Returns the last evaluated step, or 0."""
        ...

    def evaluate(self, step: int) -> dict[str, float]:
        """Scores of the model as it is now, which is saved as this step's checkpoint."""
        ...
