"""Tables: the texts of parquet and Arrow files, and the files of data sets that Hugging Face `datasets` saved.

Its formats: `Dataset.save_to_disk` writes a directory with state.json, which names Arrow files in the stream format;
`DatasetDict.save_to_disk` one with dataset_dict.json and such a directory for each split; its cache holds Arrow files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_utils.base.errors import DataError
from data_utils.base.setting_files import one_line
from data_utils.text.stored_files import raise_if_out_of_memory, read_errors

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".parquet", ".arrow")
_BLOCK_ROWS = 512
_FILE_MAGIC = b"ARROW1"  # the other of Arrow's two formats, as written by Feather and Polars


def column_texts(path: Path, text_key: str) -> Iterator[tuple[list[bytes | None], int]]:
    """Yield (texts of the next rows as bytes, which may not be UTF-8; bytes of the file up to there, about).

    Raises: DataError for a damaged file, and one without such a column of text.
    """
    import pyarrow

    read, kind = (_parquet, "parquet") if path.suffix == ".parquet" else (_arrow, "Arrow")
    try:
        for column, position in read(path, text_key):
            for start in range(0, len(column), _BLOCK_ROWS):
                # as bytes, so that one invalid string does not make the whole block unreadable
                texts = column.slice(start, _BLOCK_ROWS).cast(pyarrow.large_string())
                yield texts.cast(pyarrow.large_binary()).to_pylist(), position
    except (pyarrow.ArrowException, OSError) as error:
        raise_if_out_of_memory(error)
        raise DataError(f"{path}: not a readable {kind} file ({one_line(error)}); fetch it again.") from None


def _parquet(path: Path, text_key: str) -> Iterator[tuple[pyarrow.Array, int]]:
    import pyarrow.parquet

    size, row = path.stat().st_size, 0
    with pyarrow.parquet.ParquetFile(path) as file:
        _check_column(path, file.schema_arrow, text_key)
        for batch in file.iter_batches(batch_size=_BLOCK_ROWS, columns=[text_key]):
            row += len(batch)
            yield batch.column(0), size * row // max(file.metadata.num_rows, 1)


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
        _check_column(path, reader.schema, text_key)
        for batch, position in batches:
            yield _sound(batch.column(text_key)), position


def _sound(column: pyarrow.Array) -> pyarrow.Array:
    """`column`, whose offsets are checked: Arrow believes them, and a damaged file would end the process."""
    import pyarrow

    as_bytes = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
        pyarrow.string_view(): pyarrow.binary_view(),
    }
    # Not as text: that would refuse the whole batch for one invalid character.
    (column if pyarrow.types.is_dictionary(column.type) else column.view(as_bytes[column.type])).validate(
        full=True
    )
    return column


def _check_column(path: Path, schema: Any, text_key: str) -> None:
    import pyarrow

    if text_key not in schema.names:
        names = ", ".join(schema.names[:20])
        raise DataError(f"{path}: there is no column {text_key!r}; name one of {names} with --text-key.")
    kind = schema.field(text_key).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise DataError(
            f"{path}: column {text_key!r} holds {kind}, not text; name a column of text with --text-key."
        )


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
            f"input {directory} is a directory, but not one of Hugging Face `save_to_disk` (no state.json); name "
            f"files, or a glob like {directory}/*.jsonl."
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
