"""Writes a run's records: metrics.jsonl, TensorBoard and trackers. records.py reads metrics.jsonl."""

from __future__ import annotations

import contextlib
import datetime
import errno
import io
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from data_utils.common.untrusted import open_regular
from megatron_lite.telemetry.trackers import Background

log = logging.getLogger(__name__)

FILE = "metrics.jsonl"
SAVED = "checkpoint"  # the kind of record that each save writes
MAX_LINE_BYTES = 1 << 16  # of a record that is written
_MAX_READ_BYTES = 1 << 24  # of a line that is read


def set_records_aside(directory: Path) -> None:
    """Rename the records of an earlier start that stopped before its first save: the run starts again at step 0."""
    old = directory / FILE
    with contextlib.suppress(OSError):
        if old.exists() and old.stat().st_size:
            renamed = (
                directory / f"metrics_before_{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S_%f}.jsonl"
            )
            old.rename(renamed)
            log.warning("no checkpoint to continue from; the records of an earlier start are in %s", renamed)


def record_rewind(directory: Path, step: int) -> None:
    """Record that the run continues after `step`: its records of later steps are void for every reader."""
    if (directory / FILE).exists():
        metrics = Metrics(directory, enabled=True, tensorboard=False)
        metrics.write("rewind", step, {})
        metrics.close("FINISHED")


class Metrics:
    """Writes on the main rank only; on the others every call does nothing.

    A disk that is full or fails costs records and a warning, not the run. JSON has no infinity and no NaN: they are
    null in the records.
    """

    def __init__(
        self,
        directory: Path,
        enabled: bool,
        tensorboard: bool,
        step: int = 0,
        trackers: Sequence[Background] = (),
    ):
        """Args: step: of the checkpoint that the run continues from; TensorBoard hides what was logged after it."""
        self._trackers = trackers
        self._file: io.FileIO | None = None
        self._board: Any = None
        self._lost = 0  # records lost in a row
        if not enabled:
            return
        directory.mkdir(parents=True, exist_ok=True)
        # Without a buffer a record is one write, so that a killed run loses no record and a reader sees whole
        # lines.
        self._file = (directory / FILE).open("ab+", buffering=0)
        _cut_last_line(self._file)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)

    def write(self, kind: str, step: int, values: dict[str, Any], line: str = "") -> None:
        """One record to JSONL, TensorBoard and the trackers, `line` to the console unless it is empty."""
        if self._file is None:
            return
        if line:
            log.info("%s", line)
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        try:
            _append(self._file, json.dumps(_strict(record), allow_nan=False).encode() + b"\n")
        except OSError as error:
            if not self._lost:
                log.warning(
                    "%s: %s; records are lost until the file can be written.", self._file.name, error.strerror
                )
            self._lost += 1
        else:
            if self._lost:
                log.warning("%s can be written again; %d records were lost.", self._file.name, self._lost)
            self._lost = 0
        self._write_board(kind, step, values)
        for tracker in self._trackers:
            tracker.write(kind, step, values)

    def _write_board(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self._board is None:
            return
        try:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
        except OSError as error:  # raised by TensorBoard's writing thread, which has ended
            self._board = None
            log.warning("TensorBoard's file cannot be written: %s; records continue in metrics.jsonl.", error)

    def close(self, outcome: str) -> None:
        """Args: outcome: what trackers show of the run: FINISHED, KILLED or FAILED."""
        for opened in filter(None, (self._file, self._board)):
            with contextlib.suppress(OSError):  # a disk that fails then, too
                opened.close()
        for tracker in self._trackers:
            tracker.close(outcome)


def _strict(value: Any) -> Any:
    """`value` with null for infinity and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value


def _append(file: io.FileIO, line: bytes) -> None:
    """Write a line whole or not at all. Raises OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(line) != len(line):  # the disk is full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            # A part of a line would make the next record unreadable too.
            file.truncate(size)
        raise


def _cut_last_line(file: io.FileIO) -> None:
    """Remove an incomplete last line, which a crash of the machine may leave."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_LINE_BYTES))
    tail = file.read()
    if tail and not tail.endswith(b"\n"):
        file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)


def has_saved(run: Path) -> bool:
    """Whether the records say that the run saved a checkpoint, or was continued from one. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        for _, line in read_lines(run / FILE):
            record = parse_record(line)
            if record is not None and (
                record["kind"] == SAVED or (record["kind"] == "start" and record.get("restarts"))
            ):
                return True
    return False


def is_recorded(run: Path, kind: str, step: int) -> bool:
    """Whether a record of this kind and step is among the last bytes of RUN/metrics.jsonl."""
    try:
        with open_regular(run / FILE) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * MAX_LINE_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return False
    records = map(parse_record, lines)
    return any(record is not None and (record["kind"], record["step"]) == (kind, step) for record in records)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Complete lines with their numbers from 1; a longer line than any record is cut."""
    number, inside = 1, False
    with open_regular(path) as file:
        while line := file.readline(_MAX_READ_BYTES):
            if not inside and (line.endswith(b"\n") or len(line) == _MAX_READ_BYTES):
                yield number, line
            inside = not line.endswith(b"\n")
            number += not inside


def parse_record(line: bytes) -> dict[str, Any] | None:
    """None if the line is not a record."""
    try:
        record = orjson.loads(line)
        is_record = (
            isinstance(record["kind"], str) and type(record["step"]) is int and 0 <= record["step"] < 1 << 63
        )
    except (ValueError, KeyError, TypeError):
        return None
    return record if is_record else None
