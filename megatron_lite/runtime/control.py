"""Requests to stop or to save: signals to any rank, and the files STOP and SAVE in the run's directory.

A signal handler only sets a flag. The ranks exchange their flags in every step's reduction (trainer.py), so that all
act after the same step. A second signal exits the process at once, even one that hangs in a collective: Python runs
signal handlers between its own instructions only, but the C-level handler writes the signal's number to a pipe, which a
thread reads. That thread also acknowledges each request at once, in one line; exits the process at the first signal
before training; and treats the exit of the launcher as a signal: DeepSpeed's launcher exits before its ranks.

Signals within two seconds count as one, because launchers pass on what SLURM has delivered already.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import NoReturn

from data_utils.common.errors import ExitStatus, HaltedError
from megatron_lite.parallel.launch import LauncherMonitor, report_status

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# The system sends a signal, and a launcher often passes it on: the second one is the same request.
SAME_REQUEST_SECONDS = 2.0

# For which a process that ends before training waits for `leave`: storage may never answer.
LEAVE_SECONDS = 10.0

LAUNCHER_CHECK_SECONDS = 0.5

FILE_CHECK_SECONDS = 1.0  # a look at a shared file system can cost a millisecond


@dataclass(frozen=True)
class Requests:
    """Requests of one rank, or those that all ranks have agreed on."""

    stop: bool = False  # by a signal: save and exit
    halt: bool = False  # by the file STOP: save and exit, and do not start again while it exists
    save: bool = False  # by the file SAVE: save now and continue

    @property
    def end(self) -> bool:
        return self.stop or self.halt

    def events(self) -> list[str]:
        """Requests in words, for the records."""
        asked = (
            (self.save, "saved at the request of the file SAVE"),
            (self.stop, "stopped at the request of a signal"),
            (self.halt, "stopped at the request of the file STOP"),
        )
        return [event for is_asked, event in asked if is_asked]

    def to_vector(self) -> list[float]:
        """Numbers that are summed over the ranks."""
        return [float(self.stop), float(self.halt), float(self.save)]

    @staticmethod
    def from_sums(sums: Sequence[float]) -> Requests:
        """What some rank requests. Args: sums: of `to_vector` over all ranks."""
        return Requests(*(value > 0 for value in sums))


class Phase(Enum):
    STARTING = auto()  # a signal exits the process at once
    TRAINING = auto()  # a signal requests to save and exit
    OVER = auto()  # a signal does nothing


class RunControl:
    """The requests to this process. Listens for signals from its construction on, in the main thread."""

    def __init__(self, directory: Path, is_main: bool):
        """Args: is_main: this rank looks at the files, and prints the line before the first step."""
        self.stop_file, self.save_file = directory / "STOP", directory / "SAVE"
        self._is_main = is_main
        self.leave: Callable[[], None] = lambda: None  # called if the process ends before training
        self._launcher = LauncherMonitor()
        self._phase = Phase.STARTING
        self._stop_signal = False
        self._files = Requests()
        self._next_look = 0.0
        self._can_delete = True
        self._claim: socket.socket | None = None
        self._listen()

    def refuse_if_halted(self) -> None:
        """Raise HaltedError while the file STOP exists."""
        if self.stop_file.exists():
            raise HaltedError(f"{self.stop_file} exists, which stops this run; remove it to train on.")

    def local_requests(self) -> Requests:
        """The requests that this rank knows of."""
        files = self._look() if self._is_main else Requests()
        return Requests(self._stop_signal, files.halt, files.save)

    def saved(self) -> None:
        """Called after the save that the file SAVE asked for: removes the file."""
        self._files = Requests()
        if self._is_main:
            try:
                self.save_file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s: %s; it is ignored from now on.", self.save_file, error.strerror)
                self._can_delete = False

    def _look(self) -> Requests:
        # The main rank alone, once a second: a thousand ranks that ask a shared file system in each step would load it.
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + FILE_CHECK_SECONDS
            self._files = Requests(
                halt=self.stop_file.exists(), save=self._can_delete and self.save_file.exists()
            )
        return self._files

    def _listen(self) -> None:
        reader, writer = os.pipe()
        # The C handler writes: a full pipe must not block the interpreter's signal handling.
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._await_requests, args=(reader,), name="signals", daemon=True).start()
        for number in STOP_SIGNALS:
            signal.signal(number, self._request_stop)

    def enter(self, phase: Phase) -> None:
        self._phase = phase

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = True

    def _await_requests(self, reader: int) -> None:
        """In a thread: acknowledge signals and the exit of the launcher."""
        first, launcher_ended = math.inf, False
        while True:
            ready, _, _ = select.select([reader], [], [], LAUNCHER_CHECK_SECONDS)
            # Every signal with a Python handler arrives here; only the three that stop a run are requests.
            for number in os.read(reader, 64) if ready else b"":
                if number not in STOP_SIGNALS:
                    continue
                name, now = signal.Signals(number).name, time.monotonic()
                if first == math.inf:
                    first = now
                    self._acknowledge(name)
                elif now - first >= SAME_REQUEST_SECONDS and self._phase != Phase.OVER:
                    _print_line(f"second signal ({name}): exiting now")
                    _exit(128 + number)
            if first == math.inf and not launcher_ended and self._launcher.has_ended():
                launcher_ended = True
                self._acknowledge("the launcher has ended")
                self._stop_signal = True  # after the line is printed: the step may finish at once

    def _acknowledge(self, cause: str) -> None:
        if self._phase == Phase.TRAINING and self._is_first_of_node():
            _print_line(
                f"{cause}: finishing this step, however long it takes, then saving and exiting; a second signal, "
                f"{SAME_REQUEST_SECONDS:g} seconds later or more, exits at once without saving"
            )
        if self._phase == Phase.STARTING:
            # Ranks exit at once, so that a socket name taken by the first would be free for the next.
            if self._is_main:
                _print_line(f"{cause}: exiting before the first step")
            leaving = threading.Thread(target=self.leave, daemon=True)
            leaving.start()
            leaving.join(LEAVE_SECONDS)
            _exit(ExitStatus.STOPPED)

    def _is_first_of_node(self) -> bool:
        """Whether no other rank of this run has acknowledged on this node: a launcher passes signals on to all.

        The first one takes a name of the system's, which is free again when its process has ended.
        """
        digest = hashlib.sha256(os.fsencode(self.stop_file.absolute())).hexdigest()
        try:
            self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._claim.bind(f"\0megatron_lite {digest}")  # Linux: in no directory
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True


def _print_line(line: str) -> None:
    # Not through `print`: another thread may hold its lock while it hangs.
    os.write(2, f"{line}\n".encode())


def _exit(status: int) -> NoReturn:
    report_status(status)
    os._exit(status)
