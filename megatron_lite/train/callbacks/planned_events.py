"""Applies the changes that the configuration plans (`events`): skipped samples, learning rate, gradient shrink."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.events import EventLog
from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.train.callbacks.callback import Callback, RecordEvent
from megatron_lite.train.step import Progress


@dataclass
class PlannedEvents(Callback):
    """Applies them before the step, and records what begins and ends. The learning rate itself is in `step_rate`.

    Attributes:
        log: the run's events; `report` writes one that is in it, `record` one that is not.
        shrink: model.embedding_gradient_shrink that the engine has.
    """

    config: Config
    phase_plan: PhasePlan
    engine: Engine
    progress: Progress
    log: EventLog
    record: RecordEvent
    report: RecordEvent
    shrink: float

    def on_step_begin(self, step: int) -> None:
        events, before = self.config.events, step - 1
        first = events.next_sample(self.progress.consumed_samples, self.phase_plan.batch_size(before))
        if first > self.progress.consumed_samples:
            self.record(f"samples {self.progress.consumed_samples} to {first - 1} are skipped", step)
            self.progress.consumed_samples = first
        in_force = [*self.phase_plan.in_force(before), *events.in_force(step)]
        for event in self.log.now_in_force(step, in_force):
            self.report(event, step)
        phase = self.phase_plan.config(before)
        shrink = events.shrink_at(step, phase.model.embedding_gradient_shrink)
        if shrink != self.shrink:
            self.engine.set_embedding_gradient_shrink(shrink)
            self.shrink = shrink
