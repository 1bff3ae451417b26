"""Tables: the texts of parquet and Arrow files, and the files of data sets that Hugging Face `datasets` saved.

Its formats: `Dataset.save_to_disk` writes a directory with state.json, which names Arrow files in the stream format;
`DatasetDict.save_to_disk` one with dataset_dict.json and such a directory for each split; its cache holds Arrow files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_utils.common.errors import DataError
from data_utils.common.setting_files import one_line, shorten
from data_utils.corpus.json_records import UnusableRecord
from data_utils.corpus.stored_files import open_regular, raise_if_out_of_memory, read_errors

if TYPE_CHECKING:
    import pyarrow

_BLOCK_ROWS = 512
_FILE_MAGIC = b"ARROW1"  # the other of Arrow's two formats, as written by Feather and Polars


def column_texts(path: Path, text_key: str) -> Iterator[tuple[list[bytes | UnusableRecord], int]]:
    """Yield (texts of the next rows as bytes, which may not be UTF-8; bytes of the file up to there, about).

    Args: text_key: a column, or `a.b` for the field b of the column a.
    Raises: DataError for a damaged file, and one without such a column of text.
    """
    import pyarrow

    read, kind = (_parquet, "parquet") if path.suffix.lower() == ".parquet" else (_arrow, "Arrow")
    null = UnusableRecord("field_not_text", f"column {text_key!r} is null, not text")
    try:
        open_regular(path).close()  # pyarrow would wait for the other end of a pipe
        for column, position in read(path, text_key):
            for start in range(0, len(column), _BLOCK_ROWS):
                # as bytes, so that one invalid string does not make the whole block unreadable
                texts = _as_bytes(column.slice(start, _BLOCK_ROWS))
                yield [null if text is None else text for text in texts.to_pylist()], position
    except (pyarrow.ArrowException, OSError) as error:
        raise_if_out_of_memory(error)
        raise DataError(f"{path}: not a readable {kind} file ({one_line(error)}); fetch it again.") from None


def _as_bytes(column: pyarrow.Array) -> pyarrow.Array:
    import pyarrow

    if _is_text(column.type):
        column = column.cast(pyarrow.large_string())  # of a dictionary too; the next cast would refuse that
    elif pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pyarrow.large_binary())


def _is_text(kind: pyarrow.DataType) -> bool:
    import pyarrow

    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())


def _is_bytes(kind: pyarrow.DataType) -> bool:
    """Whether text may stand there that its writer did not call text, as Hive, Impala and old Spark do."""
    import pyarrow

    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return kind in (pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view())


def _parquet(path: Path, text_key: str) -> Iterator[tuple[pyarrow.Array, int]]:
    import pyarrow.parquet

    size, row = path.stat().st_size, 0
    with pyarrow.parquet.ParquetFile(path) as file:
        first, *fields = _place(path, file.schema_arrow, text_key)
        for batch in file.iter_batches(batch_size=_BLOCK_ROWS, columns=[text_key]):
            row += len(batch)
            yield _field(batch.column(first), fields), size * row // max(file.metadata.num_rows, 1)


def _arrow(path: Path, text_key: str) -> Iterator[tuple[pyarrow.Array, int]]:
    import pyarrow.ipc

    # Mapped: only the pages of this column are read, and the kernel may drop them again.
    with pyarrow.memory_map(str(path)) as source:
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            count = reader.num_record_batches
            batches = ((reader.get_batch(i), source.size() * (i + 1) // count) for i in range(count))
        else:
            reader = pyarrow.ipc.open_stream(source)
            batches = ((batch, source.tell()) for batch in reader)
        first, *fields = _place(path, reader.schema, text_key)
        for batch, position in batches:
            yield _sound(_field(batch.column(first), fields)), position


def _sound(column: pyarrow.Array) -> pyarrow.Array:
    """`column`, whose offsets are checked: Arrow believes them, and a damaged file would end the process."""
    import pyarrow

    as_bytes = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
        pyarrow.string_view(): pyarrow.binary_view(),
    }
    # Not as text: that would refuse the whole batch for one invalid character.
    kind = column.type
    (column.view(as_bytes[kind]) if kind in as_bytes else column).validate(full=True)
    return column


def _field(column: pyarrow.Array, names: Sequence[str]) -> pyarrow.Array:
    """A field within a column; null where what it is in is null."""
    import pyarrow.compute

    return pyarrow.compute.struct_field(column, list(names)) if names else column


def _place(path: Path, schema: pyarrow.Schema, text_key: str) -> list[str]:
    """The column of the text, and names of fields within it. Raises DataError."""
    import pyarrow

    names, place, kind = schema.names, [text_key], None
    if text_key not in names and "." in text_key:
        place = text_key.split(".")
    if (count := names.count(place[0])) > 1:
        raise DataError(f"{path}: {count} columns are named {place[0]!r}; rename all but one.")
    if count:
        kind = schema.field(place[0]).type
        for name in place[1:]:
            is_there = pyarrow.types.is_struct(kind) and kind.get_field_index(name) >= 0
            kind = kind.field(name).type if is_there else None
            if kind is None:
                break
    if kind is None:
        raise DataError(
            f"{path}: there is no column {text_key!r}; name one of {shorten(', '.join(_columns(schema)), 400)} with "
            "--text-key."
        )
    if not _is_text(kind) and not _is_bytes(kind):
        within = [f"{text_key}.{field.name}" for field in kind] if pyarrow.types.is_struct(kind) else []
        better = f"one of {shorten(', '.join(within), 200)}" if within else "a column of text"
        raise DataError(
            f"{path}: column {text_key!r} holds {shorten(str(kind), 200)}, not text; name {better} with --text-key."
        )
    return place


def _columns(schema: pyarrow.Schema) -> Iterator[str]:
    """Names of the columns, and of fields in them."""
    import pyarrow

    for field in schema:
        if pyarrow.types.is_struct(field.type):
            yield from (f"{field.name}.{name.name}" for name in field.type)
        else:
            yield field.name


def is_saved_dataset(directory: Path) -> bool:
    """Whether `save_to_disk` wrote a directory, of one split or of several."""
    return any((directory / name).exists() for name in ("state.json", "dataset_dict.json"))


def saved_dataset_files(directory: Path) -> list[Path]:
    """The Arrow files of a directory that `Dataset.save_to_disk` wrote, in order.

    Raises: DataError for any other directory; that of several splits is to be named with the split.
    """
    splits = (_json_object(directory / "dataset_dict.json") or {}).get("splits")
    if isinstance(splits, list) and splits:
        named = " or ".join(str(directory / str(split)) for split in splits[:10])
        raise DataError(f"input {directory} holds the splits of a data set; name one: {named}.")
    state = directory / "state.json"
    found = _json_object(state)
    if found is None:
        raise DataError(
            f"input {directory} has no state.json, as a directory of Hugging Face `save_to_disk` does; fetch it again."
        )
    files = found.get("_data_files")
    entries = files if isinstance(files, list) else []
    names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
    if not names or not all(Path(name).name == name for name in names):
        raise DataError(f"{state} names no Arrow files; save the data set again with save_to_disk.")
    if found.get("_indices_files") or found.get("_indices_data_files"):
        raise DataError(f"{state}: rows are in another order than their files; save flatten_indices() of it.")
    paths = [directory / name for name in names]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} is missing, which {state.name} names; fetch the data set again.")
    return paths


def _json_object(path: Path) -> dict[str, Any] | None:
    """The object in a file; None without the file. Raises DataError if it holds something else."""
    if not path.exists():
        return None
    with read_errors(path):
        content = path.read_bytes()
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object; fetch the data set again.")
    return found
