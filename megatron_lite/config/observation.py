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
    project: str = setting(REQUIRED, "project of Weights & Biases that gets the run; needs the package wandb")
    entity: str | None = setting(None, "user or team that owns the project; null = your default one")
    mode: str = setting(
        "online",
        "online: sent while training; offline: kept in directory/wandb, and sent by `wandb sync` when you ask",
        one_of=("online", "offline"),
    )
    name: str | None = setting(None, "the run's name there; null = the last part of run.directory")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("trackers.mlflow")
class MlflowConfig:
    uri: str = setting(
        REQUIRED,
        "tracking server (https://...) or store that gets the run; needs the package mlflow-skinny",
        is_path=True,
    )
    experiment: str = setting("megatron-lite-glm", "MLflow experiment; it is made if it is absent")
    name: str | None = setting(None, "the run's name there; null = the last part of run.directory")

    def __post_init__(self) -> None:
        check(
            "@" not in self.uri.partition("://")[2].partition("/")[0],
            "trackers.mlflow.uri holds a name or password, which every record of the configuration would show; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead.",
        )
        query = parse_qsl(self.uri.partition("?")[2].partition("#")[0], keep_blank_values=True)
        secret = next((name for name, _ in query if _SECRET.search(name)), None)
        check(
            secret is None,
            f"trackers.mlflow.uri holds {shown(secret)}, which every record of the configuration would show; set "
            "MLFLOW_TRACKING_TOKEN instead.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackersConfig:
    wandb: WandbConfig | None = setting(None, "Weights & Biases; null = not used")
    mlflow: MlflowConfig | None = setting(None, "MLflow; null = not used")

    @property
    def is_used(self) -> bool:
        return self.wandb is not None or self.mlflow is not None


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("profiler")
class ProfilerConfig:
    first_step: int | None = setting(
        None,
        "first step of which a trace is written to directory/profile (torch.profiler); null = none",
        at_least=1,
    )
    last_step: int | None = setting(None, "last step of the trace; null = first_step", at_least=1)
    ranks: tuple[int, ...] = setting((0,), "ranks that write a trace")
    memory: bool = setting(
        False, "write a snapshot of GPU memory over these steps too; refused on CPUs, which have none"
    )

    def __post_init__(self) -> None:
        first, last = self.first_step, self.last_step
        check(
            first is not None or (last is None and not self.memory),
            "profiler.last_step or profiler.memory is set, but profiler.first_step is null; set that too.",
        )
        check(
            first is None or last is None or first <= last,
            f"profiler.first_step is {first} and profiler.last_step {last}; the first must not be the larger.",
        )
        check(
            bool(self.ranks) and min(self.ranks) >= 0,
            f"profiler.ranks is {list(self.ranks)}; it must name ranks, 0 or more.",
        )

    def require_ranks(self, world_size: int) -> None:
        """Raise ConfigError if a rank to be traced does not exist."""
        check(
            self.first_step is None or max(self.ranks) < world_size,
            f"profiler.ranks is {list(self.ranks)}, but the run has {world_size} processes; name ranks below that.",
        )

    @property
    def end(self) -> int | None:
        """The last step of the trace; None = there is none."""
        return self.first_step if self.last_step is None else self.last_step
