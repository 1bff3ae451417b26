"""A process that dies in the middle of its file operations, and what a disk may hold afterwards.

`record_and_kill` wraps the functions of `os` that change files, writes each operation down, and kills the process
during the n-th. `Disk` replays what was written down: what has reached the disk for certain (fsync), what has not, and
any state in between that a crash of the machine may leave. `fill_disk` lets the n-th and all later ones fail that need
space. `at_every_operation` runs a command so, in copies of this process.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import pickle
import random
import shutil
import signal
import threading
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

LOGGED = ("mkdir", "rmdir", "unlink", "rename", "replace")
RENAMES = ("rename", "replace")


class _RawFile(io.RawIOBase):
    """A file opened for writing whose operations go through the functions of `os`."""

    def __init__(self, path, opener=None):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        if isinstance(path, int):
            self._descriptor = path
        else:
            self._descriptor = os.open(path, flags, 0o666) if opener is None else opener(path, flags)

    def writable(self):
        return True

    def fileno(self):
        return self._descriptor

    def write(self, content):
        return os.write(self._descriptor, content)

    def truncate(self, size=None):
        os.ftruncate(self._descriptor, size)

    def close(self):
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def record_and_kill(journal: Path, number: int) -> None:
    """From now on: write every operation on files to `journal`, and kill this process during operation `number`.

    A write is done by half before the process dies, anything else not at all.
    """
    _change_os(journal, number, lambda: os.kill(os.getpid(), signal.SIGKILL))


def fill_disk(journal: Path, number: int) -> None:
    """From now on: every operation that needs space fails from the `number`-th on, a write after half of it."""

    def refuse():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _change_os(journal, number, refuse, ("mkdir", "create", "write", "fsync", *RENAMES))


def at_every_operation(change, command, before, after) -> int:
    """Run a command in copies of this process with the `change` (above) at its 1st, 2nd, ... operation, until it
    meets none of them. Returns the number of operations.

    Args: before: makes what is there at first, and returns the path of a journal; after: is called with the copy's
        exit status (-9: killed, 99: a traceback) and what it said on stderr.
    """
    number = 0
    while True:
        journal = before()
        said = journal.with_name(f"{journal.name}.stderr")
        child = os.fork()
        if child == 0:
            with said.open("w") as err, redirect_stderr(err), redirect_stdout(io.StringIO()):
                status = 99
                try:
                    change(journal, number)
                    status = command()
                except SystemExit as ended:
                    status = ended.code
                except BaseException:
                    traceback.print_exc()
            os._exit(status or 0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return number
        after(status, said.read_text())
        number += 1


def _change_os(journal, number, fail, failing=None):
    """Args: fail: called instead of the operation; failing: names of those that fail, None: only the first."""
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # so that rmtree names whole paths
    real = {name: getattr(os, name) for name in (*LOGGED, "open", "write", "close")}
    log = real["open"](journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    paths: dict[int, str] = {}
    left, lock = [number], threading.Lock()

    def note(*record):
        real["write"](log, pickle.dumps(record))

    def is_last(name):
        if failing is not None and name not in failing:
            return False
        left[0] -= 1
        return left[0] < 0

    def plain(name):
        def operation(*args, **options):
            with lock:
                if is_last(name):
                    fail()
                real[name](*args, **options)
                note(name, *map(str, args[: 2 if name in RENAMES else 1]))

        return operation

    def open_(path, flags, *rest, **options):
        with lock:
            creates = bool(flags & os.O_CREAT)
            if creates and is_last("create"):
                fail()
            descriptor = real["open"](path, flags, *rest, **options)
            paths[descriptor] = str(path)
            if creates:
                note("create", str(path))
            return descriptor

    def write(descriptor, content):
        with lock:
            last = is_last("write")
            count = real["write"](descriptor, content[: len(content) // 2] if last else content)
            note("write", paths[descriptor], bytes(content[:count]))
            if last:
                fail()
            return count

    def fsync(descriptor):
        with lock:
            if is_last("fsync"):
                fail()
            # A killed process loses no page: no need to wait for the real disk.
            note("fsync", paths[descriptor])

    open_file = builtins.open

    def open_whole(path, mode="r", buffering=-1, **options):
        if mode != "wb":
            return open_file(path, mode, buffering, **options)
        raw = _RawFile(path, options.get("opener"))
        return raw if buffering == 0 else io.BufferedWriter(raw)

    builtins.open = open_whole  # type: ignore[assignment]
    for name in LOGGED:
        setattr(os, name, plain(name))
    os.open, os.write, os.fsync = open_, write, fsync  # type: ignore[assignment]


class File:
    def __init__(self, content: bytes = b""):
        self.states = [content]  # from what is on disk for certain to what the process has written


class Directory:
    def __init__(self) -> None:
        self.states: list[dict[str, File | Directory]] = [{}]


class Disk:
    """A directory tree with, for every file and directory, the states since it was last synchronized."""

    def __init__(self, root: Path):
        """Everything that is there now is on disk."""
        self._path = root
        self._root = self._scan(root)

    def _scan(self, path: Path) -> Directory:
        directory = Directory()
        for entry in path.iterdir():
            directory.states[0][entry.name] = (
                self._scan(entry) if entry.is_dir() else File(entry.read_bytes())
            )
        return directory

    def replay(self, journal: Path) -> int:
        """Apply recorded operations. Returns their number."""
        count = 0
        with journal.open("rb") as file:
            while True:
                try:
                    name, *args = pickle.load(file)
                except EOFError:
                    return count
                getattr(self, f"_{name}")(*args)
                count += 1

    def _node(self, path: str) -> File | Directory:
        node: File | Directory = self._root
        for name in Path(path).relative_to(self._path).parts:
            node = node.states[-1][name]  # type: ignore[index]
        return node

    def _change(self, path: str, node: File | Directory | None) -> None:
        parent = self._node(str(Path(path).parent))
        entries = dict(parent.states[-1])
        if node is None:
            del entries[Path(path).name]
        else:
            entries[Path(path).name] = node
        parent.states.append(entries)

    def _create(self, path: str) -> None:
        self._change(path, File())

    def _mkdir(self, path: str) -> None:
        self._change(path, Directory())

    def _unlink(self, path: str) -> None:
        self._change(path, None)

    _rmdir = _unlink

    def _replace(self, source: str, target: str) -> None:
        self._rename(source, target)

    def _rename(self, source: str, target: str) -> None:
        node = self._node(source)
        parent = self._node(str(Path(source).parent))
        entries = {name: entry for name, entry in parent.states[-1].items() if entry is not node}
        entries[Path(target).name] = node  # both names change at once, in one directory
        parent.states.append(entries)

    def _write(self, path: str, content: bytes) -> None:
        node = self._node(path)
        node.states.append(node.states[-1] + content)

    def _fsync(self, path: str) -> None:
        node = self._node(path)
        del node.states[:-1]

    def write(self, target: Path, survives: str, seed: int) -> None:
        """Make the tree as a crash leaves it: `kept`, `dropped` (what was not synchronized) or `some` of it."""
        _write(self._root, target, survives, random.Random(seed))


def _write(node: File | Directory, path: Path, survives: str, rng: random.Random) -> None:
    index = {"kept": -1, "dropped": 0, "some": rng.randrange(len(node.states))}[survives]
    if isinstance(node, File):
        path.write_bytes(node.states[index])
        return
    path.mkdir()
    for name, entry in node.states[index].items():
        _write(entry, path / name, survives, rng)
