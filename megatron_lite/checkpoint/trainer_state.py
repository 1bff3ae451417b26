"""The trainer's state in a checkpoint: its progress, configuration and data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from data_utils.common.errors import CheckpointError
from megatron_lite.config.removed import current


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What a run resumes from. It holds no random state: samples, dropout and rate are functions of the step."""

    step: int
    consumed_samples: int
    consumed_tokens: int
    skipped_steps: int
    skipped_in_a_row: int
    config: dict[str, Any]  # the whole configuration, resolved
    data: list[dict[str, Any]] | None  # fingerprints of the corpora (loader.py); None: not trained here
    restarts: int = 0  # how often the run was continued from a checkpoint
    events: dict[str, Any] = field(default_factory=dict)  # EventLog.state
    program: dict[str, Any] = field(default_factory=dict)  # version and commit (version.py); {}: not recorded
    machine_rates: dict[str, float] = field(default_factory=dict)  # PeakFlops.rates (peak_flops.py)

    @staticmethod
    def at_step_0(config: dict[str, Any]) -> TrainerState:
        """The state of a model that has not been trained here."""
        numbers = ("step", "consumed_samples", "consumed_tokens", "skipped_steps", "skipped_in_a_row")
        values: dict[str, Any] = dict.fromkeys(numbers, 0)
        return TrainerState(**values, config=config, data=None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Any, checkpoint: Path) -> TrainerState:
        """The inverse of `to_json`. Raises CheckpointError naming a key that is missing or of another type."""
        values = values if isinstance(values, dict) else {}
        checked = {}
        for entry in fields(TrainerState):
            value = values.get(entry.name, ...)
            types = [name.partition("[")[0] for name in str(entry.type).split(" | ")]
            if type(value).__name__.removesuffix("Type") not in types:
                actual = "is missing" if value is ... else f"is {value!r:.40}"
                raise CheckpointError(
                    f"checkpoint {checkpoint}: {entry.name} {actual} in its training state, which must be "
                    f"{entry.type}; use a checkpoint of pretrain_glm.py."
                )
            checked[entry.name] = value
        try:
            checked["config"] = current(checked["config"])
        except ValueError as error:
            remedy = "or continue it with the version that wrote it"
            raise CheckpointError(f"checkpoint {checkpoint} {error}; {remedy}.") from None
        return TrainerState(**checked)
