"""Interventions in a run: skip samples after a loss spike, change the learning rate, shrink the embeddings' gradient.

All are settings for absolute samples or steps, so that a run with them is as repeatable as one without. Each event is
recorded with its step in metrics.jsonl and in the checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from data_utils.common.settings import REQUIRED, check, checked, setting


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("events.skip_samples")
class SkippedSamples:
    first: int = setting(REQUIRED, "First sample to skip.", at_least=0)
    end: int = setting(REQUIRED, "First sample to train on again.", at_least=0)

    def __post_init__(self) -> None:
        check(
            self.first < self.end,
            f"events.skip_samples has first {self.first} and end {self.end}; first must be smaller than end.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("events.learning_rate")
class LearningRateChange:
    from_step: int = setting(REQUIRED, "First step of the change.", at_least=0)
    until_step: int | None = setting(None, "Last step of the change; null = until the end.", at_least=0)
    factor: float | None = setting(None, "Multiplies the scheduled learning rate.", at_least=0)
    value: float | None = setting(None, "Replaces the scheduled learning rate.", at_least=0)

    def __post_init__(self) -> None:
        check(
            self.until_step is None or self.from_step <= self.until_step,
            f"events.learning_rate has from_step {self.from_step} and until_step {self.until_step}; from_step "
            "must not be larger than until_step.",
        )
        set_values = [number for number in (self.factor, self.value) if number is not None]
        check(
            len(set_values) == 1,
            f"events.learning_rate has factor {self.factor} and value {self.value}; set exactly one of them.",
        )

    def includes(self, step: int) -> bool:
        return self.from_step <= step and (self.until_step is None or step <= self.until_step)

    def __str__(self) -> str:
        what = f"x {self.factor:g}" if self.factor is not None else f"{self.value:g}"
        return f"learning rate {what} from step {self.from_step}"


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("events.embedding_gradient_shrink")
class ShrinkChange:
    from_step: int = setting(REQUIRED, "First step of the change.", at_least=0)
    value: float = setting(REQUIRED, "model.embedding_gradient_shrink from this step on.", above=0, at_most=1)

    def __str__(self) -> str:
        return f"embedding gradient x {self.value:g} from step {self.from_step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EventsConfig:
    skip_samples: tuple[SkippedSamples, ...] = setting(
        (), "List of {first, end}: batches that contain any of these samples are skipped."
    )
    learning_rate: tuple[LearningRateChange, ...] = setting(
        (), "List of {from_step, until_step, factor or value}; the last entry that covers a step applies."
    )
    embedding_gradient_shrink: tuple[ShrinkChange, ...] = setting(
        (), "List of {from_step, value}; the last entry whose from_step has been reached applies."
    )

    def next_sample(self, consumed: int, batch_size: int) -> int:
        """First sample of the next batch, when all samples before `consumed` are used or skipped."""
        for skip in sorted(self.skip_samples, key=lambda skip: skip.first):
            if consumed < skip.end and consumed + batch_size > skip.first:
                consumed = skip.end
        return consumed

    def learning_rate_at(self, step: int, scheduled: float) -> float:
        change = self._learning_rate_change(step)
        if change is None:
            return scheduled
        return scheduled * change.factor if change.factor is not None else float(change.value or 0.0)

    def shrink_at(self, step: int, initial: float) -> float:
        change = self._shrink_change(step)
        return initial if change is None else change.value

    def in_force(self, step: int) -> list[str]:
        """The changes in effect at `step`, in words."""
        changes = (self._learning_rate_change(step), self._shrink_change(step))
        return [str(change) for change in changes if change is not None]

    def _learning_rate_change(self, step: int) -> LearningRateChange | None:
        return next((change for change in reversed(self.learning_rate) if change.includes(step)), None)

    def _shrink_change(self, step: int) -> ShrinkChange | None:
        active = (change for change in reversed(self.embedding_gradient_shrink) if change.from_step <= step)
        return next(active, None)


@dataclass
class EventLog:
    """The events of a run so far, across restarts; checkpoints hold its `state`."""

    history: list[dict[str, Any]] = field(default_factory=list)  # {"step", "event"}, oldest first
    in_force: list[str] = field(default_factory=list)

    def add(self, step: int, event: str) -> None:
        self.history.append({"step": step, "event": event})

    def now_in_force(self, step: int, changes: list[str]) -> list[str]:
        """Record what begins and ends with `step`. Returns the new entries in words."""
        began = [f"begins: {change}" for change in changes if change not in self.in_force]
        ended = [f"ends: {change}" for change in self.in_force if change not in changes]
        self.in_force = changes
        for event in began + ended:
            self.add(step, event)
        return began + ended

    def state(self) -> dict[str, Any]:
        return {"history": list(self.history), "in_force": list(self.in_force)}

    @staticmethod
    def from_state(state: dict[str, Any]) -> EventLog:
        return EventLog(list(state.get("history", [])), list(state.get("in_force", [])))
