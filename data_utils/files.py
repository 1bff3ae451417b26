"""Files of the scripts: written whole or not at all, and refused before the work whose result they are to hold."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_lite.errors import ConfigError, DataError


def require_directory(path: Path, remedy: str) -> None:
    """Raise DataError unless the directory exists; called before libraries are loaded that take seconds."""
    if not path.is_dir():
        reason = "is not a directory" if path.exists() else "does not exist"
        raise DataError(f"{path} {reason}; {remedy}.")


def require_new_directory(path: Path) -> None:
    """Raise DataError if a directory `path` holds something, or surely cannot be made. Makes nothing."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} exists; choose a new directory, or remove it.")
    require_writable(path / "file", "--output")


def require_writable(path: Path, option: str) -> None:
    """Raise DataError, naming the option, if a file `path` surely cannot be written. Makes nothing."""
    if not path.name or path.is_dir():
        raise DataError(f"{option} '{path}' is a directory; give the name of a file.")
    above = next(directory for directory in path.absolute().parents if directory.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise DataError(f"{option} {path}: {above} is not a writable directory; choose another {option}.")


def require_prefix(output: str) -> None:
    """Raise ConfigError unless `output` can be the beginning of the names of a dataset's files."""
    if not Path(output).name or output.endswith("/"):
        raise ConfigError(f"output {output!r} is no file prefix; give a path such as data/corpus.")


def write_whole(path: Path, content: bytes, option: str) -> None:
    """The whole file or none: written beside its place, synced, renamed. Raises DataError if that fails."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DataError(f"{option} {path}: {error.strerror}; choose another {option}.") from None
