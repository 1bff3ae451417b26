"""Tables in text: the texts of a column of .csv and .tsv files, as RFC 4180 has them.

The first row names the columns. A field in double quotes may hold the delimiter, ends of lines, and a quote written
twice.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence

import orjson

from data_utils.common.errors import DataError
from data_utils.common.setting_files import listed, one_line, shorten
from data_utils.corpus.json_records import UTF8_BOM, UnusableRecord, not_utf8
from data_utils.corpus.stored_files import InputFile, refuse_other_content

_BLOCK_ROWS = 512
FIRST_ROW = 2  # the number of the first row with values; the row of names is 1
_NAMES = {",": "commas", "\t": "tabs"}


def records(
    path: InputFile,
    chunks: Iterator[tuple[bytes, int]],
    delimiter: str,
    text_key: str | Sequence[str],
    max_bytes: int,
) -> Iterator[tuple[list[bytes | UnusableRecord], int]]:
    """Yield (texts of the next rows as bytes, which may not be UTF-8; bytes of the file up to there).

    Args: chunks: bytes of the file and how many were read. text_key: the column of the texts; or several, () = all:
        rows are JSON objects of these. max_bytes: of a field and of a line.
    Raises: DataError for a file that is no such table, or one without the column.
    """
    position = 0

    def lines() -> Iterator[str]:
        nonlocal position
        pending, is_first = bytearray(), True  # the line that is not yet at its end
        for chunk, bytes_read in chunks:
            position = bytes_read
            end_of_line, *next_lines = chunk.split(b"\n")
            pending += end_of_line
            if len(pending) > max_bytes:
                raise DataError(
                    f"{path}: a line is longer than {max_bytes} bytes; is this a CSV or TSV file?"
                )
            for line in next_lines:
                yield _decoded(pending + b"\n", path, is_first)
                pending, is_first = bytearray(line), False
        if pending:
            yield _decoded(pending, path, is_first)

    csv.field_size_limit(max_bytes)
    # strict: otherwise a quote that is never closed takes the rest of the file for one field
    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        names = next(filter(None, rows), None)
        if names is None:  # an empty file
            return
        make = _reader(path, names, delimiter, text_key)
        texts: list[bytes | UnusableRecord] = []
        for row in rows:
            if row:  # an empty line is no row
                texts.append(make(row))
            if len(texts) >= _BLOCK_ROWS:
                yield texts, position
                texts = []
    except csv.Error as error:
        if "new-line character" in str(error):
            raise DataError(
                f"{path}:{rows.line_num}: lines end in a bare carriage return; convert the file (tr '\\r' '\\n' < "
                "FILE > NEW)."
            ) from None
        raise DataError(
            f"{path}:{rows.line_num}: not a valid table with fields separated by {_NAMES[delimiter]} "
            f'({one_line(error)}); enclose a field with quotes in quotes and double the inner ones ("").'
        ) from None
    if texts:
        yield texts, position


def _decoded(line: bytes | bytearray, path: InputFile, is_first: bool) -> str:
    """A line as text, whose bytes come back by the same rule, whatever its encoding is."""
    if is_first:
        refuse_other_content(line, path)
        line = line.removeprefix(UTF8_BOM)
    return line.decode("utf-8", "surrogateescape")


def _column(path: InputFile, names: list[str], delimiter: str, text_key: str) -> int:
    if names.count(text_key) == 1:
        return names.index(text_key)
    if text_key in names:
        raise DataError(
            f"{path}: {names.count(text_key)} columns have the name {text_key!r}; rename all but one."
        )
    if any("\0" in name for name in names):
        raise DataError(
            f"{path}: the column names have NUL bytes: UTF-16 without a byte order mark (iconv -f UTF-16LE -t UTF-8)."
        )
    # One column whose name has a delimiter in it: the file is separated by that one.
    if len(names) == 1 and any(sign in names[0] for sign in (";", "\t", "|", ",")):
        raise DataError(
            f"{path}: a file with this suffix has fields separated by {_NAMES[delimiter]}, but the first row is "
            f"{shorten(names[0])!r}; convert the file or rename it (.csv: commas, .tsv: tabs)."
        )
    raise DataError(
        f"{path}: there is no column {text_key!r}; set --text-key to one of {listed(names[:20])} (the first row must "
        "hold the column names)."
    )


def _reader(
    path: InputFile, names: list[str], delimiter: str, text_key: str | Sequence[str]
) -> Callable[[list[str]], bytes | UnusableRecord]:
    """What makes a record of a row."""
    if isinstance(text_key, str):
        column = _column(path, names, delimiter, text_key)
        return lambda row: _text(row, column) if len(row) == len(names) else _wrong_columns(row, names)
    columns = {key: _column(path, names, delimiter, key) for key in text_key or names if key in names}
    return lambda row: _object(row, columns) if len(row) == len(names) else _wrong_columns(row, names)


def _text(row: list[str], column: int) -> bytes:
    return row[column].encode("utf-8", "surrogateescape")


def _object(row: list[str], columns: Mapping[str, int]) -> bytes | UnusableRecord:
    try:
        return orjson.dumps({name: _text(row, column).decode() for name, column in columns.items()})
    except UnicodeDecodeError as error:
        return not_utf8(error)


def _wrong_columns(row: list[str], names: list[str]) -> UnusableRecord:
    return UnusableRecord(
        "wrong_columns", f"the row has {len(row)} fields, but the first row has {len(names)}"
    )
