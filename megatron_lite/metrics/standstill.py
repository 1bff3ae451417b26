"""Notices that a run has stopped learning while its rate is still high, and says where to look (docs/learning.md)."""

from __future__ import annotations

LEAST_EVALUATIONS = 6
LEAST_GAIN = 0.005  # relative, of the second half of the steps on the first: a run that learns gains several times this
HIGH_RATE = 0.3  # of the peak: below it a loss comes to rest by plan
RISE = 0.02  # relative, above the best
ADVICE = (
    "Look at optimizer.lr first; a small model is also held back by learned positions (try model.positions=rotary) and "
    "by words that begin small (docs/learning.md)."
)


class Standstill:
    """Fed with each evaluation of a start. It speaks once: the reasons do not change while the run goes on."""

    def __init__(self) -> None:
        self._losses: list[tuple[int, float]] = []
        self._has_spoken = False

    def advice(self, step: int, loss: float, rate_share: float) -> str:
        """A warning, or "". Args: loss: of validation, nats. rate_share: learning rate as a part of its peak."""
        self._losses.append((step, loss))
        if self._has_spoken or len(self._losses) < LEAST_EVALUATIONS or rate_share < HIGH_RATE:
            return ""
        before, since = (
            [value for at, value in self._losses if (at <= step // 2) == is_first]
            for is_first in (True, False)
        )
        if not before or min(since) < (1 - LEAST_GAIN) * min(before):
            return ""
        self._has_spoken = True
        if loss > (1 + RISE) * min(before):
            return (
                f"the validation loss rises, from {min(before):.4f} to {loss:.4f} at step {step}: the model learns its "
                "training text by heart, or optimizer.lr is too high; more text or dropout, or a lower rate, helps."
            )
        return (
            f"the validation loss stands still: {min(before):.4f} at best up to step {step // 2}, {min(since):.4f} "
            f"since. {ADVICE}"
        )
