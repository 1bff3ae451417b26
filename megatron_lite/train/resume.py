"""What a run begins with, looked at before there is a process group: a mistake costs seconds, not a cluster's start.

Each process reads a manifest for itself. What is really loaded, all ranks agree on and verify later (checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_utils.base.errors import CheckpointError
from data_utils.objectives import OBJECTIVES
from megatron_lite.checkpoint.manifest import Checkpoint, check_model, find_manifest, newest_readable
from megatron_lite.config.tree import Config
from megatron_lite.model.glm import parameter_shapes


def check_beginning(config: Config) -> None:
    """Raise CheckpointError unless the run can begin with the checkpoint that it would load, if any.

    That is its own newest one, else that of `checkpoint.initialize_from`. Args: config: its vocab_size is known.
    """
    found = newest_readable(checkpoint_directory(config))
    if found is not None:
        check_may_continue(config, found)
    elif config.checkpoint.initialize_from is not None:
        found = find_manifest(Path(config.checkpoint.initialize_from))
    if found is not None:
        check_model(found, parameter_shapes(config.model))


def checkpoint_directory(config: Config) -> Path:
    """Where the run's own checkpoints are."""
    return Path(config.run.directory) / "checkpoints"


def check_may_continue(config: Config, found: Checkpoint) -> None:
    """Raise CheckpointError unless the configuration may continue from this checkpoint of the run's own."""
    before = found.trainer_state().config
    if config.checkpoint.resume == "never":
        raise CheckpointError(
            f"{checkpoint_directory(config)} already holds a checkpoint of step {found.step} and checkpoint.resume is "
            "never; choose another run.directory, or checkpoint.resume=auto to continue."
        )
    old, new = before.get("training", {}).get("seed"), config.training.seed
    if old != new:
        raise CheckpointError(
            f"training.seed is {new}, but the run of {found.path} has {old}, by which its samples are numbered: with "
            f"another some would come twice and some never. Set training.seed={old}, or begin another run.directory "
            f"with checkpoint.initialize_from={found.path}."
        )


def changed_samples(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Settings that differ between two configuration trees and make other samples of the same corpora."""
    return [
        change
        for change in config_changes(before, after)
        if change.startswith(("data.sequence_length", "objective", *(f"{name}." for name in OBJECTIVES)))
    ]


def config_changes(before: Any, after: Any, path: str = "") -> list[str]:
    """Dotted keys whose values differ, as `key: old -> new`."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        keys = sorted(set(before) | set(after))
        return [
            change
            for key in keys
            for change in config_changes(before.get(key), after.get(key), f"{path}{key}.")
        ]
    return [] if before == after else [f"{path.rstrip('.')}: {before} -> {after}"]
