"""Records the phases that begin, and applies what a phase changes in the engine."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.engine.engine import Engine
from megatron_lite.train.callbacks.callback import Callback, RecordEvent
from megatron_lite.train.event_log import EventLog


@dataclass
class PhaseChanges(Callback):
    """Before the step. Samples, batches, rates and weights of losses are read from the plan where they are used.

    Attributes:
        log: the run's events; `report` writes one that is in it.
        shrink: model.embedding_gradient_shrink that the engine has.
    """

    phase_plan: PhasePlan
    engine: Engine
    log: EventLog
    report: RecordEvent
    shrink: float

    def on_step_begin(self, step: int) -> None:
        for event in self.log.now_in_force(step, self.phase_plan.in_force(step - 1)):
            self.report(event, step)
        shrink = self.phase_plan.config(step - 1).model.embedding_gradient_shrink
        if shrink != self.shrink:
            self.engine.set_embedding_gradient_shrink(shrink)
            self.shrink = shrink
