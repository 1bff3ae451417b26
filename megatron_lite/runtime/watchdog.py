"""A thread in every rank that kills the process when a section of the run takes longer than its limit.

A rank that waits in a collective cannot notice that another rank never comes: such a hang costs hours until somebody
looks. The watchdog prints its rank, host and point of the program, every thread's stack, and which rank the others wait
for (heartbeats.py). Then it ends the process, whereupon the launcher ends the others. The background thread that writes
a checkpoint has the limit of its section too.

A Python thread needs the interpreter's lock. If native code keeps it, a timer of the C library (faulthandler) ends the
process a little later, with the stacks and status 1. faulthandler also prints the stacks at a signal that kills the
process in native code, above all the bus error of a mapped corpus whose storage fails.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from data_utils.common.errors import ExitStatus, RankError
from megatron_lite.parallel.launch import report_status
from megatron_lite.runtime.heartbeats import (
    Heartbeat,
    heartbeat_directory,
    read_heartbeats,
    who_is_behind,
)
from megatron_lite.runtime.lease import Lease

TICK_SECONDS = 0.5
BACKSTOP_SECONDS = 30.0  # after the limit, for the timer that needs no interpreter
# Limit of leaving the process group and ending the interpreter, on a starved machine too.
EXIT_SECONDS = 300.0
CLOCKS_DIFFER_SECONDS = 60.0  # between the machines of a run, and between the starts of its ranks
DEATH_SECONDS = 10.0  # from the failure of a collective until the process at its other end is seen to be dead
COMPARE_SECONDS = 1.5  # from this rank's alarm until the last heartbeats of the others are read


class Section(StrEnum):
    """The sections of a run, each with a time limit: timeouts.*_seconds."""

    SETUP = "setup"
    STEP = "step"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    EXIT = "exit"


@dataclass(frozen=True)
class _Point:
    """Where a thread is."""

    section: Section
    place: str
    step: int
    passed: int
    since: float


class Watchdog:
    """The point of the program where this rank is, and the thread that watches how long it stays there."""

    def __init__(
        self,
        limits: Mapping[str, float],
        directory: Path,
        rank: int,
        world_size: int,
        heartbeat_seconds: float,
        lease: Lease | None = None,
    ):
        """Args: limits: seconds by section name; directory: of the run; lease: to be renewed."""
        self._limits = {**limits, Section.EXIT: EXIT_SECONDS}
        self._directory = heartbeat_directory(directory)
        self._rank, self._world_size = rank, world_size
        self._heartbeat_seconds = heartbeat_seconds
        self._lease = lease
        self._has_joined = False
        self._status: int = ExitStatus.CRASHED
        self._started = time.time()
        self._point = _Point(Section.SETUP, "", 0, 0, time.monotonic())
        self._background: _Point | None = None
        self._closed = threading.Event()
        self._writes = threading.Lock()  # of the heartbeat
        faulthandler.enable(file=2)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def enter(self, section: Section, place: str = "", step: int | None = None) -> None:
        """Enter a section and restart its clock. All ranks call this in the same order."""
        # One immutable record replaced by one assignment: the watching thread needs no lock to read it.
        point = self._point
        step = point.step if step is None else step
        self._point = _Point(section, place, step, point.passed + 1, time.monotonic())
        if section == Section.CHECKPOINT and self._has_joined:
            self._beat()  # where runs die most: on a full disk, or of the memory that a save needs
        if section == Section.EXIT:
            self._closed.set()
            if self._has_joined:
                self._beat()  # the watching thread may stop before it writes that the run is over

    def at(self, place: str) -> None:
        """Name a place within the section."""
        point = self._point
        self._point = _Point(point.section, place, point.step, point.passed + 1, point.since)

    def done(self, status: int) -> None:
        """The work has finished with a status, which a slow exit does not change."""
        self._status = status

    def joined(self) -> None:
        """All ranks have met, so the run's directory belongs to this start: heartbeats may be written."""
        self._has_joined = True

    @contextlib.contextmanager
    def in_background(self, section: Section, place: str) -> Iterator[None]:
        """Give the calling thread, which works in the background, the limit of a section. One thread at a time."""
        point = self._point
        self._background = _Point(section, place, point.step, point.passed, time.monotonic())
        try:
            yield
        finally:
            self._background = None

    def _watch(self) -> None:
        next_beat = 0.0
        while True:
            # Of the training thread and the background save, the one whose time is over first.
            point = min(filter(None, (self._point, self._background)), key=self._deadline)
            now = time.monotonic()
            left = self._deadline(point) - now
            if left < 0:
                self._end(point, now)
            self._keep_lease()
            if self._has_joined and now >= next_beat and self._beat():
                next_beat = now + self._heartbeat_seconds
            if self._closed.wait(TICK_SECONDS):
                self._watch_the_end()
                return
            # Every tick restarts the timer, so it only fires if the ticks stop.
            faulthandler.dump_traceback_later(max(left, 0.0) + BACKSTOP_SECONDS, exit=True, file=2)

    def _watch_the_end(self) -> None:
        # The interpreter stops this thread before it ends; the timer continues.
        faulthandler.dump_traceback_later(EXIT_SECONDS + BACKSTOP_SECONDS, exit=True, file=2)
        time.sleep(EXIT_SECONDS)
        _say(
            f"rank {self._rank} has finished, but did not exit within {EXIT_SECONDS:g} s; killing it\n",
            _stacks(),
        )
        os._exit(self._status)

    def _keep_lease(self) -> None:
        holder = self._lease and self._lease.lost_to()
        if holder:
            _say(f"error: {self._directory.parent} was taken over by {holder}; this process exits.\n")
            report_status(ExitStatus.USER_ERROR)
            os._exit(ExitStatus.USER_ERROR)

    def _deadline(self, point: _Point) -> float:
        return point.since + self._limits[point.section]

    def _heartbeat(self, point: _Point) -> Heartbeat:
        seconds = round(time.monotonic() - point.since, 1)
        host, now = socket.gethostname(), round(time.time(), 1)
        other = self._background
        place = point.place if other in (None, point) else f"{point.place}; in the background: {other.place}"
        return Heartbeat(
            self._rank, host, os.getpid(), point.section, place, point.step, point.passed, seconds, now
        )

    def _beat(self, always: bool = False) -> bool:
        """Write where this rank is, if the run has begun: a start that is refused leaves nothing. Returns if it has.

        Args: always: write in any case.
        """
        if not always and not self._directory.with_name("config.yaml").exists():
            return False
        # A full or broken disk must not keep the watchdog from watching.
        with contextlib.suppress(OSError), self._writes:
            self._heartbeat(self._point).write(self._directory)
        return True

    def _heartbeats(self) -> list[Heartbeat]:
        """The last heartbeats of this start's ranks; files of an earlier start may still be there."""
        return read_heartbeats(self._directory, self._started - CLOCKS_DIFFER_SECONDS)

    def dead_ranks(self) -> list[Heartbeat]:
        """The last heartbeats of those ranks on this machine whose processes have died."""
        beats = [beat for beat in self._heartbeats() if beat.rank < self._world_size]
        dead = [beat for beat in beats if beat.section != Section.EXIT and beat.process_has_died]
        # Read again: a process that ended in order said so before it ended, maybe between the two looks at it.
        ended = {beat.rank for beat in self._heartbeats() if beat.section == Section.EXIT} if dead else set()
        return [beat for beat in dead if beat.rank not in ended]

    @contextlib.contextmanager
    def name_dead_ranks(self) -> Iterator[None]:
        """Turn an error of torch into a RankError if another rank of this machine has died, whatever the error says."""
        try:
            yield
        except RuntimeError as error:
            deadline = time.monotonic() + DEATH_SECONDS * (self._world_size > 1)
            while not (dead := self.dead_ranks()) and time.monotonic() < deadline:
                time.sleep(0.1)
            if not dead:
                raise
            died = RankError(
                f"rank {self._rank} lost the connection to another rank: "
                + "; ".join(f"{beat.with_age}, process {beat.pid}, has died" for beat in dead)
                + ". Its last output, or the system's log if memory ran out, shows the cause; start again to continue."
            )
            died.only_here = self._rank == min(set(range(self._world_size)) - {beat.rank for beat in dead})
            raise died from error

    def _end(self, point: _Point, now: float) -> None:
        rule = f"timeouts.{point.section}_seconds is {self._limits[point.section]:g}"
        _say(f"\n{self._heartbeat(point)} hangs: {now - point.since:.0f} s, {rule}\n", _stacks())
        if point is not self._background:  # no other rank waits for a background thread
            # In another thread: the file system that is to blame may hang here as well.
            summary = threading.Thread(target=self._compare, daemon=True)
            summary.start()
            summary.join(COMPARE_SECONDS + 5.0)
        report_status(ExitStatus.HUNG)
        # No cleanup: it would wait for the same collective or file system that hangs.
        os._exit(ExitStatus.HUNG)

    def _compare(self) -> None:
        self._beat(always=True)
        time.sleep(COMPARE_SECONDS)
        heartbeats = self._heartbeats()
        _say(f"rank {self._rank} compares heartbeats: {who_is_behind(heartbeats, self._world_size)}\n")
        if self._point.passed < max((beat.passed for beat in heartbeats), default=0):
            time.sleep(COMPARE_SECONDS)  # our end breaks the others' connections: let them speak first


def _say(text: str, more: bytes = b"") -> None:
    """Write to stderr at once: other ranks write at the same time, and another thread may hold `sys.stderr`."""
    os.write(2, text.encode() + more)


def _stacks() -> bytes:
    """Every thread's stack."""
    with open(os.memfd_create("stacks"), "w+b") as file:  # in memory, since faulthandler writes word by word
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


class NoWatchdog(Watchdog):
    """Watches nothing, for a Trainer inside another program. Has the methods that a Trainer calls."""

    def __init__(self) -> None:
        pass

    def enter(self, section: Section, place: str = "", step: int | None = None) -> None:
        pass

    def at(self, place: str) -> None:
        pass

    @contextlib.contextmanager
    def in_background(self, section: Section, place: str) -> Iterator[None]:
        yield
