"""The numbers of a metrics file as curves, in memory that does not grow with the file.

A curve keeps the first, lowest, highest and last value of each column of steps. A line through these covers the same
pixels as a line through all values, so no spike is lost (M4, doi:10.14778/2732951.2732953).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_lite.telemetry.records import valid_records
from megatron_lite.telemetry.writer import FILE

COLUMNS = 500
BUFFERED = 1024  # values of a curve that are added at once, by numpy
MAX_CURVES = 64  # per type of record; names come from the file
MAX_EVENTS = 200
MAX_FILLINGS = 8  # steps whose fillings are shown
KINDS = ("train", "validation", "scores")  # whose numbers are curves; scores are those of a task
NO_CURVES = ("kind", "step", "time")


class Point(NamedTuple):
    step: int
    value: float


class Curve:
    """One number over the steps. Values are buffered: call `flush` before reading the attributes."""

    def __init__(self, columns: int = COLUMNS) -> None:
        self._most = columns
        self._width = 1  # steps in a column
        self._columns: dict[int, list[Point]] = {}  # first, least, greatest, last
        self._steps: list[int] = []
        self._values: list[float] = []
        self.count, self.sum, self.not_finite = 0, 0.0, 0
        self.least = self.greatest = self.last = Point(0, math.nan)

    def add(self, step: int, value: Any) -> None:
        """Steps come in order, except that a damaged file may hold anything. Null stands for what is not finite."""
        if type(value) not in (int, float) or not math.isfinite(value):
            self.not_finite += value is None
            return
        self._steps.append(step)
        self._values.append(value)
        if len(self._steps) == BUFFERED:
            self.flush()

    def flush(self) -> None:
        if not self._steps:
            return
        steps, values = np.array(self._steps, np.int64), np.array(self._values, np.float64)
        self._steps, self._values = [], []
        indices = (values.argmin(), values.argmax(), -1)
        least, greatest, last = (Point(int(steps[i]), float(values[i])) for i in indices)
        is_new = self.count == 0
        self.least = least if is_new or least.value < self.least.value else self.least
        self.greatest = greatest if is_new or greatest.value > self.greatest.value else self.greatest
        self.last = last
        self.count, self.sum = self.count + len(values), self.sum + float(values.sum())
        while int(steps.max()) // self._width >= self._most:
            self._halve()
        columns = steps // self._width
        starts = [0, *(np.flatnonzero(np.diff(columns)) + 1).tolist(), len(steps)]
        for start, end in itertools.pairwise(starts):
            in_column = values[start:end]
            kept = {start, start + int(in_column.argmin()), start + int(in_column.argmax()), end - 1}
            for i in sorted(kept):
                column = self._columns.setdefault(int(columns[i]), [])
                _include(column, Point(int(steps[i]), float(values[i])))

    def _halve(self) -> None:
        """Merge each two neighbouring columns, so that a curve of any length keeps a bounded number of points."""
        columns, self._columns = self._columns, {}
        self._width *= 2
        for number, points in columns.items():
            for point in points:
                _include(self._columns.setdefault(number // 2, []), point)

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def points(self) -> list[Point]:
        """The points of the curve, in the order of steps."""
        self.flush()
        return sorted({point for column in self._columns.values() for point in column})


def _include(column: list[Point], point: Point) -> None:
    first, least, greatest, _ = column or [point] * 4
    least = point if point.value < least.value else least
    greatest = point if point.value > greatest.value else greatest
    column[:] = first, least, greatest, point


@dataclass
class Records:
    """The contents of a metrics file: curves, starts, events and fillings."""

    curves: dict[str, dict[str, Curve]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    # The newest events, starts included.
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    num_events: int = 0
    starts: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    num_starts: int = 0
    fillings: list[dict[str, Any]] = field(default_factory=list)
    last_train: dict[str, Any] = field(default_factory=dict)
    first_time: float | None = None
    last_time: float | None = None
    seconds: float = 0.0  # from each start to the last record before the next one
    last_step: int = 0
    notes: list[str] = field(default_factory=list)

    def curve(self, kind: str, name: str) -> Curve | None:
        """The curve of one number; None if no record has a value for it."""
        curve = self.curves[kind].get(name)
        return curve if curve is not None and curve.count else None

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record with a valid type, step and time; its numbers may be anything."""
        kind, step, time = record["kind"], record["step"], record.get("time")
        self.last_step = max(self.last_step, step)
        if isinstance(time, (int, float)) and math.isfinite(time):
            self.first_time = time if self.first_time is None else self.first_time
            if kind != "start" and self.last_time is not None:
                self.seconds += max(0.0, time - self.last_time)
            self.last_time = time
        if kind in KINDS:
            self._add_numbers(kind, record)
        elif kind == "start":
            self.starts.append(dict(record))
            self.num_starts += 1
        elif kind == "fillings":
            self._add_fillings(dict(record))
        if kind in ("event", "start"):
            self.events.append(dict(record))
            self.num_events += 1

    def _add_numbers(self, kind: str, record: Mapping[str, Any]) -> None:
        curves = self.curves[kind]
        step = record["step"]
        for name, value in record.items():
            if name in curves:
                curves[name].add(step, value)
            elif (
                len(curves) < MAX_CURVES
                and name not in NO_CURVES
                and not isinstance(value, (str, list, dict))
            ):
                curves[name] = Curve()
                curves[name].add(step, value)
        if kind == "train":
            self.last_train = dict(record)

    def _add_fillings(self, record: dict[str, Any]) -> None:
        """Keep a sample of the whole run: at the limit every second one is dropped, but not the first and newest."""
        self.fillings.append(record)
        if len(self.fillings) > 2 * MAX_FILLINGS:
            del self.fillings[1:-1:2]


def read_records(run: Path) -> Records:
    """The records of a run. A missing file and damaged lines become notes."""
    records, path = Records(), run / FILE
    count = first = 0

    def count_damaged(number: int) -> None:
        nonlocal count, first
        count, first = count + 1, first or number

    try:
        for record in valid_records(path, count_damaged):
            records.add(record)
    except OSError as error:
        records.notes.append(f"{path.name}: {error.strerror or error}; no curves.")
    if count:
        records.notes.append(
            f"{path.name}: {count:,} lines are not valid records and were skipped; the first is line "
            f"{first:,}."
        )
    for kind, curves in records.curves.items():
        for curve in curves.values():
            curve.flush()
        if len(curves) == MAX_CURVES:
            records.notes.append(
                f"{path.name}: only the first {MAX_CURVES} numbers of type {kind} are shown."
            )
    return records
