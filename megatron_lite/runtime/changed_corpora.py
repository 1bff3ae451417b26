"""Effects of a changed `data.train` on a run's samples, reported before training continues.

A sample's position in its corpus follows from its number and the current weights (data_utils/loader/mixture.py), as if
they had held from the start. So after a change of weights a corpus continues before or after the position that it had
reached: samples are repeated or skipped. A corpus's index in the list is the key of its random order.

Phases say when weights change, so that nothing is repeated or skipped. The phases that have begun by the checkpoint's
step must then be the same in the checkpoint's configuration and in the new one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_utils.common.checksums import identity
from data_utils.common.errors import CheckpointError
from data_utils.common.seeds import derive_seed
from data_utils.common.settings import build, leaves, to_tree
from data_utils.dataset.manifest import read_manifest
from data_utils.loader.config import CorpusConfig
from data_utils.loader.extent_ahead import mixtures_ahead
from data_utils.loader.loader import corpus_weights
from data_utils.loader.mixture import quotas, samples_of_corpora
from megatron_lite.checkpoint.trainer_state import TrainerState
from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.config.tree import Config

_MAX_SHOWN = 4  # corpora or settings in a message


class Change(NamedTuple):
    """A difference from a checkpoint by which samples are repeated or skipped."""

    setting: str
    effect: str
    remedy: str  # a sentence without its end


def require_same_corpora(config: Config, path: Path, state: TrainerState) -> None:
    """Raise CheckpointError if seed or `data.train` is not the checkpoint's (at `path`), unless that is accepted."""
    change = changed_seed(config, state) or changed_corpora(config, state)
    if change is None or config.checkpoint.accept_changed_data:
        return
    raise CheckpointError(
        f"{change.setting} differs from {path}, which numbers its {state.consumed_samples:,} samples by it: "
        f"{change.effect}. {change.remedy}; or start at step 0 in another run.directory with "
        f"checkpoint.initialize_from={path}; or accept the change with checkpoint.accept_changed_data=true."
    )


def changed_seed(config: Config, state: TrainerState) -> Change | None:
    """The seed numbers samples and draws dropout, also in fine-tuning."""
    old, new = state.config.get("training", {}).get("seed"), config.training.seed
    # Before the first sample no number has been used, so nothing can be repeated or skipped.
    if old == new or not state.consumed_samples:
        return None
    effect = f"it was {old} and is now {new}; another seed repeats and skips samples and draws other dropout"
    return Change("training.seed", effect, f"Set training.seed={old}")


def changed_corpora(config: Config, state: TrainerState) -> Change | None:
    """Differences between the corpora of a checkpoint and of `config`, with their effect; None: the samples are equal.

    Raises: DataError for a corpus without a manifest.
    """
    before = state.data or []
    if config.task is not None or not before or any("weight" not in entry for entry in before):
        return None  # the checkpoint was not trained here, or on a task
    after = config.data.train
    old, new = [recorded_identity(entry) for entry in before], [current_identity(corpus) for corpus in after]
    regions = state.config.get("data", {}).get("region", 0), config.data.region
    if config.phases or state.config.get("phases") or any(regions):
        return _changed_phases(config, state, old, new)
    # Weights count as they round to a number of samples in each block: equal numbers make equal samples.
    old_weights = [entry["weight"] for entry in before]
    (new_weights,) = phase_weights(config)
    if old == new and np.array_equal(quotas(old_weights), quotas(new_weights)):
        return None
    seed = derive_seed(config.training.seed, "train")
    # How many samples of each corpus are trained with the old weights, and at which one the new weights continue.
    trained, starts = (
        samples_of_corpora(seed, weights, state.consumed_samples).tolist()
        for weights in (old_weights, new_weights)
    )
    effects = []
    for index, corpus in enumerate(after):
        name, start = corpus.prefix, starts[index]
        if old[index : index + 1] == [new[index]]:
            was, now = (f"{weights[index]:g} of {sum(weights):g}" for weights in (old_weights, new_weights))
            name += f" (weight {was} -> {now})"
            if start < trained[index]:
                effects.append(f"{name} would repeat {trained[index] - start:,} samples")
            elif start > trained[index]:
                effects.append(f"{name} would skip {start - trained[index]:,} samples")
        elif new[index] in old:
            count = f"{trained[old.index(new[index])]:,}"
            effects.append(
                f"{name} has another index in data.train and so another order, which may repeat its {count} samples"
            )
        else:
            effects.append(f"{name} is new and would skip its first {start:,} samples")
    effects += [f"{name} is removed" for name in _removed(state, old, new)]
    if not effects:
        return None
    change = _corpora_change(_shortened(effects), state)
    return change._replace(remedy=_remedy_of_caps(state, [old_weights]) or change.remedy)


def _shortened(effects: Sequence[str]) -> str:
    more = [f"and {len(effects) - _MAX_SHOWN} more"] if len(effects) > _MAX_SHOWN else []
    return "; ".join([*effects[:_MAX_SHOWN], *more])


def _remedy_of_caps(state: TrainerState, weights: Sequence[Sequence[float]]) -> str | None:
    """What helps where the length of the run has made weights, so that the corpora are not to blame; else None.

    Args: weights: [phases][corpora], of the phases that have begun.
    """
    train = [build(CorpusConfig, corpus) for corpus in state.config.get("data", {}).get("train") or []]
    if all(corpus.max_epochs is None for corpus in train):
        return None
    remedy = "Restore the number of steps and the batches, by which max_epochs changes the weights"
    if any(corpus.objective for corpus in train):
        return remedy  # weights of pairs are shares among their objective's corpora
    if state.config.get("phases"):
        named = [
            ", ".join(f"{corpus.key}: {weight:.9g}" for corpus, weight in zip(train, each, strict=True))
            for each in weights
        ]
        kept = "; ".join(f"phases[{number}].weights={{{each}}}" for number, each in enumerate(named))
    else:
        kept = f"weight: {', '.join(f'{weight:.9g}' for weight in weights[0])} in data.train"
    return f"{remedy}, or keep the weights for any number of steps: {kept}, without tokens and max_epochs"


def _corpora_change(effect: str, state: TrainerState) -> Change:
    remedy = f"Restore the former corpora and weights, and set new ones in a phase after step {state.step}"
    return Change("data.train", effect, remedy)


def _changed_phases(
    config: Config, state: TrainerState, old: Sequence[Any], new: Sequence[Any]
) -> Change | None:
    """As `changed_corpora`, where phases are planned. Args: old, new: identities of the corpora."""
    recorded: Config = build(Config, state.config)
    old_region, new_region = recorded.data.region, config.data.region
    if old_region != new_region:
        effect = f"it was {old_region} and is now {new_region}"
        return Change("data.region", effect, f"Set data.region={old_region}")
    has_phases = bool(recorded.phases or config.phases)
    old_phases, new_phases = (
        _begun_phases(each.phase_plan, weights, state.step, has_phases)
        for each, weights in ((recorded, _recorded_weights(recorded, state)), (config, phase_weights(config)))
    )
    seed = derive_seed(config.training.seed, "train")
    trained = np.zeros(len(old), np.int64)
    # Each phase numbers its samples from its own first one, so they are counted phase by phase.
    ends = [phase.first_sample for phase in old_phases[1:]] + [state.consumed_samples]
    for number, (phase, end) in enumerate(zip(old_phases, ends, strict=True)):
        weights = [*phase.quotas, *[0] * (len(old) - len(phase.quotas))]
        trained += samples_of_corpora(seed, weights, end - phase.first_sample, number)
    for index, count in enumerate(trained.tolist()):
        if count and old[index : index + 1] != new[index : index + 1]:
            name = recorded.data.train[index].prefix
            effect = f"{name}, with {count:,} trained samples, is no longer at index {index} of data.train"
            return _corpora_change(effect, state)
    differences, consumed = _differences(old_phases, new_phases), config.phase_plan.consumed(state.step)
    if consumed != state.consumed_samples:
        differences.append(
            f"step {state.step} now ends with {consumed:,} samples, because batches or skipped samples changed"
        )
    if not differences:
        return None
    remedy = (
        "Keep the phases that have begun as in the run's config.yaml, and change only phases after step "
        f"{state.step}"
    )
    of_caps = _remedy_of_caps(state, [phase.weights for phase in old_phases])
    return Change("the phase plan", _shortened(differences), of_caps or remedy)


class _BegunPhase(NamedTuple):
    first_step: int
    first_sample: int
    quotas: list[int]  # samples of each corpus in a block
    weights: list[float]  # from which the quotas are rounded
    settings: dict[str, Any]  # dotted key -> value


def phase_weights(config: Config) -> list[list[float]]:
    """The weights of each phase, in samples. Raises DataError where they depend on corpora that are not here."""
    phase_plan = config.phase_plan
    if not config.data.has_caps and not config.data.has_token_shares:
        return [corpus_weights(each.data.train, each.objective_choices) for each in phase_plan.configs]
    seed = config.training.seed
    mixtures = mixtures_ahead(config.data, seed, config.objective_choices, phase_plan.samples)
    return [[weight for _, weight in mixture.corpora] for mixture in mixtures]


def _recorded_weights(recorded: Config, state: TrainerState) -> list[list[float]]:
    """The weights of each phase that a checkpoint records, which are settings where it records none."""
    entries = [
        entry.get("phase_weights", None if recorded.phases else [entry["weight"]])
        for entry in state.data or []
    ]
    return phase_weights(recorded) if None in entries else [list(each) for each in zip(*entries, strict=True)]


def _begun_phases(
    phase_plan: PhasePlan, phase_weights: Sequence[Sequence[float]], step: int, has_phases: bool
) -> list[_BegunPhase]:
    """The phases that begin before a step."""
    begun = []
    starts = zip(
        phase_plan.first_steps, phase_plan.first_samples, phase_plan.configs, phase_weights, strict=False
    )
    for first_step, first_sample, config, weights in starts:
        # Phase 0 counts as begun before the first step too.
        if first_step < max(step, 1):
            corpus_quotas = quotas(weights).tolist()
            while not corpus_quotas[-1]:
                corpus_quotas.pop()  # of a corpus that is added later
            settings = _sample_settings(config, has_phases)
            begun.append(_BegunPhase(first_step, first_sample, corpus_quotas, list(weights), settings))
    return begun


def _sample_settings(config: Config, has_phases: bool) -> dict[str, Any]:
    """The settings that a phase can change, and on which samples, their loss or its gradient depend.

    Weights of corpora are left out. Without phases a change of most of these settings is an event (continuation.py),
    since no phase could say from when it holds.
    """
    settings = {"data.sequence_length": config.data.sequence_length}
    if not has_phases:
        return settings
    choices = config.objective_choices
    total = sum(choice.weight for choice in choices)
    tree = {
        "objectives": {choice.name: round(choice.weight / total, 9) for choice in choices},
        "batch": {"global_batch_size": config.batch.global_batch_size, "ramp": to_tree(config.batch.ramp)},
        "training": {"loss_weights": dict(config.training.loss_weights)},
        "model": {"embedding_gradient_shrink": config.model.embedding_gradient_shrink},
        **{choice.name: to_tree(choice.section) for choice in choices},
    }
    return {**settings, **dict(leaves(tree))}


def _differences(before: Sequence[_BegunPhase], after: Sequence[_BegunPhase]) -> list[str]:
    """How phases that have begun differ, with both values."""
    differences: list[str] = []
    for number, (was, now) in enumerate(itertools.zip_longest(before, after)):
        if was is None:
            return [*differences, f"phases[{number}] has begun by the new settings, but not in the run"]
        if now is None:
            return [*differences, f"phases[{number}] has begun in the run, but not by the new settings"]
        # From here on the phases do not correspond, and more differences would only confuse.
        if was.first_step != now.first_step:
            starts = f"begins after step {now.first_step}, but began after step {was.first_step}"
            return [*differences, f"phases[{number}] {starts}"]
        changes = [
            f"{key}: {was.settings.get(key)} -> {now.settings.get(key)}"
            for key in sorted({*was.settings, *now.settings})
            if was.settings.get(key) != now.settings.get(key) and _in_both_or_neither(key, was, now)
        ]
        if was.quotas != now.quotas:
            old, new = (", ".join(f"{weight:g}" for weight in phase.weights) for phase in (was, now))
            changes.append(f"weights of data.train: {old} -> {new}")
        differences += [f"phases[{number}] has begun and changes {change}" for change in changes]
    return differences


def _in_both_or_neither(key: str, was: _BegunPhase, now: _BegunPhase) -> bool:
    """Whether both phases train the objective of a key, or neither does. Else the key `objectives` has the change."""
    name = f"objectives.{key.partition('.')[0]}"
    return (name in was.settings) == (name in now.settings)


def _removed(state: TrainerState, old: Sequence[Any], new: Sequence[Any]) -> list[str]:
    """The names that corpora of the checkpoint had, which are no longer in the list."""
    entries = state.config.get("data", {}).get("train") or []
    names = [entry.get("prefix") for entry in entries] if len(entries) == len(old) else old
    return [str(name) for name, contents in zip(names, old, strict=True) if contents not in new]


def recorded_identity(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """The contents of a corpus as a checkpoint records them: checksums of tokens, decoder tokens, entities."""
    return entry.get("sha256"), entry.get("decoder_sha256"), entry.get("entities_sha256")


def current_identity(corpus: CorpusConfig) -> tuple[Any, ...]:
    """The same of a corpus as it is now. Raises DataError."""
    wanted = ((corpus.prefix, ".bin"), (corpus.decoder_prefix, ".bin"), (corpus.prefix, ".ent"))
    entries = [prefix and read_manifest(prefix)["files"].get(suffix) for prefix, suffix in wanted]
    return tuple(entry and identity(entry) for entry in entries)
