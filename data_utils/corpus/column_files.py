"""Tables: the texts of parquet and Arrow files, and the files of data sets that Hugging Face `datasets` saved.

Its formats: `Dataset.save_to_disk` writes a directory with state.json, which names Arrow files in the stream format;
`DatasetDict.save_to_disk` one with dataset_dict.json and such a directory for each split; its cache holds Arrow files.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from data_utils.common.errors import DataError
from data_utils.common.setting_files import listed, one_line, shorten
from data_utils.corpus.json_records import UnusableRecord, not_utf8
from data_utils.corpus.stored_files import (
    InputFile,
    open_input,
    raise_if_out_of_memory,
    read_errors,
    read_in_order,
    stored_bytes,
)

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_BLOCK_ROWS = 512
_FILE_MAGIC = b"ARROW1"  # the other of Arrow's two formats, as written by Feather and Polars


def column_texts(path: InputFile, text_key: str) -> Iterator[tuple[list[bytes | UnusableRecord], int]]:
    """Yield (texts of the next rows as bytes, which may not be UTF-8; bytes of the file up to there, about).

    Args: text_key: a column, or `a.b` for the field b of the column a.
    Raises: DataError for a damaged file, and one without such a column of text.
    """
    read = _read_parquet if path.suffix.lower() == ".parquet" else _read_arrow
    null = UnusableRecord("field_not_text", f"column {text_key!r} is null, not text")
    with table_errors(path):
        open_input(path).close()  # pyarrow would wait for the other end of a pipe
        for column, position in read(path, text_key):
            for start in range(0, len(column), _BLOCK_ROWS):
                # as bytes, so that one invalid string does not make the whole block unreadable
                texts = _as_bytes(column.slice(start, _BLOCK_ROWS))
                yield [null if text is None else text for text in texts.to_pylist()], position


def row_objects(
    path: InputFile, columns: Sequence[str]
) -> Iterator[tuple[list[bytes | UnusableRecord], int]]:
    """As `column_texts`, of rows as JSON objects.

    Args: columns: of the objects, those that exist; () = all; `a.b` takes the whole column a.
    """
    read = _parquet_rows if path.suffix.lower() == ".parquet" else _arrow_rows
    with table_errors(path):
        open_input(path).close()
        for batch, position in read(path, columns):
            for start in range(0, len(batch), _BLOCK_ROWS):
                yield (
                    [_object(batch, row) for row in range(start, min(start + _BLOCK_ROWS, len(batch)))],
                    position,
                )


def _object(batch: pyarrow.RecordBatch, row: int) -> bytes | UnusableRecord:
    try:
        values = {name: batch.column(i)[row].as_py() for i, name in enumerate(batch.schema.names)}
        return orjson.dumps(values, default=_as_text)
    except UnicodeDecodeError as error:
        return not_utf8(error)
    except (orjson.JSONEncodeError, ValueError) as error:
        return UnusableRecord("not_json", f"the row cannot be read as text ({one_line(error)})")


def _as_text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _existing(columns: Sequence[str], schema: pyarrow.Schema) -> list[str]:
    wanted = [name if name in schema.names else name.partition(".")[0] for name in columns or schema.names]
    return [name for name in dict.fromkeys(wanted) if name in schema.names]


def _parquet_rows(path: InputFile, columns: Sequence[str]) -> Iterator[tuple[pyarrow.RecordBatch, int]]:
    size, rows_read = stored_bytes(path), 0
    with open_parquet(path) as file:
        names = _existing(columns, file.schema_arrow)
        for batch in file.iter_batches(batch_size=_BLOCK_ROWS, columns=names):
            rows_read += len(batch)
            yield batch, size * rows_read // max(file.metadata.num_rows, 1)


def _arrow_rows(path: InputFile, columns: Sequence[str]) -> Iterator[tuple[pyarrow.RecordBatch, int]]:
    with open_arrow(path) as (schema, batches):
        names = _existing(columns, schema)
        for batch, position in batches:
            for name in names:
                _checked(batch.column(name))
            yield batch.select(names), position


@contextlib.contextmanager
def table_errors(path: InputFile) -> Iterator[None]:
    """Turn errors of opening and reading a table into a DataError, or a MemoryError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise_if_out_of_memory(error)
        file_type = "parquet" if path.suffix.lower() == ".parquet" else "Arrow"
        raise DataError(
            f"{path}: not a readable {file_type} file ({one_line(error)}); download it again."
        ) from None


def _as_bytes(column: pyarrow.Array) -> pyarrow.Array:
    import pyarrow

    if _is_text(column.type):
        column = column.cast(pyarrow.large_string())  # of a dictionary too; the next cast would refuse that
    elif pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pyarrow.large_binary())


def _is_text(data_type: pyarrow.DataType) -> bool:
    import pyarrow

    data_type = data_type.value_type if pyarrow.types.is_dictionary(data_type) else data_type
    return data_type in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())


def _is_bytes(data_type: pyarrow.DataType) -> bool:
    """Whether text may stand there that its writer did not call text, as Hive, Impala and old Spark do."""
    import pyarrow

    data_type = data_type.value_type if pyarrow.types.is_dictionary(data_type) else data_type
    return data_type in (pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view())


def _read_parquet(path: InputFile, text_key: str) -> Iterator[tuple[pyarrow.Array, int]]:
    size, rows_read = stored_bytes(path), 0
    with open_parquet(path) as file:
        column, *fields = _column_and_fields(path, file.schema_arrow, text_key)
        for batch in file.iter_batches(batch_size=_BLOCK_ROWS, columns=[text_key]):
            rows_read += len(batch)
            position = size * rows_read // max(file.metadata.num_rows, 1)
            yield _field(batch.column(column), fields), position


def open_parquet(path: InputFile) -> pyarrow.parquet.ParquetFile:
    """An open parquet file, to be closed. Raises: pyarrow.ArrowException, OSError."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path if isinstance(path, Path) else open_input(path))


def _read_arrow(path: InputFile, text_key: str) -> Iterator[tuple[pyarrow.Array, int]]:
    with open_arrow(path) as (schema, batches):
        column, *fields = _column_and_fields(path, schema, text_key)
        for batch, position in batches:
            yield _checked(_field(batch.column(column), fields)), position


@contextlib.contextmanager
def open_arrow(
    path: InputFile,
) -> Iterator[tuple[pyarrow.Schema, Iterator[tuple[pyarrow.RecordBatch, int]]]]:
    """The schema of an Arrow file, and its batches with the bytes of the file up to there.

    Raises: pyarrow.ArrowException, OSError.
    """
    import pyarrow.ipc

    with _arrow_source(path) as source:
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            count = reader.num_record_batches
            batches = ((reader.get_batch(i), source.size() * (i + 1) // count) for i in range(count))
        else:
            reader = pyarrow.ipc.open_stream(source)
            batches = ((batch, source.tell()) for batch in reader)
        yield reader.schema, batches


def _arrow_source(path: InputFile) -> pyarrow.NativeFile:
    import pyarrow

    if isinstance(path, Path):
        # Mapped: only the pages of this column are read, and the kernel may drop them again.
        return pyarrow.memory_map(str(path))
    file = open_input(path)
    read_in_order(file, 0, stored_bytes(path))
    return pyarrow.PythonFile(file, "r")


def _checked(column: pyarrow.Array) -> pyarrow.Array:
    """`column`, whose offsets are checked: Arrow believes them, and a damaged file would end the process."""
    import pyarrow

    as_bytes = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
        pyarrow.string_view(): pyarrow.binary_view(),
    }
    # Not as text: that would refuse the whole batch for one invalid character.
    bytes_type = as_bytes.get(column.type)
    (column if bytes_type is None else column.view(bytes_type)).validate(full=True)
    return column


def _field(column: pyarrow.Array, names: Sequence[str]) -> pyarrow.Array:
    """A field within a column; null where what it is in is null."""
    import pyarrow.compute

    return pyarrow.compute.struct_field(column, list(names)) if names else column


def _column_and_fields(path: InputFile, schema: pyarrow.Schema, text_key: str) -> list[str]:
    """The column of the text, and names of fields within it. Raises DataError."""
    import pyarrow

    names = [text_key]
    if text_key not in schema.names and "." in text_key:
        names = text_key.split(".")
    if (count := schema.names.count(names[0])) > 1:
        raise DataError(f"{path}: {count} columns have the name {names[0]!r}; rename all but one.")
    data_type = schema.field(names[0]).type if count else None
    for name in names[1:]:
        if data_type is not None:
            has_field = pyarrow.types.is_struct(data_type) and data_type.get_field_index(name) >= 0
            data_type = data_type.field(name).type if has_field else None
    if data_type is None:
        raise DataError(
            f"{path}: there is no column {text_key!r}; set --text-key to one of "
            f"{listed(_columns(schema), 400)}."
        )
    if not _is_text(data_type) and not _is_bytes(data_type):
        is_struct = pyarrow.types.is_struct(data_type)
        fields = [f"{text_key}.{field.name}" for field in data_type] if is_struct else []
        better = f"one of {shorten(', '.join(fields), 200)}" if fields else "a column of text"
        raise DataError(
            f"{path}: column {text_key!r} holds {shorten(str(data_type), 200)}, not text; set --text-key to {better}."
        )
    return names


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
        raise DataError(f"input {directory} contains several splits; give one of them: {named}.")
    state = directory / "state.json"
    state_tree = _json_object(state)
    if state_tree is None:
        raise DataError(
            f"input {directory} has no state.json, so it is not a directory that Hugging Face `save_to_disk` wrote; "
            "download it again."
        )
    files = state_tree.get("_data_files")
    entries = files if isinstance(files, list) else []
    names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
    if not names or not all(Path(name).name == name for name in names):
        raise DataError(f"{state} lists no Arrow files; save the dataset again with save_to_disk.")
    if state_tree.get("_indices_files") or state_tree.get("_indices_data_files"):
        raise DataError(
            f"{state}: the dataset has an indices mapping (select, shuffle); call flatten_indices() and save it "
            "again."
        )
    paths = [directory / name for name in names]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} is listed in {state.name} but missing; download the dataset again.")
    return paths


def _json_object(path: Path) -> dict[str, Any] | None:
    """The object in a file; None without the file. Raises DataError if it holds something else."""
    if not path.exists():
        return None
    with read_errors(path):
        content = path.read_bytes()
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise DataError(f"{path} is not a JSON object; download the dataset again.")
    return tree
