"""Minimal pairs in the report: bars with published means, and a table with standard errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from data_utils.common.setting_files import shorten
from data_utils.tasks.readers.minimal_pairs import BLIMP_PARADIGMS, PUBLISHED
from megatron_lite.report.render import MISSING
from megatron_lite.report.run import PairFigures, RunReport
from megatron_lite.report.tables import Table

BAR = 12  # pixels from the top of a bar to the top of the next one
GAP = 10  # pixels between the bars of two phenomena
MAX_MEASUREMENTS = 8  # as many as there are colours; the latest
ALL = "all"


class Bar(NamedTuple):
    """A bar, in percent of the width and pixels from the top."""

    measurement: int  # decides the colour
    title: str
    y: float
    percent: float
    low: float  # a standard error below, and above
    high: float
    height: int = BAR - 1


@dataclass(frozen=True)
class PairChart:
    """Bars of each measurement on each phenomenon, as coordinates, and the same as a table."""

    names: list[tuple[str, float]]  # of the phenomena, with the y of each
    bars: list[Bar]
    height: int
    published: dict[str, float]
    measurements: list[tuple[str, str]]  # (label, how sentences were scored)
    num_measurements: int  # with those that are left out
    table: Table


def pair_charts(run: RunReport) -> list[PairChart]:
    """The chart; none for a run without results on minimal pairs."""
    measured = dict(list(run.minimal_pairs.items())[-MAX_MEASUREMENTS:])
    if not measured:
        return []
    # The mean over all paradigms is the last row, as if it were a phenomenon.
    columns = {label: {**scores["phenomena"], ALL: scores} for label, scores in measured.items()}
    names = [*sorted({name for column in columns.values() for name in column} - {ALL}), ALL]
    group = BAR * len(columns) + GAP
    bars = [
        _bar(column[name], order, number * group + GAP / 2 + order * BAR, f"{label}, {name}")
        for number, name in enumerate(names)
        for order, (label, column) in enumerate(columns.items())
        if name in column
    ]
    # The published means are over all paradigms of BLiMP.
    is_whole = all(len(scores["paradigms"]) == BLIMP_PARADIGMS for scores in measured.values())
    rows = [[name, *(_percent(column.get(name)) for column in columns.values())] for name in names]
    chart = PairChart(
        [(shorten(name, 40), (number + 0.5) * group) for number, name in enumerate(names)], bars, group * len(names),
        PUBLISHED if is_whole else {}, [(label, scores["score"]) for label, scores in measured.items()],
        len(run.minimal_pairs), Table(["", *columns], rows, "numbers"),
    )  # fmt: skip
    return [chart]


def _bar(figures: PairFigures, measurement: int, y: float, label: str) -> Bar:
    percent, error = 100 * figures["accuracy"], 100 * (figures["standard_error"] or 0.0)
    ends = round(max(0.0, percent - error), 2), round(min(100.0, percent + error), 2)
    return Bar(measurement, f"{label}: {_percent(figures)}", y, round(percent, 2), *ends)


def _percent(figures: PairFigures | None) -> str:
    if figures is None:
        return MISSING
    error = figures["standard_error"]
    plus_minus = "" if error is None else f" \N{PLUS-MINUS SIGN} {100 * error:.1f}"
    return f"{100 * figures['accuracy']:.1f}{plus_minus}"
