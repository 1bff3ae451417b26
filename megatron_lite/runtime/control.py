"""Requests to stop or to save: signals to any rank, and the files STOP and SAVE in the run's directory.

A signal handler only sets a flag. The ranks exchange their flags in every step's reduction (trainer.py), so that all
act after the same step. A second signal ends the process at once, even one that hangs in a collective: Python runs
signal handlers between its own instructions only, but the C-level handler writes the signal's number to a pipe, which a
thread reads. That thread also answers each request at once, in one line; ends the process at the first signal before
training has begun; and treats the end of the launcher as a signal.
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
from collections.abc import Callable
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

LAUNCHER_CHECK_SECONDS = 0.5

FILE_CHECK_SECONDS = 1.0  # a look at a shared file system can cost a millisecond


@dataclass(frozen=True)
class Requests:
    """The requests that all ranks have agreed on."""

    stop: bool = False  # by a signal: save and end
    halt: bool = False  # by the file STOP: save and end, and do not start again while it exists
    save: bool = False  # by the file SAVE: save now and go on

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


class Phase(Enum):
    STARTING = auto()  # a signal ends the process at once
    TRAINING = auto()  # a signal asks to save and end
    OVER = auto()  # a signal does nothing


class RunControl:
    """The requests to this process. Listens for signals from its construction on, in the main thread."""

    def __init__(self, directory: Path, is_main: bool):
        """Args: is_main: this rank looks at the files, and speaks before the first step."""
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

    def local_requests(self) -> list[float]:
        """This rank's requests as numbers, to be summed over the ranks and given to `agreed`."""
        files = self._look() if self._is_main else Requests()
        return [float(self._stop_signal), float(files.halt), float(files.save)]

    @staticmethod
    def agreed(sums: list[float]) -> Requests:
        return Requests(*(value > 0 for value in sums))

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
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + FILE_CHECK_SECONDS
            self._files = Requests(
                halt=self.stop_file.exists(), save=self._can_delete and self.save_file.exists()
            )
        return self._files

    def _listen(self) -> None:
        reader, writer = os.pipe()
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
        """In a thread: answer signals and the end of the launcher."""
        first, launcher_ended = math.inf, False
        while True:
            ready, _, _ = select.select([reader], [], [], LAUNCHER_CHECK_SECONDS)
            for number in os.read(reader, 64) if ready else b"":
                if number not in STOP_SIGNALS:
                    continue
                name, now = signal.Signals(number).name, time.monotonic()
                if first == math.inf:
                    first = now
                    self._answer(name)
                elif now - first >= SAME_REQUEST_SECONDS and self._phase != Phase.OVER:
                    _say(f"second signal ({name}): ending at once")
                    _end(128 + number)
            if first == math.inf and not launcher_ended and self._launcher.has_ended():
                launcher_ended = True
                self._answer("the launcher has ended")
                self._stop_signal = True  # after the answer: the step may end at once

    def _answer(self, cause: str) -> None:
        if self._phase == Phase.TRAINING and self._is_first_of_node():
            _say(
                f"{cause}: finishing this step, however long it takes, then saving and ending; a second signal, "
                f"{SAME_REQUEST_SECONDS:g} seconds later or more, ends at once without saving"
            )
        if self._phase == Phase.STARTING:
            if (
                self._is_main
            ):  # ranks end at once, so that a name taken by the first would be free for the next
                _say(f"{cause}: ending before the first step")
            leaving = threading.Thread(target=self.leave, daemon=True)  # a file system may not answer
            leaving.start()
            leaving.join(SAME_REQUEST_SECONDS)
            _end(ExitStatus.STOPPED)

    def _is_first_of_node(self) -> bool:
        """Whether no other rank of this run has answered on this node: a launcher passes signals on to all.

        The first one takes a name of the system's, which is free again when its process has ended.
        """
        digest = hashlib.sha256(os.fsencode(self.stop_file.absolute())).hexdigest()
        try:
            self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._claim.bind(f"\0megatron_lite {digest}")  # Linux: in no directory
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True


def _say(line: str) -> None:
    os.write(2, f"{line}\n".encode())


def _end(status: int) -> NoReturn:
    report_status(status)
    os._exit(status)
