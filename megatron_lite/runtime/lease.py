"""A lease on a run's directory: one process at a time writes into it, and loses the lease when it dies.

The file `LEASE` in the directory names the holder, who locks it (flock) and sets its modification time at intervals. A
start that finds the file decides as follows:

1. It does not get the lock: the holder is alive.
2. It gets the lock, and the holder was on the same kernel: the holder is dead.
3. Else, as where the file system has no locks or does not share them between machines: the start watches the file by
   its own clock. A holder that does not renew it for STALE_SECONDS is dead.

If two machines without common locks take over at once, the later one has the file, and the other one ends when it would
renew it. Needs no torch: a second start is refused before it loads anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from data_utils.common.errors import ConfigError, system_remedy
from data_utils.common.files import is_named, remove_files, sync_descriptor
from data_utils.common.untrusted import conform_to, open_regular, parse_json, read_bounded
from megatron_lite.parallel.launch import slurm_job

log = logging.getLogger(__name__)

NAME = "LEASE"
RENEW_SECONDS = 10.0
STALE_SECONDS = 60.0  # six renewals, since a file system may stall for a while
POLL_SECONDS = 0.2
RECORD_BYTES = 1024  # written in one piece, so that no reader sees half of it


class LeaseError(ConfigError):
    """Another process holds the run's directory."""

    only_here = True  # only the rank that asks for the lease raises it


@dataclass(frozen=True)
class Holder:
    """The process that holds the lease, as the file has it."""

    token: str  # of this start alone
    what: str  # what it does in the directory, as a verb: "trains"
    host: str
    pid: int
    since: str
    job: str  # number of the SLURM job; "" outside of a job
    boot: str  # identifies the running kernel, see `_boot_id`

    def __str__(self) -> str:
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"

    @staticmethod
    def read(path: Path) -> Holder | None:
        """None if the file is absent or incomplete."""
        try:
            return conform_to(parse_json(read_bounded(path, 4 * RECORD_BYTES)), Holder)
        except (FileNotFoundError, ValueError):
            return None

    @staticmethod
    def this_process(what: str) -> Holder:
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        host, pid = socket.gethostname(), os.getpid()
        return Holder(secrets.token_hex(8), what, host, pid, since, slurm_job(), _boot_id())


class Lease:
    """A held directory. `lost_to` is called by the watchdog's thread, `release` once at the end."""

    def __init__(self, path: Path, descriptor: int, token: str, new_directories: list[Path]):
        """Args: new_directories: created for the lease; `release` removes those that are still empty."""
        self._path, self._descriptor, self._token = path, descriptor, token
        self._new_directories = new_directories
        self._next_renewal = time.monotonic() + RENEW_SECONDS

    def lost_to(self) -> Holder | None:
        """Renew the lease every RENEW_SECONDS. Returns the new holder if another process has taken it over."""
        if self._descriptor < 0 or time.monotonic() < self._next_renewal:
            return None
        self._next_renewal = time.monotonic() + RENEW_SECONDS
        with contextlib.suppress(OSError):  # a disk may fail for a while; the next renewal may succeed
            holder = Holder.read(self._path)
            if holder is not None and holder.token != self._token:
                return holder
            # By path, which other starts watch: the descriptor may belong to a file that has been replaced.
            os.utime(self._path)
        return None

    def release(self) -> None:
        """Remove the file and the empty directories. A second call does nothing."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            holder = Holder.read(self._path)
            if holder is not None and holder.token == self._token:
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1
        _remove_empty(self._new_directories)


@contextlib.contextmanager
def held(directory: Path, what: str) -> Iterator[Lease]:
    """Hold a run's directory within the context. Arguments and errors: see `acquire`."""
    lease = acquire(directory, what)
    try:
        yield lease
    finally:
        lease.release()


def acquire(directory: Path, what: str) -> Lease:
    """Take the lease of a run's directory, which is created if it does not exist.

    Args: what: what this process does in the directory, as a verb, for the message to other starts.
    Raises: LeaseError if another process holds it; ConfigError if the file cannot be written.
    """
    path = directory / NAME
    new_directories = [
        each for each in (directory, *directory.parents) if not each.exists()
    ]  # innermost first
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while (descriptor := _open(path)) is None:
            pass
        own = Holder.this_process(what)
        _write(path, descriptor, own)
        return Lease(path, descriptor, own.token, new_directories)
    except OSError as error:
        _remove_empty(new_directories)
        raise ConfigError(
            f"run.directory {directory}: {error.strerror}; {system_remedy(error, 'choose a writable directory')}."
        ) from None


def _remove_empty(directories: list[Path]) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):  # not empty: the run has begun
            directory.rmdir()


def _open(path: Path) -> int | None:
    """The file, new or of a dead holder, locked where locks work. None if its holder has released it meanwhile.

    Raises: LeaseError if the holder is alive; OSError.
    """
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # no locks here
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # another start keeps the lock for as long as it looks
        return descriptor
    try:
        # Links are not followed: a dangling one exists, but an open that follows it would find no file, for ever.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    is_ours = False
    try:
        is_ours = _take_over(path, descriptor)
        return descriptor if is_ours else None
    finally:
        if not is_ours:
            os.close(descriptor)


def _take_over(path: Path, descriptor: int) -> bool:
    """Whether the file is now ours, of a dead holder; False if it was released. Raises LeaseError, OSError."""
    locked = _lock(descriptor)
    holder = Holder.read(path)  # after the lock: its new holder may just have written
    is_dead_here = locked is True and holder is not None and holder.boot == _boot_id() != ""
    if locked is not False and not is_dead_here:
        if locked:  # whoever has just made the file waits for it
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        log.warning("%s is held by %s; waiting up to %d s for a sign of life", path, holder, STALE_SECONDS)
        locked = False if _is_renewed(path, descriptor) else _lock(descriptor)
    if not is_named(path, descriptor):
        return False
    if locked is False:
        raise LeaseError(_refusal(path, holder))
    log.warning("%s: %s exited without releasing it; this start takes over", path.parent, holder)
    return True


def _lock(descriptor: int) -> bool | None:
    """Try to lock the file to the end of this process. None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_renewed(path: Path, descriptor: int) -> bool:
    """Whether the file changes, or goes, within STALE_SECONDS. Clocks of two machines are not compared."""
    first, deadline = _modified(path), time.monotonic() + STALE_SECONDS
    while time.monotonic() < deadline and is_named(path, descriptor):
        if _modified(path) != first:
            return True
        time.sleep(POLL_SECONDS)
    return not is_named(path, descriptor)


def _modified(path: Path) -> int:
    """Time of the file's last change; 0 if it is absent."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        return os.fstat(file.fileno()).st_mtime_ns  # opened, so that network file systems ask the server
    return 0


def _write(path: Path, descriptor: int, own: Holder) -> None:
    try:
        os.pwrite(descriptor, json.dumps(asdict(own)).encode().ljust(RECORD_BYTES), 0)
        sync_descriptor(descriptor)
    except OSError:
        remove_files(path)
        raise


def _refusal(path: Path, holder: Holder | None) -> str:
    run = path.parent
    who = (
        "a process is about to begin in it"
        if holder is None
        else f"{holder} {holder.what} in it, since {holder.since}"
    )
    return (
        f"{run} is in use: {who}; choose another run.directory, or stop that process (touch {run / 'STOP'}) and start "
        "again when it has ended."
    )


def _boot_id() -> str:
    """Identifies the running kernel; it changes with each start of the machine; "" if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
