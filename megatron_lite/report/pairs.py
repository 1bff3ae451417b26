"""Minimal pairs in the report: bars with published means, and a table with standard errors."""

from __future__ import annotations

from collections.abc import Iterator

from data_utils.common.setting_files import shorten
from data_utils.tasks.readers.minimal_pairs import BLIMP_PARADIGMS, PUBLISHED
from megatron_lite.report.charts import swatch
from megatron_lite.report.html import Html, element, table
from megatron_lite.report.run import PairFigures, RunReport

BAR = 12  # pixels of a bar's height
GAP = 10  # pixels between the bars of two phenomena
MAX_MEASUREMENTS = 8  # as many as there are colours; the latest
ALL = "all"


def pair_figure(run: RunReport) -> Iterator[Html]:
    """A figure and a table; nothing for a run without results on minimal pairs."""
    measured = dict(list(run.minimal_pairs.items())[-MAX_MEASUREMENTS:])
    if not measured:
        return
    # The mean over all paradigms is the last row, as if it were a phenomenon.
    columns: dict[str, dict[str, PairFigures]] = {
        name: {**dict(sorted(scores["phenomena"].items())), ALL: scores} for name, scores in measured.items()
    }
    rows = [*sorted({name for column in columns.values() for name in column} - {ALL}), ALL]
    # The published means are over all paradigms of BLiMP.
    published = (
        PUBLISHED if all(len(scores["paradigms"]) == BLIMP_PARADIGMS for scores in measured.values()) else {}
    )
    group = BAR * len(columns) + GAP
    height = group * len(rows)
    shapes = [*_grid(height, published)]
    for number, name in enumerate(rows):
        shapes.append(
            element("text", shorten(name, 40), x=-6, y=number * group + group / 2, text_anchor="end")
        )
        for order, (label, column) in enumerate(columns.items()):
            if name in column:
                top = number * group + GAP / 2 + order * BAR
                shapes += _bar(column[name], top, order, f"{label}, {name}: {_percent(column[name])}")
    drawing = element(
        "svg",
        *shapes,
        class_="chart",
        role="img",
        aria_label="minimal pairs",
        width="100%",
        height=height + 56,
    )
    captions = [
        element("span", swatch(order), f"{label} (score: {scores['score']})")
        for order, (label, scores) in enumerate(measured.items())
    ]
    note = "Percent of pairs whose acceptable sentence has the higher score; 50 is guessing. Black: standard errors."
    if len(measured) < len(run.minimal_pairs):
        note += f" The last {len(measured)} of {len(run.minimal_pairs)} measurements."
    if published:
        note += " Dashed: published means, " + ", ".join(f"{name} {mean}" for name, mean in published.items())
    yield element(
        "figure",
        element("div", drawing, class_="plot pairs"),
        element("figcaption", *captions, element("span", note)),
    )
    yield table(
        ["", *columns], [[name, *(_percent(column.get(name)) for column in columns.values())] for name in rows],
        "numbers",
    )  # fmt: skip


def _grid(height: int, published: dict[str, float]) -> Iterator[Html]:
    for percent in (0, 25, 50, 75, 100):
        yield element("line", x1=f"{percent}%", x2=f"{percent}%", y1=0, y2=height, class_="grid")
        yield element("text", percent, x=f"{percent}%", y=height + 14, text_anchor="middle")
    for number, (model, mean) in enumerate(published.items()):
        yield element("line", x1=f"{mean}%", x2=f"{mean}%", y1=0, y2=height, class_="published")
        # Two of the means nearly agree, so labels alternate between three heights.
        y = height + 28 + 13 * (number % 3)
        yield element("text", model, x=f"{mean}%", y=y, text_anchor="middle")


def _bar(figures: PairFigures, top: float, order: int, label: str) -> Iterator[Html]:
    percent, error = 100 * figures["accuracy"], 100 * (figures["standard_error"] or 0.0)
    title = element("title", label)
    yield element("rect", title, x=0, y=top, width=f"{percent:.2f}%", height=BAR - 1, class_=f"run{order}")
    if error:
        middle = top + (BAR - 1) / 2
        ends = (f"{max(0.0, percent - error):.2f}%", f"{min(100.0, percent + error):.2f}%")
        yield element("line", x1=ends[0], x2=ends[1], y1=middle, y2=middle, class_="error")


def _percent(figures: PairFigures | None) -> str:
    if figures is None:
        return "-"
    error = figures["standard_error"]
    return f"{100 * figures['accuracy']:.1f}" + (
        "" if error is None else f" \N{PLUS-MINUS SIGN} {100 * error:.1f}"
    )
