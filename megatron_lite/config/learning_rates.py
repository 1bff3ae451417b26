"""The learning rate as a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from data_utils.common.settings import check
from megatron_lite.config.schedule import ScheduleConfig


def learning_rate(
    step: int, *, peak: float, kind: str, warmup_steps: int, decay_steps: int, min_lr_ratio: float
) -> float:
    """Learning rate of optimizer step `step` (the first is 1).

    Linear warmup from 0 to `peak` over `warmup_steps`, then cosine or linear decay that reaches
    `min_lr_ratio * peak` at `decay_steps` and stays there, or constant, or falling with 1/sqrt(step) to that floor.
    (The reference's linear schedule falls below zero.) ULMFiT's slanted triangle (arXiv:1801.06146, section 3.2) is
    linear both ways and begins at the floor.
    """
    if step <= warmup_steps and kind == "slanted":
        return peak * (min_lr_ratio + (1.0 - min_lr_ratio) * step / warmup_steps)
    # Step 1 has peak / warmup_steps already: a first step with rate 0 would be wasted.
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if kind == "constant":
        return peak
    if kind == "inverse_sqrt":
        return peak * max(min_lr_ratio, math.sqrt(max(1, warmup_steps) / step))
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    remaining = (
        1.0 - progress if kind in ("linear", "slanted") else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    return peak * (min_lr_ratio + (1.0 - min_lr_ratio) * remaining)


def deepspeed_rate(step: int, *, peak: float, schedule: ScheduleConfig, decay_steps: int) -> float:
    """Learning rate of optimizer step `step` (the first is 1) by DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR.

    DeepSpeed sets a rate when the scheduler is made and moves it after each step, from -1 on, so that the second step
    has number 0. Its warmup has two steps at least. Source: DeepSpeed 0.19.8.
    """
    done, warmup = step - 2, max(2, schedule.warmup_steps)
    is_cosine = schedule.kind == "deepspeed_cosine"
    if done < 0 and is_cosine:
        return 0.0
    if done < warmup:
        risen = max(0, done) / warmup
        if schedule.warmup_kind == "log":
            risen = math.log(max(0, done) + 1) / math.log(warmup)
        return peak * (schedule.warmup_start_ratio + (1.0 - schedule.warmup_start_ratio) * risen)
    remaining = 1.0
    if is_cosine:
        progress = min(1.0, (done - warmup + 1) / max(1, decay_steps - warmup))
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif schedule.kind == "deepspeed_linear":
        remaining = max(0.0, (decay_steps - done) / max(1, decay_steps - warmup))
    return peak * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * remaining)


def named_rate(step: int, peak: float, schedule: ScheduleConfig, decay_steps: int) -> float:
    """Learning rate of optimizer step `step` (the first is 1) by one of the named kinds."""
    if schedule.is_deepspeeds:
        return deepspeed_rate(step, peak=peak, schedule=schedule, decay_steps=decay_steps)
    return learning_rate(
        step,
        peak=peak,
        kind=schedule.kind,
        warmup_steps=schedule.warmup_steps,
        decay_steps=decay_steps,
        min_lr_ratio=schedule.min_lr_ratio,
    )


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
