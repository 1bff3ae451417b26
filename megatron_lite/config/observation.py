"""The section `trackers`: services that get a run's numbers beside metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.base.settings import REQUIRED, checked, setting


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
        REQUIRED, "tracking server (https://...) or store that gets the run; needs the package mlflow-skinny"
    )
    experiment: str = setting("megatron-lite-glm", "MLflow experiment; it is made if it is absent")
    name: str | None = setting(None, "the run's name there; null = the last part of run.directory")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackersConfig:
    wandb: WandbConfig | None = setting(None, "Weights & Biases; null = not used")
    mlflow: MlflowConfig | None = setting(None, "MLflow; null = not used")
