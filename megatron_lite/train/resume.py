"""A run that starts with a checkpoint: its own newest, or the one that `checkpoint.initialize_from` names.

start.py decides which; here it is checked against the settings, loaded, and compared with them: what differs becomes
events of the run.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import build, to_tree
from megatron_lite.checkpoint.full_word_embedding import with_full_word_embedding
from megatron_lite.checkpoint.manifest import Checkpoint
from megatron_lite.checkpoint.read import find_checkpoint, load_checkpoint, load_weights_only, newest_valid
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.checkpoint.upcycling import upcycled
from megatron_lite.checkpoint.verify import check_model, find_manifest, new_parameters
from megatron_lite.config.lora import LoraConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.changes import changed, differences, recorded_config, require_same_run
from megatron_lite.telemetry import version
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.flops import EXPERTS
from megatron_lite.transformer.trained_model import ENCODER

log = logging.getLogger(__name__)

_SHOWN = 6  # changes that an event names, new parameters that a line does


def check(config: Config, newest: Checkpoint | None) -> None:
    """See `check_start` in start.py. Args: newest: checkpoint of the run; None = it has `initialize_from`."""
    checkpoint = newest
    # The run's checkpoint comes first: a requeued job has `initialize_from` still set, and must not begin again.
    if newest is not None:
        _check_may_continue(config, newest)
    else:
        assert config.checkpoint.initialize_from is not None
        initial = find_manifest(Path(config.checkpoint.initialize_from))
        if config.checkpoint.initialize == "weights":
            # Called for its errors only; the names are asked for again when the weights are loaded.
            new_parameters(_for_model(initial, config), model_spec(config).shapes(config))
            _require_same_lora_scale(config, initial)
        else:
            checkpoint = initial
            require_same_run(config, initial, is_branch=True)
    if checkpoint is not None:
        require_same_optimizer(config, checkpoint)
        check_model(checkpoint, model_spec(config).shapes(config))
        _require_same_lora_scale(config, checkpoint)


def _require_same_lora_scale(config: Config, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the checkpoint's updates of LoRA would be added with another factor."""
    tree = checkpoint.trainer_state().config.get("model", {}).get("lora")
    if config.model.lora is None or tree is None:
        return
    before, now = build(LoraConfig, tree, "model.lora."), config.model.lora
    if not math.isclose(before.scale, now.scale, rel_tol=1e-9):
        raise CheckpointError(
            f"model.lora multiplies its updates by {now.scale:g}, but those of checkpoint {checkpoint.path} were "
            f"trained with {before.scale:g}, so the model would compute something else; set "
            f"model.lora.alpha={before.alpha:g} and model.lora.rank_stabilized={str(before.rank_stabilized).lower()}."
        )


def require_same_optimizer(config: Config, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the state of a trained checkpoint is another optimizer's."""
    before, kind = checkpoint.optimizer.get("kind", "adamw"), config.optimizer.kind
    # Without any step (an import, a merge) there is no state that could be of another optimizer.
    if before != kind and checkpoint.optimizer["adam_step"]:
        raise CheckpointError(
            f"optimizer.kind is {kind}, but checkpoint {checkpoint.path} holds the state of {before}; set "
            f"optimizer.kind={before}, or begin another run.directory with checkpoint.initialize_from and a fresh "
            "optimizer."
        )


def _check_may_continue(config: Config, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the configuration may continue from this checkpoint of the run's own."""
    if config.checkpoint.resume == "never":
        raise CheckpointError(
            f"{checkpoint.path.parent} already holds a checkpoint of step {checkpoint.step} and "
            "checkpoint.resume is never; choose another run.directory, or checkpoint.resume=auto to continue."
        )
    data = checkpoint.trainer_state().data or []
    model_spec(config).check_same_data(config, data, str(checkpoint.path))
    require_same_run(config, checkpoint)


def load(
    config: Config,
    directory: Path,
    engine: Engine,
    context: ParallelContext,
    data: list[dict[str, Any]],
    program: dict[str, Any],
) -> tuple[TrainerState | None, bool, list[str]]:
    """The state to continue from (None: at step 0), whether it is this run's, and events to be recorded.

    Args: directory: of the run's checkpoints. data, program: as for `load_start`.
    """
    # Again, and now by checksums and on all ranks: `check` has looked in each process for itself.
    newest = newest_valid(directory, context)
    if newest is None:
        state, events = _initialize(config, engine, context, data)
        return state, False, events
    _check_may_continue(config, newest)
    state = _load(newest, config, engine, context, data)
    tree = to_tree(config)
    if context.is_main:
        for change in config_changes(state.config, tree):
            log.warning("changed since the checkpoint: %s", change)
        if state.program and state.program != program:  # an import was written by no training program
            before, after = version.describe(state.program), version.describe(program)
            log.warning("changed since the checkpoint: the program: %s -> %s", before, after)
    events = _accepted(config, state) + other_rate(config, state) + _new_moments(newest)
    return state, True, events + changed_plan(state.config, tree)


def _initialize(
    config: Config, engine: Engine, context: ParallelContext, data: list[dict[str, Any]]
) -> tuple[TrainerState | None, list[str]]:
    assert config.checkpoint.initialize_from is not None
    checkpoint = find_checkpoint(Path(config.checkpoint.initialize_from), context)
    if config.checkpoint.initialize == "all":
        state = _load(checkpoint, config, engine, context, data)
        events = _accepted(config, state) + other_rate(config, state) + _new_moments(checkpoint)
        # Averages that start in the middle of a run differ from those of a run that had them from the start.
        if config.ema.decay is not None and not any(each.state_name == "ema" for each in checkpoint.slices):
            events.append(f"averages of the weights begin at step {state.step}")
        return state, events
    checkpoint = _for_model(checkpoint, config)
    new = new_parameters(checkpoint, model_spec(config).shapes(config))
    copied = {stored.name for stored in checkpoint.slices if stored.is_added and EXPERTS in stored.name}
    for fragment in engine.fragments():
        if fragment.name in copied:  # the copies are added to their initial weights, which are the noise
            fragment.tensors["weight"].mul_(config.checkpoint.upcycling_noise)
    load_weights_only(checkpoint, engine, context, new)
    if context.is_main:
        log.info("initialized with the weights of %s; the optimizer is new, at step 0", checkpoint.path)
        if new:
            kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in sorted(new)))
            more = f" and {len(kinds) - _SHOWN} kinds more" if len(kinds) > _SHOWN else ""
            log.info(
                "%d new parameters, with initial weights: %s%s", len(new), ", ".join(kinds[:_SHOWN]), more
            )
    return None, []


def _for_model(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """The checkpoint with the weights that the model has: of two stacks the encoder alone, of several heads one, of an
    FFN a copy for each expert.
    """
    if config.task is not None and not config.tasks and checkpoint.state.get("config", {}).get("tasks"):
        # Fine-tuning one task from a model of several takes that task's head under the only head's name.
        checkpoint = checkpoint.with_task_head(config.task.name)
    shapes = model_spec(config).shapes(config)
    has_stacks, wants_stacks = (
        any(name.startswith(ENCODER) for name in names) for names in (checkpoint.shapes, shapes)
    )
    if has_stacks and not wants_stacks:
        # The encoder alone. ELECTRA's may store its word embedding as a difference to the generator's.
        checkpoint = with_full_word_embedding(checkpoint).stack(ENCODER)
    return upcycled(checkpoint, config, shapes)


def _load(
    checkpoint: Checkpoint,
    config: Config,
    engine: Engine,
    context: ParallelContext,
    data: list[dict[str, Any]],
) -> TrainerState:
    state = checkpoint.trainer_state()
    require_same_optimizer(config, checkpoint)
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
                "the training records differ from the checkpoint's: samples differ from those of an uninterrupted run"
            )
    return state


def _accepted(config: Config, state: TrainerState) -> list[str]:
    """Events for changes of samples or of the plan. `check_start` has refused those that are not accepted."""
    changes = [each.text for each in differences(config, state) if each.kind != "never"]
    return [f"changed from the checkpoint's: {change}" for change in changes]


def other_rate(config: Config, state: TrainerState) -> list[str]:
    """An event where the next step has another learning rate than by the checkpoint's settings.

    A finished run that is made longer is the usual case: its rate leaps back to what a longer decay has there.
    """
    if state.config.get("task") or config.task is not None:
        return []  # a task's steps follow from its records
    recorded, step = recorded_config(state), state.step + 1
    was, now = (its.phase_plan.learning_rate(step) for its in (recorded, config))
    if math.isclose(was, now, rel_tol=1e-6):
        return []
    text = (
        f"the learning rate of step {step} is {now:.3g}, and would be {was:.3g} by the checkpoint's settings"
    )
    # Only where nobody chose the decay's length does lengthening the run move it: then the message offers the setting.
    chosen = config.schedule.decay_steps, config.schedule.parts, recorded.schedule.decay_steps
    if not any(chosen) and config.decay_steps != recorded.decay_steps:
        text += (
            f": the decay ends with training.steps ({recorded.decay_steps} -> {config.decay_steps}); "
            f"schedule.decay_steps={recorded.decay_steps} keeps it"
        )
    return [text]


def _new_moments(checkpoint: Checkpoint) -> list[str]:
    """An event where the checkpoint of a trained model has no state of the optimizer, as merged ones."""
    if not checkpoint.step or checkpoint.optimizer.get("adam_step"):
        return []
    return [
        f"the optimizer starts without moments at step {checkpoint.step}: {checkpoint.path.name} has none"
    ]


def changed_plan(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Changes of later steps, which phases allow: events of this start."""
    if not (before.get("phases") or after.get("phases")):
        return []
    # None and absent both mean no phases; `changed` compares lists entry by entry.
    old, new = ({**tree, "phases": tree.get("phases") or []} for tree in (before, after))
    changes = config_changes(old, new)
    events = []
    for key in ("phases", "data.train"):
        of_key = [change for change in changes if change.startswith(f"{key}[")]
        rest = f"; and {len(of_key) - _SHOWN} more" if len(of_key) > _SHOWN else ""
        events += [f"changed for later steps: {'; '.join(of_key[:_SHOWN])}{rest}"] if of_key else []
    return events


def config_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ, as `key: old -> new`."""
    return [f"{key}: {old} -> {new}" for key, old, new in changed(before, after)]
