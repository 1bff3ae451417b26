"""A lease on a run's directory: one process at a time writes into it, and loses the lease when it dies.

The file `LEASE` in the directory names the holder, who renews it by setting its modification time. A start that finds
the file decides as follows, without comparing the clocks of two machines:

1. On the same kernel, a lock (flock) on the file shows at once whether the holder is alive.
2. An earlier attempt of the same SLURM job is over: SLURM would not have begun this one otherwise.
3. Else, as where the file system has no locks or does not share them between machines: the start watches the file. If
   it is renewed, its holder is alive; if it is not renewed for STALE_SECONDS, the start takes over.

Needs no torch: a second start is refused before it loads anything.
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
from megatron_lite.parallel.launch import slurm_attempt

log = logging.getLogger(__name__)

NAME = "LEASE"
RENEW_SECONDS = 10.0
STALE_SECONDS = 60.0  # six renewals, since a file system may stall for a while
SETTLE_SECONDS = 2.0  # after a takeover: two machines may have decided on it at once
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
    attempt: int  # how often that job was queued again
    boot: str  # identifies the running kernel, see `_boot_id`
    locked: bool  # whether the holder has a lock on the file

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
    def this_process(what: str, locked: bool) -> Holder:
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        job, attempt = slurm_attempt()
        host = socket.gethostname()
        return Holder(secrets.token_hex(8), what, host, os.getpid(), since, job, attempt, _boot_id(), locked)


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
        while True:
            descriptor = _create(path)
            if descriptor is None:
                descriptor = _take_over(path)
            if descriptor is not None:
                return Lease(path, descriptor, _write_holder(path, descriptor, what), new_directories)
    except OSError as error:
        _remove_empty(new_directories)
        raise ConfigError(
            f"run.directory {directory}: {error.strerror}; {system_remedy(error, 'choose a writable directory')}."
        ) from None


def _remove_empty(directories: list[Path]) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):  # not empty: the run has begun
            directory.rmdir()


def _create(path: Path) -> int | None:
    """Create the file and lock it where locks work. None if it exists."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return None
    _lock(descriptor)
    return descriptor


def _take_over(path: Path) -> int | None:
    """Open the file of a dead holder. None if it was released meanwhile. Raises LeaseError, OSError."""
    try:
        # Links are not followed: `_create` finds a dangling link, but an open that follows it finds no file, so that
        # `acquire` would try for ever.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    is_taken = False
    try:
        holder = _wait_for_record(path)
        # Before the decision, since on the same kernel the lock decides. If the holder is alive all the same, closing
        # the descriptor gives the lock back.
        locked = _lock(descriptor)
        if not is_named(path, descriptor):
            return None
        if not _is_dead(path, descriptor, holder, locked):
            raise LeaseError(_refusal(path, holder))
        if not is_named(path, descriptor):
            return None
        log.warning("%s: %s exited without releasing it; this start takes over", path.parent, holder)
        is_taken = True
        return descriptor
    finally:
        if not is_taken:
            os.close(descriptor)


def _is_dead(path: Path, descriptor: int, holder: Holder | None, locked: bool | None) -> bool:
    """Args: locked: whether this process has just got the file's lock; None: the file system has no locks."""
    if holder is not None:
        if locked is not None and holder.locked and holder.boot and holder.boot == _boot_id():
            return locked
        job, attempt = slurm_attempt()
        if job and holder.job == job and holder.attempt < attempt:
            return True
    log.warning("%s is held by %s; waiting up to %d s for a sign of life", path, holder, STALE_SECONDS)
    first, deadline = _renewal_mark(path), time.monotonic() + STALE_SECONDS
    # By this machine's clock and by changes only: clocks of two machines may differ by more than a renewal.
    while time.monotonic() < deadline and is_named(path, descriptor):
        if _renewal_mark(path) != first:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _renewal_mark(path: Path) -> tuple[int, bytes]:
    """A value that every renewal changes. Opening the file makes network file systems ask the server."""
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read(RECORD_BYTES)
    except FileNotFoundError:
        return 0, b""


def _write_holder(path: Path, descriptor: int, what: str) -> str:
    """Write this process as the holder. Returns its token.

    Raises: LeaseError if another machine writes at the same time; OSError.
    """
    is_new = os.fstat(descriptor).st_size == 0
    own = Holder.this_process(what, _lock(descriptor) is True)
    try:
        os.pwrite(descriptor, json.dumps(asdict(own)).encode().ljust(RECORD_BYTES), 0)
        sync_descriptor(descriptor)
    except OSError:
        if is_new:
            remove_files(path)
        raise
    if not is_new and not own.locked:
        # Without locks two machines may both have found the holder dead; the last one to write gets the lease.
        time.sleep(SETTLE_SECONDS)
        holder = Holder.read(path)
        if holder is not None and holder.token != own.token:
            raise LeaseError(_refusal(path, holder))
    return own.token


def _lock(descriptor: int) -> bool | None:
    """Try to lock the file to the end of this process. None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _wait_for_record(path: Path) -> Holder | None:
    """The holder, for whose record it waits up to a second; None if the file stays unreadable."""
    deadline = time.monotonic() + 1.0
    while (holder := Holder.read(path)) is None and path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holder


def _refusal(path: Path, holder: Holder | None) -> str:
    run = path.parent
    if holder is None:
        return f"{path} cannot be read, but a process renews it; end that process, or choose another run.directory."
    return (
        f"{run} is in use: {holder} {holder.what} in it, since {holder.since}; choose another run.directory, or stop "
        f"that process (touch {run / 'STOP'}) and start again when it has ended."
    )


def _boot_id() -> str:
    """Identifies the running kernel; it changes with each start of the machine; "" if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
