"""What a run begins with, looked at before there is a process group: a mistake costs seconds, not a cluster's start.

Each process reads a manifest for itself. What is really loaded, all ranks agree on and verify later (checkpoint.py).
"""

from __future__ import annotations

from pathlib import Path

from megatron_lite import checkpoint
from megatron_lite.config import Config
from megatron_lite.errors import CheckpointError
from megatron_lite.model import parameter_shapes


def check_beginning(config: Config) -> None:
    """Raise CheckpointError unless the run can begin with the checkpoint that it would load, if any.

    That is its own newest one, else that of `checkpoint.initialize_from`. Args: config: its vocab_size is known.
    """
    found = checkpoint.newest_readable(checkpoint_directory(config))
    if found is not None:
        check_may_continue(config, found)
    elif config.checkpoint.initialize_from is not None:
        found = checkpoint.find_manifest(Path(config.checkpoint.initialize_from))
    if found is not None:
        checkpoint.check_model(found, parameter_shapes(config.model))


def checkpoint_directory(config: Config) -> Path:
    """Where the run's own checkpoints are."""
    return Path(config.run.directory) / "checkpoints"


def check_may_continue(config: Config, found: checkpoint.Checkpoint) -> None:
    """Raise CheckpointError unless the configuration may continue from this checkpoint of the run's own."""
    found.trainer_state()
    if config.checkpoint.resume == "never":
        raise CheckpointError(
            f"{checkpoint_directory(config)} already holds a checkpoint of step {found.step} and checkpoint.resume is "
            "never; choose another run.directory, or checkpoint.resume=auto to continue."
        )
