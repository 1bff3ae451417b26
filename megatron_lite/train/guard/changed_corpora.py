"""Effects of a changed `data.train` on a run's samples, reported before training continues.

A sample's position in its corpus follows from its number and the current weights (data_utils/samples/mixture.py), as if
they had held from the start. So after a change of weights a corpus continues before or after the position that it had
reached: samples are repeated or left out. A corpus's index in the list is the key of its random order.

Phases say when weights change, so that nothing is repeated or left out. What a checkpoint's phases have made must then
be what the new phases would have made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.base.checksums import identity
from data_utils.base.errors import CheckpointError
from data_utils.base.random_streams import derive_seed
from data_utils.base.settings import build
from data_utils.dataset.manifest import read_manifest
from data_utils.samples.config import CorpusConfig
from data_utils.samples.loader import weights_of
from data_utils.samples.mixture import quotas, samples_of_corpora
from megatron_lite.checkpoint.state import TrainerState
from megatron_lite.config.plan import Plan
from megatron_lite.config.tree import Config

_SHOWN = 4  # corpora in a message


def require_same_corpora(config: Config, path: Path, state: TrainerState) -> None:
    """Raise CheckpointError if `data.train` is not that of the checkpoint at `path`, unless that is accepted."""
    change = changed_corpora(config, state)
    if change is None or config.checkpoint.accept_changed_data:
        return
    raise CheckpointError(
        f"data.train is not that of {path}, by which its {state.consumed_samples:,} samples were numbered: {change}. "
        f"Set corpora and weights as they were, and others in a phase after step {state.step}; or begin at step 0 "
        f"in another run.directory with checkpoint.initialize_from={path}; or accept it with "
        "checkpoint.accept_changed_data=true."
    )


def changed_corpora(config: Config, state: TrainerState) -> str | None:
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
    weights = [entry["weight"] for entry in before], weights_of(after, config.objective_choices)
    if old == new and np.array_equal(quotas(weights[0]), quotas(weights[1])):
        return None
    seed = derive_seed(config.training.seed, "train")
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
    return "; ".join(changes[:_SHOWN] + more) if changes else None


def _changed_phases(
    config: Config, state: TrainerState, old: Sequence[Any], new: Sequence[Any]
) -> str | None:
    """As `changed_corpora`, where phases are planned. Args: old, new: identities of the corpora."""
    recorded: Config = build(Config, state.config)
    regions = recorded.data.region, config.data.region
    if regions[0] != regions[1]:
        return f"data.region is {regions[1]}, and was {regions[0]}"
    before, after = recorded.plan, config.plan
    consumed = after.consumed(state.step)
    if consumed != state.consumed_samples:
        return f"with these phases, batches and skipped samples step {state.step} would end with {consumed:,} samples"
    made = [list(_made(plan, state.step)) for plan in (before, after)]
    read, seed = np.zeros(len(old), np.int64), derive_seed(config.training.seed, "train")
    ends = [first for _, first, _ in made[0][1:]] + [consumed]
    for number, ((_, first, (_, *places)), end) in enumerate(zip(made[0], ends, strict=True)):
        weights = [*places, *[0] * (len(old) - len(places))]
        read += samples_of_corpora(seed, weights, end - first, number)
    for place, count in enumerate(read.tolist()):
        if count and old[place : place + 1] != new[place : place + 1]:
            name = recorded.data.train[place].prefix
            return f"{name}, of which {count:,} samples are read, is no longer at index {place} of data.train"
    for number, (was, now) in enumerate(itertools.zip_longest(*made)):
        if was != now:
            return (
                f"phases[{number}] makes other samples before step {state.step}; only what follows may change"
            )
    return None


def _made(plan: Plan, step: int) -> Iterator[tuple[int, int, list[int]]]:
    """First step, first sample, length and places of corpora in a block, of the phases that begin before a step."""
    for first, sample, config in zip(plan.first_steps, plan.first_samples, plan.configs, strict=False):
        if first < max(step, 1):
            places = quotas(weights_of(config.data.train, config.objective_choices)).tolist()
            while not places[-1]:
                places.pop()  # of a corpus added later
            yield first, sample, [config.data.sequence_length, *places]


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
