"""Readers: JSON lines, CSV, parquet, Arrow and plain text files become documents; inputs.py says which files.

Reading has three steps, so that a corpus build can share the work between processes. `plan_pieces` cuts the input into
parts of about equal size by bytes alone, without reading it. `read_blocks` cuts a part into blocks of whole records
without parsing them. `parse_block` turns a block into texts. `read_documents` does all three. Compressed files, tables
(CSV, parquet, Arrow) and text files of one document each are never cut, so a huge .gz is the work of one process.

A byte position inside a file stands for the next start of a record. Neighbouring parts use the same rule for the
position they share, so each record is in exactly one part, wherever the cuts are.

A bad record is reported as `file:line` with the problem. By default it stops the work; with `on_bad_record="skip"` it
is counted by kind, up to a limit. Damage that hides where records begin and end (a truncated compressed stream, an
unreadable table, a huge record) always stops the work.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from data_utils.common.errors import ConfigError, DataError
from data_utils.corpus import column_files, csv_files
from data_utils.corpus.inputs import DELIMITERS, ending_of, expand_inputs, layout_of
from data_utils.corpus.json_records import UTF8_BOM, UnusableRecord, not_utf8, parse_json_line
from data_utils.corpus.stored_files import (
    BEGINNING_BYTES,
    compression_of,
    decompressed,
    open_regular,
    read_errors,
    refuse_other_content,
    stored_bytes,
)

TEXT_KEY = "text"  # field or column that holds the text where nobody says otherwise
BLOCK_BYTES = 256 << 10
MAX_RECORD_BYTES = 256 << 20
MAX_EXAMPLES = 10  # bad records that the report quotes
DEFAULT_MAX_BAD_RECORDS = 1000
BAD_RECORD_POLICIES = ("error", "skip")
TEXT_SPLITS = ("file", "blank_lines", "lines")

_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
_NEWLINE = re.compile(rb"\n")
_RECORD_ENDS = {"jsonl": _NEWLINE, "lines": _NEWLINE, "blank_lines": _BLANK_LINES}  # layouts that can be cut
_BOUNDARY_READ_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Document:
    """One text and its origin: `line` is the 1-based line (of a table: row) at which its record starts."""

    text: str
    source: str
    line: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The records between two byte positions of a file; stop None: up to its end."""

    path: Path
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A record to be reported, and its problem."""

    source: str
    line: int  # 1-based (of a table: row), counted from the file part that begins at byte `start`
    problem: str
    start: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Block:
    """Whole, unparsed records of one part of a file."""

    source: str
    layout: str  # "jsonl", "rows" (of a table), or how a text file is cut: one of TEXT_SPLITS
    start: int  # byte at which the file part begins
    first_line: int  # line (or row) number of the first record, counted from the start of the file part
    data: bytes | list[bytes | UnusableRecord]  # a list for "rows", else the bytes of the file
    num_lines: int  # newlines (or rows) in it
    input_bytes: int  # bytes of the stored file that this block covers, for the progress bar


@dataclass(slots=True)
class RecordCounts:
    """The records that were not used, and why. Counts merged in input order do not depend on the number of workers."""

    bad: dict[str, int] = field(default_factory=dict)  # kind -> number of records
    examples: list[Place] = field(default_factory=list)  # the first MAX_EXAMPLES
    empty_documents: int = 0
    blank_lines: int = 0
    mentions: dict[str, int] = field(default_factory=dict)  # of entities: how many were kept, or why not

    def add_bad(self, kind: str, place: Place) -> None:
        self.bad[kind] = self.bad.get(kind, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(place)

    def merge(self, other: RecordCounts) -> None:
        for own, more in ((self.bad, other.bad), (self.mentions, other.mentions)):
            for kind, count in more.items():
                own[kind] = own.get(kind, 0) + count
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
        first = with_line_of_file(self.examples[0], text_split)
        if on_bad_record == "error":
            raise DataError(f"{first}; correct or remove it, or skip bad records (--on-bad-record skip).")
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.bad.items()))
        raise DataError(
            f"{self.num_bad} bad records ({kinds}) are more than max_bad_records ({max_bad_records}); "
            f"the first is {first}; correct the input or raise the limit."
        )


@dataclass(slots=True)
class ParsedBlock:
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
    return documents_of(expand_inputs(patterns), text_key, text_split, on_bad_record, max_bad_records, counts)


def documents_of(
    paths: Iterable[Path],
    text_key: str,
    text_split: str,
    on_bad_record: str,
    max_bad_records: int,
    counts: RecordCounts | None = None,
) -> Iterator[Document]:
    """As `read_documents`, of these files."""
    counts = RecordCounts() if counts is None else counts
    for block in read_blocks(map(Piece, paths), text_key, text_split):
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


def check_text_key(text_key: str, paths: Iterable[Path]) -> None:
    """Raise ConfigError for a named key where no input has fields or columns."""
    if text_key != TEXT_KEY and all(layout_of(path, "") == "" for path in paths):
        raise ConfigError(
            f"text_key is {text_key!r}, but all inputs are .txt, which have no fields; leave --text-key out."
        )


# ------------------------------------------------------------------------------------------------------------
# Files to parts, parts to blocks


def plan_pieces(paths: Iterable[Path], text_split: str, piece_bytes: int) -> list[list[Piece]]:
    """Cut the input into groups of file parts, each group of about `piece_bytes` of stored data, in order.

    A group holds at most one part of each file. Files that cannot be cut go whole into a group. The plan
    depends only on the sizes of the files.
    """
    groups: list[list[Piece]] = []
    room = 0
    for path in paths:
        size, position = stored_bytes(path), 0
        while (
            position < size or not position
        ):  # an empty file is a part too: its reader decides whether that is an error
            if room <= 0:
                groups.append([])
                room = piece_bytes
            taken = min(room, size - position) if _can_be_cut(path, text_split) else size
            at_end = position + taken >= size
            groups[-1].append(Piece(path, position, None if at_end else position + taken))
            position += taken
            room -= taken
            if at_end:
                break
    return groups


def _can_be_cut(path: Path, text_split: str) -> bool:
    return not compression_of(path) and layout_of(path, text_split) in _RECORD_ENDS


def is_whole(path: Path, text_split: str) -> bool:
    """Whether all of a text file is one document."""
    return layout_of(path, text_split) == "file"


def lines_before(piece: Piece, text_split: str) -> int:
    """The number of lines of the file before this part; reads the file up to there."""
    count = 0
    with read_errors(piece.path), open_regular(piece.path) as file:
        left = _record_start(file, piece.start, layout_of(piece.path, text_split)) if piece.start else 0
        file.seek(0)
        while left > 0 and (data := file.read(min(left, BLOCK_BYTES))):
            count += data.count(b"\n")
            left -= len(data)
    return count


def with_line_of_file(place: Place, text_split: str) -> Place:
    """The same place with the line counted from the start of the file."""
    lines = lines_before(Piece(Path(place.source), place.start), text_split)
    return Place(place.source, place.line + lines, place.problem)


def read_blocks(
    pieces: Iterable[Piece], text_key: str = "text", text_split: str = "file", block_bytes: int = BLOCK_BYTES
) -> Iterator[Block]:
    """Cut file parts into blocks of whole records, of about `block_bytes` each.

    Raises: DataError for files that cannot be read or decompressed and for records beyond MAX_RECORD_BYTES.
    """
    for piece in pieces:
        layout = layout_of(piece.path, text_split)
        if layout == "rows":
            yield from _row_blocks(piece.path, text_key)
        else:
            yield from _byte_blocks(piece, layout, block_bytes)


def _byte_blocks(piece: Piece, layout: str, block_bytes: int) -> Iterator[Block]:
    path = piece.path
    line, consumed, position, started = 1, 0, 0, piece.start > 0
    pending = bytearray()  # grows in place: a record may be many chunks long
    for chunk, position in _chunks(piece, layout, block_bytes):
        searched = len(pending)
        pending += chunk
        if not started and len(pending) >= BEGINNING_BYTES:
            pending, started, searched = _without_mark(pending, path), True, 0
        if len(pending) > MAX_RECORD_BYTES + block_bytes:
            raise DataError(
                f"{path}:{line + lines_before(piece, layout)}: a record is longer than {MAX_RECORD_BYTES} "
                f"bytes; split it, or check that each record has its own line."
            )
        cut = _last_boundary(pending, layout, searched) if started else 0
        if cut:
            lines = pending.count(b"\n", 0, cut)
            with memoryview(pending) as view:
                data = bytes(view[:cut])
            yield Block(str(path), layout, piece.start, line, data, lines, position - consumed)
            del pending[:cut]
            line, consumed = line + lines, position
    if not started:
        pending = _without_mark(pending, path)
    if pending:
        if piece.stop is None:  # a decompressor may not have read its file to the end
            position = stored_bytes(path) - piece.start
        lines = pending.count(b"\n")
        yield Block(str(path), layout, piece.start, line, bytes(pending), lines, position - consumed)


def _without_mark(data: bytearray, path: Path) -> bytearray:
    """The beginning of a file without its byte order mark. Raises DataError if it is no text in UTF-8."""
    refuse_other_content(data, path)
    return data.removeprefix(UTF8_BOM)


def _last_boundary(data: bytearray, layout: str, searched: int) -> int:
    """Length of the longest prefix of `data` that is sure to end with a whole record, if beyond `searched`."""
    if layout == "file":
        return 0
    if layout == "blank_lines":
        # A boundary across `searched` may be missed; the block is then cut at a later one.
        return max((match.end() for match in _BLANK_LINES.finditer(data, max(searched - 1, 0))), default=0)
    return data.rfind(b"\n", searched) + 1


def _record_start(file: IO[bytes], position: int, layout: str) -> int:
    """The first start of a record after `position`, or the end of the file; position 0 is a start itself."""
    if not position:
        return 0
    size = _BOUNDARY_READ_BYTES
    while True:
        file.seek(position)
        data = file.read(size)
        at_end = len(data) < size
        match = _RECORD_ENDS[layout].search(data)
        if match and (match.end() < len(data) or at_end):
            return position + match.end()
        if at_end:
            return position + len(data)
        size *= 2


def _chunks(piece: Piece, layout: str, chunk_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield (decompressed bytes, stored bytes of the file part so far)."""
    path = piece.path
    with read_errors(path), open_regular(path) as file:
        if compression := compression_of(path):
            stream = decompressed(file, compression, chunk_bytes)
        else:
            stop = math.inf if piece.stop is None else _record_start(file, piece.stop, layout)
            file.seek(_record_start(file, piece.start, layout))
            stream = _read_until(file, stop, chunk_bytes)
        for chunk in stream:
            yield chunk, file.tell() - piece.start


def _read_until(file: IO[bytes], stop: float, chunk_bytes: int) -> Iterator[bytes]:
    while (size := min(stop - file.tell(), chunk_bytes)) > 0 and (chunk := file.read(int(size))):
        yield chunk


def _row_blocks(path: Path, text_key: str) -> Iterator[Block]:
    consumed = 0
    if delimiter := DELIMITERS.get(ending_of(path)):
        row, chunks = csv_files.FIRST_ROW, _chunks(Piece(path), "rows", BLOCK_BYTES)
        blocks = csv_files.column_texts(path, chunks, delimiter, text_key, MAX_RECORD_BYTES)
    else:
        row, blocks = 1, column_files.column_texts(path, text_key)
    for rows, position in blocks:
        yield Block(str(path), "rows", 0, row, rows, len(rows), position - consumed)
        row, consumed = row + len(rows), position


# ------------------------------------------------------------------------------------------------------------
# Blocks to texts


def parse_block(block: Block, text_key: str = "text") -> ParsedBlock:
    """Parse the records of a block. Bad and empty records are counted, never raised."""
    parsed = ParsedBlock([], [], RecordCounts())
    unterminated_line = _unterminated_line(block)
    for line, record in _records(block):
        try:
            text = _parse_record(record, block.layout, text_key)
        except UnusableRecord as error:
            cut_off = error.kind == "malformed_json" and line == unterminated_line
            kind = "truncated_record" if cut_off else error.kind
            note = " (the file ends inside this record)" if cut_off else ""
            parsed.counts.add_bad(kind, Place(block.source, line, f"{error}{note}", block.start))
            continue
        if text is None:
            parsed.counts.blank_lines += 1
        elif not text or text.isspace():
            parsed.counts.empty_documents += 1
        else:
            parsed.texts.append(text)
            parsed.lines.append(line)
    return parsed


def largest_record(block: Block) -> tuple[int, int]:
    """Line (or row) and bytes of the largest record of a block."""
    data = block.data
    if not isinstance(data, bytes):
        sizes = [0 if isinstance(row, UnusableRecord) else len(row) for row in data]
        return block.first_line + sizes.index(max(sizes)), max(sizes)
    if block.layout not in _RECORD_ENDS:
        return block.first_line, len(data)
    ends = [match.end() for match in _RECORD_ENDS[block.layout].finditer(data)] + [len(data)]
    size, start = max((end - start, start) for start, end in itertools.pairwise([0, *ends]))
    return block.first_line + data.count(b"\n", 0, start), size


def _unterminated_line(block: Block) -> int | None:
    """The number of the file's last line if it does not end with a newline."""
    if not isinstance(block.data, bytes) or block.data.endswith(b"\n"):
        return None
    return block.first_line + block.data.count(b"\n")


def _records(block: Block) -> Iterator[tuple[int, bytes | UnusableRecord]]:
    """Yield (line number, record)."""
    if not isinstance(block.data, bytes):
        yield from enumerate(block.data, block.first_line)
    elif block.layout == "file":
        yield block.first_line, block.data
    elif block.layout == "blank_lines":
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


def _parse_record(record: bytes | UnusableRecord, layout: str, text_key: str) -> str | None:
    """The text of a record; None for a blank line. Raises UnusableRecord."""
    if isinstance(record, UnusableRecord):
        raise record
    if layout == "jsonl":
        return parse_json_line(record, text_key) if record and not record.isspace() else None
    try:
        text = record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(error) from None
    if layout == "rows":
        return text
    if "\0" in text:
        problem = "a NUL byte, which no text file has: a binary file, or UTF-16 (iconv -f UTF-16LE -t UTF-8)"
        raise UnusableRecord("nul_byte", problem)
    if layout == "lines" and not text.strip():
        return None
    return text.replace("\r\n", "\n").removesuffix("\r")
