"""The hooks of the training loop. The trainer calls the callbacks in the order of its list, the same on every rank.

The order matters: a step's records are written before its checkpoint is saved, and the checkpoint is saved before the
step is evaluated, because an evaluation may take long, or hang.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from megatron_lite.engine.engine import StepResult
from megatron_lite.runtime.control import Requests
from megatron_lite.runtime.watchdog import Section

# Enter a section of the watchdog, at a place within it, whose duration does not count as training time.
Pause = Callable[[Section, str], AbstractContextManager[None]]
RecordEvent = Callable[[str, int], None]  # text of an event, step


class Callback:
    """The hooks of the loop, which do nothing here. Steps are numbered from 1."""

    def on_train_begin(self, step: int) -> None:
        """Before the first step of this start. Args: step: number of steps before it."""

    def on_step_begin(self, step: int) -> None:
        """Before a step."""

    def on_step_end(self, step: int, result: StepResult, requests: Requests) -> None:
        """After a step, which the device may still compute: to read `result` waits for it."""

    def on_train_end(self, step: int) -> None:
        """After the last step of this start, unless an error ended it."""

    def close(self) -> None:
        """When the loop ends, also after an error: release what is open."""


class Callbacks(Callback):
    """Several callbacks as one, in order."""

    def __init__(self, *callbacks: Callback):
        self._callbacks = callbacks

    def on_train_begin(self, step: int) -> None:
        for callback in self._callbacks:
            callback.on_train_begin(step)

    def on_step_begin(self, step: int) -> None:
        for callback in self._callbacks:
            callback.on_step_begin(step)

    def on_step_end(self, step: int, result: StepResult, requests: Requests) -> None:
        for callback in self._callbacks:
            callback.on_step_end(step, result, requests)

    def on_train_end(self, step: int) -> None:
        for callback in self._callbacks:
            callback.on_train_end(step)

    def close(self) -> None:
        with ExitStack() as stack:  # an error of one leaves no other open
            for callback in reversed(self._callbacks):
                stack.callback(callback.close)


def is_multiple(step: int, interval: int) -> bool:
    """Whether something that happens every `interval` steps happens at this one. Args: interval: 0 = never."""
    return interval > 0 and step % interval == 0
