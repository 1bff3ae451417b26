"""Reading stored input: the bytes of compressed files, and errors of reading any file."""

from __future__ import annotations

import contextlib
import errno
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import zstandard

from data_utils.base.errors import DataError

COMPRESSIONS = (".gz", ".zst")
_READ_BYTES = 16 << 10  # of compressed data; small, because one read may expand ten-thousandfold


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading and decompressing `path` into a DataError, or a MemoryError."""
    try:
        yield
    except EOFError:
        raise DataError(f"{path}: the compressed data is cut off; fetch the file again.") from None
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise_if_out_of_memory(error)
        raise DataError(f"{path}: damaged compressed data ({error}); fetch the file again.") from None
    except OSError as error:
        raise_if_out_of_memory(error)
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); check its permissions and the disk."
        ) from None


def raise_if_out_of_memory(error: Exception) -> None:
    """Raise MemoryError if a library's error means that memory ran out, which is no fault of the input."""
    is_memory_error = isinstance(error, MemoryError) or "not enough memory" in str(error).lower()
    if isinstance(error, OSError):
        is_memory_error = error.errno == errno.ENOMEM
    if is_memory_error:
        raise MemoryError from None


def decompressed(file: IO[bytes], suffix: str, chunk_bytes: int) -> Iterator[bytes]:
    """The decompressed bytes of a file in chunks of about this size. Raises EOFError for a truncated file."""
    if not file.read(1):
        raise EOFError
    file.seek(0)
    decompress = _gzip_data if suffix == ".gz" else _zstandard_data
    yield from _grouped(decompress(file, chunk_bytes), chunk_bytes)


def _read_all(file: IO[bytes] | gzip.GzipFile, chunk_bytes: int) -> Iterator[bytes]:
    while chunk := file.read(chunk_bytes):
        yield chunk


def _gzip_data(file: IO[bytes], chunk_bytes: int) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as stream:
        yield from _read_all(stream, chunk_bytes)


def _zstandard_data(file: IO[bytes], chunk_bytes: int) -> Iterator[bytes]:
    # Frame by frame: zstandard's stream reader takes a truncated frame for the end of the data. The window limit
    # admits files written with `zstd --long=31`, as some public corpora are.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    for data in _read_all(file, min(chunk_bytes, _READ_BYTES)):
        while data:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(data)
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError


def _grouped(parts: Iterator[bytes], chunk_bytes: int) -> Iterator[bytes]:
    held: list[bytes] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= chunk_bytes:
            yield b"".join(held)
            held, size = [], 0
    if size:
        yield b"".join(held)
