"""The next step's data, made in a thread while this step computes: read, counted, planned, laid out in pinned memory.

The trainer says which place probably follows, and takes what the place of the step demands. Anything else that was
made is thrown away. The thread never communicates, and an error in it is raised where its step begins.

The thread works on one step at a time, so a rank holds at most one step's inputs more than it computes.
"""

from __future__ import annotations

import threading

import torch

from megatron_lite.train.loop.step import HostStep, Make, Place

LEAVE_SECONDS = 10.0  # that the end of a run waits for the thread; storage may never answer


class Prefetch:
    """Makes one step at a time in a thread."""

    def __init__(self, make: Make, device: torch.device):
        self._make, self._device = make, device
        self._making: _Making | None = None

    def begin(self, place: Place) -> None:
        """Start to make a step, unless that is the one being made."""
        if self._making is not None and self._making.place == place:
            return
        self.close()
        self._making = _Making(self._make, place, self._device)
        self._making.start()

    def take(self, place: Place) -> HostStep:
        """The step of a place, made ahead or now. Raises what making it raised."""
        self.begin(place)
        making, self._making = self._making, None
        assert making is not None
        return making.result()

    def close(self) -> None:
        """Throw away what was made, and end the thread."""
        if self._making is not None:
            self._making.abandon()
            self._making = None


class _Making(threading.Thread):
    """A daemon, so that it never keeps the process alive."""

    def __init__(self, make: Make, place: Place, device: torch.device):
        super().__init__(name="prefetch", daemon=True)
        self.place = place
        self._make, self._device = make, device
        self._is_wanted = True
        self._made: HostStep | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            if self._device.type == "cuda":  # a new thread would pin memory for device 0
                torch.cuda.set_device(self._device)
            self._made = self._make(self.place, lambda: self._is_wanted)
        except BaseException as error:  # `result` raises it
            self._error = error

    def result(self) -> HostStep:
        self.join()
        if self._error is not None:
            raise self._error
        assert self._made is not None
        return self._made

    def abandon(self) -> None:
        self._is_wanted = False
        self.join(LEAVE_SECONDS)
