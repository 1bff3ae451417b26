"""Tables in text: the texts of a column of .csv and .tsv files, as RFC 4180 has them.

The first row names the columns. A field in double quotes may hold the delimiter, ends of lines, and a quote written
twice.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from data_utils.common.errors import DataError
from data_utils.common.setting_files import one_line, shorten
from data_utils.corpus.json_records import UTF8_BOM, UnusableRecord
from data_utils.corpus.stored_files import refuse_other_content

_BLOCK_ROWS = 512
FIRST_ROW = 2  # the number of the first row with values; the row of names is 1
_NAMES = {",": "commas", "\t": "tabs"}


def column_texts(
    path: Path, chunks: Iterator[tuple[bytes, int]], delimiter: str, text_key: str, max_bytes: int
) -> Iterator[tuple[list[bytes | UnusableRecord], int]]:
    """Yield (texts of the next rows as bytes, which may not be UTF-8; bytes of the file up to there).

    Args: chunks: bytes of the file and how many were read. max_bytes: of a field and of a line.
    Raises: DataError for a file that is no such table, or one without the column.
    """
    position = 0

    def lines() -> Iterator[str]:
        nonlocal position
        rest, is_first = bytearray(), True
        for chunk, read in chunks:
            position = read
            first, *others = chunk.split(b"\n")
            rest += first
            if len(rest) > max_bytes:
                raise DataError(f"{path}: a line is longer than {max_bytes} bytes; is this a table in text?")
            for line in others:
                yield _decoded(rest + b"\n", path, is_first)
                rest, is_first = bytearray(line), False
        if rest:
            yield _decoded(rest, path, is_first)

    csv.field_size_limit(max_bytes)
    # strict: otherwise a quote that is never closed takes the rest of the file for one field
    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        names = next(filter(None, rows), None)
        if names is None:  # an empty file
            return
        column = _column(path, names, delimiter, text_key)
        texts: list[bytes | UnusableRecord] = []
        for row in rows:
            if row:  # an empty line is no row
                texts.append(_text(row, column, len(names)))
            if len(texts) >= _BLOCK_ROWS:
                yield texts, position
                texts = []
    except csv.Error as error:
        if "new-line character" in str(error):
            raise DataError(
                f"{path}:{rows.line_num}: lines end in a carriage return alone, as old spreadsheets write them; "
                "convert it (tr '\\r' '\\n' < FILE > NEW)."
            ) from None
        raise DataError(
            f"{path}:{rows.line_num}: not a table of fields between {_NAMES[delimiter]} ({one_line(error)}); a field "
            'with a quote in it stands in quotes, and writes that quote as "".'
        ) from None
    if texts:
        yield texts, position


def _decoded(line: bytes | bytearray, path: Path, is_first: bool) -> str:
    """A line as text, whose bytes come back by the same rule, whatever its encoding is."""
    if is_first:
        refuse_other_content(line, path)
        line = line.removeprefix(UTF8_BOM)
    return line.decode("utf-8", "surrogateescape")


def _column(path: Path, names: list[str], delimiter: str, text_key: str) -> int:
    if names.count(text_key) == 1:
        return names.index(text_key)
    if text_key in names:
        raise DataError(
            f"{path}: {names.count(text_key)} columns are named {text_key!r}; rename all but one."
        )
    found = shorten(", ".join(name if name == name.strip() else repr(name) for name in names[:20]), 200)
    other = next((sign for sign in (";", "\t", "|", ",") if len(names) == 1 and sign in names[0]), None)
    if other is not None:
        raise DataError(
            f"{path}: fields are between {_NAMES[delimiter]} in a file of this name, and its first row is "
            f"{found!r}; write the file so, or rename it (.csv: commas, .tsv: tabs)."
        )
    raise DataError(
        f"{path}: there is no column {text_key!r}; name one of {found} with --text-key (the first row is their names)."
    )


def _text(row: list[str], column: int, count: int) -> bytes | UnusableRecord:
    if len(row) != count:
        return UnusableRecord("wrong_columns", f"the row has {len(row)} fields, and the first row {count}")
    return row[column].encode("utf-8", "surrogateescape")
