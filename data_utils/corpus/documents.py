"""Readers: JSON lines, CSV, parquet, Arrow and plain text files become documents; inputs.py says which files.

Reading has three steps, so that a corpus build can share the work between processes. `plan_shards` cuts the input into
ranges of files, by their sizes alone. `read_blocks` cuts a range into blocks of whole records without parsing them.
`parse_block` turns a block into texts. `read_documents` does all of it in one process. Compressed files, tables (CSV,
parquet, Arrow) and text files of one document each are never cut, so a huge .gz is the work of one process.

A byte position inside a file stands for the next start of a record. Neighbouring ranges use the same rule for the
position they share, so each record is in exactly one range, wherever the cuts are.

A bad record is reported as `file:line` with the problem. By default it stops the work; with `on_bad_record="skip"` it
is counted by type, up to a limit. Damage that hides where records begin and end (a truncated compressed stream, an
unreadable table, a huge record) always stops the work.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.urls import is_url
from data_utils.corpus import column_files, csv_files
from data_utils.corpus.inputs import DELIMITERS, expand_inputs, file_ending, file_format
from data_utils.corpus.json_records import UTF8_BOM, UnusableRecord, not_utf8, parse_json_line
from data_utils.corpus.stored_files import (
    BEGINNING_BYTES,
    InputFile,
    compression_suffix,
    decompressed,
    open_input,
    read_errors,
    read_in_order,
    refuse_other_content,
    stored_bytes,
)
from data_utils.storage.objects import StoredObject

TEXT_KEY = "text"  # field or column that holds the text where nobody says otherwise
BLOCK_BYTES = 256 << 10
MAX_RECORD_BYTES = 256 << 20
MAX_EXAMPLES = 10  # bad records that the report quotes
DEFAULT_MAX_BAD_RECORDS = 1000
BAD_RECORD_POLICIES = ("error", "skip")
TEXT_SPLITS = ("file", "blank_lines", "lines")

Parsed = TypeVar("Parsed")


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """The options of all commands that read text."""
    add = parser.add_argument
    text = "field or column with the text; a.b for a nested field (default: text)"
    add("--text-key", default=TEXT_KEY, help=text)
    text = "how .txt files are split into documents (default: file)"
    add("--text-split", default="file", choices=TEXT_SPLITS, help=text)
    add("--on-bad-record", default="error", choices=BAD_RECORD_POLICIES, help="(default: error)")
    text = f"with skip: stop after this many bad records (default: {DEFAULT_MAX_BAD_RECORDS})"
    add("--max-bad-records", type=int, default=DEFAULT_MAX_BAD_RECORDS, help=text)


_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
_NEWLINE = re.compile(rb"\n")
_RECORD_ENDS = {"jsonl": _NEWLINE, "lines": _NEWLINE, "blank_lines": _BLANK_LINES}  # formats that can be cut
_BOUNDARY_READ_BYTES = 64 << 10
_OBJECT_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Document:
    """One text and its origin: `line` is the 1-based line (of a table: row) at which its record starts."""

    text: str
    source: str
    line: int


@dataclass(frozen=True, slots=True)
class FileRange:
    """The records between two byte positions of a file; stop None: up to its end."""

    path: InputFile
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A record to be reported, and its problem."""

    source: str
    line: int  # 1-based (of a table: row), counted from the file range that begins at byte `start`
    problem: str
    start: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.problem}"


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Whole, unparsed records of one file range."""

    source: str
    record_format: str  # "jsonl", "rows" (of a table), or how a text file is cut: one of TEXT_SPLITS
    start: int  # byte at which the file range begins
    first_line: int  # line (or row) number of the first record, counted from the start of the file range
    data: bytes | list[bytes | UnusableRecord]  # a list for "rows", else the bytes of the file
    num_lines: int  # newlines (or rows) in it
    input_bytes: int  # bytes of the stored file that this block covers, for the progress bar


@dataclass(slots=True)
class RecordCounts:
    """The records that were not used, and why. Counts merged in input order do not depend on the number of workers."""

    bad: dict[str, int] = field(default_factory=dict)  # type of problem -> number of records
    examples: list[SourceLocation] = field(default_factory=list)  # the first MAX_EXAMPLES
    empty_documents: int = 0
    blank_lines: int = 0
    mentions: dict[str, int] = field(default_factory=dict)  # of entities: how many were kept, or why not

    def add_bad(self, problem: str, location: SourceLocation) -> None:
        self.bad[problem] = self.bad.get(problem, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(location)

    def merge(self, other: RecordCounts) -> None:
        for counts, added in ((self.bad, other.bad), (self.mentions, other.mentions)):
            for name, count in added.items():
                counts[name] = counts.get(name, 0) + count
        self.examples.extend(other.examples[: MAX_EXAMPLES - len(self.examples)])
        self.empty_documents += other.empty_documents
        self.blank_lines += other.blank_lines

    @property
    def num_bad(self) -> int:
        return sum(self.bad.values())

    def enforce(self, on_bad_record: str, max_bad_records: int, text_split: str) -> None:
        """Raise DataError if the bad records so far are more than the policy allows."""
        allowed = 0 if on_bad_record == "error" else max_bad_records
        if self.num_bad <= allowed:
            return
        first = with_line_in_file(self.examples[0], text_split)
        if on_bad_record == "error":
            raise DataError(
                f"{first}; correct or remove this record, or skip bad records (--on-bad-record skip)."
            )
        problems = ", ".join(f"{count} {problem}" for problem, count in sorted(self.bad.items()))
        raise DataError(
            f"{self.num_bad} bad records ({problems}) exceed max_bad_records ({max_bad_records}); the first is "
            f"{first}; correct the input or raise the limit."
        )


@dataclass(slots=True)
class ParsedBlock:
    """The texts of a block, and the line (or row) of each."""

    texts: list[str]
    lines: list[int]
    counts: RecordCounts
    origins: list[str] | None = None  # the text from which each comes, where it was made of another


def read_documents(
    patterns: Iterable[str | Path],
    text_key: str = "text",
    text_split: str = "file",
    on_bad_record: str = "error",
    max_bad_records: int = DEFAULT_MAX_BAD_RECORDS,
    counts: RecordCounts | None = None,
) -> Iterator[Document]:
    """Yield the documents of files or globs in order.

    Args:
        text_key: field (JSONL) or column (of a table) that holds the text.
        text_split: how a .txt file is cut: one document per file, per paragraph ("blank_lines") or per line.
        on_bad_record: "error" stops at the first bad record, "skip" counts up to `max_bad_records` of them.
        counts: receives the numbers of bad, empty and blank records.
    Raises: DataError naming file and line; ConfigError for an unknown option.
    """
    check_options(text_split, on_bad_record, max_bad_records)
    return read_document_files(
        expand_inputs(patterns), text_key, text_split, on_bad_record, max_bad_records, counts
    )


def read_document_files(
    paths: Iterable[InputFile],
    text_key: str,
    text_split: str,
    on_bad_record: str,
    max_bad_records: int,
    counts: RecordCounts | None = None,
) -> Iterator[Document]:
    """As `read_documents`, of these files."""
    counts = RecordCounts() if counts is None else counts
    for block in read_blocks(map(FileRange, paths), text_key, text_split):
        parsed = parse_block(block, text_key)
        counts.merge(parsed.counts)
        counts.enforce(on_bad_record, max_bad_records, text_split)
        for text, line in zip(parsed.texts, parsed.lines, strict=True):
            yield Document(text, block.source, line)


def check_options(text_split: str, on_bad_record: str, max_bad_records: int) -> None:
    """Raise ConfigError unless the reading options are valid."""
    if text_split not in TEXT_SPLITS:
        raise ConfigError(f"text_split is {text_split!r}; it must be one of {', '.join(TEXT_SPLITS)}.")
    if on_bad_record not in BAD_RECORD_POLICIES:
        raise ConfigError(
            f"on_bad_record is {on_bad_record!r}; it must be {' or '.join(BAD_RECORD_POLICIES)}."
        )
    if max_bad_records < 0:
        raise ConfigError(f"max_bad_records is {max_bad_records}; it must be 0 or more.")
    if on_bad_record == "error" and max_bad_records not in (0, DEFAULT_MAX_BAD_RECORDS):
        raise ConfigError(
            f"max_bad_records is {max_bad_records}, but on_bad_record is error, which allows none; set it to skip, or "
            "leave max_bad_records out."
        )


def check_text_key(text_key: str, paths: Iterable[InputFile]) -> None:
    """Raise ConfigError for a named key where no input has fields or columns."""
    if text_key != TEXT_KEY and all(file_format(path, "") == "" for path in paths):
        raise ConfigError(
            f"text_key is {text_key!r}, but all inputs are .txt files, which have no fields; drop --text-key."
        )


# ------------------------------------------------------------------------------------------------------------
# Files to ranges, ranges to blocks


def plan_shards(
    paths: Iterable[InputFile], text_split: str, shard_bytes: int, shard_files: float = math.inf
) -> list[list[FileRange]]:
    """Cut the input into shards, in order: lists of file ranges, of about `shard_bytes` of stored data each.

    A shard holds at most one range of each file, and at most `shard_files`. Files that cannot be cut go whole into a
    shard. The plan depends only on the sizes of the files. A small object counts for what a worker reads while it asks
    for one, so that the workers share many of them.
    """
    shards: list[list[FileRange]] = []
    remaining = 0  # bytes that the current shard can still take
    for path in paths:
        can_be_cut = not compression_suffix(path) and file_format(path, text_split) in _RECORD_ENDS
        size, position, at_end = stored_bytes(path), 0, False
        while not at_end:  # once for an empty file too: its reader decides whether that is an error
            if remaining <= 0 or len(shards[-1]) >= shard_files:
                shards.append([])
                remaining = shard_bytes
            # Cuts are at any byte; readers move both ends of a range to the next start of a record, so the plan
            # needs sizes only.
            taken = min(remaining, size - position) if can_be_cut else size
            at_end = position + taken >= size
            shards[-1].append(FileRange(path, position, None if at_end else position + taken))
            position += taken
            remaining -= planned_bytes(path, taken)
    return shards


def planned_bytes(path: InputFile, stored: int) -> int:
    """What `stored` bytes of a file count for in a plan of shards."""
    return max(stored, _OBJECT_BYTES) if isinstance(path, StoredObject) else stored


def is_one_document(path: InputFile, text_split: str) -> bool:
    """Whether all of a text file is one document."""
    return file_format(path, text_split) == "file"


def lines_before(file_range: FileRange, text_split: str) -> int:
    """The number of lines of the file before this range; reads the file up to there."""
    if not file_range.start:
        return 0
    count = 0
    with read_errors(file_range.path), open_input(file_range.path) as file:
        record_format = file_format(file_range.path, text_split)
        remaining = _record_start(file, file_range.path, file_range.start, record_format)
        file.seek(0)
        while remaining > 0 and (data := file.read(min(remaining, BLOCK_BYTES))):
            count += data.count(b"\n")
            remaining -= len(data)
    return count


def with_line_in_file(location: SourceLocation, text_split: str) -> SourceLocation:
    """The same location with the line counted from the start of the file; an object is not read again for that."""
    if is_url(location.source):
        after = f" (lines after byte {location.start})" * (location.start > 0)
        return SourceLocation(f"{location.source}{after}", location.line, location.problem)
    lines = lines_before(FileRange(Path(location.source), location.start), text_split)
    return SourceLocation(location.source, location.line + lines, location.problem)


def read_blocks(
    file_ranges: Iterable[FileRange],
    text_key: str | Sequence[str] = TEXT_KEY,
    text_split: str = "file",
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[RecordBlock]:
    """Cut file ranges into blocks of whole records, of about `block_bytes` each.

    Args: text_key: the column of tables whose texts are the records; or several columns, () = all: then a record is the
        row as a JSON object.

    Raises: DataError for files that cannot be read or decompressed and for records beyond MAX_RECORD_BYTES.
    """
    for file_range in file_ranges:
        record_format = file_format(file_range.path, text_split)
        if record_format == "rows":
            yield from _row_blocks(file_range.path, text_key)
        else:
            yield from _byte_blocks(file_range, record_format, block_bytes)


def _byte_blocks(file_range: FileRange, record_format: str, block_bytes: int) -> Iterator[RecordBlock]:
    """The blocks of a file that is bytes. A chunk is what is read at a time, a block whole records of chunks."""
    path = file_range.path
    line, consumed, position = 1, 0, 0
    is_begun = file_range.start > 0  # the beginning of the file is behind, so its content has been checked
    pending = bytearray()  # grows in place: a record may be many chunks long
    for chunk, position in _chunks(file_range, record_format, block_bytes):
        # Only what is new is searched for a boundary: a record of many chunks would else cost quadratic time.
        searched = len(pending)
        pending += chunk
        if not is_begun and len(pending) >= BEGINNING_BYTES:
            pending, is_begun, searched = _without_byte_order_mark(pending, path), True, 0
        # A limit, because a file that is no JSONL may be one line of any length.
        if len(pending) > MAX_RECORD_BYTES + block_bytes:
            problem = f"a record is longer than {MAX_RECORD_BYTES} bytes"
            place = SourceLocation(str(path), line, problem, file_range.start)
            raise DataError(
                f"{with_line_in_file(place, record_format)}; split it, or check that every record is on its own line."
            )
        cut = _last_boundary(pending, record_format, searched) if is_begun else 0
        if cut:
            lines = pending.count(b"\n", 0, cut)
            with memoryview(pending) as view:
                data = bytes(view[:cut])
            yield RecordBlock(
                str(path), record_format, file_range.start, line, data, lines, position - consumed
            )
            del pending[:cut]
            line, consumed = line + lines, position
    if not is_begun:
        pending = _without_byte_order_mark(pending, path)
    if pending:
        if file_range.stop is None:  # a decompressor may not have read its file to the end
            position = stored_bytes(path) - file_range.start
        lines = pending.count(b"\n")
        yield RecordBlock(
            str(path), record_format, file_range.start, line, bytes(pending), lines, position - consumed
        )


def _without_byte_order_mark(data: bytearray, path: InputFile) -> bytearray:
    """The beginning of a file without its byte order mark. Raises DataError if it is no text in UTF-8."""
    refuse_other_content(data, path)
    return data.removeprefix(UTF8_BOM)


def _last_boundary(data: bytearray, record_format: str, searched: int) -> int:
    """Length of the longest prefix of `data` that is sure to end with a whole record, if beyond `searched`."""
    if record_format == "file":
        return 0
    if record_format == "blank_lines":
        # A boundary across `searched` may be missed; the block is then cut at a later one.
        return max((match.end() for match in _BLANK_LINES.finditer(data, max(searched - 1, 0))), default=0)
    return data.rfind(b"\n", searched) + 1


def _record_start(file: IO[bytes], path: InputFile, position: int, record_format: str) -> int:
    """The first start of a record after `position`, or the end of the file; position 0 is a start itself.

    Raises: DataError if no record ends within MAX_RECORD_BYTES.
    """
    if not position:
        return 0
    size = _BOUNDARY_READ_BYTES
    while True:
        file.seek(position)
        data = file.read(size)
        at_end = len(data) < size
        match = _RECORD_ENDS[record_format].search(data)
        # A match at the end of what was read may go on (blank lines), so more is read.
        if match and (match.end() < len(data) or at_end):
            return position + match.end()
        if at_end:
            return position + len(data)
        # A limit here too: a file that is no JSONL may be one line, larger than memory.
        if size > MAX_RECORD_BYTES:
            raise DataError(
                f"{path}: after byte {position} no record ends within {MAX_RECORD_BYTES} bytes; split it, or check "
                "that every record is on its own line."
            )
        size = min(2 * size, MAX_RECORD_BYTES + 1)


def _chunks(file_range: FileRange, record_format: str, chunk_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield (decompressed bytes, stored bytes of the file range so far)."""
    path = file_range.path
    with read_errors(path), open_input(path) as file:
        if compression := compression_suffix(path):
            read_in_order(file, 0, stored_bytes(path))
            chunks = decompressed(file, compression, chunk_bytes)
        else:
            # The end is the start of the first record after `stop`, by the same rule that the next range begins
            # with: no record is lost or read twice.
            stop = math.inf
            if file_range.stop is not None:
                stop = _record_start(file, path, file_range.stop, record_format)
            read_in_order(file, _record_start(file, path, file_range.start, record_format), stop)
            chunks = _read_until(file, stop, chunk_bytes)
        for chunk in chunks:
            yield chunk, file.tell() - file_range.start


def _read_until(file: IO[bytes], stop: float, chunk_bytes: int) -> Iterator[bytes]:
    while (size := min(stop - file.tell(), chunk_bytes)) > 0 and (chunk := file.read(int(size))):
        yield chunk


def _row_blocks(path: InputFile, text_key: str | Sequence[str]) -> Iterator[RecordBlock]:
    """The blocks of a table."""
    consumed = 0
    if delimiter := DELIMITERS.get(file_ending(path)):
        row, chunks = csv_files.FIRST_ROW, _chunks(FileRange(path), "rows", BLOCK_BYTES)
        blocks = csv_files.records(path, chunks, delimiter, text_key, MAX_RECORD_BYTES)
    elif isinstance(text_key, str):
        row, blocks = 1, column_files.column_texts(path, text_key)
    else:
        row, blocks = 1, column_files.row_objects(path, text_key)
    for rows, position in blocks:
        yield RecordBlock(str(path), "rows", 0, row, rows, len(rows), position - consumed)
        row, consumed = row + len(rows), position


# ------------------------------------------------------------------------------------------------------------
# Blocks to texts


def parse_block(block: RecordBlock, text_key: str = "text") -> ParsedBlock:
    """Parse the records of a block. Bad and empty records are counted, never raised."""
    parsed = ParsedBlock([], [], RecordCounts())

    def parse(record: bytes | UnusableRecord) -> str | None:
        return _parse_record(record, block.record_format, text_key)

    for line, text in parsed_records(block, parse, parsed.counts):
        if not text or text.isspace():
            parsed.counts.empty_documents += 1
        else:
            parsed.texts.append(text)
            parsed.lines.append(line)
    return parsed


def parsed_records(
    block: RecordBlock, parse: Callable[[bytes | UnusableRecord], Parsed | None], counts: RecordCounts
) -> Iterator[tuple[int, Parsed]]:
    """The line of each record of a block, and what `parse` makes of it, which may raise UnusableRecord.

    Args: parse: None for a blank line. counts: receives bad records and blank lines.
    """
    unterminated_line = _unterminated_line(block)
    for line, record in _records(block):
        try:
            value = parse(record)
        except UnusableRecord as error:
            # A file that ends inside a record was cut off while it was copied: another remedy than for bad
            # JSON.
            is_cut_off = error.kind == "malformed_json" and line == unterminated_line
            problem = "truncated_record" if is_cut_off else error.kind
            note = " (the file ends inside this record)" if is_cut_off else ""
            counts.add_bad(problem, SourceLocation(block.source, line, f"{error}{note}", block.start))
            continue
        if value is None:
            counts.blank_lines += 1
        else:
            yield line, value


def text_bytes(text: str) -> int:
    """The length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def largest_record(block: RecordBlock) -> tuple[int, int]:
    """Line (or row) and bytes of the largest record of a block."""
    data = block.data
    if not isinstance(data, bytes):
        sizes = [0 if isinstance(row, UnusableRecord) else len(row) for row in data]
        return block.first_line + sizes.index(max(sizes)), max(sizes)
    if block.record_format not in _RECORD_ENDS:
        return block.first_line, len(data)
    ends = [match.end() for match in _RECORD_ENDS[block.record_format].finditer(data)] + [len(data)]
    size, start = max((end - start, start) for start, end in itertools.pairwise([0, *ends]))
    return block.first_line + data.count(b"\n", 0, start), size


def _unterminated_line(block: RecordBlock) -> int | None:
    """The number of a block's last line if it does not end with a newline: the last line of the file."""
    if not isinstance(block.data, bytes) or block.data.endswith(b"\n"):
        return None
    return block.first_line + block.data.count(b"\n")


def _records(block: RecordBlock) -> Iterator[tuple[int, bytes | UnusableRecord]]:
    """Yield (line number, record)."""
    if not isinstance(block.data, bytes):
        yield from enumerate(block.data, block.first_line)
    elif block.record_format == "file":
        yield block.first_line, block.data
    elif block.record_format == "blank_lines":
        line, start = block.first_line, 0
        for end in [match.end() for match in _BLANK_LINES.finditer(block.data)] + [len(block.data)]:
            record = block.data[start:end]
            if record.strip():
                leading_lines = record[: len(record) - len(record.lstrip())].count(b"\n")
                yield line + leading_lines, record.strip()
            line, start = line + record.count(b"\n"), end
    else:
        lines = block.data.split(b"\n")
        if not lines[-1]:
            lines.pop()  # after the final newline there is no record
        yield from enumerate(lines, block.first_line)


def _parse_record(record: bytes | UnusableRecord, record_format: str, text_key: str) -> str | None:
    """The text of a record; None for a blank line. Raises UnusableRecord."""
    if isinstance(record, UnusableRecord):
        raise record
    if record_format == "jsonl":
        return parse_json_line(record, text_key) if record and not record.isspace() else None
    try:
        text = record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(error) from None
    if record_format == "rows":
        return text
    if "\0" in text:
        problem = "a NUL byte: this is a binary file or UTF-16 (iconv -f UTF-16LE -t UTF-8)"
        raise UnusableRecord("nul_byte", problem)
    if record_format == "lines" and not text.strip():
        return None
    return text.replace("\r\n", "\n").removesuffix("\r")
