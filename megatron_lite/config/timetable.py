"""Steps and samples of a run in closed form: stages with one batch size each, ramps of such stages, skipped samples.

A step's first sample and batch size are pure functions of its number, so that no state is kept of them. They equal what
`EventsConfig.next_sample` gives step by step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_lite.config.events import EventsConfig


class Stage(NamedTuple):
    """Steps of one batch size."""

    steps: float  # whole, or infinite
    batch_size: int


class _UninterruptedStage(NamedTuple):
    """Steps of one batch size that no skip interrupts."""

    step: int  # steps before it
    first_sample: int
    batch_size: int


class Timetable:
    """The first sample and the batch size of each step.

    Args:
        stages: one after another; the last goes on without end, whatever its steps.
        events: which samples are skipped.
    """

    def __init__(self, stages: Sequence[Stage], events: EventsConfig) -> None:
        self._stages: list[_UninterruptedStage] = []
        step = consumed = 0
        for number, (steps, size) in enumerate(stages):
            left = math.inf if number == len(stages) - 1 else steps
            while left:
                consumed = events.next_sample(consumed, size)
                self._stages.append(_UninterruptedStage(step, consumed, size))
                next_skips = [skip.first for skip in events.skip_samples if skip.first >= consumed]
                # Whole batches up to the next skip; the batch that would reach into it begins after it.
                num_steps = min([left, *((first - consumed) // size for first in next_skips)])
                if num_steps == math.inf:
                    return
                step, consumed, left = (
                    step + int(num_steps),
                    consumed + int(num_steps) * size,
                    left - num_steps,
                )

    def batch_size(self, step: int) -> int:
        """Args: step: the steps before it, as in all methods."""
        return self._stage(step).batch_size

    def first_sample(self, step: int) -> int:
        stage = self._stage(step)
        return stage.first_sample + (step - stage.step) * stage.batch_size

    def consumed(self, step: int) -> int:
        """Samples used or skipped by `step` steps."""
        return self.first_sample(step - 1) + self.batch_size(step - 1) if step else 0

    def _stage(self, step: int) -> _UninterruptedStage:
        return self._stages[bisect_right(self._stages, step, key=lambda each: each.step) - 1]


def ramp_stages(size: int, start: int, by: int, samples: int) -> Iterator[Stage]:
    """Batches that grow from `start` by `by` to `size` within `samples` samples; the last stage has no end.

    Megatron's rule at x consumed samples: start + x // (samples / ((size - start) / by)) * by, in whole steps.
    """
    consumed, growths = 0, (size - start) // by
    for number in range(growths):
        until = -(-(number + 1) * samples // growths)  # the first sample of the next size
        # Megatron asks at each step how many samples are consumed; the same rule, expanded, is a list of
        # stages.
        steps = max(0, -(-(until - consumed) // (start + number * by)))
        if steps:
            yield Stage(steps, start + number * by)
        consumed += steps * (start + number * by)
    yield Stage(math.inf, size)
