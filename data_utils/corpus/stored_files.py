"""Reading stored input: the bytes of compressed files, and errors of reading any file."""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import zstandard

from data_utils.common.errors import DataError
from data_utils.storage.objects import RangeReader, StoredObject

InputFile: TypeAlias = Path | StoredObject  # a file that is read: of this machine, or of a store

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
_READ_BYTES = 16 << 10  # of compressed data; small, because one read may expand ten-thousandfold


# The first bytes of files that are not what their name says.
_BEGINNINGS = {
    b"\x1f\x8b": "compressed by gzip (name it with .gz)",
    b"\x28\xb5\x2f\xfd": "compressed by zstd (name it with .zst)",
    b"BZh91AY&SY": "compressed by bzip2 (name it with .bz2)",
    b"\xfd7zXZ\x00": "compressed by xz (name it with .xz)",
    b"PK\x03\x04": "a zip archive (unpack it)",
    b"PAR1\x15": "parquet (name it with .parquet)",
    b"ARROW1": "Arrow (name it with .arrow)",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself (fetch it with git lfs pull)",
    b"\xff\xfe\x00\x00": "UTF-32, not UTF-8; convert it (iconv -f UTF-32 -t UTF-8)",
    b"\x00\x00\xfe\xff": "UTF-32, not UTF-8; convert it (iconv -f UTF-32 -t UTF-8)",
    b"\xff\xfe": "UTF-16, not UTF-8; convert it (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "UTF-16, not UTF-8; convert it (iconv -f UTF-16 -t UTF-8)",
}  # the longer before what it begins with
BEGINNING_BYTES = max(map(len, _BEGINNINGS))


def compression_suffix(path: InputFile) -> str:
    """The part of a name's end that tells how a file is compressed, such as .gz or .GZ; "" = it is not."""
    return path.suffix if path.suffix.lower() in COMPRESSIONS else ""


def why_not_regular(mode: int) -> str:
    """What a file is that cannot be read again and at any place, by its `st_mode`; "" for a regular one."""
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory"}
    return "" if stat.S_ISREG(mode) else f"is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a regular file"


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file. Never waits, as for the other end of a pipe. Raises OSError; DataError for another file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if problem := why_not_regular(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path} {problem}; write its content to a file.")
    return open(descriptor, "rb")


def open_input(path: InputFile) -> IO[bytes]:
    """Open an input to read, as `open_regular` does; the bytes of a stored object come by ranges."""
    return cast(IO[bytes], RangeReader(path)) if isinstance(path, StoredObject) else open_regular(path)


def read_in_order(file: IO[bytes], start: int, stop: float) -> None:
    """Go to `start` of an input, of which the bytes up to `stop` will be read in order."""
    if isinstance(file, RangeReader):
        file.expect(start, int(min(stop, file.stored.size)))
    else:
        file.seek(start)


def stored_bytes(path: InputFile) -> int:
    """The size of a file. Raises DataError if it has gone."""
    if isinstance(path, StoredObject):
        return path.size
    with read_errors(path):
        return path.stat().st_size


def refuse_other_content(data: bytes | bytearray, path: InputFile) -> None:
    """Raise DataError for text whose first bytes show that it is none, or has another encoding."""
    for beginning, what in _BEGINNINGS.items():
        if data.startswith(beginning):
            # Its name there, and an encoding that a server adds (Content-Encoding), are not the reader's to change.
            first = "; download it first" if isinstance(path, StoredObject) else ""
            raise DataError(f"{path}: the file is {what}{first}.")


@contextlib.contextmanager
def read_errors(path: InputFile) -> Iterator[None]:
    """Turn errors of reading and decompressing `path` into a DataError, or a MemoryError."""
    try:
        yield
    except EOFError:
        raise DataError(f"{path}: the compressed data is truncated; download the file again.") from None
    except _TrailingBytes:
        raise DataError(
            f"{path}: other bytes follow the compressed data; download the file again or remove "
            f"them (`gzip -dc FILE | gzip > NEW{path.suffix}` leaves them out)."
        ) from None
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, lzma.LZMAError) as error:
        raise_if_out_of_memory(error)
        raise _damaged(path, error) from None
    except OSError as error:
        raise_if_out_of_memory(error)
        if error.errno is None:  # bz2 has no error of its own
            raise _damaged(path, error) from None
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); check its permissions and the disk."
        ) from None


def _damaged(path: InputFile, error: Exception) -> DataError:
    remedy = f"download the file again, or drop {path.suffix} from its name if it is not compressed"
    return DataError(f"{path}: damaged compressed data ({error}); {remedy}.")


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
    suffix = suffix.lower()
    if suffix == ".zst":
        parts = _zstandard_data(file, chunk_bytes)
    else:
        parts = _library_data(_OPENERS[suffix](file), chunk_bytes)
    yield from _grouped(parts, chunk_bytes)


_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {  # all read several streams, one after another
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}


def _read_all(file: IO[bytes], chunk_bytes: int) -> Iterator[bytes]:
    while chunk := file.read(chunk_bytes):
        yield chunk


class _TrailingBytes(Exception):
    """What follows a whole stream is not another one."""


def _library_data(stream: IO[bytes], chunk_bytes: int) -> Iterator[bytes]:
    with stream:
        try:
            yield from _read_all(stream, chunk_bytes)
        except gzip.BadGzipFile as error:  # bz2 and xz leave such bytes out by themselves
            if stream.tell() and "Not a gzipped file" in str(error):
                raise _TrailingBytes from None
            raise


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
