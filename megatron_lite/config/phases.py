"""The list `phases`: what changes in the course of a run, and from which step on.

Each phase is a configuration of its own: the run's, with what the phase sets in place of it. `Plan` says which one
holds at a step. Both are pure functions of the configuration, so that no state is kept of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from data_utils.base.errors import ConfigError
from data_utils.base.setting_files import shown
from data_utils.base.settings import (
    build,
    check,
    checked,
    inline_sections,
    merge,
    setting,
    setting_mapping,
    to_tree,
)
from data_utils.objectives import OBJECTIVES
from data_utils.samples.config import PhaseSamples
from megatron_lite.config.schedule import ScheduleConfig
from megatron_lite.config.timetable import Stage, Timetable, ramp_stages

Config = Any  # that of tree.py, which imports this file
SHORTEST = 32  # tokens: empty positions of three borders and what two documents cost are 20 in a row
_LENGTHS = ("steps", "samples", "tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
@checked("phases")
class PhaseConfig:
    steps: int | None = setting(
        None, "length in optimizer steps; the last phase may have no length: to training.steps", at_least=1
    )
    samples: int | None = setting(None, "length in samples instead, rounded up to whole steps", at_least=1)
    tokens: int | None = setting(
        None, "length in tokens instead: sequence_length for each sample", at_least=1
    )
    sequence_length: int | None = setting(None, "instead of data.sequence_length", at_least=16)
    row_length: int | None = setting(
        None, "instead of data.row_length, null = derived where a sequence_length is given", at_least=1
    )
    weights: dict[str, Any] = setting_mapping("name of a corpus -> its weight; not named = no part")
    batch: dict[str, Any] = setting_mapping("what of the section batch differs")
    objectives: dict[str, Any] = setting_mapping("instead of the run's objectives, among which they must be")
    loss_weights: dict[str, Any] = setting_mapping("instead of training.loss_weights")
    embedding_gradient_shrink: float | None = setting(None, "instead of that of model", above=0, at_most=1)
    objective_settings: dict[str, Any] = inline_sections(
        OBJECTIVES, lambda name: dict[str, Any], "what of it differs"
    )

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _LENGTHS if getattr(self, name) is not None}
        check(
            len(given) <= 1,
            f"a phase has {' and '.join(f'{name} {value}' for name, value in given.items())}; give one of them.",
        )

    @property
    def has_length(self) -> bool:
        return any(getattr(self, name) is not None for name in _LENGTHS)

    def settings(self, tree: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """A configuration's tree with this phase's settings. Args: names: of its training corpora."""
        merged = merge(tree, {"phases": [], "batch": self.batch, **self.objective_settings})
        if self.weights:
            train = zip(tree["data"]["train"], names, strict=True)
            with_weights = [{**corpus, "weight": self.weights.get(name, 0)} for corpus, name in train]
            merged["data"] = {**merged["data"], "train": with_weights}
        if self.sequence_length is not None or self.row_length is not None:
            length = self.sequence_length or tree["data"]["sequence_length"]
            merged["data"] = {**merged["data"], "sequence_length": length, "row_length": self.row_length}
        if self.objectives:
            merged["objectives"], merged["objective_starts"] = self.objectives, {}
        if self.loss_weights:
            merged["training"] = {**merged["training"], "loss_weights": self.loss_weights}
        if self.embedding_gradient_shrink is not None:
            merged["model"] = {
                **merged["model"],
                "embedding_gradient_shrink": self.embedding_gradient_shrink,
            }
        return merged

    def __str__(self) -> str:
        settings = {key: value for key, value in to_tree(self).items() if value and key not in _LENGTHS}
        return ", ".join(f"{key} {shown(value)}" for key, value in settings.items()) or "as the run"


class RatePart(NamedTuple):
    """A part of the schedule. Its steps are begin + 1 to end, counted from 1; rates are factors of optimizer.lr."""

    begin: int
    end: int
    kind: str
    start_rate: float
    end_rate: float

    def factor(self, step: int) -> float:
        """After the end: that of the end."""
        if self.kind == "inverse_sqrt":
            return max(self.end_rate, self.start_rate * math.sqrt(self.begin / step))
        x = min(1.0, (step - self.begin) / (self.end - self.begin))
        way = {
            "constant": 0.0,
            "linear": x,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * x)),
            "1-sqrt": math.sqrt(x),
            "exponential": 2.0 * (1.0 - 0.5**x),
        }
        return self.start_rate + (self.end_rate - self.start_rate) * way[self.kind]


class Plan:
    """The phases of a run: configuration, steps and samples of each. A run without `phases` is one phase.

    Raises: ConfigError for phases that contradict the run or themselves.
    """

    def __init__(self, config: Config) -> None:
        steps = config.training.steps
        self.phases = config.phases
        self.configs = [_of_phase(config, number, phase) for number, phase in enumerate(config.phases)] or [
            config
        ]
        self.stages: list[Stage] = []
        self.first_steps = [0]  # of each phase, and the end of the run: the steps before it
        for number, of_phase in enumerate(self.configs):
            phase = config.phases[number] if config.phases else PhaseConfig()
            is_last = number == len(self.configs) - 1
            check(
                phase.has_length or is_last,
                f"phases[{number}] has no length, and phases follow it; give its steps, samples or tokens.",
            )
            stages = list(_stages(of_phase, phase, steps - self.first_steps[-1]))
            self.stages += stages
            self.first_steps.append(self.first_steps[-1] + sum(int(stage.steps) for stage in stages))
            check(
                len(stages) > 0,
                f"phases[{number}] has no length, and the phases before it take all of training.steps ({steps:,}); "
                "raise that, or remove the phase.",
            )
        ends = self.first_steps[-1]
        check(
            ends == steps,
            f"the phases have {ends:,} steps, and training.steps is {steps:,}; set it to {ends:,}, or leave out the "
            "length of the last phase.",
        )
        self._check_lengths(config)
        micro_batches = {each.batch.micro_batch_size for each in self.configs} | {
            config.batch.micro_batch_size
        }
        check(
            len(micro_batches) == 1 or config.parallel.pipeline_parallel_size == 1,
            f"the phases have micro-batches of {', '.join(map(str, sorted(micro_batches)))} samples, and the run has "
            "pipeline stages, which send each other one size; set batch.micro_batch_size once, outside phases.",
        )
        self.timetable = Timetable(self.stages, config.events)
        self.parts = self._parts(config.schedule)
        # Samples skipped when a phase begins count as its own.
        self.first_samples = [self.timetable.consumed(step) for step in self.first_steps[:-1]]

    def _check_lengths(self, config: Config) -> None:
        """Raise ConfigError for lengths and regions that do not go with each other or with the run."""
        lengths = {each.data.sequence_length for each in self.configs}
        rows = {each.row_length for each in self.configs}
        self.has_streams = len(lengths) > 1 or config.data.region > 0
        whole = [
            choice.name
            for each in self.configs
            for choice in each.objective_choices
            if choice.section.whole_documents
        ]
        check(
            not self.has_streams or not whole,
            f"{whole and whole[0]} has rows of whole documents, which are packed for one sequence_length; leave it out "
            "of phases, and data.region at 0.",
        )
        check(
            not self.has_streams or min(lengths) >= SHORTEST,
            f"the phases have samples of {min(lengths)} tokens; where the length changes or data.region is set, give "
            f"{SHORTEST} or more, so that every row has text.",
        )
        check(
            len(rows) == 1 or config.parallel.pipeline_parallel_size == 1,
            f"the phases have rows of {', '.join(map(str, sorted(rows)))} tokens, and the run has pipeline stages, "
            f"which send each other one size; set data.row_length ({max(rows)}), or train without stages.",
        )

    def _parts(self, schedule: ScheduleConfig) -> list[RatePart]:
        """The parts of the schedule in steps. Raises: ConfigError for parts that are longer than the run."""
        parts: list[RatePart] = []
        begin, rate = 0, 0.0
        for part in schedule.parts:
            end = (
                begin + part.steps if part.steps is not None else self._after_tokens(begin, part.tokens or 0)
            )
            start = rate if part.start is None else part.start
            parts.append(RatePart(begin, end, part.kind, start, start if part.end is None else part.end))
            begin, rate = end, parts[-1].factor(end)
        check(
            begin <= self.first_steps[-1],
            f"schedule.parts have {begin:,} steps, and training.steps is {self.first_steps[-1]:,}; shorten them.",
        )
        return parts

    def _after_tokens(self, step: int, tokens: int) -> int:
        """The first step before which `tokens` tokens were used since `step`."""
        begin = per_step = 0
        for stage in self.stages:
            per_step = stage.batch_size * self.config(begin).data.sequence_length
            begin += int(stage.steps)
            steps = min(max(0, begin - step), -(-tokens // per_step))
            step, tokens = step + steps, max(0, tokens - steps * per_step)
        return step - -tokens // per_step  # beyond the run as at its end

    def learning_rate(self, step: int) -> float | None:
        """The factor of optimizer.lr for a step, counted from 1; None without schedule.parts."""
        if not self.parts:
            return None
        return next((part for part in self.parts if step <= part.end), self.parts[-1]).factor(step)

    @property
    def samples(self) -> list[PhaseSamples]:
        """All that makes the samples of each phase; empty where the run has neither phases nor regions."""
        if not self.phases and not self.has_streams:
            return []
        each = zip(self.first_samples, self.configs, strict=True)
        return [PhaseSamples(first, config.data, config.objective_choices) for first, config in each]

    def number(self, step: int) -> int:
        """The phase of a step, from 0. Args: step: the steps before it, as in all methods."""
        return max(0, bisect_right(self.first_steps, step, hi=len(self.configs)) - 1)

    def config(self, step: int) -> Config:
        """The configuration that holds at a step."""
        return self.configs[self.number(step)]

    def batch_size(self, step: int) -> int:
        return self.timetable.batch_size(step)

    @property
    def largest_batch(self) -> int:
        return max(stage.batch_size for stage in self.stages)

    def in_force(self, step: int) -> list[str]:
        """The phase of a step, in words, if the run has phases."""
        number = self.number(step)
        return [f"phase {number + 1}: {self.phases[number]}"] if self.phases else []

    def steps_left(self, step: int) -> float:
        """The rest of the run after `step` steps, one or more, in steps with as many row tokens as the last of them."""
        begin = left = 0
        for stage in self.stages:
            per_step = stage.batch_size * self.config(begin).row_length
            begin += int(stage.steps)
            left += per_step * min(max(0, begin - step), int(stage.steps))
        return left / (self.batch_size(step - 1) * self.config(step - 1).row_length)

    def lines(self) -> list[str]:
        """Steps, batches and settings of each phase, in words, if the run has phases."""
        lines = []
        for number, phase in enumerate(self.phases):
            first, end = self.first_steps[number : number + 2]
            sizes = sorted({self.batch_size(first), self.batch_size(end - 1)})
            lines.append(
                f"phase {number + 1}: steps {first + 1:,} to {end:,}, "
                f"batches of {' to '.join(map(str, sizes))}: {phase}"
            )
        return lines

    def alone(self) -> list[Config]:
        """Each phase as a run of its own, without a ramp, to be estimated."""
        runs = []
        for config, first, end in zip(self.configs, self.first_steps, self.first_steps[1:], strict=False):
            training = replace(config.training, steps=end - first, stop_after_step=None)
            batch, schedule = replace(config.batch, ramp=None), type(config.schedule)()
            changes = {"training": training, "batch": batch, "schedule": schedule}
            runs.append(replace(config, phases=(), profiler=type(config.profiler)(), **changes))
        return runs

    def require_ranks(self, data_parallel_size: int) -> None:
        """Raise ConfigError unless every batch of the run is whole micro-batches on each rank."""
        for config, begin, end in zip(self.configs, self.first_steps, self.first_steps[1:], strict=False):
            per_pass = config.batch.micro_batch_size * data_parallel_size
            sizes = {self.batch_size(step) for step in self._first_of_sizes(begin, end)}
            for size in sorted(size for size in sizes if size % per_pass):
                raise ConfigError(
                    f"batch.global_batch_size ({size}) after step {begin} must be a multiple of batch.micro_batch_size "
                    f"({config.batch.micro_batch_size}) x data-parallel ranks ({data_parallel_size}) = {per_pass}; "
                    "start a number of processes that divides every batch of the run, or change batch."
                )

    def _first_of_sizes(self, begin: int, end: int) -> Iterator[int]:
        step = 0
        for stage in self.stages:
            if begin <= step < end:
                yield step
            step += int(stage.steps)


def _of_phase(config: Config, number: int, phase: PhaseConfig) -> Config:
    """The run's configuration with the settings of a phase. Raises: ConfigError naming the phase."""
    names = [corpus.key for corpus in config.data.train]
    for name in phase.weights:
        check(
            names.count(name) == 1,
            f"phases[{number}].weights names {shown(name)}, which {'no' if name not in names else 'more than one'} "
            f"corpus of data.train is called; name one of {', '.join(names)}, or give corpora a name.",
        )
    run = [choice.name for choice in config.objective_choices]
    for name in phase.objectives:
        check(
            name in run,
            f"phases[{number}].objectives names {shown(name)}, but the model is built for {', '.join(run)}; add it to "
            "objectives, or remove it here.",
        )
    try:
        made: Config = build(type(config), phase.settings(to_tree(config), names))
    except ConfigError as error:
        raise ConfigError(f"phases[{number}]: {error}") from None
    idle = phase.objective_settings.keys() - {choice.name for choice in made.objective_choices}
    check(
        not idle,
        f"phases[{number}] sets {', '.join(sorted(idle))}, which has no part in the phase; add it to objectives, or "
        "remove it here.",
    )
    return made


def _stages(config: Config, phase: PhaseConfig, rest: int) -> Iterator[Stage]:
    """Batch sizes of a phase. Args: rest: steps of the run from its beginning on.

    Raises: ConfigError for a phase that ends within its ramp.
    """
    batch, ramp = config.batch, config.batch.ramp
    every = [Stage(math.inf, batch.global_batch_size)]
    if ramp is not None:
        every = list(ramp_stages(batch.global_batch_size, ramp.start, ramp.by, ramp.samples))
    samples: float = math.inf if phase.samples is None else phase.samples
    if phase.tokens is not None:
        samples = -(-phase.tokens // config.data.sequence_length)
    left: float = phase.steps if phase.steps is not None else math.inf if samples < math.inf else max(rest, 0)
    for stage in every:
        steps = min(stage.steps, left, -(-samples // stage.batch_size) if samples < math.inf else math.inf)
        if steps:
            yield Stage(int(steps), stage.batch_size)
        left, samples = left - steps, max(0, samples - steps * stage.batch_size)
        if not (left and samples) and stage is not every[-1]:
            raise ConfigError(
                f"a phase ends with batches of {stage.batch_size}, before batch.ramp has reached "
                f"{batch.global_batch_size}; make the phase longer, or ramp.samples smaller."
            )
