"""The bytes of a checkpoint: safetensors files written and checked in one pass, read by position.

A file's checksums are CRC-32 of each 16 MiB: every flipped bit and every burst up to 32 bits is found with certainty,
any other damage but for one case in four billion per block. They are computed while the block before them is being
written; several ranks can check one file, and a message can say where the damage is. (SHA-256, where the processor has
no instructions for it, runs at a quarter of a disk's rate.) The writer needs two blocks of memory, the reader one; the
safetensors library reads the same files, but maps them, which counts against a process as if it held them.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from data_utils.base.errors import CheckpointError
from megatron_lite.checkpoint.boxes import Box

BLOCK_BYTES = 16 << 20  # written, and checked, at once
READ_BYTES = 4 << 20  # read at once: fits in a processor's cache
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_FP32 = "F32"


# Writing


def write_tensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor, tuple[int, int]]]) -> dict[str, Any]:
    """Write a safetensors file and wait until it is on disk.

    Args: tensors: key, fp32 values [numel] on any device, and the shape under which to store them.
    Returns: size and checksums, as `check_block` wants them. Raises OSError.
    """
    tensors = list(tensors)
    header, end = {}, 0
    for key, values, shape in tensors:
        start, end = end, end + 4 * values.numel()
        header[key] = {"dtype": _FP32, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with ThreadPoolExecutor(1, "checkpoint write") as pool:
            writer = _Writer(descriptor, pool)
            writer.add(torch.frombuffer(bytearray(struct.pack("<Q", len(text)) + text), dtype=torch.uint8))
            for _, values, _ in tensors:
                writer.add(values.detach().view(torch.uint8))
            writer.finish()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {"bytes": writer.position, "block_bytes": writer.block_bytes, "crc32": writer.checksums}


@dataclass
class _Writer:
    """Gathers bytes into blocks; while one is being written, the next is filled and its checksum computed."""

    descriptor: int
    pool: ThreadPoolExecutor
    block_bytes: int = 0
    position: int = 0  # bytes handed on to be written
    checksums: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block_bytes = BLOCK_BYTES
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
        self.checksums.append(zlib.crc32(block))
        self._wait()
        self._writing = self.pool.submit(_write_block, self.descriptor, block, self.position)
        self.position += self._used
        self._blocks.reverse()
        self._used = 0

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()


def _write_block(descriptor: int, block: memoryview, position: int) -> None:
    _write_all(descriptor, block)
    # Starts writing to the disk now instead of at the end, and keeps the pages out of other readers' way.
    os.posix_fadvise(descriptor, position, len(block), os.POSIX_FADV_DONTNEED)


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def write_file(path: Path, content: bytes) -> None:
    """Write a file and wait until its content is on disk. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(descriptor, memoryview(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create a directory and those above it, names on disk. Nothing happens if it exists. Raises OSError."""
    if path.is_dir():
        return
    make_directory(path.parent)
    os.mkdir(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_file(path: Path) -> dict[str, Any]:
    """Size and checksums of a file that something else wrote, as `write_tensors` returns them."""
    with path.open("rb") as file:
        blocks = [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]
    return {"bytes": path.stat().st_size, "block_bytes": BLOCK_BYTES, "crc32": blocks}


# Checking


def block_sizes(described: dict[str, Any]) -> list[int]:
    """Bytes of each part of a file that has a checksum of its own. Raises KeyError, TypeError or ValueError."""
    size, block = int(described["bytes"]), int(described["block_bytes"])
    if block < 1 or size < 0 or len(described["crc32"]) != -(-size // block):
        raise ValueError(f"{len(described['crc32'])} checksums for {size} bytes")
    return [min(block, size - start) for start in range(0, size, block)]


def check_block(path: Path, described: dict[str, Any], number: int) -> None:
    """Compare one part of a file with its checksum. Raises CheckpointError naming file and place; OSError."""
    size = block_sizes(described)[number]
    start = number * described["block_bytes"]
    if _crc32(path, start, size) != described["crc32"][number]:
        raise CheckpointError(
            f"checkpoint {path.parent}: {path.name} does not match its checksum in bytes {start} to {start + size}; "
            "the file is damaged."
        )


def _crc32(path: Path, start: int, size: int) -> int:
    value, stop = 0, start + size
    buffer = memoryview(bytearray(min(size, READ_BYTES)))
    with path.open("rb", buffering=0) as file:
        for position in range(start, stop, READ_BYTES):
            part = buffer[: stop - position]
            _read_exactly(file.fileno(), part, position)
            value = zlib.crc32(part, value)
    return value


# Reading


class TensorFile:
    """The tensors of a safetensors file, read box by box."""

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
                raise self._damaged("its header is no JSON") from None
        self._data = 8 + length
        self._data_bytes = size - self._data

    def read(self, key: str, stored: Box, wanted: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """The box `wanted` of the tensor `key`, which holds the box `stored`, a few rows at a time.

        Yields: boxes that together are `wanted`, with their fp32 values, valid until the next one.
        """
        start = self._data + self._offset(key, stored)
        columns = stored.shape[1]
        rows_at_once = max(1, READ_BYTES // (4 * columns))
        buffer = bytearray(4 * columns * min(rows_at_once, wanted.shape[0]))
        with self.path.open("rb", buffering=0) as file:
            for row in range(wanted.row, wanted.row_stop, rows_at_once):
                stop = min(wanted.row_stop, row + rows_at_once)
                part = memoryview(buffer)[: 4 * columns * (stop - row)]
                _read_exactly(file.fileno(), part, start + 4 * columns * (row - stored.row))
                matrix = torch.frombuffer(part, dtype=torch.float32).view(stop - row, columns)
                box = Box(row, stop, wanted.column, wanted.column_stop)
                yield box, matrix[:, wanted.column - stored.column : wanted.column_stop - stored.column]

    def _offset(self, key: str, stored: Box) -> int:
        try:
            described = self._header[key]
            start, stop = described["data_offsets"]
            good = described["dtype"] == _FP32 and tuple(described["shape"]) == stored.shape
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
