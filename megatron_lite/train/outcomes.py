"""Outcomes of steps, which the host reads from the device one step late."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from data_utils.common.errors import TrainingError
from megatron_lite.engine.engine import StepResult


class Outcomes:
    """Which steps were skipped. Args: limit: `training.max_nonfinite_steps`."""

    def __init__(self, limit: int, directory: Path):
        self._limit, self._directory = limit, directory
        self._unread: list[tuple[int, StepResult]] = []  # steps whose outcome the host does not know yet
        self.skipped_steps = 0
        self.skipped_in_a_row = 0

    def add(self, step: int, result: StepResult) -> None:
        """Take in a step, which the device may still compute."""
        self._unread.append((step, result))

    def read(self, all_but: int = 0) -> None:
        """Learn which steps were skipped. Waits for the device, but not for the newest `all_but` steps.

        Raises: TrainingError after too many in a row.
        """
        while len(self._unread) > all_but:
            step, result = self._unread.pop(0)
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
            self.skipped_steps += result.skipped
            if self.skipped_in_a_row >= self._limit:
                raise TrainingError(
                    f"gradients were not finite in {self._limit} consecutive steps, up to step {step}; these steps did "
                    "not change the weights. Lower optimizer.lr, or go back with "
                    f"`scripts/checkpoints.py rewind {quote(str(self._directory))} STEP`."
                )
