"""Files: written whole or not at all, synced to disk, and checked before the work whose result they will hold.

Every command that writes a result follows one protocol. It holds a lock beside the output (`locked`), so that a second
command is refused. It writes under a partial name that only this program gives, and follows no link there. It syncs,
and renames last. If it is killed, the same command removes what is left and begins again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from data_utils.common.errors import ConfigError, DataError, system_problem, system_remedy
from data_utils.common.urls import is_url

if TYPE_CHECKING:  # it takes long to load, and only pictures need it
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")  # endings of files that pictures are written to


def short_names(paths: Iterable[str | Path]) -> dict[str, str]:
    """The last name of each path, or the whole path where several have the same last name."""
    names = {str(path): Path(path).name for path in paths}
    counts = Counter(names.values())
    return {path: name if counts[name] == 1 else path for path, name in names.items()}


def require_directory(path: Path, remedy: str) -> None:
    """Raise DataError unless the directory exists. Called before slow libraries are loaded."""
    if not path.is_dir():
        reason = "is not a directory" if path.exists() else "does not exist"
        raise DataError(f"{path} {reason}; {remedy}.")


def require_new_directory(path: Path) -> None:
    """Raise DataError if the directory `path` is not empty, or clearly cannot be made. Makes nothing."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} already exists; choose a new directory or remove it.")
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
    if is_url(output):
        raise ConfigError(
            f"output {output} is a URL; give a path of this machine, and then: python scripts/dataset.py push PATH URL"
        )
    if not Path(output).name or output.endswith("/"):
        raise ConfigError(f"output {output!r} is not a file prefix; give a path such as data/corpus.")
    if output.endswith((".bin", ".idx", ".ent", ".hash", ".score", ".json")):
        name, _, suffix = output.rpartition(".")
        raise ConfigError(
            f"output {output!r} must be a prefix without .{suffix}, to which the suffixes of several files are "
            f"added; give {name}."
        )


def write_whole(path: Path, content: bytes, option: str) -> None:
    """Write the whole file or none. Raises DataError, naming the option, if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        remedy = system_remedy(error, f"choose another {option}")
        raise DataError(f"{option} {path}: {error.strerror}; {remedy}.") from None


def write_picture(path: Path, figure: Figure, option: str, dpi: int | None = None) -> None:
    """Write a figure of matplotlib as `write_whole`, whose directory it makes: the work before it takes long.

    Raises: DataError, naming the option.
    """
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=path.suffix[1:], dpi=dpi or "figure")
    except ValueError as error:  # an ending that is no kind of picture
        raise DataError(f"{option} {path}: {error}; give a name in .png, .svg or .pdf.") from None
    write_whole(path, picture.getvalue(), option)


def write_atomically(path: Path, content: bytes, ending: str = ".partial") -> None:
    """Write the whole file or none, as PATH + `ending`, which is synced and renamed. Raises OSError."""
    with _partial_file(path, ending) as file:
        file.write(content)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, PATH.partial, which is renamed to `path` at the end, or removed if anything fails.

    Raises: BlockingIOError if another command writes it; OSError.
    """
    with locked(path), _partial_file(path, ".partial") as file:
        yield file


@contextlib.contextmanager
def _partial_file(path: Path, ending: str) -> Iterator[IO[bytes]]:
    # A fixed name, so that the same command finds and replaces what an interrupted one left.
    partial = path.with_name(f"{path.name}{ending}")
    new = open_new(partial)
    try:
        with new as file:
            yield file
            sync_file(file)
        os.replace(partial, path)
    except BaseException:
        remove_files(partial)
        raise
    sync_directory(path.parent)


def remove_files(*paths: Path) -> None:
    """Remove what is left of work that has ended. One that stays, with its error, must hide neither the others' removal
    nor how the work ended."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_directory(path: Path) -> None:
    """Remove a directory with all in it that can be removed. Raises the first OSError."""
    errors: list[BaseException] = []
    shutil.rmtree(path, onerror=lambda function, name, info: errors.append(info[1]))
    if errors:
        raise errors[0]


def copy_files(source: Path, target: Path) -> None:
    """Make `target` a directory with the files of `source`. Of the content alone: some file systems refuse modes."""
    target.mkdir()
    for path in source.iterdir():
        (copy_files if path.is_dir() else shutil.copyfile)(path, target / path.name)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until its content is on disk; its name may not be. Raises OSError."""
    with open_new(path) as file:
        file.write(content)
        sync_file(file)


def open_new(path: Path) -> IO[bytes]:
    """A new file to write, in place of what has its name: a leftover, perhaps another's, or a link. Raises OSError."""
    path.unlink(missing_ok=True)
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o666))


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[Path]:
    """A directory to fill. It is synced and renamed to `output` at the end, or removed if anything fails.

    Raises: DataError if `output` holds something, is being written by another command, or cannot be written.
    """
    require_new_directory(output)
    output = Path(os.path.abspath(output))  # "." has no name
    partial = output.with_name(f".{output.name}.megatron_lite_partial")  # no name that is anyone else's
    with disk_errors(output), locked(output):
        require_new_directory(output)  # another command may have made it before the lock was ours
        try:
            if partial.exists():  # left by a command that was killed
                remove_directory(partial)
            partial.mkdir()
            yield partial
            put_in_place(partial, output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def put_in_place(directory: Path, output: Path) -> None:
    """Sync a complete directory, and rename it to `output`, which may be an empty directory. Raises OSError."""
    _sync_tree(directory)
    if output.exists():
        output.rmdir()
    os.rename(directory, output)
    sync_directory(output.parent)


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keep other commands away from `output`. Makes the directories above it, and removes those that stay empty.

    Raises: BlockingIOError if another command holds it; OSError.
    """
    # A file beside the output: a file system may lock files and no directories, and a name that is renamed
    # under a lock keeps it.
    path = output.with_name(f".{output.name}.megatron_lite_lock")
    missing = [above for above in output.parents if not above.exists()]  # the innermost first
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_locked(path)
        try:
            yield
        finally:
            remove_files(path)  # while it is locked: whoever has opened it sees that it is no more
            os.close(descriptor)
    finally:
        for above in missing:
            with contextlib.suppress(OSError):
                above.rmdir()


def open_locked(path: Path, wait: bool = False) -> int:
    """The descriptor of a file that only this process has locked, to the end of the descriptor. Follows no link.

    The file of a dead process is taken over. Raises: BlockingIOError if another process holds it and `wait` is false;
    OSError.
    """
    while True:
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
        )
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EEXIST, "it exists and is not a regular file", str(path))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise
            except OSError:  # a file system without locks: two commands are not kept apart, one is still safe
                pass
            if is_named(path, descriptor):
                _locks[descriptor] = os.fstat(descriptor)
                return descriptor
            if not wait:  # its holder has ended and taken the name away between our open and our lock
                raise BlockingIOError
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


_locks: dict[int, os.stat_result] = {}  # the last file that was locked by a descriptor; it may be closed


def leave_locks() -> None:
    """In a fork: leave locks to the process that took them. They end with it, and not with its last worker."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, file in _locks.items():
        with contextlib.suppress(OSError):  # closed
            if os.path.samestat(os.fstat(descriptor), file):
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def is_named(path: Path, descriptor: int) -> bool:
    """Whether the path still names the opened file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sync_tree(directory: Path) -> None:
    """Wait until a directory is on disk with all that is in it."""
    for above, _, names in os.walk(directory):
        for name in names:
            _sync(Path(above) / name)
        _sync(Path(above))


def sync_file(file: IO[bytes]) -> None:
    """Wait until what was written to an open file is on disk."""
    file.flush()
    sync_descriptor(file.fileno())


def sync_descriptor(descriptor: int) -> None:
    """Wait until an open file or directory is on disk, where its file system can tell. Raises OSError."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Answers of file systems that sync no directories, or nothing: what was written is complete all the same.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS):
            raise


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on disk."""
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(output: str | Path, setting: str = "--output") -> Iterator[None]:
    """Turn the file system's errors while writing `output`, which `setting` names, into a DataError."""
    try:
        yield
    except BlockingIOError:
        raise DataError(
            f"output {output} is being written by another process; wait until it finishes."
        ) from None
    except OSError as error:
        remedy = system_remedy(error, f"choose another {setting}")
        # A file that is read may be the cause.
        raise DataError(
            f"output {output} cannot be written ({system_problem(error)}); {remedy} and repeat the command."
        ) from None
