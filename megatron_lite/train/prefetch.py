"""Makes the inputs of the next step while the device computes this one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from megatron_lite.train.step import StepInputs

STOP_SECONDS = 10.0  # for which the end of a run waits for the thread; storage may never answer

MakeInputs = Callable[[int, Callable[[], bool]], StepInputs]  # steps before it, is it still wanted


class Prefetch:
    """Makes the inputs of the next step in a thread: reads, counts, plans, and copies them to pinned memory.

    The trainer starts the step that probably follows, and takes the one that it needs: a wrong guess costs
    time only. The thread calls no collective, and an error in it is raised where its step begins. It works on one step
    at a time, so a rank holds the inputs of at most one step in addition to the inputs of the step that it computes.

    A thread suffices, because the compiled samplers release the interpreter's lock; a process would have to send the
    arrays back.
    """

    def __init__(self, make: MakeInputs, device: torch.device):
        self._make, self._device = make, device
        self._running: _PrefetchThread | None = None

    def start(self, step: int) -> None:
        """Start to make a step, unless it is the one being made."""
        if self._running is not None and self._running.step == step:
            return
        # A wrong guess (after a request): the old thread is stopped, since two would compete for the disk.
        self.close()
        self._running = _PrefetchThread(self._make, step, self._device)
        self._running.start()

    def take(self, step: int) -> StepInputs:
        """The inputs of a step, made ahead or now. Raises what making them raised."""
        self.start(step)
        # Taken out first: an error of `result` must not leave a finished thread that the next step would take.
        running, self._running = self._running, None
        assert running is not None
        return running.result()

    def close(self) -> None:
        """Discard the inputs made ahead, and stop the thread."""
        if self._running is not None:
            self._running.cancel()
            self._running = None


class _PrefetchThread(threading.Thread):
    """A daemon, so that it never keeps the process alive."""

    def __init__(self, make: MakeInputs, step: int, device: torch.device):
        super().__init__(name="prefetch", daemon=True)
        self.step = step
        self._make, self._device = make, device
        self._is_wanted = True
        self._inputs: StepInputs | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            if self._device.type == "cuda":  # a new thread would pin memory for device 0
                torch.cuda.set_device(self._device)
            self._inputs = self._make(self.step, lambda: self._is_wanted)
        except BaseException as error:  # `result` raises it
            self._error = error

    def result(self) -> StepInputs:
        self.join()
        if self._error is not None:
            raise self._error
        assert self._inputs is not None
        return self._inputs

    def cancel(self) -> None:
        self._is_wanted = False
        self.join(STOP_SECONDS)
