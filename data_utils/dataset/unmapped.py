"""Tokens of a file on a file system that refuses to map it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from data_utils.common.errors import DataError


class FileTokens:
    """The tokens of a file that is not mapped; slices and index arrays are read on access."""

    def __init__(self, path: Path, dtype: np.dtype, count: int) -> None:
        self.dtype = dtype
        self.shape = (count,)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with the last reference to it)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice | np.ndarray) -> np.ndarray:
        if not isinstance(key, slice):
            return np.array([self[i : i + 1][0] for i in np.asarray(key).tolist()], self.dtype)
        start, stop, step = key.indices(len(self))
        assert step == 1
        data = b""
        size, position = max(stop - start, 0) * self.dtype.itemsize, start * self.dtype.itemsize
        while len(data) < size:
            more = os.pread(self._file.fileno(), size - len(data), position + len(data))
            if not more:
                raise DataError(
                    f"{self._file.name} became shorter while it was read; copy the dataset again."
                )
            data += more
        return np.frombuffer(data, self.dtype)
