"""Warns once when a run has stopped learning while its learning rate is still high (docs/learning.md).

Halves of the steps are compared, not the last few evaluations: a run of 300,000 steps gains less than a percent in four
of these and learns well. A power law with a large part that cannot be learnt still gains 1 % from half to half.
"""

from __future__ import annotations

LEAST_EVALUATIONS = 6
LEAST_GAIN = 0.005  # relative, of the second half of the steps on the first: a run that learns gains several times this
HIGH_RATE = 0.3  # of the peak: below it a loss flattens by plan
RISE = 0.02  # relative, above the best
ADVICE = (
    "Look at optimizer.lr first; a small model is also held back by learned positions (try model.positions=rotary) and "
    "by word embeddings that are initialised small (docs/learning.md)."
)


class Standstill:
    """Gets each evaluation of a start. It warns once: the causes do not change while the run continues."""

    def __init__(self) -> None:
        self._losses: list[tuple[int, float]] = []
        self._has_warned = False

    def advice(self, step: int, loss: float, rate_share: float) -> str:
        """A warning, or "". Args: loss: of validation, nats. rate_share: learning rate over its peak."""
        self._losses.append((step, loss))
        if self._has_warned or len(self._losses) < LEAST_EVALUATIONS or rate_share < HIGH_RATE:
            return ""
        # By halves of the steps, not the last few evaluations: a long run gains less than a percent in four of
        # them and learns well.
        before, since = (
            [value for at, value in self._losses if (at <= step // 2) == is_first]
            for is_first in (True, False)
        )
        if not before or min(since) < (1 - LEAST_GAIN) * min(before):
            return ""
        self._has_warned = True
        if loss > (1 + RISE) * min(before):
            return (
                f"the validation loss rises, from {min(before):.4f} to {loss:.4f} at step {step}: the model "
                "overfits its training text, or optimizer.lr is too high; use more text or dropout, or a lower rate."
            )
        return (
            f"the validation loss stands still: {min(before):.4f} at best up to step {step // 2}, {min(since):.4f} "
            f"since. {ADVICE}"
        )
