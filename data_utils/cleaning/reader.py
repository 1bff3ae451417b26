"""The first step of a pipeline: the documents of a task, by the readers of a corpus build.

A task reads a run of the input, so the documents of task 0, 1, 2, ... follow each other in the order of the input, for
any number of tasks. datatrove's own readers deal whole files out in turn, so what it chooses depends on that number.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from data_utils.cleaning.counts import CountFile
from data_utils.common.errors import DataError
from data_utils.common.setting_files import listed, one_line
from data_utils.corpus.column_files import open_arrow, open_parquet, table_errors
from data_utils.corpus.documents import (
    FileRange,
    ParsedBlock,
    RecordBlock,
    RecordCounts,
    SourceLocation,
    parse_block,
    plan_shards,
    planned_bytes,
    read_blocks,
    text_bytes,
)
from data_utils.corpus.inputs import DELIMITERS, file_ending
from data_utils.corpus.json_records import UnusableRecord, field_at, parse_json_object
from data_utils.corpus.stored_files import InputFile, stored_bytes

_TABLE_ROWS = 512  # of a table, read at a time


@dataclass(frozen=True, slots=True)
class Reading:
    """How inputs are read; the names are those of a corpus build."""

    text_key: str = "text"
    text_split: str = "file"
    on_bad_record: str = "error"
    max_bad_records: int = 1000


def ranges_of_tasks(paths: Sequence[InputFile], reading: Reading, tasks: int) -> list[list[FileRange]]:
    """The input of each task: about equal shares by stored bytes, in the order of the input; the last may be empty."""
    total = sum(planned_bytes(path, stored_bytes(path)) for path in paths)
    shard_bytes = max(-(-total // tasks), 1)
    # A cut object counts for more than its bytes, so equal shares may be more than there are tasks.
    while len(shards := plan_shards(paths, reading.text_split, shard_bytes)) > tasks:
        shard_bytes += -(-shard_bytes // 8)
    return shards + [[] for _ in range(tasks - len(shards))]


class CorpusReader(PipelineStep):
    """Yields the documents of a task, and stores what it read as counts.

    A document's metadata has `source`, `start` and `line` (see SourceLocation), `task`, and `fields`: the values of the
    fields that the recipe names, by name, those that the record has.
    """

    type = "📖 - READER"
    name = "corpus"

    def __init__(
        self, ranges: Sequence[list[FileRange]], reading: Reading, fields: Sequence[str], counts: CountFile
    ) -> None:
        super().__init__()
        self.ranges, self.reading, self.fields, self.counts = list(ranges), reading, tuple(fields), counts

    def __deepcopy__(self, memo: dict[int, Any]) -> CorpusReader:
        # Each task runs a copy of its pipeline. A copy of the paths of a million files would take 15 s.
        memo[id(self.ranges)] = self.ranges
        copied = copy.copy(self)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Raises: DataError as `read_documents`; the limit of bad records is checked here for the task alone."""
        records, documents, size = RecordCounts(), 0, 0
        seen: set[str] = set()  # fields
        lines: Counter[tuple[str, int]] = Counter()  # of ranges that other ranges of their file follow
        reading, fields = self.reading, FieldReader(self.fields)
        for file_range, block in self._blocks(rank):
            if file_range.stop is not None:
                lines[block.source, block.start] += block.num_lines
            parsed = parse_block(block, reading.text_key)
            values = fields.read(file_range.path, block, parsed)
            records.merge(parsed.counts)
            records.enforce(reading.on_bad_record, reading.max_bad_records, reading.text_split)
            for text, line, named in zip(parsed.texts, parsed.lines, values, strict=True):
                documents, size = documents + 1, size + text_bytes(text)
                seen.update(named)
                yield Document(
                    text=text,
                    id=f"{block.source}:{block.start}:{line}",
                    metadata={
                        "source": block.source, "start": block.start, "line": line, "task": rank, "fields": named,
                    },
                )  # fmt: skip
        counts = {"documents": documents, "bytes": size, "fields": sorted(seen), "records": records}
        self.counts.write(rank, {**counts, "lines": [[*key, count] for key, count in lines.items()]})

    def _blocks(self, rank: int) -> Iterator[tuple[FileRange, RecordBlock]]:
        for file_range in self.ranges[rank]:
            for block in read_blocks([file_range], self.reading.text_key, self.reading.text_split):
                yield file_range, block


class FieldReader:
    """The values of other fields of the records of blocks, which come in the order of `read_blocks`.

    Raises: DataError for a table without such a column.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._path: InputFile | None = None
        self._rows: Iterator[dict[str, Any]] = iter(())

    def read(self, path: InputFile, block: RecordBlock, parsed: ParsedBlock) -> list[dict[str, Any]]:
        """The fields of each document of a block of a file.

        A record whose fields cannot be read goes from the documents of `parsed` to its bad records.
        """
        if not self._names or block.record_format not in ("jsonl", "rows"):
            return [{} for _ in parsed.texts]
        if block.record_format == "jsonl":
            return self._of_lines(block, parsed)
        if path != self._path:
            self._path, self._rows = path, _table_rows(path, self._names)
        rows = [next(self._rows) for _ in range(block.num_lines)]
        return [rows[line - block.first_line] for line in parsed.lines]

    def _of_lines(self, block: RecordBlock, parsed: ParsedBlock) -> list[dict[str, Any]]:
        assert isinstance(block.data, bytes)
        lines, values, kept = block.data.split(b"\n"), [], []
        for index, line in enumerate(parsed.lines):
            try:
                named = _values(parse_json_object(lines[line - block.first_line]), self._names)
                _require_writable(named)
            except UnusableRecord as error:
                location = SourceLocation(block.source, line, str(error), block.start)
                parsed.counts.add_bad(error.kind, location)
                continue
            kept.append(index)
            values.append(named)
        parsed.texts[:] = [parsed.texts[index] for index in kept]
        parsed.lines[:] = [parsed.lines[index] for index in kept]
        return values


def _values(tree: Any, names: Sequence[str]) -> dict[str, Any]:
    """The fields that are there and not null."""
    values = {}
    for name in names:
        try:
            value = field_at(tree, name)
        except KeyError:
            continue
        if value is not None:
            values[name] = value
    return values


def _require_writable(fields: Mapping[str, Any]) -> None:
    """Raise UnusableRecord for fields that datatrove cannot store: orjson writes fewer levels than it reads."""
    if any(isinstance(value, (dict, list)) for value in fields.values()):
        try:
            orjson.dumps({"metadata": {"fields": fields}})  # where they are in a document
        except TypeError:
            raise UnusableRecord(
                "too_deep", f"a field of {', '.join(fields)} has too many levels to be written"
            ) from None


def _table_rows(path: InputFile, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The fields of each row of a table, in order."""
    if file_ending(path) in DELIMITERS:
        columns = [_column_of_text(path, name) for name in names]
        for row in zip(*columns, strict=True):
            yield {name: value for name, value in zip(names, row, strict=True) if value is not None}
        return
    with table_errors(path):
        for batch in _batches(path, names):
            try:
                rows = batch.to_pylist()
            # Text that is not UTF-8, times in nanoseconds, dates that Python does not have.
            except (ValueError, OverflowError) as error:
                raise DataError(
                    f"{path}: a value of {listed(batch.schema.names)}, which the recipe names, cannot be read "
                    f"({one_line(error, 200)}); write the column as text in UTF-8, or leave it out of the recipe."
                ) from None
            for row in rows:
                yield {name: _as_json(value) for name, value in _values(row, names).items()}


def _as_json(value: Any) -> Any:
    """A value of a table as JSON can hold it: dates, decimals and the like are text, also within others."""
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, bytes):  # text that its writer did not call text, as in the column of the text
        return value.decode("utf-8", "replace")
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _column_of_text(path: InputFile, name: str) -> Iterator[str | None]:
    """A column of a .csv or .tsv file; None where the row is unusable."""
    try:
        for block in read_blocks([FileRange(path)], name):
            assert isinstance(block.data, list)
            for value in block.data:
                yield None if isinstance(value, UnusableRecord) else value.decode("utf-8", "replace")
    except DataError as error:
        raise DataError(
            f"the recipe names the field {name!r}: {str(error).replace('set --text-key to', 'name')}"
        ) from None


def _batches(path: InputFile, names: Sequence[str]) -> Iterator[Any]:
    """Batches of rows of a parquet or Arrow file, of the columns in which the fields are."""
    if file_ending(path) == ".parquet":
        with open_parquet(path) as file:
            columns = _columns(path, file.schema_arrow.names, names)
            yield from file.iter_batches(batch_size=_TABLE_ROWS, columns=columns)
        return
    with open_arrow(path) as (schema, batches):
        columns = _columns(path, schema.names, names)
        for batch, _ in batches:
            selected = batch.select(columns)
            selected.validate(full=True)  # Arrow believes offsets, and damaged ones would end the process
            yield selected


def _columns(path: InputFile, present: Sequence[str], names: Sequence[str]) -> list[str]:
    """The columns in which the fields are. Raises DataError for one that is nowhere, or twice."""
    columns = {name: name if name in present else name.partition(".")[0] for name in names}
    for name, column in columns.items():
        if column not in present:
            raise DataError(
                f"{path}: there is no column {name!r}, which the recipe names; the columns are {listed(present, 400)}."
            )
        if (count := present.count(column)) > 1:
            raise DataError(f"{path}: {count} columns have the name {column!r}; rename all but one.")
    return list(dict.fromkeys(columns.values()))
