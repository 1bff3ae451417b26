"""Charts as SVG that stretches to the width of the page: curves stretch; labels and line widths do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_lite.report.curves import Curve, Point
from megatron_lite.report.html import Html, element, joined
from megatron_lite.telemetry.formatting import format_count

HEIGHT = 190  # of the curves, in pixels
WIDTH = 1000  # of the curves, in their own coordinates, which stretch
MAX_DOTS = 60  # a curve of more values has no dots


@dataclass(frozen=True)
class Line:
    """A curve of one run."""

    curve: Curve
    run: int  # decides the colour
    label: str
    thin: bool = False  # drawn below the others, without dots


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


def draw(chart: Chart) -> Html:
    """The chart, with the last value of each line and `Chart.also` in its caption."""
    points = [line.curve.points() for line in chart.lines]
    values = [point.value for line in points for point in line] + [value for _, value, _ in chart.levels]
    low, high = min(values), max(values)
    if chart.from_zero:
        low = min(low, 0.0)
    scale = logarithmic_scale(low, high) if chart.logarithmic and low > 0 else linear_scale(low, high)
    last_step = max(
        1, *(point.step for line in points for point in line), *(step for _, step in chart.restarts)
    )
    elements = [*_grid(scale, last_step, chart.text), _curves(chart, points, scale, last_step)]
    for line, line_points in zip(chart.lines, points, strict=True):
        if not line.thin and len(line_points) <= MAX_DOTS:
            elements += _dots(line, line_points, scale, last_step, chart.text)
    drawing = element(
        "svg", *elements, class_="chart", role="img", aria_label=chart.title, width="100%", height=HEIGHT + 26
    )
    captions = [_caption(line, chart) for line in chart.lines]
    captions += [_level_caption(run, f"{label} {chart.text(value)}") for run, value, label in chart.levels]
    title = element("h3", chart.title)
    return element("figure", title, element("div", drawing, class_="plot"), element("figcaption", *captions))


def _y(scale: Scale, value: float) -> float:
    return round(HEIGHT * (1 - scale.height(value)), 1)


def _percent(step: int, last_step: int) -> str:
    return f"{100 * step / last_step:.2f}%"


def _grid(scale: Scale, last_step: int, text: Callable[[float], str]) -> list[Html]:
    elements = []
    for tick in scale.ticks:
        y = _y(scale, tick)
        elements.append(element("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        elements.append(element("text", text(tick), x=-6, y=y + 4, text_anchor="end"))
    steps = [
        round(step)
        for step in linear_scale(0, last_step, 5).ticks
        if step <= last_step and step == round(step)
    ]
    for step in steps:
        anchor = "start" if step == 0 else "end" if step > 0.9 * last_step else "middle"
        elements.append(
            element(
                "text", format_count(step), x=_percent(step, last_step), y=HEIGHT + 18, text_anchor=anchor
            )
        )
    return elements


def _curves(chart: Chart, points: Sequence[Sequence[Point]], scale: Scale, last_step: int) -> Html:
    """The curves, in an inner SVG that scales with the page. Thin lines lie below the others."""
    elements = []
    for run, step in chart.restarts:
        x = round(WIDTH * step / last_step, 1)
        elements.append(element("line", x1=x, x2=x, y1=0, y2=HEIGHT, class_=f"restart run{run}"))
    for run, value, label in chart.levels:
        y = _y(scale, value)
        title = element("title", label)
        elements.append(element("line", title, x1=0, x2=WIDTH, y1=y, y2=y, class_=f"level run{run}"))
    pairs = sorted(zip(chart.lines, points, strict=True), key=lambda pair: not pair[0].thin)
    for line, line_points in pairs:
        coordinates = " ".join(
            f"{WIDTH * point.step / last_step:.5g},{_y(scale, point.value):g}" for point in line_points
        )
        weight = "thin" if line.thin else "thick"
        elements.append(
            element(
                "polyline", element("title", line.label), points=coordinates, class_=f"{weight} run{line.run}"
            )
        )
    return element(
        "svg",
        *elements,
        width="100%",
        height=HEIGHT,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
    )


def _dots(
    line: Line, points: Sequence[Point], scale: Scale, last_step: int, text: Callable[[float], str]
) -> list[Html]:
    return [
        element(
            "circle",
            element("title", f"{line.label} step {point.step:,}: {text(point.value)}".strip()),
            cx=_percent(point.step, last_step),
            cy=_y(scale, point.value),
            r=3,
            class_=f"run{line.run}",
        )
        for point in points
    ]


def _caption(line: Line, chart: Chart) -> Html:
    curve, text = line.curve, chart.text
    also = f"mean {text(curve.mean)}"
    if chart.also != "mean":
        point = curve.least if chart.also == "lowest" else curve.greatest
        also = f"{chart.also} {text(point.value)} at step {point.step:,}"
    label = f"{line.label}: " if line.label else ""
    words = f"{label}last {text(curve.last.value)}, {also}"
    if curve.not_finite:
        words += f", non-finite {curve.not_finite:,} times"
    return element("span", swatch(line.run, "thin" if line.thin else ""), words)


def _level_caption(run: int, words: str) -> Html:
    return element("span", swatch(run, "dotted"), words)


def swatch(run: int, style: str = "") -> Html:
    """A short sample of a run's line, for the legend."""
    return joined(element("i", class_=f"swatch run{run} {style}".rstrip()), " ")
