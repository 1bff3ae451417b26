"""Effects of a changed `data.train` on a run's samples, reported before training continues.

A sample's position in its corpus follows from its number and the current weights (data_utils/loader/mixture.py), as if
they had held from the start. So after a change of weights a corpus continues before or after the position that it had
reached: samples are repeated or left out. A corpus's index in the list is the key of its random order.

Phases say when weights change, so that nothing is repeated or left out. What a checkpoint's phases have made must then
be what the new phases would have made.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_utils.common.checksums import identity
from data_utils.common.errors import CheckpointError
from data_utils.common.random_streams import derive_seed
from data_utils.common.settings import build, leaves, to_tree
from data_utils.dataset.manifest import read_manifest
from data_utils.loader.config import CorpusConfig
from data_utils.loader.loader import weights_of
from data_utils.loader.mixture import quotas, samples_of_corpora
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.config.tree import Config

_SHOWN = 4  # corpora or settings in a message


class Change(NamedTuple):
    """What is not as a checkpoint has it, so that samples come again or are left out."""

    setting: str
    what: str
    remedy: str  # a sentence without its end


def require_same_corpora(config: Config, path: Path, state: TrainerState) -> None:
    """Raise CheckpointError if seed or `data.train` is not the checkpoint's (at `path`), unless that is accepted."""
    change = changed_seed(config, state) or changed_corpora(config, state)
    if change is None or config.checkpoint.accept_changed_data:
        return
    raise CheckpointError(
        f"{change.setting} differs from {path}, by which its {state.consumed_samples:,} samples were numbered: "
        f"{change.what}. {change.remedy}; or begin at step 0 in another run.directory with "
        f"checkpoint.initialize_from={path}; or accept it with checkpoint.accept_changed_data=true."
    )


def changed_seed(config: Config, state: TrainerState) -> Change | None:
    """The seed numbers samples and draws dropout, of a task too."""
    old, new = state.config.get("training", {}).get("seed"), config.training.seed
    # Before the first sample no number has been used, so nothing can be repeated or left out.
    if old == new or not state.consumed_samples:
        return None
    what = f"it is {new}, and was {old}; another seed repeats some samples, leaves out others and draws other dropout"
    return Change("training.seed", what, f"Set training.seed={old}")


def changed_corpora(config: Config, state: TrainerState) -> Change | None:
    """Differences of the corpora of a checkpoint and of `config`, with their effect; None: the samples are the same.

    Raises: DataError for a corpus without a manifest.
    """
    before = state.data or []
    if config.task is not None or not before or any("weight" not in entry for entry in before):
        return None  # not trained here, or on a task
    after = config.data.train
    old, new = [identity_there(entry) for entry in before], [identity_here(corpus) for corpus in after]
    regions = state.config.get("data", {}).get("region", 0), config.data.region
    if config.phases or state.config.get("phases") or any(regions):
        return _changed_phases(config, state, old, new)
    # Weights count as they round to places in a block of samples: equal places make equal samples.
    weights = [entry["weight"] for entry in before], weights_of(after, config.objective_choices)
    if old == new and np.array_equal(quotas(weights[0]), quotas(weights[1])):
        return None
    seed = derive_seed(config.training.seed, "train")
    # How many samples of each corpus the old weights have read, and from which on the new ones would read.
    read, begin = (samples_of_corpora(seed, its, state.consumed_samples).tolist() for its in weights)
    changes = []
    for place, corpus in enumerate(after):
        name, start = corpus.prefix, begin[place]
        if old[place : place + 1] == [new[place]]:
            was, now = (f"{its[place]:g} of {sum(its):g}" for its in weights)
            name += f" (weight {was} -> {now})"
            if start < read[place]:
                changes.append(f"{name} would read {read[place] - start:,} samples again")
            elif start > read[place]:
                changes.append(f"{name} would leave out {start - read[place]:,} samples")
        elif new[place] in old:
            count = f"{read[old.index(new[place])]:,}"
            changes.append(
                f"{name} is at another index of data.train and gets a new order: its {count} samples may be repeated"
            )
        else:
            changes.append(f"{name} is new and would leave out its first {start:,} samples")
    changes += [f"{name} is gone" for name in _missing(state, old, new)]
    more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
    return _of_corpora("; ".join(changes[:_SHOWN] + more), state) if changes else None


def _of_corpora(what: str, state: TrainerState) -> Change:
    remedy = f"Set corpora and weights as they were, and others in a phase after step {state.step}"
    return Change("data.train", what, remedy)


def _changed_phases(
    config: Config, state: TrainerState, old: Sequence[Any], new: Sequence[Any]
) -> Change | None:
    """As `changed_corpora`, where phases are planned. Args: old, new: identities of the corpora."""
    recorded: Config = build(Config, state.config)
    regions = recorded.data.region, config.data.region
    if regions[0] != regions[1]:
        what = f"it is {regions[1]}, and was {regions[0]}"
        return Change("data.region", what, f"Set data.region={regions[0]}")
    before, after = recorded.phase_plan, config.phase_plan
    has_phases = bool(recorded.phases or config.phases)
    made = [_begun(phase_plan, state.step, has_phases) for phase_plan in (before, after)]
    seed = derive_seed(config.training.seed, "train")
    read = np.zeros(len(old), np.int64)
    # Each phase numbers its samples from its own first one, so they are counted phase by phase.
    ends = [begun.first_sample for begun in made[0][1:]] + [state.consumed_samples]
    for number, (begun, end) in enumerate(zip(made[0], ends, strict=True)):
        weights = [*begun.places, *[0] * (len(old) - len(begun.places))]
        read += samples_of_corpora(seed, weights, end - begun.first_sample, number)
    for place, count in enumerate(read.tolist()):
        if count and old[place : place + 1] != new[place : place + 1]:
            name = recorded.data.train[place].prefix
            what = f"{name}, of which {count:,} samples are read, is no longer at index {place} of data.train"
            return _of_corpora(what, state)
    differences, consumed = _differences(*made), after.consumed(state.step)
    if consumed != state.consumed_samples:
        differences.append(
            f"step {state.step} ends with {consumed:,} samples, by batches and skipped samples"
        )
    if not differences:
        return None
    more = [f"and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
    remedy = f"Leave phases that have begun as the run's config.yaml has them, and change those after step {state.step}"
    return Change("the plan", "; ".join(differences[:_SHOWN] + more), remedy)


class _Begun(NamedTuple):
    """A phase that has begun."""

    first_step: int
    first_sample: int
    places: list[int]  # of each corpus in a block of samples
    weights: list[float]  # of which they are made
    recipe: dict[str, Any]  # dotted key -> value


def _begun(phase_plan: PhasePlan, step: int, has_phases: bool) -> list[_Begun]:
    """The phases that begin before a step."""
    begun = []
    for first, sample, config in zip(
        phase_plan.first_steps, phase_plan.first_samples, phase_plan.configs, strict=False
    ):
        # Phase 0 counts as begun before the first step too.
        if first < max(step, 1):
            weights = weights_of(config.data.train, config.objective_choices)
            places = quotas(weights).tolist()
            while not places[-1]:
                places.pop()  # of a corpus added later
            begun.append(_Begun(first, sample, places, weights, _recipe(config, has_phases)))
    return begun


def _recipe(config: Config, has_phases: bool) -> dict[str, Any]:
    """What a phase can set and its samples, their loss and its gradient depend on, but the weights of corpora.

    Without phases a change of most of this is an event (continuation.py), since no phase could say from when it holds.
    """
    recipe = {"data.sequence_length": config.data.sequence_length}
    if not has_phases:
        return recipe
    choices = config.objective_choices
    total = sum(choice.weight for choice in choices)
    tree = {
        "objectives": {choice.name: round(choice.weight / total, 9) for choice in choices},
        "batch": {"global_batch_size": config.batch.global_batch_size, "ramp": to_tree(config.batch.ramp)},
        "training": {"loss_weights": dict(config.training.loss_weights)},
        "model": {"embedding_gradient_shrink": config.model.embedding_gradient_shrink},
        **{choice.name: to_tree(choice.section) for choice in choices},
    }
    return {**recipe, **dict(leaves(tree))}


def _differences(before: Sequence[_Begun], after: Sequence[_Begun]) -> list[str]:
    """What phases that have begun would have made otherwise, with both values."""
    differences: list[str] = []
    for number, (was, now) in enumerate(itertools.zip_longest(before, after)):
        if was is None or now is None:
            has, had = ("has" if it is not None else "has not" for it in (now, was))
            return [*differences, f"phases[{number}] {has} begun by these settings, and {had} in the run"]
        # From here on the phases do not correspond, and more differences would only confuse.
        if was.first_step != now.first_step:
            return [
                *differences,
                f"phases[{number}] begins after step {now.first_step}, and began after step {was.first_step}",
            ]
        changes = [
            f"{key}: {was.recipe.get(key)} -> {now.recipe.get(key)}"
            for key in sorted({*was.recipe, *now.recipe})
            if was.recipe.get(key) != now.recipe.get(key) and _is_shared(key, was, now)
        ]
        if was.places != now.places:
            old, new = (", ".join(f"{weight:g}" for weight in its.weights) for its in (was, now))
            changes.append(f"weights of data.train: {old} -> {new}")
        differences += [f"phases[{number}] has begun with {change}" for change in changes]
    return differences


def _is_shared(key: str, was: _Begun, now: _Begun) -> bool:
    """Whether a key is not of an objective that only one of two recipes has, which `objectives` tells."""
    name = f"objectives.{key.partition('.')[0]}"
    return (name in was.recipe) == (name in now.recipe)


def _missing(state: TrainerState, old: Sequence[Any], new: Sequence[Any]) -> list[str]:
    """The corpora of the checkpoint that are in the list no more, by their names then."""
    named = state.config.get("data", {}).get("train") or []
    names = [corpus.get("prefix") for corpus in named] if len(named) == len(old) else old
    return [str(name) for name, its in zip(names, old, strict=True) if its not in new]


def identity_there(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """The contents of a corpus as a checkpoint has them: tokens, those of the decoder, entities."""
    return entry.get("sha256"), entry.get("decoder_sha256"), entry.get("entities_sha256")


def identity_here(corpus: CorpusConfig) -> tuple[Any, ...]:
    """The same as they are now. Raises DataError."""
    wanted = ((corpus.prefix, ".bin"), (corpus.decoder_prefix, ".bin"), (corpus.prefix, ".ent"))
    entries = [name and read_manifest(name)["files"].get(suffix) for name, suffix in wanted]
    return tuple(entry and identity(entry) for entry in entries)
