"""Curves from metrics files: honest in little memory, and never a traceback."""

import math
import tracemalloc

import pytest
from support.training.report_runs import train, write_records

from megatron_lite.report.curves import COLUMNS, MAX_CURVES, MAX_EVENTS, MAX_FILLINGS, Curve, read_records
from megatron_lite.telemetry.records import read_metrics


def test_very_many_values_become_few_points_between_the_same_heights():
    curve, spikes = Curve(), {12_345: 50.0, 170_001: -40.0}
    values = [spikes.get(step, float(step * 7919 % 1009)) / 3 for step in range(200_000)]
    for step, value in enumerate(values):
        curve.add(step, value)
    points = curve.points()
    assert len(points) <= 4 * COLUMNS
    width = 512  # the least power of two of which 500 hold all steps
    for start in range(0, len(values), width):
        drawn = [point.value for point in points if start <= point.step < start + width]
        column = values[start : start + width]
        assert (drawn[0], min(drawn), max(drawn), drawn[-1]) == (
            column[0],
            min(column),
            max(column),
            column[-1],
        )
    assert all(values[step] == value for step, value in points)
    assert curve.last == points[-1] and curve.lowest == (170_001, -40.0 / 3)
    assert curve.count == len(values) and curve.mean == pytest.approx(sum(values) / len(values))


def test_what_is_no_number_is_left_out_and_counted():
    curve = Curve()
    for step, value in enumerate((1.0, None, True, "5", math.inf, 2)):
        curve.add(step, value)
    assert curve.points() == [(0, 1.0), (5, 2.0)] and curve.not_finite == 1


def test_steps_that_were_trained_again_count_once(tmp_path):
    first = [train(step, loss=1.0) for step in range(10, 60, 10)]
    start = {"kind": "start", "step": 25, "time": 0}
    event = {"kind": "event", "step": 30, "time": 0, "event": "of the second start"}
    second = [train(step, loss=2.0) for step in range(30, 50, 10)]
    expected = [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]
    run = write_records(tmp_path / "run", [*first, start, event, *second])
    found = read_records(run)
    assert found.curves["train"]["loss"].points() == expected
    assert [(r["step"], r["loss"]) for r in read_metrics(run) if r["kind"] == "train"] == expected
    assert [record["kind"] for record in found.events] == ["start", "event"] and found.last_step == 40


def test_two_restarts_leave_what_the_last_one_did(tmp_path):
    parts = [[10, 20, 30, 40], [20, 30, 40, 50], [10, 20]]
    records = []
    for number, steps in enumerate(parts):
        records += [{"kind": "start", "step": steps[0] - 10, "time": 0}] if number else []
        records += [train(step, loss=float(4 * number + i)) for i, step in enumerate(steps)]
    run = write_records(tmp_path / "run", records)
    assert read_records(run).curves["train"]["loss"].points() == [(10, 8.0), (20, 9.0)]


def test_lines_that_are_no_records_are_counted(tmp_path):
    lines = [
        "",
        "[]",
        "{}",
        '{"kind": "train", "step": -1}',
        '{"kind": "train", "step": true}',
        '{"kind": 1, "step": 1}',
    ]
    run = write_records(tmp_path / "run", [train(1), *lines, "\x00", "x" * 100, train(2)])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n" + b'{"kind": "train", "st')
    records = read_records(run)
    assert records.curves["train"]["loss"].count == 2
    assert records.notes == [
        "metrics.jsonl: 9 lines are not valid records and were skipped; the first is line 2."
    ]
    (run / "metrics.jsonl").unlink()
    assert read_records(run).notes == ["metrics.jsonl: No such file or directory; no curves."]


def test_memory_is_bounded_whatever_the_file_holds(tmp_path):
    def records():
        for step in range(10_000):
            yield train(step, **{f"loss/{step}": 1.0})
            yield {"kind": "event", "step": step, "time": 0, "event": "x" * 100}
            yield {"kind": "fillings", "step": step, "fillings": []}

    run = write_records(tmp_path / "run", records())
    tracemalloc.start()
    found = read_records(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 19 < (run / "metrics.jsonl").stat().st_size
    assert (
        len(found.curves["train"]) == MAX_CURVES
        and len(found.events) == MAX_EVENTS < found.num_events == 10_000
    )
    steps = [record["step"] for record in found.fillings]
    assert steps[0] == 0 and steps[-1] == 9_999 and MAX_FILLINGS <= len(steps) <= 2 * MAX_FILLINGS
    assert found.notes == [f"metrics.jsonl: only the first {MAX_CURVES} numbers of type train are shown."]


def test_steps_of_any_size_are_drawn(tmp_path):
    run = write_records(tmp_path / "run", [train(step) for step in (1, 2, 2**60)])
    assert [point.step for point in read_records(run).curves["train"]["loss"].points()] == [1, 2, 2**60]
