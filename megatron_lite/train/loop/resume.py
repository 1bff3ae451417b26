"""Where a run begins: at its own newest checkpoint, at `checkpoint.initialize_from`, or at step 0.

`check_beginning` looks before there is a process group, each process for itself: a mistake costs seconds, not the start
of a cluster. `load_beginning` loads what all ranks agree on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_utils.base.errors import CheckpointError
from data_utils.base.settings import to_tree
from data_utils.objectives import LOSSES, OBJECTIVES
from megatron_lite.checkpoint.agreement import agreement
from megatron_lite.checkpoint.manifest import (
    Checkpoint,
    check_model,
    find_manifest,
    new_parameters,
    newest_readable,
    rewinds,
)
from megatron_lite.checkpoint.read import find_checkpoint, load_checkpoint, load_weights_only, newest_valid
from megatron_lite.checkpoint.state import TrainerState
from megatron_lite.config.system_class import require_class
from megatron_lite.config.tree import Config
from megatron_lite.model.trunk.build import kind_of, model_shapes
from megatron_lite.model.trunk.stacks import ENCODER
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.engine.engine import Engine
from megatron_lite.train.guard.changed_corpora import changed_corpora, require_same_corpora
from megatron_lite.train.guard.finished import changed
from megatron_lite.train.guard.run_state import state_of
from megatron_lite.train.observe import version

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beginning:
    """The state that was loaded into the engine."""

    state: TrainerState | None  # where training goes on; None: at step 0
    is_own: bool = False  # the state is of the run's own checkpoint
    events: list[str] = field(default_factory=list)  # to be recorded as soon as that is possible


def check_beginning(config: Config) -> None:
    """Raise CheckpointError unless the run can begin with the checkpoint that it would load, if any.

    Args: config: its vocab_size is known.
    """
    found = state_of(Path(config.run.directory))
    found.require_start()
    checkpoint = found.newest
    if checkpoint is None:
        require_class(config.model)
    if checkpoint is not None:
        check_may_continue(config, checkpoint)
    elif config.checkpoint.initialize_from is not None:
        initial = find_manifest(Path(config.checkpoint.initialize_from))
        if config.checkpoint.initialize == "weights":
            new_parameters(_for_model(initial, config), model_shapes(config))
        else:
            checkpoint = initial
            require_same_corpora(config, initial.path, initial.trainer_state())
    else:
        kind_of(config).check_beginning(config)
    if checkpoint is not None:
        check_model(checkpoint, model_shapes(config))


def keep_task_rows(config: Config) -> Config:
    """This configuration with `model.task_rows`: those of the checkpoint that the run would load, and new ones."""
    if not config.model.task_types:
        return config
    from megatron_lite.config.task_rows import with_task_rows

    checkpoint = newest_readable(checkpoint_directory(config))
    if checkpoint is None and config.checkpoint.initialize_from is not None:
        checkpoint = find_manifest(Path(config.checkpoint.initialize_from))
    before = {} if checkpoint is None else checkpoint.trainer_state().config.get("model", {})
    former: Sequence[int] = before.get("task_rows") or ()
    if not former and before.get("task_types"):
        former = range(min(config.model.task_types, len(LOSSES)))  # a run of a former version
    return with_task_rows(config, former)


def checkpoint_directory(config: Config) -> Path:
    """Where the run's own checkpoints are."""
    return Path(config.run.directory) / "checkpoints"


def check_may_continue(config: Config, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the configuration may continue from this checkpoint of the run's own."""
    if config.checkpoint.resume == "never":
        raise CheckpointError(
            f"{checkpoint_directory(config)} already holds a checkpoint of step {checkpoint.step} and "
            "checkpoint.resume is never; choose another run.directory, or checkpoint.resume=auto to continue."
        )
    before = checkpoint.trainer_state().config
    kind_of(config).check_continuation(config, before, checkpoint.path)
    old, new = before.get("training", {}).get("seed"), config.training.seed
    if old != new:
        raise CheckpointError(
            f"training.seed is {new}, but the run of {checkpoint.path} has {old}, by which its samples are numbered: "
            f"another seed would repeat some and leave out others. Set training.seed={old}, or begin another "
            f"run.directory with checkpoint.initialize_from={checkpoint.path}."
        )
    require_same_corpora(config, checkpoint.path, checkpoint.trainer_state())


def load_beginning(
    config: Config,
    engine: Engine,
    context: ParallelContext,
    data: list[dict[str, Any]],
    program: dict[str, Any],
) -> Beginning:
    """Load the run's newest checkpoint, else what `checkpoint.initialize_from` names, if anything.

    Args: data: fingerprints of the training corpora or records; program: of `version.program`, on the main rank.
    """
    settings, directory = config.checkpoint, checkpoint_directory(config)
    with agreement(context, f"looking at {config.run.directory}"):
        if context.is_main:  # other nodes may see an older state of a shared file system
            state_of(Path(config.run.directory)).require_start()
    own = newest_valid(directory, context)
    if own is None:
        state = None
        if settings.initialize_from is not None:
            state = _initialize(config, engine, context, data)
        else:
            kind_of(config).begin(config, engine, context)
        events = [] if state is None else _changed(corpora_changes(config, state))
        return Beginning(state, events=events + _rewinds(directory, [], context))
    check_may_continue(config, own)
    state = _load(own, config, engine, context, data)
    new = to_tree(config)
    events = _changed(changed_samples(state.config, new) + corpora_changes(config, state))
    events += changed_plan(state.config, new)
    known = [entry["event"] for entry in state.events.get("history", [])]
    if context.is_main:
        for change in config_changes(state.config, new):
            log.warning("changed since the checkpoint: %s", change)
        if state.program != program:
            before, after = version.describe(state.program), version.describe(program)
            log.warning("changed since the checkpoint: the program: %s -> %s", before, after)
    return Beginning(state, is_own=True, events=events + _rewinds(directory, known, context))


def _initialize(
    config: Config, engine: Engine, context: ParallelContext, data: list[dict[str, Any]]
) -> TrainerState | None:
    assert config.checkpoint.initialize_from is not None
    checkpoint = find_checkpoint(Path(config.checkpoint.initialize_from), context)
    if config.checkpoint.initialize == "all":
        return _load(checkpoint, config, engine, context, data)
    checkpoint = _for_model(checkpoint, config)
    new = new_parameters(checkpoint, model_shapes(config))
    load_weights_only(checkpoint, engine, context, new)
    if context.is_main:
        log.info("began with the weights of %s, a fresh optimizer and step 0", checkpoint.path)
        if new:
            log.info("new, with initial weights: %s", ", ".join(sorted(new)))
    return None


def _for_model(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """The part of a checkpoint that a configuration begins with: of two stacks the encoder, where it has one."""
    has_stacks = any(name.startswith(ENCODER) for name in checkpoint.shapes)
    return checkpoint.part(ENCODER) if has_stacks and config.decoder is None else checkpoint


def _load(
    checkpoint: Checkpoint,
    config: Config,
    engine: Engine,
    context: ParallelContext,
    data: list[dict[str, Any]],
) -> TrainerState:
    state = checkpoint.trainer_state()
    load_checkpoint(checkpoint, engine, context)
    if context.is_main:
        log.info(
            "resumed from %s: step %d, %d samples consumed",
            checkpoint.path,
            state.step,
            state.consumed_samples,
        )
        if config.task is not None and state.data != data:
            log.warning(
                "the training records are not those of the checkpoint: its samples are not those of an unbroken run"
            )
    return state


def _rewinds(directory: Path, known: list[str], context: ParallelContext) -> list[str]:
    """Events for each `scripts/checkpoints.py rewind` of the run, without the known ones."""
    events = [
        f"went back from step {last}, whose checkpoint is in {path.name}"
        for path, last in (rewinds(directory) if context.is_main else ())
    ]
    return [event for event in events if event not in known]


def _changed(changes: list[str]) -> list[str]:
    return [f"changed, so that its samples are not those of an unbroken run: {change}" for change in changes]


def corpora_changes(config: Config, state: TrainerState) -> list[str]:
    """Accepted changes of the corpora. `check_beginning` has refused the others."""
    change = changed_corpora(config, state)
    return [] if change is None else [f"data.train: {change}"]


def changed_samples(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Settings that differ between two configuration trees and make other samples of the same corpora."""
    chosen = {name for tree in (before, after) for name in tree.get("objectives") or ("blank_infilling",)}
    decisive = ["data.sequence_length", "objective"]
    for name in chosen & OBJECTIVES.keys():
        keys = OBJECTIVES[name].config_class.sample_settings
        decisive += (f"{name}.",) if keys is None else keys
    return [change for change in config_changes(before, after) if change.startswith(tuple(decisive))]


def changed_plan(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Changes of later steps, which phases allow: events of this start."""
    if not (before.get("phases") or after.get("phases")):
        return []
    old, new = ({**tree, "phases": tree.get("phases") or []} for tree in (before, after))
    keys = ("phases", "data.train")
    return [
        f"changed for later steps: {change}" for change in config_changes(old, new) if change.startswith(keys)
    ]


def config_changes(before: Any, after: Any) -> list[str]:
    """Dotted keys whose values differ, as `key: old -> new`."""
    return [f"{key}: {old} -> {new}" for key, old, new in changed(before, after)]
