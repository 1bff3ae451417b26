"""Safetensors files: written in one pass with their checksums, read slice by slice.

A file's checksums are CRC-32 of each 16 MiB (data_utils/common/checksums.py says what they find). They are computed
while the previous block is being written; several ranks can check one file, and a message can name the damaged block.
The writer needs two blocks of memory beside the tensor at hand, where the safetensors library holds a whole file. The
reader reads by position: the library maps the file, which counts against a process as if it held it.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch

from data_utils.common.errors import CheckpointError
from data_utils.common.files import sync_descriptor
from megatron_lite.checkpoint.shard_slices import ShardSlice

BLOCK_BYTES = 16 << 20  # written, and checked, at once
READ_BYTES = 4 << 20  # read at once: fits in a processor's cache
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


# Writing


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[torch.Tensor],
    dtype: torch.dtype = torch.float32,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write a safetensors file and wait until it is on disk.

    Args:
        shapes: name -> the shape under which to store a tensor.
        tensors: the values in the order of `shapes`, on any device, each needed only until the next is asked for.
    Returns: size and checksums, as manifests record them. Raises OSError.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns data to 8 bytes
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1, "checkpoint write") as pool:
        writer = _Writer(file, pool)
        writer.add(torch.frombuffer(bytearray(struct.pack("<Q", len(text)) + text), dtype=torch.uint8))
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            assert tensor.numel() == math.prod(shape), name
            writer.add(tensor.detach().to(dtype).contiguous().flatten().view(torch.uint8))
        writer.finish()
        sync_descriptor(file.fileno())
    return {"bytes": writer.position, "block_bytes": writer.block_bytes, "crc32": writer.checksums}


class _Writer:
    """Gathers bytes into blocks; while one is being written, the next is filled and its checksum computed."""

    def __init__(self, file: IO[bytes], pool: ThreadPoolExecutor) -> None:
        self.block_bytes = BLOCK_BYTES
        self.position = 0  # bytes handed on to be written
        self.checksums: list[int] = []
        self._file, self._pool = file, pool
        self._blocks = [torch.empty(self.block_bytes, dtype=torch.uint8) for _ in range(2)]
        self._used = 0
        self._writing: Future[None] | None = None

    def add(self, values: torch.Tensor) -> None:
        """Append bytes: uint8 [n]."""
        while len(values):
            part = values[: self.block_bytes - self._used]
            self._blocks[0][self._used : self._used + len(part)].copy_(part)
            self._used += len(part)
            values = values[len(part) :]
            if self._used == self.block_bytes:
                self._flush()

    def finish(self) -> None:
        if self._used:
            self._flush()
        self._wait()

    def _flush(self) -> None:
        block = self._blocks[0].numpy().data[: self._used]
        # While the block before it is being written: hashing and the disk run at the same time.
        self.checksums.append(zlib.crc32(block))
        self._wait()
        self._writing = self._pool.submit(self._write, block, self.position)
        self.position += self._used
        self._blocks.reverse()
        self._used = 0

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write(self, block: memoryview, position: int) -> None:
        rest = block
        while rest:
            # An unbuffered write may write less than it was given.
            rest = rest[self._file.write(rest) :]
        # Starts writing to the disk now instead of at the end, and keeps the pages out of other readers' way.
        os.posix_fadvise(self._file.fileno(), position, len(block), os.POSIX_FADV_DONTNEED)


# Reading


class TensorFile:
    """The tensors of a safetensors file, read slice by slice."""

    def __init__(self, path: Path):
        """Read the header. Raises CheckpointError if it is damaged, OSError if it cannot be read."""
        self.path = path
        with path.open("rb") as file:
            size = path.stat().st_size
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise self._damaged(f"its header of {length} bytes does not fit")
            try:
                self._header = json.loads(file.read(length))
            except (ValueError, RecursionError):
                raise self._damaged("its header is not JSON") from None
        self._data = 8 + length
        self._data_bytes = size - self._data

    def read(
        self, key: str, stored: ShardSlice, wanted: ShardSlice
    ) -> Iterator[tuple[ShardSlice, torch.Tensor]]:
        """The slice `wanted` of the tensor `key`, which holds the slice `stored`, a few rows at a time.

        Yields: slices that together are `wanted`, with their fp32 values, valid until the next one.
        """
        start = self._data + self._offset(key, stored)
        columns = stored.shape[1]
        rows_at_once = max(1, READ_BYTES // (4 * columns))
        # One buffer for the whole slice; rows are read whole, also where few columns are wanted, since they lie
        # together.
        buffer = bytearray(4 * columns * min(rows_at_once, wanted.shape[0]))
        with self.path.open("rb", buffering=0) as file:
            for row in range(wanted.row, wanted.row_stop, rows_at_once):
                stop = min(wanted.row_stop, row + rows_at_once)
                part = memoryview(buffer)[: 4 * columns * (stop - row)]
                _read_exactly(file.fileno(), part, start + 4 * columns * (row - stored.row))
                matrix = torch.frombuffer(part, dtype=torch.float32).view(stop - row, columns)
                read = ShardSlice(row, stop, wanted.column, wanted.column_stop)
                yield read, matrix[:, wanted.column - stored.column : wanted.column_stop - stored.column]

    def _offset(self, key: str, stored: ShardSlice) -> int:
        try:
            described = self._header[key]
            start, stop = described["data_offsets"]
            good = described["dtype"] == _DTYPES[torch.float32] and tuple(described["shape"]) == stored.shape
            if not good or not 0 <= start <= stop <= self._data_bytes or stop - start != 4 * stored.size:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise self._damaged(f"{key!r} is not there as the manifest says") from None
        return start

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.path.parent}: {self.path.name} is damaged: {what}.")


def _read_exactly(descriptor: int, target: memoryview, start: int) -> None:
    while target:
        count = os.preadv(descriptor, [target], start)
        if not count:
            raise OSError("the file ends too early")
        target, start = target[count:], start + count
