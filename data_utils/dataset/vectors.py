"""Fixed vectors of entities: a .npy file, mapped, whose row is an entity's number; and its conversion from text."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from data_utils.common.checksums import describe_file, identity
from data_utils.common.errors import DataError
from data_utils.common.files import disk_errors, new_file, require_named
from data_utils.corpus.stored_files import open_regular, read_errors

_ROWS = 1 << 16  # at a time
_REMEDY = "make it with: python scripts/dataset.py vectors TEXT --output FILE.npy"


class Vectors:
    """The vectors of a file, fp32 [entities, size], mapped. Raises DataError."""

    def __init__(self, path: str, size: int) -> None:
        try:
            open_regular(path).close()  # NumPy would wait for the other end of a pipe
            self.rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not a NumPy array"
            raise DataError(f"entities.vectors {path}: {why or error}; {_REMEDY}.") from None
        if not isinstance(self.rows, np.ndarray):  # several arrays in one file, .npz
            raise DataError(
                f"entities.vectors {path}: it is an archive (.npz), not a single array; {_REMEDY}."
            )
        if self.rows.dtype != np.float32 or self.rows.ndim != 2 or self.rows.shape[1] != size:
            raise DataError(
                f"entities.vectors {path} holds {self.rows.dtype} {list(self.rows.shape)}; it must be float32 with "
                f"{size} columns (entities.size)."
            )
        for start in range(0, len(self.rows), _ROWS):
            wrong = ~np.isfinite(self.rows[start : start + _ROWS]).all(axis=1)
            if wrong.any():
                place = start + int(wrong.argmax())
                raise DataError(
                    f"entities.vectors {path}: row {place} has a value that is not finite; {_REMEDY}."
                )
        self.path, self.identity = path, identity(describe_file(Path(path)))

    def require(self, count: int, what: str) -> None:
        """Raise DataError unless entities have vectors. Args: count: of the entities. what: has them, for messages."""
        if count != len(self.rows):
            raise DataError(
                f"{what} has {count} entities, but entities.vectors {self.path} has {len(self.rows)} rows; give the "
                "vectors that belong to its entity ids."
            )

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """The vectors of entities, which count from 1, fp32 [..., size]; 0 has zeros."""
        found = np.zeros((*numbers.shape, self.rows.shape[1]), np.float32)
        found[numbers > 0] = self.rows[numbers[numbers > 0] - 1]
        return found


def convert_vectors(text: str, output: str) -> tuple[int, int]:
    """Write lines of numbers, between tabs or spaces, as a .npy file. Returns: rows and columns. Raises DataError."""
    require_named(Path(output), "--output", (".npy",))
    with read_errors(Path(text)):
        lines = open_regular(text)
    with disk_errors(output), lines, new_file(Path(output)) as file:
        size = rows = 0
        for number, line in enumerate(lines, 1):
            try:
                row = np.array(line.split(), np.float32)
            except ValueError:
                row = np.array([np.nan], np.float32)
            size = size or len(row)
            if len(row) != size or not size or not np.isfinite(row).all():
                needed = f"{size:,} finite numbers, as line 1 does" if number > 1 else "finite numbers alone"
                raise DataError(f"{text}:{number}: the line must hold {needed}; correct it.")
            if not rows:
                file.write(bytes(_HEADER_BYTES))
            file.write(row.tobytes())
            rows = number
        if not rows:
            raise DataError(f"{text}: the file is empty; it needs one line of numbers per entity.")
        file.seek(0)
        file.write(_header(rows, size))
    return rows, size


_HEADER_BYTES = 128


def _header(rows: int, size: int) -> bytes:
    """The beginning of a .npy file, version 1.0."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {size}), }}"
    return (
        b"\x93NUMPY\x01\x00"
        + (_HEADER_BYTES - 10).to_bytes(2, "little")
        + text.ljust(_HEADER_BYTES - 11).encode()
        + b"\n"
    )
