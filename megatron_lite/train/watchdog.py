"""A thread in every rank that ends the process when a section of the run takes longer than its limit.

A hang otherwise costs the hours until somebody looks: a rank that waits for the others in a collective cannot notice
that one of them never comes. The watchdog prints its rank, host and place and every thread's stack, and which rank is
furthest behind, then ends the process, whereupon the launcher ends the others.

Who is behind: all ranks pass the same places in the same order, so each counts the places it has passed, and the lowest
count is the rank that the others wait for. The counts are in small files below the run's directory, one for each rank,
written every few seconds by the watchdogs, by training itself only at its end; `scripts/heartbeats.py` shows them.

What a thread does beside training, the writing of a checkpoint, has the limit of its section too: training would go on
without a word, and without a new checkpoint.

A thread of Python needs the interpreter's lock. Should native code keep it, a timer of the C library (faulthandler)
ends the process a little later, with the stacks and status 1. A signal that no Python sees, above all the bus error of
a mapped corpus whose storage fails, also prints the stacks before it ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from data_utils.base.errors import ExitStatus, RankError
from megatron_lite.parallel.launch import report_status
from megatron_lite.train.lease import Lease

TICK_SECONDS = 0.5
BACKSTOP_SECONDS = 30.0  # after the limit, for the timer that needs no interpreter
EXIT_SECONDS = 60.0  # limit of leaving the process group and ending the interpreter
CLOCKS_DIFFER_SECONDS = 60.0  # of the machines of a run, and their starts
DEATH_SECONDS = 5.0  # from a broken connection until the process at its other end is seen to be dead
# What gloo, NCCL and torch's store say of one.
_CONNECTION = re.compile(
    r"gloo/transport|Connection (closed|reset|refused|was likely closed)|Broken pipe|ncclRemoteError"
)
OTHERS_SECONDS = 1.5  # from our own alarm until the others' last heartbeats are read


class Section(StrEnum):
    """The parts of a run that have a time limit each: timeouts.*_seconds."""

    SETUP = "setup"
    STEP = "step"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    EXIT = "exit"


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank is. `seconds` is the time in the section, `time` when this was written (Unix)."""

    rank: int
    host: str
    pid: int
    section: str
    place: str
    step: int
    passed: int  # places passed since the start
    seconds: float
    time: float

    def __str__(self) -> str:
        where = f"{self.section}, step {self.step}"
        return f"rank {self.rank} on {self.host} ({where}{', ' if self.place else ''}{self.place})"


@dataclass(frozen=True)
class _Here:
    section: Section
    place: str
    step: int
    passed: int
    since: float


class Watchdog:
    """Where this rank is, and the thread that watches how long it stays."""

    def __init__(
        self,
        limits: Mapping[str, float],
        directory: Path,
        rank: int,
        world_size: int,
        heartbeat_seconds: float,
        lease: Lease | None = None,
    ):
        """Args: limits: seconds by section name; directory: the run's, for the heartbeats; lease: to be renewed."""
        self._limits = {**limits, Section.EXIT: EXIT_SECONDS}
        self._directory = heartbeat_directory(directory)
        self._rank, self._world_size = rank, world_size
        self._heartbeat_seconds = heartbeat_seconds
        self._lease = lease
        self._has_joined = False
        self._started = time.time()
        self._here = _Here(Section.SETUP, "", 0, 0, time.monotonic())
        self._beside: _Here | None = None
        self._closed = threading.Event()
        faulthandler.enable(file=2)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def enter(self, section: Section, place: str = "", step: int | None = None) -> None:
        """Begin a section (its time starts again), to be called by all ranks in the same order."""
        here = self._here
        step = here.step if step is None else step
        self._here = _Here(section, place, step, here.passed + 1, time.monotonic())
        if section == Section.EXIT:
            self._closed.set()
            if self._has_joined:
                self._beat()  # the watching thread would be stopped before it has written that the run is over

    def at(self, place: str) -> None:
        """Name a place within the section."""
        here = self._here
        self._here = _Here(here.section, place, here.step, here.passed + 1, here.since)

    def joined(self) -> None:
        """All ranks have met: the run's directory is theirs, no other start's, and heartbeats may be written."""
        self._has_joined = True

    @contextlib.contextmanager
    def beside(self, section: Section, place: str) -> Iterator[None]:
        """Give what the calling thread does beside training the limit of a section. One thread at a time."""
        here = self._here
        self._beside = _Here(section, place, here.step, here.passed, time.monotonic())
        try:
            yield
        finally:
            self._beside = None

    def _watch(self) -> None:
        next_beat = 0.0
        while True:
            here, now = min(filter(None, (self._here, self._beside)), key=self._deadline), time.monotonic()
            left = self._deadline(here) - now
            if left < 0:
                self._end(here, now)
            self._keep_lease()
            if self._has_joined and now >= next_beat and self._beat():
                next_beat = now + self._heartbeat_seconds
            if self._closed.wait(TICK_SECONDS):
                # The interpreter stops this thread before it ends; the timer goes on.
                faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=2)
                return
            # Every tick sets the timer anew, so it only fires if the ticks stop.
            faulthandler.dump_traceback_later(max(left, 0.0) + BACKSTOP_SECONDS, exit=True, file=2)

    def _keep_lease(self) -> None:
        holder = self._lease and self._lease.lost_to()
        if holder:
            os.write(
                2, f"error: {self._directory.parent} was taken over by {holder}; this start ends.\n".encode()
            )
            report_status(ExitStatus.USER_ERROR)
            os._exit(ExitStatus.USER_ERROR)

    def _deadline(self, here: _Here) -> float:
        return here.since + self._limits[here.section]

    def _heartbeat(self, here: _Here) -> Heartbeat:
        seconds = round(time.monotonic() - here.since, 1)
        host, now = socket.gethostname(), round(time.time(), 1)
        beside = self._beside
        place = here.place if beside in (None, here) else f"{here.place}; beside it: {beside.place}"
        return Heartbeat(
            self._rank, host, os.getpid(), here.section, place, here.step, here.passed, seconds, now
        )

    def _beat(self, at_any_rate: bool = False) -> bool:
        """Write where we are, unless the run has not begun: one that is refused at its start leaves nothing.

        Args: at_any_rate: do so all the same. Returns: whether it has begun.
        """
        if not at_any_rate and not self._directory.with_name("config.yaml").exists():
            return False
        path = self._directory / f"rank_{self._rank:05d}.json"
        temporary = path.with_suffix(".tmp")
        # A full or broken disk is not the heartbeat's business; and a save that hangs on it must be noticed.
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(asdict(self._heartbeat(self._here))) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        return True

    def dead_ranks(self) -> list[Heartbeat]:
        """The last heartbeats of those ranks on this machine whose processes have died, of this start."""
        host, earliest = socket.gethostname(), self._started - CLOCKS_DIFFER_SECONDS
        return [
            beat
            for beat in read_heartbeats(self._directory)
            if beat.host == host and beat.time >= earliest and beat.rank < self._world_size
            if beat.section != Section.EXIT and not _lives(beat.pid)
        ]

    @contextlib.contextmanager
    def name_dead_ranks(self) -> Iterator[None]:
        """Where a collective fails because a rank has died: raises RankError with its name instead."""
        try:
            yield
        except RuntimeError as error:
            if not _CONNECTION.search(str(error)):
                raise
            deadline = time.monotonic() + DEATH_SECONDS
            while not (dead := self.dead_ranks()) and time.monotonic() < deadline:
                time.sleep(0.1)
            ended = RankError(
                f"rank {self._rank} lost the connection to another rank: "
                + (
                    "; ".join(f"{beat}, process {beat.pid}, has died" for beat in dead)
                    or "which one, others say"
                )
                + ". Its own last lines, or the system's log where memory ran out, say why; start again to continue."
            )
            living = set(range(self._world_size)) - {beat.rank for beat in dead}
            ended.only_here = self._rank == min(living) or not dead
            raise ended from error

    def _end(self, here: _Here, now: float) -> None:
        rule = f"timeouts.{here.section}_seconds is {self._limits[here.section]:g}"
        head = f"\n{self._heartbeat(here)} hangs: {now - here.since:.0f} s, {rule}\n"
        os.write(2, head.encode() + _stacks())
        if here is not self._beside:  # nobody waits for what is done beside training
            # Writing and reading may hang as well, on the file system that is to blame: not in this thread.
            summary = threading.Thread(target=self._compare, daemon=True)
            summary.start()
            summary.join(OTHERS_SECONDS + 5.0)
        report_status(ExitStatus.HUNG)
        os._exit(ExitStatus.HUNG)

    def _compare(self) -> None:
        self._beat(at_any_rate=True)
        time.sleep(OTHERS_SECONDS)
        # Of this start: a rank that has not joined it may have left one of an earlier start.
        earliest = self._started - CLOCKS_DIFFER_SECONDS
        heartbeats = [beat for beat in read_heartbeats(self._directory) if beat.time >= earliest]
        os.write(2, f"rank {self._rank} compares: {who_is_behind(heartbeats, self._world_size)}\n".encode())
        if self._here.passed < max((beat.passed for beat in heartbeats), default=0):
            time.sleep(OTHERS_SECONDS)  # our end breaks the others' connections: let them speak first


def _lives(process: int) -> bool:
    """False also for one that has ended and whose parent has not asked for its status yet."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return status.rpartition(")")[2].split()[:1] not in (["Z"], ["X"])


def _stacks() -> bytes:
    """Every thread's stack as one piece of text: other ranks print at the same time, and faulthandler word by word."""
    lines = []
    for thread, frame in sys._current_frames().items():
        lines.append(f"Thread {thread:#x} (most recent call first):")
        lines += [
            f'  File "{step.f_code.co_filename}", line {line} in {step.f_code.co_name}'
            for step, line in traceback.walk_stack(frame)
        ]
    return ("\n".join(lines) + "\n").encode()


class NoWatchdog(Watchdog):
    """Watches nothing, for runs inside other programs."""

    def __init__(self) -> None:
        pass

    def enter(self, section: Section, place: str = "", step: int | None = None) -> None:
        pass

    def at(self, place: str) -> None:
        pass

    def joined(self) -> None:
        pass

    def dead_ranks(self) -> list[Heartbeat]:
        return []

    @contextlib.contextmanager
    def beside(self, section: Section, place: str) -> Iterator[None]:
        yield


def heartbeat_directory(run_directory: Path) -> Path:
    return run_directory / "heartbeats"


def read_heartbeats(directory: Path) -> list[Heartbeat]:
    """What the ranks last wrote, by rank; unreadable files are left out."""
    found = []
    for path in sorted(directory.glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found.append(Heartbeat(**values))
    return sorted(found, key=lambda beat: beat.rank)


def who_is_behind(heartbeats: list[Heartbeat], world_size: int) -> str:
    """One line: the ranks that have passed the fewest places, for whom the others wait."""
    ours = [beat for beat in heartbeats if beat.rank < world_size]
    silent = sorted(set(range(world_size)) - {beat.rank for beat in ours})
    if silent:
        return f"no heartbeat of {len(silent)} of {world_size} ranks, the first of them {silent[:8]}"
    least = min(beat.passed for beat in ours)
    behind = [beat for beat in ours if beat.passed == least]
    if len(behind) == world_size:
        return f"all {world_size} ranks are at the same place"
    named = "; ".join(str(beat) for beat in behind[:8])
    return f"furthest behind, so that the other {world_size - len(behind)} wait: {named}"
