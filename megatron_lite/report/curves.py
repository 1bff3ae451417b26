"""The numbers of a metrics file as curves, in memory that does not grow with the file."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_lite.telemetry.records import valid_records
from megatron_lite.telemetry.writer import FILE

COLUMNS = 500
MAX_VALUES = 16 * COLUMNS  # that a curve holds before it is thinned out to 4 a column at most
MAX_CURVES = 64  # per type of record; names come from the file
MAX_EVENTS = 200
MAX_FILLINGS = 8  # steps whose fillings are shown
KINDS = ("train", "validation", "scores")  # whose numbers are curves; scores are those of a task
NO_CURVES = ("kind", "step", "time")


class Point(NamedTuple):
    step: int
    value: float


class Curve:
    """One number over the steps."""

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")
        self.count, self.sum, self.not_finite = 0, 0.0, 0

    def add(self, step: int, value: Any) -> None:
        """Steps come in order, except that a damaged file may hold anything. Null stands for what is not finite."""
        if type(value) not in (int, float) or not math.isfinite(value):
            self.not_finite += value is None
            return
        if len(self._steps) == MAX_VALUES:
            self._thin_out()
        self._steps.append(step)
        self._values.append(value)
        self.count += 1
        self.sum += value

    def _thin_out(self) -> None:
        """Keep the first, lowest, highest and last value of each column of steps.

        A line through these covers the same pixels as a line through all values, so no spike is lost (M4,
        doi:10.14778/2732951.2732953). Columns are powers of two wide: wider ones hold whole narrower ones.
        """
        steps, values = np.array(self._steps), np.array(self._values)
        width = 1
        while int(steps.max()) // width >= COLUMNS:
            width *= 2
        columns = steps // width
        in_order = columns.argsort(kind="stable")
        starts = np.flatnonzero(np.diff(columns[in_order], prepend=-1))
        ends = np.append(starts[1:], len(columns)) - 1
        lowest, highest = (np.lexsort((order, columns))[starts] for order in (values, -values))
        kept = np.unique((in_order[starts], lowest, highest, in_order[ends]))
        self._steps, self._values = array("q", steps[kept].tobytes()), array("d", values[kept].tobytes())

    @property
    def last(self) -> Point:
        return Point(self._steps[-1], self._values[-1])

    @property
    def lowest(self) -> Point:
        return min(self.points(), key=lambda point: point.value)

    @property
    def highest(self) -> Point:
        return max(self.points(), key=lambda point: point.value)

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    def points(self) -> list[Point]:
        """The points to draw, in the order of steps."""
        if len(self._steps) > COLUMNS:
            self._thin_out()
        return sorted(map(Point, self._steps, self._values))


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
        if len(curves) == MAX_CURVES:
            records.notes.append(
                f"{path.name}: only the first {MAX_CURVES} numbers of type {kind} are shown."
            )
    return records
