"""Where a run starts: at its own newest checkpoint, at `checkpoint.initialize_from`, or at step 0.

`check_start` looks before there is a process group, each process for itself: a mistake costs seconds, not the start
of a cluster. `load_start` loads what all ranks agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.common.settings import check
from megatron_lite.checkpoint.collective_errors import raise_on_all_ranks, steps_seen_by_rank_0
from megatron_lite.checkpoint.manifest import rewound_directories
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.checkpoint.verify import find_manifest, newest_readable
from megatron_lite.config.model import require_class, require_rotary
from megatron_lite.config.task_rows import with_task_rows
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.run_state import read_run_state
from megatron_lite.train import resume
from megatron_lite.transformer.build import model_spec


@dataclass(frozen=True)
class LoadedState:
    """The state that was loaded into the engine."""

    state: TrainerState | None  # from which training continues; None: at step 0
    is_own: bool  # the state is of a checkpoint of this run, not of one that it branches from
    events: list[str]  # to be recorded as soon as that is possible


def check_start(config: Config) -> None:
    """Raise CheckpointError unless the run can start with the checkpoint that it would load, if any.

    Args: config: its vocab_size is known.
    Raises: ConfigError too, for updates of LoRA without a checkpoint that they update.
    """
    run_state = read_run_state(Path(config.run.directory))
    run_state.require_start()
    # Manifests are enough here: the same decision with checksums follows on all ranks in `load_start`.
    if run_state.newest is None:
        require_class(config.model)
        if config.task is None:  # else the model is a run's, of which nothing can be removed
            require_rotary(config.model)
        if config.checkpoint.initialize_from is None:
            check(
                config.model.lora is None,
                "model.lora is set, but the run begins with random weights, which LoRA would keep as they are; set "
                "checkpoint.initialize_from to a run of a trained model, or model.lora to null.",
            )
            model_spec(config).check_start(config)
            return
    resume.check(config, run_state.newest)


def keep_task_rows(config: Config) -> Config:
    """The configuration with `model.task_rows`: those of the checkpoint that the run would load, and new ones."""
    if not config.model.task_types:
        return config
    checkpoint = newest_readable(checkpoint_directory(config))
    if checkpoint is None and config.checkpoint.initialize_from is not None:
        checkpoint = find_manifest(Path(config.checkpoint.initialize_from))
    before = {} if checkpoint is None else checkpoint.trainer_state().config.get("model", {})
    return with_task_rows(config, before.get("task_rows") or ())


def checkpoint_directory(config: Config) -> Path:
    """Where the run's own checkpoints are."""
    return Path(config.run.directory) / "checkpoints"


def load_start(
    config: Config,
    engine: Engine,
    context: ParallelContext,
    data: list[dict[str, Any]],
    program: dict[str, Any],
) -> LoadedState:
    """Load the run's newest checkpoint, else what `checkpoint.initialize_from` names, if anything.

    Args: data: fingerprints of the training corpora or records; program: of `version.program`, on the main rank.
    """
    directory = checkpoint_directory(config)
    with raise_on_all_ranks(context, f"looking at {config.run.directory}"):
        if context.is_main:  # other nodes may see an older state of a shared file system
            read_run_state(Path(config.run.directory)).require_start()
    state, is_own = None, False
    events: list[str] = []
    if steps_seen_by_rank_0(directory, context) or config.checkpoint.initialize_from is not None:
        state, is_own, events = resume.load(config, directory, engine, context, data, program)
    else:
        model_spec(config).load_start(config, engine, context)
    # A rewind is recorded at one start only, though its directory stays.
    known = state.events.get("history", []) if state is not None and is_own else []
    return LoadedState(
        state, is_own, events + _rewinds(directory, [entry["event"] for entry in known], context)
    )


def _rewinds(directory: Path, known: list[str], context: ParallelContext) -> list[str]:
    """Events for each `scripts/checkpoints.py rewind` of the run, without the known ones."""
    events = [
        f"went back from step {last}, whose checkpoint is in {path.name}"
        for path, last in (rewound_directories(directory) if context.is_main else ())
    ]
    return [event for event in events if event not in known]
