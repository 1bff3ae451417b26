"""What a start may change in a run: its settings and corpora, compared with those of a checkpoint. Needs no torch.

Each setting says by `on_resume` whether any start may change it ("free"), a phase for later steps ("phase"), or none
("never"). A branch of another run keeps what says which samples were used: corpora, `data`, the seed, the steps of the
phases and their samples; it may change everything else.
"""

from __future__ import annotations

import itertools
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from data_utils.common.checksums import identity
from data_utils.common.errors import CheckpointError, UserError
from data_utils.common.settings import build, keys_of, section_in, to_tree
from data_utils.common.settings_listed import path_settings
from data_utils.dataset.manifest import read_manifest
from data_utils.loader.config import CorpusConfig
from data_utils.loader.loader import FURTHER_CHECKSUMS, corpus_weights
from data_utils.loader.mixture import quotas
from data_utils.loader.mixtures_ahead import mixtures_ahead
from data_utils.objectives import OBJECTIVES
from megatron_lite.checkpoint.manifest import Checkpoint
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.config.tree import Config, require_objectives

_MAX_SHOWN = 6  # differences in a message


class Difference(NamedTuple):
    text: str  # `key: old value -> new value`
    kind: str  # "never", "phase", or "samples": other samples were used


def require_same_run(config: Config, checkpoint: Checkpoint, is_branch: bool = False) -> None:
    """Raise CheckpointError unless a run of `config` may go on from a checkpoint of its own, or branch off from it."""
    found = differences(config, checkpoint.trainer_state())
    if config.checkpoint.accept_changed_data:
        found = [each for each in found if each.kind == "never"]
    if is_branch:
        found = [each for each in found if each.kind == "samples"]
    if found:
        problem = f"the run of {checkpoint.path} was trained with other settings: {shown(found)}"
        raise CheckpointError(f"{problem}. {_remedy(found, checkpoint)}.")


def _remedy(found: Sequence[Difference], checkpoint: Checkpoint) -> str:
    branch = (
        f"another run.directory with checkpoint.initialize_from={checkpoint.path} checkpoint.initialize=all"
    )
    if all(each.kind == "never" for each in found):
        return f"Put the old values back, or branch off: {branch}"
    return (
        f"Put the old values back, set new ones in a phase that begins after step {checkpoint.step}, or accept that "
        "samples repeat or are left out: checkpoint.accept_changed_data=true"
        + ("" if all(each.kind != "never" for each in found) else f", in {branch}")
    )


def shown(found: Sequence[Difference]) -> str:
    """The first differences, for a message."""
    more = [f"and {len(found) - _MAX_SHOWN} more"] if len(found) > _MAX_SHOWN else []
    return "; ".join([*(each.text for each in found[:_MAX_SHOWN]), *more])


def differences(config: Config, state: TrainerState, is_over: bool = False) -> list[Difference]:
    """What only another run may have, beside the run of a checkpoint.

    Args: is_over: the run has no later steps, which a phase or the schedule could change.
    Raises: CheckpointError for a recorded configuration that cannot be read.
    """
    if not state.step:
        return []  # as of an import: nothing has been trained with its settings
    recorded = recorded_config(state)
    rules = ("never", "phase") if is_over else ("never",)
    found = [
        Difference(
            f"{key}: {old} -> {new}", "samples" if key.startswith(("data.", "training.seed")) else "never"
        )
        for key, old, new in _changed_by_content(recorded, config)
        if resume_rule(key) in rules and not key.startswith("data.train")
    ]
    if not is_over:
        found += _changed_plan(recorded, config, state)
    return found + [Difference(text, "samples") for text in _changed_corpora(recorded, config, state)]


def recorded_config(state: TrainerState) -> Config:
    """The configuration of a checkpoint; settings that are newer have their defaults. Raises: CheckpointError."""
    try:
        require_objectives(state.config, state.program)
        return build(Config, state.config)
    except UserError as error:
        raise CheckpointError(
            f"the checkpoint of step {state.step}: its configuration cannot be read: {error}"
        ) from None


# Settings


def resume_rule(key: str) -> str:
    """`on_resume` of a setting of the tree, given by its dotted key; [n] may follow the name of a list."""
    cls: type = Config
    rule = "never"
    for name in re.sub(r"\[\d*\]", "", key).split("."):
        hint, field = keys_of(cls).get(name, (None, None))
        if field is None:
            break  # within a mapping
        if "inline" in field.metadata:
            return "phase"  # an objective's section
        inner = section_in(hint) or next(iter(typing.get_args(hint)), None)
        rules = (
            field.metadata.get("on_resume"),
            getattr(inner, "on_resume", None),
            getattr(cls, "on_resume", None),
        )
        rule = next(filter(None, rules), "never")
        if section_in(hint) is None:
            break
        cls = typing.cast(type, inner)
    return rule


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


def _changed_by_content(before: Config, after: Config) -> Iterator[tuple[str, Any, Any]]:
    """As `changed`, of configurations. A path that is written in another way is no change, nor are scaled shares."""
    paths = set(path_settings(Config))
    for key, old, new in changed(_tree(before), _tree(after)):
        if re.sub(r"\[\d+\]", "[]", key) not in paths or _absolute(old) != _absolute(new):
            yield key, old, new


def _tree(config: Config) -> dict[str, Any]:
    total = sum(choice.weight for choice in config.objective_choices)
    shares = {choice.name: round(choice.weight / total, 9) for choice in config.objective_choices}
    return {**to_tree(config), "objectives": shares}


def _absolute(path: Any) -> Any:
    return os.path.abspath(path) if isinstance(path, str) else path


# The plan


def _changed_plan(recorded: Config, config: Config, state: TrainerState) -> Iterator[Difference]:
    """Differences of the phases that have begun, but for corpora and rates."""
    plans = recorded.phase_plan, config.phase_plan
    old, new = (begun(plan.first_steps, state.step) for plan in plans)
    for number in range(min(old, new)):
        name = f"phases[{number}]"
        before, after = (plan.first_steps[number] for plan in plans)
        if before != after:
            yield Difference(f"{name} begins after step {before} -> {after}", "samples")
            return  # from here on the phases do not correspond
        configs = [plan.configs[number] for plan in plans]
        for key, was, now in _changed_by_content(*configs):
            if resume_rule(key) == "phase" and not key.startswith(("data.train", "schedule", "phases")):
                text = f"{name + ': ' if max(old, new) > 1 else ''}{key}: {was} -> {now}"
                yield Difference(text, "samples" if key.startswith("data.") else "phase")
    if old != new:
        yield Difference(f"phases begun by step {state.step}: {old} -> {new}", "samples")
    elif (consumed := plans[1].consumed(state.step)) != state.consumed_samples:
        text = f"samples used or skipped by step {state.step}: {state.consumed_samples} -> {consumed}"
        yield Difference(text, "samples")


def begun(first_steps: Sequence[int], step: int) -> int:
    """How many phases have begun. Args: first_steps: of each, and the end of the run."""
    return sum(first < step for first in first_steps[:-1])


# Corpora


def _changed_corpora(recorded: Config, config: Config, state: TrainerState) -> Iterator[str]:
    """Differences of the corpora that were trained on, by content and not by path, and of their weights.

    Weights count as they round to a number of samples in each block. A corpus that has had no samples is free.
    Raises: DataError for a corpus without a manifest.
    """
    entries = state.data or []
    if config.task is not None or not entries or any("weight" not in entry for entry in entries):
        return  # not trained here, or on a task
    if to_tree(recorded.data.train) == to_tree(config.data.train) and not _are_here(config.data.train):
        return  # nothing is left to compare: whoever reads them finds it out
    count = begun(recorded.phase_plan.first_steps, state.step)
    weights = [each[:count] for each in (_recorded_weights(recorded, entries), phase_weights(config))]
    dealt = [[_dealt(each) for each in of_phases] for of_phases in weights]
    old, new = (
        [recorded_identity(entry) for entry in entries],
        [current_identity(c) for c in config.data.train],
    )
    for index, contents in enumerate(old):
        had_samples = any(index < len(each) and each[index] for each in dealt[0])
        if had_samples and new[index : index + 1] != [contents]:
            names = [
                each.data.train[index].prefix if index < len(each.data.train) else None
                for each in (recorded, config)
            ]
            yield f"data.train[{index}]: {names[0]} -> {names[1] if names[0] != names[1] else 'other contents'}"
    if dealt[0] != dealt[1]:
        was, now = (
            "; ".join(_named(each, config_of.data.train) for each in of_phases)
            for config_of, of_phases in zip((recorded, config), weights, strict=True)
        )
        caps = (
            " (max_epochs makes other weights for another length of the run: write the old ones as `weight`)"
        )
        yield f"weights of data.train: {was} -> {now}{caps if recorded.data.has_caps else ''}"


def _dealt(weights: Sequence[float]) -> list[int]:
    """Samples of each corpus in a block, without those at the end that have none: they may be added later."""
    counts = quotas(weights).tolist()
    while not counts[-1]:
        counts.pop()
    return counts


def _named(weights: Sequence[float], corpora: Sequence[CorpusConfig]) -> str:
    return f"{{{', '.join(f'{each.key}: {weight:.9g}' for each, weight in zip(corpora, weights, strict=False))}}}"


def phase_weights(config: Config) -> list[list[float]]:
    """The weights of each phase, in samples. Raises DataError where they depend on corpora that are not here."""
    phase_plan = config.phase_plan
    if not config.data.has_caps and not config.data.has_token_shares:
        return [corpus_weights(each.data.train, each.objective_choices) for each in phase_plan.configs]
    seed = config.training.seed
    mixtures = mixtures_ahead(config.data, seed, config.objective_choices, phase_plan.samples)
    return [[weight for _, weight in mixture.corpora] for mixture in mixtures]


def _recorded_weights(recorded: Config, entries: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """The weights of each phase that a checkpoint records, which are settings where it records none."""
    found = [entry.get("phase_weights", None if recorded.phases else [entry["weight"]]) for entry in entries]
    return phase_weights(recorded) if None in found else [list(each) for each in zip(*found, strict=True)]


def recorded_identity(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """The contents of a corpus as a checkpoint records them: checksums of tokens, decoder tokens, further files."""
    return tuple(entry.get(name) for name in ("sha256", "decoder_sha256", *FURTHER_CHECKSUMS.values()))


def current_identity(corpus: CorpusConfig) -> tuple[Any, ...]:
    """The same of a corpus as it is now. Raises DataError."""
    further = [(corpus.prefix, suffix) for suffix in FURTHER_CHECKSUMS]
    wanted = ((corpus.prefix, ".bin"), (corpus.decoder_prefix, ".bin"), *further)
    entries = [prefix and read_manifest(prefix)["files"].get(suffix) for prefix, suffix in wanted]
    return tuple(entry and identity(entry) for entry in entries)


def _are_here(corpora: Sequence[CorpusConfig]) -> bool:
    try:
        return all(current_identity(corpus) for corpus in corpora)
    except UserError:
        return False
