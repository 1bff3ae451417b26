"""`schedule.parts` in steps: the learning rate of a schedule that consists of consecutive parts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from data_utils.common.settings import check
from megatron_lite.config.schedule import ScheduleConfig


class RatePart(NamedTuple):
    """A part of the schedule. Its steps are begin + 1 to end, counted from 1; rates are factors of optimizer.lr."""

    begin: int
    end: int
    kind: str
    start_rate: float
    end_rate: float

    def factor(self, step: int) -> float:
        """The factor of optimizer.lr for a step; after the end, the factor of the end."""
        if self.kind == "inverse_sqrt":
            return max(self.end_rate, self.start_rate * math.sqrt(self.begin / step))
        x = min(1.0, (step - self.begin) / (self.end - self.begin))
        progress = {
            "constant": 0.0,
            "linear": x,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * x)),
            "1-sqrt": math.sqrt(x),
            "exponential": 2.0 * (1.0 - 0.5**x),
        }
        return self.start_rate + (self.end_rate - self.start_rate) * progress[self.kind]


def rate_parts(schedule: ScheduleConfig, steps: int, tokens: Callable[[int], int]) -> list[RatePart]:
    """The parts of a schedule in steps.

    Args: steps: of the run. tokens: step -> tokens of the steps until then.
    Raises: ConfigError for parts that are longer than the run.
    """
    parts: list[RatePart] = []
    begin, rate, used = 0, 0.0, 0
    for part in schedule.parts:
        end = begin + (part.steps or 1)  # of a part in tokens: one at least
        used = tokens(end) if part.tokens is None else used + part.tokens
        if part.tokens is not None:
            # The first step by which that many tokens are trained; `tokens` rises with the step.
            end = bisect_left(range(steps + 1), used, end, key=tokens)
        start = rate if part.start is None else part.start
        parts.append(RatePart(begin, end, part.kind, start, start if part.end is None else part.end))
        begin, rate = end, parts[-1].factor(end)
    check(
        begin <= steps,
        f"schedule.parts have at least {begin:,} steps, but training.steps is {steps:,}; shorten the parts.",
    )
    return parts
