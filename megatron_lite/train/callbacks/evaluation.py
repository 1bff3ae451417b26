"""Evaluates at intervals and at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_lite.engine.engine import StepResult
from megatron_lite.runtime.control import Requests
from megatron_lite.runtime.watchdog import Section, Watchdog
from megatron_lite.train.callbacks.callback import Callback, Pause, is_multiple
from megatron_lite.train.delayed_results import DelayedResults
from megatron_lite.train.evaluation import Evaluation


@dataclass
class EvaluationCallback(Callback):
    """Attributes:
    evaluate: evaluates the model as it is now.
    is_over: whether the run has ended, not only this start.
    """

    evaluation: Evaluation
    evaluate: Callable[[], Any]
    is_over: Callable[[], bool]
    eval_interval: int
    results: DelayedResults
    watchdog: Watchdog
    pause: Pause

    def on_train_begin(self, step: int) -> None:
        # The earlier start was killed between the save of this step and its evaluation.
        if step > self.evaluation.last_step and is_multiple(step, self.eval_interval):
            with self.pause(Section.EVALUATION, ""):
                self.evaluate()

    def on_step_end(self, step: int, result: StepResult, requests: Requests) -> None:
        if is_multiple(step, self.eval_interval):
            self.results.read()
            with self.pause(Section.EVALUATION, ""):
                self.evaluate()

    def on_train_end(self, step: int) -> None:
        if self.is_over() and step > self.evaluation.last_step:
            self.watchdog.enter(Section.EVALUATION)
            self.evaluate()
