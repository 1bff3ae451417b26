"""Charts as coordinates, for the template that draws them: percent of the width, which stretches, and pixels down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from megatron_lite.report.curves import Curve, Point
from megatron_lite.telemetry.formatting import format_count

MAX_DOTS = 60  # a curve of more values has no dots


@dataclass(frozen=True)
class Line:
    """A curve of one run."""

    curve: Curve
    run: int  # decides the colour
    label: str
    thin: bool = False  # drawn below the others, without dots

    @cached_property
    def points(self) -> list[Point]:
        return self.curve.points()

    @property
    def dots(self) -> list[Point]:
        return [] if self.thin or len(self.points) > MAX_DOTS else self.points


@dataclass(frozen=True)
class Chart:
    """Curves over the steps, on one scale."""

    title: str
    lines: Sequence[Line]
    text: Callable[[float], str]  # formats a value
    levels: Sequence[tuple[int, float, str]] = ()  # (run, value, label): dotted lines
    restarts: Sequence[tuple[int, int]] = ()  # (run, step)
    logarithmic: bool = False
    from_zero: bool = False
    also: str = "lowest"  # what the caption has besides the last value: lowest, highest or mean
    height: ClassVar[int] = 190  # of the curves, in pixels

    @cached_property
    def scale(self) -> Scale:
        values = [point.value for line in self.lines for point in line.points]
        values += [value for _, value, _ in self.levels] + [0.0] * self.from_zero
        low, high = min(values), max(values)
        return logarithmic_scale(low, high) if self.logarithmic and low > 0 else linear_scale(low, high)

    @cached_property
    def last_step(self) -> int:
        steps = [point.step for line in self.lines for point in line.points]
        return max(1, *steps, *(step for _, step in self.restarts))

    def x(self, step: float) -> float:
        """Percent of the width."""
        return round(100 * step / self.last_step, 3)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return round(self.height * (1 - self.scale.height(value)), 1)

    def steps(self) -> Iterator[tuple[int, str, str]]:
        """(step, label, the side of the label that is at the step), of the steps below the curves."""
        for step in linear_scale(0, self.last_step, 5).ticks:
            if step <= self.last_step and step == round(step):
                side = "start" if step == 0 else "end" if step > 0.9 * self.last_step else "middle"
                yield round(step), format_count(round(step)), side

    def path(self, line: Line) -> str:
        """The points of an SVG's polyline."""
        return " ".join(f"{self.x(point.step):g},{self.y(point.value):g}" for point in line.points)

    def caption(self, line: Line) -> str:
        curve, also = line.curve, f"mean {self.text(line.curve.mean)}"
        if self.also != "mean":
            point = curve.lowest if self.also == "lowest" else curve.highest
            also = f"{self.also} {self.text(point.value)} at step {point.step:,}"
        label = f"{line.label}: " if line.label else ""
        not_finite = f", non-finite {curve.not_finite:,} times" if curve.not_finite else ""
        return f"{label}last {self.text(curve.last.value)}, {also}{not_finite}"


@dataclass(frozen=True)
class Scale:
    """Values -> 0 (bottom) to 1 (top)."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def height(self, value: float) -> float:
        """The share of the chart's height at which a value is drawn."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = (math.log10(max(number, 1e-300)) for number in (value, low, high))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def linear_scale(low: float, high: float, most: int = 6) -> Scale:
    """A scale whose ticks are round numbers: 1, 2 or 5 times a power of ten apart."""
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-300):
        low, high = low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    distance = next(
        power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= most - 1
    )
    first, last = math.floor(low / distance + 1e-9), math.ceil(high / distance - 1e-9)
    ticks = tuple(number * distance for number in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def logarithmic_scale(low: float, high: float) -> Scale:
    """A scale of powers of ten; within one of them, linear."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first < 2:
        return linear_scale(low, high)
    every = -(-(last - first) // 5)
    ticks = tuple(10.0**number for number in range(first, last + every, every))
    return Scale(ticks[0], ticks[-1], ticks, logarithmic=True)
