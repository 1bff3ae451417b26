"""What happens in a run beside its steps: phases that begin, rewinds, changed settings.

Each event is recorded with its step in metrics.jsonl and in the checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
