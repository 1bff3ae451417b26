"""The sections `trackers` and `profiler`: services that receive a run's numbers, and the steps to trace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

from data_utils.common.setting_files import shown
from data_utils.common.settings import REQUIRED, check, checked, setting

# Names of a parameter of an address that lets somebody in.
_SECRET = re.compile(r"token|key|secret|pass|pwd|auth|credential|sig(nature)?$|session", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("trackers.wandb")
class WandbConfig:
    project: str = setting(REQUIRED, "Weights & Biases project; needs the package wandb.")
    entity: str | None = setting(None, "User or team that owns the project; null = your default entity.")
    mode: str = setting(
        "online",
        "online = upload while training; offline = keep the run in directory/wandb and upload it with "
        "`wandb sync`.",
        one_of=("online", "offline"),
    )
    name: str | None = setting(None, "Run name in Weights & Biases; null = last component of run.directory.")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("trackers.mlflow")
class MlflowConfig:
    uri: str = setting(
        REQUIRED,
        "Tracking server (https://...) or local store; needs the package mlflow-skinny.",
        is_path=True,
    )
    experiment: str = setting("megatron-lite-glm", "MLflow experiment; created if missing.")
    name: str | None = setting(None, "Run name in MLflow; null = last component of run.directory.")

    def __post_init__(self) -> None:
        check(
            "@" not in self.uri.partition("://")[2].partition("/")[0],
            "trackers.mlflow.uri contains a user name or password, which would be stored in every record of "
            "the configuration; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead.",
        )
        query = parse_qsl(self.uri.partition("?")[2].partition("#")[0], keep_blank_values=True)
        secret = next((name for name, _ in query if _SECRET.search(name)), None)
        check(
            secret is None,
            f"trackers.mlflow.uri contains {shown(secret)}, which would be stored in every record of the "
            "configuration; set MLFLOW_TRACKING_TOKEN instead.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackersConfig:
    wandb: WandbConfig | None = setting(None, "Weights & Biases; null = off.")
    mlflow: MlflowConfig | None = setting(None, "MLflow; null = off.")

    @property
    def is_used(self) -> bool:
        return self.wandb is not None or self.mlflow is not None


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("profiler")
class ProfilerConfig:
    first_step: int | None = setting(
        None,
        "First step to trace with torch.profiler, written to directory/profile; null = off.",
        at_least=1,
    )
    last_step: int | None = setting(None, "Last step to trace; null = first_step.", at_least=1)
    ranks: tuple[int, ...] = setting((0,), "Ranks that write a trace.")
    memory: bool = setting(False, "Also write a GPU memory snapshot of these steps; refused on CPUs.")

    def __post_init__(self) -> None:
        first, last = self.first_step, self.last_step
        check(
            first is not None or (last is None and not self.memory),
            "profiler.last_step or profiler.memory is set, but profiler.first_step is null; set first_step "
            "too.",
        )
        check(
            first is None or last is None or first <= last,
            f"profiler.first_step is {first} and profiler.last_step {last}; first_step must not be larger "
            "than last_step.",
        )
        check(
            bool(self.ranks) and min(self.ranks) >= 0,
            f"profiler.ranks is {list(self.ranks)}; it must list ranks, 0 or more.",
        )

    def require_ranks(self, world_size: int) -> None:
        """Raise ConfigError if a rank to be traced does not exist."""
        check(
            self.first_step is None or max(self.ranks) < world_size,
            f"profiler.ranks is {list(self.ranks)}, but the run has {world_size} processes; ranks must be "
            "below that.",
        )

    @property
    def end(self) -> int | None:
        """The last step of the trace; None = there is none."""
        return self.first_step if self.last_step is None else self.last_step
