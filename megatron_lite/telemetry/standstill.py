"""Warns once when a run has stopped learning while its learning rate is still high (docs/learning.md).

Halves of the steps are compared, not the last few evaluations: a run of 300,000 steps gains less than a percent in four
of these and learns well. A power law with a large part that cannot be learnt still gains 1 % from half to half.
"""

from __future__ import annotations

MIN_EVALUATIONS = 6
MIN_GAIN = 0.005  # relative, from the first half of the steps to the second: a run that learns gains several times this
HIGH_RATE = 0.3  # of the peak: with a lower rate a loss is expected to flatten
RISE = 0.02  # relative, above the lowest loss of the first half
ADVICE = (
    "Look at optimizer.lr first; a small model is also held back by learned positions (try model.positions=rotary) and "
    "by word embeddings that are initialized small (docs/learning.md)."
)


class Standstill:
    """Watches the evaluations since the process began. Warns once: the cause stays while the run continues."""

    def __init__(self) -> None:
        self._losses: list[tuple[int, float]] = []
        self._has_warned = False

    def advice(self, step: int, loss: float, rate_share: float) -> str:
        """A warning, or "". Args: loss: of validation, nats. rate_share: learning rate over its peak."""
        self._losses.append((step, loss))
        if self._has_warned or len(self._losses) < MIN_EVALUATIONS or rate_share < HIGH_RATE:
            return ""
        first_half = [loss for at, loss in self._losses if at <= step // 2]
        second_half = [loss for at, loss in self._losses if at > step // 2]
        if not first_half or min(second_half) < (1 - MIN_GAIN) * min(first_half):
            return ""
        self._has_warned = True
        if loss > (1 + RISE) * min(first_half):
            return (
                f"the validation loss rises, from {min(first_half):.4f} to {loss:.4f} at step {step}: the model "
                "overfits its training text, or optimizer.lr is too high; use more text or dropout, or a lower rate."
            )
        return (
            f"the validation loss has stopped falling: the lowest is {min(first_half):.4f} up to step {step // 2}, and "
            f"{min(second_half):.4f} since. {ADVICE}"
        )
