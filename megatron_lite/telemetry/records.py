"""Reads the records of a run. Needs no torch, so that scripts read them at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_utils.common.errors import DataError
from megatron_lite.telemetry.writer import FILE, parse_record, read_lines

START_KINDS = ("start", "rewind")  # a record of these kinds makes earlier records of later steps void
# Above the square of any fp32 number; sums and ranges of larger numbers would overflow fp64.
MAX_FINITE = 1e100


def last_validation(run: Path) -> dict[str, Any]:
    """The last validation record of a run whose loss is a number (infinity is null). Raises DataError without one."""
    records = [record for record in read_metrics(run) if record["kind"] == "validation"]
    records = [record for record in records if None not in record.values()]
    if not records:
        raise DataError(f"{run / 'metrics.jsonl'} holds no validation; set data.validation and train on.")
    return records[-1]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of RUN/metrics.jsonl; of a step that was repeated after a restart or a rewind, only the last record.

    Raises DataError if the file is missing or damaged. An incomplete last line is ignored.
    """
    path = run / FILE

    def refuse(number: int) -> None:
        raise DataError(f"{path}:{number}: not a metrics record; remove the line.")

    try:
        records = {(record["kind"], record["step"]): record for record in valid_records(path, refuse)}
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give the directory of a run that has begun.") from None
    return sorted(records.values(), key=lambda record: record["step"])


def valid_records(path: Path, damaged: Callable[[int], None]) -> Iterator[dict[str, Any]]:
    """The records in the order of the file, without those whose steps a later start trained again.

    Reads the file twice, in memory that grows with the number of restarts only. Raises OSError.

    Args: damaged: called with the number of each line that is not a record. An incomplete last line is ignored.
    """
    voids = _voids(path)
    for number, line in read_lines(path):
        record = parse_record(line)
        if record is None:
            damaged(number)
            continue
        while voids and voids[-1][0] <= number:
            voids.pop()
        if not voids or record["step"] < voids[-1][1]:
            yield _finite(record)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """A record without numbers that count as infinite: null, as the writer has for infinity."""
    if all(type(value) is not float or abs(value) <= MAX_FINITE for value in record.values()):
        return record
    return {
        key: None if type(value) is float and abs(value) > MAX_FINITE else value
        for key, value in record.items()
    }


def _voids(path: Path) -> list[tuple[int, int]]:
    """(line, step): before the line, records of the step or a later one are void. The last lines come first."""
    starts: list[tuple[int, int]] = []
    for number, line in read_lines(path):
        record = parse_record(line)
        if record is None:
            continue
        kind, step = record["kind"], record["step"]
        if kind in START_KINDS:
            starts.append((number, step + 1))
    lowest = math.inf
    effective = []
    for number, step in reversed(starts):
        lowest = min(lowest, step)
        effective.append((number, int(lowest)))
    return effective
