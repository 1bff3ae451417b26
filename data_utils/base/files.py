"""Files: written whole or not at all, synced to disk, and checked before the work whose result they will hold."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from data_utils.base.errors import ConfigError, DataError

PICTURES = (".png", ".svg", ".pdf")  # endings of files that pictures are written to


def require_directory(path: Path, remedy: str) -> None:
    """Raise DataError unless the directory exists. Called before slow libraries are loaded."""
    if not path.is_dir():
        reason = "is not a directory" if path.exists() else "does not exist"
        raise DataError(f"{path} {reason}; {remedy}.")


def require_new_directory(path: Path) -> None:
    """Raise DataError if the directory `path` is not empty, or clearly cannot be made. Makes nothing."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} exists; choose a new directory, or remove it.")
    require_writable(path / "file", "--output")


def require_writable(path: Path, option: str) -> None:
    """Raise DataError, naming the option, if a file `path` clearly cannot be written. Makes nothing."""
    if not path.name or path.is_dir():
        raise DataError(f"{option} '{path}' is a directory; give the name of a file.")
    above = next(directory for directory in path.absolute().parents if directory.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise DataError(f"{option} {path}: {above} is not a writable directory; choose another {option}.")


def require_named(path: Path, option: str, suffixes: tuple[str, ...] = PICTURES) -> None:
    """Raise ConfigError unless the name has one of the endings, and DataError as `require_writable`."""
    if path.suffix not in suffixes:
        raise ConfigError(f"{option} is {str(path)!r}; its name must end in {', '.join(suffixes)}.")
    require_writable(path, option)


def require_prefix(output: str) -> None:
    """Raise ConfigError unless `output` can be the beginning of the names of a dataset's files."""
    if not Path(output).name or output.endswith("/"):
        raise ConfigError(f"output {output!r} is no file prefix; give a path such as data/corpus.")
    if output.endswith((".bin", ".idx", ".ent", ".json")):
        name, _, suffix = output.rpartition(".")
        raise ConfigError(
            f"output {output!r} is to be the beginning of three names, .{suffix} among them; give {name}."
        )


def write_whole(path: Path, content: bytes, option: str) -> None:
    """Write the whole file or none. Raises DataError, naming the option, if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise DataError(f"{option} {path}: {error.strerror}; choose another {option}.") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write the whole file or none, as PATH.partial, which is synced and renamed. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        write_synced(partial, content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until its content is on disk; its name may not be. Follows no link. Raises OSError."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
        file.write(content)
        sync_file(file)


def sync_file(file: IO[bytes]) -> None:
    """Wait until what was written to an open file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(output: str | Path, setting: str = "--output") -> Iterator[None]:
    """Turn the file system's errors while writing `output`, which `setting` names, into a DataError."""
    try:
        yield
    except BlockingIOError:
        raise DataError(f"output {output} is being written by another process; wait for it.") from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else f"choose another {setting}"
        raise DataError(
            f"output {output} cannot be written ({error.strerror or error}); {remedy} and run again."
        ) from None
