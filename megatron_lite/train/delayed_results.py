"""Results of steps, which the host reads from the device one step late.

A step whose gradients are not finite is skipped on the device. The host reads this one step later, so that it is at
most one step ahead of the device, or where a log line, a save, an evaluation or the end of the run needs it.
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from data_utils.common.errors import TrainingError
from megatron_lite.engine.engine import StepResult


class DelayedResults:
    """Counts the skipped steps. Args: limit: `training.max_nonfinite_steps`. precision: `training.precision`."""

    def __init__(self, limit: int, directory: Path, precision: str):
        self._limit, self._directory, self._precision = limit, directory, precision
        self._unread: list[tuple[int, StepResult]] = []  # steps whose result the host has not read yet
        self.skipped_steps = 0
        self.skipped_in_a_row = 0

    def add(self, step: int, result: StepResult) -> None:
        """Add the result of a step, which the device may still compute."""
        self._unread.append((step, result))

    def read(self, all_but: int = 0) -> None:
        """Read which steps were skipped. Waits for the device, but not for the newest `all_but` steps.

        Raises: TrainingError after too many in a row.
        """
        while len(self._unread) > all_but:
            step, result = self._unread.pop(0)
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
            self.skipped_steps += result.skipped
            if self.skipped_in_a_row >= self._limit:
                raise TrainingError(
                    f"gradients were not finite in {self._limit} consecutive steps, up to step {step}; these steps did "
                    f"not change the weights. {self._remedy(step)}"
                )

    def _remedy(self, step: int) -> str:
        wider = (
            "Set training.precision=bf16, since fp16 overflows above 65,504. "
            if self._precision == "fp16"
            else ""
        )
        if self.skipped_steps == step:  # so neither the rate nor an earlier checkpoint helps
            return f"{wider}No step has changed the weights so far: look at those that the run begins with."
        rewind = f"scripts/checkpoints.py rewind {quote(str(self._directory))} STEP"
        return f"{wider}Lower optimizer.lr, or go back with `{rewind}`."
