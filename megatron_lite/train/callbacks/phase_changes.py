"""Records the phases that begin."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.train.callbacks.callback import Callback, RecordEvent
from megatron_lite.train.event_log import EventLog


@dataclass
class PhaseChanges(Callback):
    """Before the step. What a phase changes is read from the plan where it is used.

    Attributes: log: the run's events; `report` writes one that is in it.
    """

    phase_plan: PhasePlan
    log: EventLog
    report: RecordEvent

    def on_step_begin(self, step: int) -> None:
        for event in self.log.now_in_force(step, self.phase_plan.in_force(step - 1)):
            self.report(event, step)
