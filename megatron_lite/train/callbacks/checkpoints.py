"""Saves checkpoints at intervals, at requests and at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_lite.checkpoint.saver import Saver
from megatron_lite.engine.engine import StepResult
from megatron_lite.runtime.control import Requests, RunControl
from megatron_lite.runtime.watchdog import Section, Watchdog
from megatron_lite.train.callbacks.callback import Callback, Pause, RecordEvent, is_multiple
from megatron_lite.train.delayed_results import DelayedResults


@dataclass
class Checkpoints(Callback):
    """Attributes:
    state: what the checkpoint holds besides weights and optimizer, as it is when called.
    save_interval: steps; 0 = at requests and at the end alone.
    """

    saver: Saver
    state: Callable[[], dict[str, Any]]
    save_interval: int
    results: DelayedResults
    control: RunControl
    watchdog: Watchdog
    pause: Pause
    record: RecordEvent

    def on_step_end(self, step: int, result: StepResult, requests: Requests) -> None:
        for event in requests.events():  # before the save, so that the checkpoint holds them
            self.record(event, step)
        if requests.save or requests.end or is_multiple(step, self.save_interval):
            self.results.read()  # the state has the number of skipped steps
            with self.pause(Section.CHECKPOINT, "saving"):
                self.saver.save(step, self.state())
        else:
            self.saver.poll()
        if requests.save:
            # Whoever made the file SAVE waits for its removal as the sign that the checkpoint is there.
            self.saver.finish()
            self.control.saved()

    def on_train_end(self, step: int) -> None:
        self.results.read()
        self.watchdog.enter(Section.CHECKPOINT, "saving")
        self.saver.save_last(step, self.state())
