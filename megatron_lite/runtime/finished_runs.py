"""Whether a start would train nothing, and whether that is what its configuration asks for. Needs no torch.

A sweep that names one directory twice must not skip its second half without a message: where a run is trained to its
end, a start with settings that make another run is refused.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from data_utils.common.errors import CheckpointError, UserError
from data_utils.common.settings import build, to_tree
from data_utils.common.settings_listed import path_settings
from data_utils.objectives import OBJECTIVES
from megatron_lite.checkpoint.manifest import Checkpoint
from megatron_lite.checkpoint.verify import ChecksumBlock, checksum_blocks, verify_checkpoint
from megatron_lite.config.tree import Config, require_objectives
from megatron_lite.metrics.writer import is_recorded
from megatron_lite.runtime.changed_corpora import current_identity, recorded_identity
from megatron_lite.runtime.run_state import RunState

# Settings that a finished run may change and remain the same run; a change of any other makes another run.
SAME_RUN = (
    "run.", "timeouts.", "trackers.", "profiler.", "parallel.", "generation.", "finetune.",
    "checkpoint.save_interval", "checkpoint.keep_", "checkpoint.asynchronous", "checkpoint.max_failed_saves",
    "checkpoint.resume", "checkpoint.accept_", "batch.micro_batch_size", "optimizer.kernel", "training.kernels",
    "training.attention",
    "training.steps", "training.stop_after_step", "training.eval_", "training.recompute", "training.layernorm",
    "training.deterministic", "training.max_nonfinite_steps", "training.replica_check_interval",
    "training.gradient_norm_interval", "data.validation", "data.local_directory", "model.task_rows",
    "tokenizer.path", "decoder_tokenizer.path",  # the corpora name their tokenizer, and their content is compared
)  # fmt: skip
_CHECKED_BYTES = 4 << 30  # of a finished run's newest checkpoint, by each rank: a few seconds
_MAX_SHOWN = 3


def nothing_to_do(config: Config, found: RunState) -> str | None:
    """Why a start would train no step, None if it would. It is known before libraries are loaded.

    Args: config: complete, with the vocabulary's size.
    Raises: CheckpointError if the run was trained with settings that make it another run.
    """
    training, newest = config.training, found.newest
    if config.checkpoint.resume == "never" or newest is None:
        return None  # such a start has messages of its own
    last = training.stop_after_step or training.steps
    if newest.step < last:
        return None
    name = "steps" if training.stop_after_step is None else "stop_after_step"
    reached = f"the newest checkpoint of {found.run} is of step {newest.step}, and training.{name} is {last}"
    differing = differing_settings(newest, config)
    if differing:
        more = f" and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
        raise CheckpointError(
            f"{reached}, but the run was trained with other settings ({'; '.join(differing[:_MAX_SHOWN])}{more}), so "
            "the new ones would train nothing. Choose another run.directory, or the settings of its config.yaml."
        )
    # A run is over with its last evaluation, which may have been cut off.
    is_validated = not config.data.validation or is_recorded(found.run, "validation", newest.step)
    if newest.step == training.steps and not is_validated:
        return None  # the start was ended between its last save and its last evaluation
    try:
        # A sample of the blocks: every rank does this before the ranks meet, and all of a large checkpoint would take
        # each of them hours.
        verify_checkpoint(newest, sampled_blocks(newest))
    except CheckpointError:
        return None  # the start falls back to an older one, and trains the rest again
    return f"nothing to do: {reached}; raise training.{name} to train on."


def sampled_blocks(checkpoint: Checkpoint) -> list[ChecksumBlock]:
    """All blocks of a small checkpoint, else blocks at equal distances that take a few seconds to check."""
    blocks = checksum_blocks(checkpoint)
    return blocks[:: max(1, -(-checkpoint.bytes // _CHECKED_BYTES))]


def differing_settings(checkpoint: Checkpoint, config: Config) -> list[str]:
    """Settings that make another run than the checkpoint's, as `key: checkpoint's value -> new value`."""
    state = checkpoint.trainer_state()
    try:
        # Settings that are newer than the checkpoint have their defaults.
        require_objectives(state.config, state.program)
        recorded: Config = build(Config, state.config)
    except UserError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.path}: its configuration cannot be read: {error}"
        ) from None
    unimportant: tuple[str, ...] = SAME_RUN
    paths = set(path_settings(Config))
    old_weights, new_weights = (
        [(corpus.weight, corpus.tokens, corpus.max_epochs) for corpus in each.data.train]
        for each in (recorded, config)
    )
    contents = [recorded_identity(entry) for entry in state.data or ()]
    # By content and not by path: corpora move, and the same texts are the same run.
    if old_weights == new_weights and _contents(config) == contents:
        unimportant += ("data.train",)
    return [
        f"{key}: {old} -> {new}"
        for key, old, new in changed(to_tree(recorded), to_tree(config))
        if not key.startswith(unimportant)
        and (re.sub(r"\[\d+\]", "[]", key) not in paths or _absolute(old) != _absolute(new))
    ]


def _absolute(path: Any) -> Any:
    return os.path.abspath(path) if isinstance(path, str) else path


def _contents(config: Config) -> list[tuple[Any, ...]] | None:
    """Identities of the corpora's contents; None if one cannot be read."""
    try:
        return [current_identity(corpus) for corpus in config.data.train]
    except UserError:
        return None


def changed(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of each difference between two trees of settings.

    Lists of sections, such as phases, are compared by index; a section that only one list has is shown with all that it
    sets. A section of an objective that only one tree has is no difference: `objectives` has it already.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            yield from changed(before.get(key), after.get(key), f"{path}{key}.")
    elif _are_sections(before) and _are_sections(after):
        for number, (old, new) in enumerate(itertools.zip_longest(before, after)):
            key = f"{path.rstrip('.')}[{number}]"
            if old is None or new is None:
                yield key, _set_values(old), _set_values(new)
            else:
                yield from changed(old, new, f"{key}.")
    elif before != after and path.rstrip(".") not in OBJECTIVES:
        yield path.rstrip("."), before, after


def _are_sections(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, Mapping) for each in value)


def _set_values(section: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The settings of a section that are neither empty nor false."""
    return None if section is None else {key: value for key, value in section.items() if value}
