"""Files of labelled samples: their lines, the fields of a line, and one way for what cannot be read.

A reader walks over its file and gives what it finds to an Intake:

    for number, line in numbered_lines(path):
        with intake.at(number):
            tree = parse_json_object(line)
            intake.add({"text": text_in(tree, "text")}, intake.class_name(tree), index=index_in(tree))

What is raised inside `at` as BadLine stops the reading with `file:line`, the value, the rule and the remedy; with
task.skip_bad_lines it leaves the line out and counts it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.setting_files import shorten, shown
from data_utils.corpus.inputs import file_ending
from data_utils.corpus.json_records import UTF8_BOM, UnusableRecord, field_at, json_type, not_utf8
from data_utils.corpus.stored_files import (
    compression_suffix,
    decompressed,
    open_regular,
    read_errors,
    refuse_other_content,
)
from data_utils.tasks.base import TaskRecord
from data_utils.tasks.config import TaskConfig

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 28  # SQuAD 2.0's training file is one line of 42 MB
_REMEDY = "correct or remove it, or skip such lines (task.skip_bad_lines: true)"


class BadLine(Exception):
    """Why a line is no sample: the value and the rule.

    Args:
        line: of the file, where it is not the one that the sample begins at.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


class TaskRecords(list[TaskRecord]):
    """The samples of one file in its order.

    Attributes:
        skipped: how many lines were left out because they are no samples.
    """

    skipped = 0


class Intake:
    """The samples of one file while it is read.

    Args:
        labelled: every sample must have a label; else one that has none is a sample too.
        labels: names of the classes or tags; () where the task has none; None: those that are found.

    Attributes:
        found: names of the classes or tags that the file has.
    """

    def __init__(
        self, config: TaskConfig, path: Path | str, labelled: bool, labels: tuple[str, ...] | None = ()
    ) -> None:
        self.config, self.path, self.labelled = config, path, labelled
        self.labels, self._takes_all = labels or (), labels is None
        self.found: set[str] = set()
        self.records = TaskRecords()
        self._seen: dict[Any, str] = {}  # index that the file gives -> location
        self._location = ""
        self._first_problem = ""

    @contextlib.contextmanager
    def at(self, location: int | str) -> Iterator[None]:
        """Context in which a line (its number, from 1) or another named part of the file is read.

        Raises: DataError for a bad line, unless task.skip_bad_lines counts and skips it.
        """
        self._location = self._named(location)
        count = len(self.records)
        try:
            yield
        except (BadLine, UnusableRecord) as problem:
            line = getattr(problem, "line", None)
            message = f"{self._location if line is None else self._named(line)}: {problem}"
            if not self.config.skip_bad_lines:
                raise DataError(f"{message}; {_REMEDY}.") from None
            # A bad line may have given samples before its problem was found: all of them go.
            for record in self.records[count:]:
                self._seen.pop(record.index, None)
            del self.records[count:]
            self.records.skipped += 1
            self._first_problem = self._first_problem or message

    def _named(self, location: int | str) -> str:
        return f"{self.path}:{location}" if isinstance(location, int) else f"{self.path}: {location}"

    def add(self, fields: Mapping[str, Any], label: Any, index: Any = None, group: Any = None) -> None:
        """One sample. Index None: its number in the file, with those that were left out counted."""
        if label is None and self.labelled:
            raise BadLine("the label is missing; files for training and validation need one")
        if index is None:
            # Lines that were left out are counted, so that a number is the line's own.
            index = len(self.records) + self.records.skipped
        elif index in self._seen:
            raise BadLine(f"index {shown(index)} already appears at {self._seen[index]}; it must be unique")
        else:
            self._seen[index] = self._location
        self.records.append(TaskRecord(index, fields, label, group, self._location))

    def class_name(self, value: Any) -> str | None:
        """The name of the class that a label says, None for none. Raises BadLine for an unknown one."""
        if value is None:
            return None
        if self._takes_all:
            self.found.add(label_name(value))
            return label_name(value)
        if not self.labels:
            raise ConfigError(
                f"task.labels is empty, and task {shown(self.config.name)} has no predefined classes; list the "
                "classes in the order of their ids, or set task.train, whose labels are taken."
            )
        name = label_name(value)
        if name not in self.labels:
            raise BadLine(f"label {shown(value)} is unknown; the labels are {listed(self.labels)}")
        return name

    def finish(self) -> TaskRecords:
        """All samples. Raises DataError if there are none, or if only some have an index."""
        records = self.records
        if not records:
            skipped = (
                f"; {records.skipped} lines were skipped; the first: {self._first_problem}"
                if records.skipped
                else ""
            )
            raise DataError(f"{self.path} has no sample{skipped}; check the file and task.reader.")
        # Predictions are matched by index: numbers of our own among the file's could coincide with them.
        if self._seen and len(self._seen) != len(records):
            without = next(record for record in records if self._seen.get(record.index) != record.location)
            raise DataError(
                f"{without.location}: there is no index (idx, id), which {len(self._seen)} other samples have; give "
                "every sample an index, or none."
            )
        if records.skipped:
            log.warning(f"{self.path}: {records.skipped} lines are skipped; the first: {self._first_problem}")
        return records


def label_name(value: Any) -> str:
    """The name of a class as files and settings write it: text, true or false, or a whole number."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int)):
        return str(value)
    raise BadLine(
        f"the label is {json_type(value)} ({shown(value)}); a class must be text, an integer, true or false"
    )


def listed(names: tuple[str, ...]) -> str:
    """Names for a message, shortened."""
    return shorten(", ".join(names), 400)


def plain_name(task: str) -> str:
    """A task's name without case and signs: `SST-2`, `sst2` and `sst_2` are one."""
    return "".join(letter for letter in task.lower() if letter.isalnum())


# ------------------------------------------------------------------------------------------------------------
# Lines


def numbered_lines(path: Path | str) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line without its end) of a file, plain or compressed; a byte order mark at its start is left out.

    Raises: DataError for a file that is missing or damaged.
    """
    path = Path(path)
    require_file(path)
    with read_errors(path), open_regular(path) as file:
        compression = compression_suffix(path)
        lines = _decompressed_lines(file, compression) if compression else _plain_lines(file)
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}:{number}: the line has more than {MAX_LINE_BYTES} bytes; is this a file of samples? "
                    "Check the paths in section task."
                )
            if number == 1:
                refuse_other_content(line, path)
                line = line.removeprefix(UTF8_BOM)
            yield number, line.rstrip(b"\r\n")


def require_file(path: Path) -> None:
    """Raise DataError unless the file exists."""
    if not path.is_file():
        reason = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"{path} {reason}; check the paths in the section task.")


def _plain_lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line


def _decompressed_lines(file: IO[bytes], suffix: str) -> Iterator[bytes]:
    """The lines of compressed data; of one that is too long a part that shows it."""
    rest = bytearray()
    for chunk in decompressed(file, suffix, _CHUNK_BYTES):
        first, *others = chunk.split(b"\n")
        rest += first
        if others:
            yield bytes(rest)
            yield from others[:-1]
            rest = bytearray(others[-1])
        if len(rest) > MAX_LINE_BYTES:
            break
    if rest:
        yield bytes(rest)


def utf8_text(line: bytes) -> str:
    """The text of a line. Raises UnusableRecord if it is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(error) from None


def file_suffix(path: Path | str) -> str:
    """`.jsonl` of a.jsonl and of A.JSONL.GZ."""
    return file_ending(Path(path))


# ------------------------------------------------------------------------------------------------------------
# Fields of an object


def value_in(tree: Mapping[str, Any], name: str) -> Any:
    """A field that must be there; `a.b` is b in the field a."""
    try:
        return field_at(tree, name)
    except KeyError:
        fields = shorten(", ".join(map(str, tree)) or "none")
        raise BadLine(f"there is no field {name!r} (fields: {fields})") from None


def known_in(tree: Mapping[str, Any], name: str) -> Any:
    """A field as `value_in` finds it; None if it is null or not there."""
    try:
        return field_at(tree, name)
    except KeyError:
        return None


def text_in(tree: Mapping[str, Any], name: str) -> str:
    value = value_in(tree, name)
    if not isinstance(value, str):
        raise BadLine(f"field {name!r} holds {json_type(value)}, not text")
    return value


def texts_in(tree: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = value_in(tree, name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadLine(f"field {name!r} must hold a list of texts, not {shown(value)}")
    return tuple(value)


def whole_number_in(tree: Mapping[str, Any], name: str) -> int:
    value = value_in(tree, name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadLine(f"field {name!r} is {shown(value)}; it must be an integer")
    return value


def object_in(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = value_in(tree, name)
    if not isinstance(value, dict):
        raise BadLine(f"field {name!r} holds {json_type(value)}, not an object")
    return value


def objects_in(tree: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = value_in(tree, name)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadLine(f"field {name!r} must hold a list of objects, not {shown(value)}")
    return value


def index_in(tree: Mapping[str, Any], name: str = "idx") -> int | str | None:
    """The sample's name in the file; None if it has none. Raises BadLine if it is no whole number or text."""
    value = tree.get(name)
    if value is not None and (not isinstance(value, (int, str)) or isinstance(value, bool)):
        raise BadLine(f"field {name!r} is {shown(value)}; it must be an integer or text")
    return value


def choice_in(tree: Mapping[str, Any], name: str, count: int) -> int | None:
    """The number of the right choice, from 0; None without a label."""
    if known_in(tree, name) is None:
        return None
    number = whole_number_in(tree, name)
    if not 0 <= number < count:
        raise BadLine(f"label {number} is not a choice; there are {count}, counted from 0")
    return number


def finite(text: Any) -> float:
    """A number of a file. Raises BadLine for another value, NaN and infinity."""
    try:
        number = math.nan if isinstance(text, bool) else float(text)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise BadLine(f"label {shown(text)} is not a number; regression needs one")
    return number
