"""The plan of a run whose settings change: phases, a ramp of the batch, parts of the schedule, skipped samples.

Each phase is a configuration of its own: the run's, with what the phase sets in place of it. The plan is a pure
function of the configuration, so that no state is kept of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, check, to_tree
from data_utils.loader.config import PhaseSamples
from megatron_lite.config.phase_plan import Config, PhasePlan
from megatron_lite.config.phases import PhaseConfig
from megatron_lite.config.schedule import ScheduleConfig
from megatron_lite.config.timetable import Stage, Timetable, ramp_stages

SHORTEST = 32  # tokens: empty positions of three borders and what two documents cost are 20 in a row


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


class VaryingPhasePlan(PhasePlan):
    """The phases of a run: configuration, steps and samples of each. A run without `phases` is one phase.

    Raises: ConfigError for phases that contradict the run or themselves.
    """

    def __init__(self, config: Config) -> None:
        steps = config.training.steps
        self.phases = config.phases
        # Each phase is a whole configuration, so that every rule holds for every phase, and no setting has a
        # second reader.
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
                f"phases[{number}] has no length, which only the last phase may leave out; set its steps, samples "
                "or tokens.",
            )
            stages = list(_stages(of_phase, phase, steps - self.first_steps[-1]))
            self.stages += stages
            self.first_steps.append(self.first_steps[-1] + sum(int(stage.steps) for stage in stages))
            check(
                len(stages) > 0,
                f"phases[{number}] has no steps left: the phases before it take all of training.steps "
                f"({steps:,}); raise training.steps, or remove the phase.",
            )
        ends = self.first_steps[-1]
        check(
            ends == steps,
            f"the phases have {ends:,} steps in total, but training.steps is {steps:,}; set it to {ends:,}, "
            "or leave out the length of the last phase.",
        )
        self._check_lengths(config)
        # With the run's own, since the pipeline is made from it.
        micro_batches = {each.batch.micro_batch_size for each in self.configs} | {
            config.batch.micro_batch_size
        }
        check(
            len(micro_batches) == 1 or config.parallel.pipeline_parallel_size == 1,
            f"the phases have micro-batches of {', '.join(map(str, sorted(micro_batches)))} samples, but "
            "pipeline stages need a single size; set batch.micro_batch_size once, outside phases.",
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
            if choice.section.whole_documents or choice.section.reads_beside == "labels"
        ]
        check(
            not self.has_streams or not whole,
            f"{whole and whole[0]} packs whole documents for one sequence_length; remove it from the phases, "
            "and set data.region to 0.",
        )
        check(
            not self.has_streams or min(lengths) >= SHORTEST,
            f"the phases have samples of {min(lengths)} tokens; with phases that change sequence_length, or "
            f"with data.region, samples need at least {SHORTEST} tokens.",
        )
        check(
            len(rows) == 1 or config.parallel.pipeline_parallel_size == 1,
            f"the phases have sequences of {', '.join(map(str, sorted(rows)))} tokens, but pipeline stages "
            f"need a single size; set data.row_length to {max(rows)}, or pipeline_parallel_size to 1.",
        )

    def _parts(self, schedule: ScheduleConfig) -> list[RatePart]:
        """The parts of the schedule in steps. Raises: ConfigError for parts that are longer than the run."""
        parts: list[RatePart] = []
        begin, rate, used = 0, 0.0, 0
        for part in schedule.parts:
            end = begin + (part.steps or 1)  # of a part in tokens: one at least
            used = self._tokens(end) if part.tokens is None else used + part.tokens
            if part.tokens is not None:
                # The first step by which that many tokens are seen; `_tokens` rises with the step.
                end = bisect_left(range(self.first_steps[-1] + 1), used, end, key=self._tokens)
            start = rate if part.start is None else part.start
            parts.append(RatePart(begin, end, part.kind, start, start if part.end is None else part.end))
            begin, rate = end, parts[-1].factor(end)
        check(
            begin <= self.first_steps[-1],
            f"schedule.parts have at least {begin:,} steps, but training.steps is {self.first_steps[-1]:,}; "
            "shorten the parts.",
        )
        return parts

    def _tokens(self, step: int) -> int:
        """Tokens of `step` steps. A phase whose length is in tokens has that many, though its last batch is whole."""
        used, begin = [0] * len(self.configs), 0
        for stage in self.stages:
            number, steps = self.number(begin), min(max(0, step - begin), int(stage.steps))
            used[number] += steps * stage.batch_size * self.configs[number].data.sequence_length
            begin += int(stage.steps)
        # A phase in tokens counts as just these, so that parts and phases of one recipe end at the same steps,
        # whatever ramps and lengths lie between.
        most = [phase.tokens or sum(used) for phase in self.phases] or used
        return sum(min(pair) for pair in zip(used, most, strict=True))

    def learning_rate(self, step: int) -> float | None:
        if not self.parts:
            return None
        return next((part for part in self.parts if step <= part.end), self.parts[-1]).factor(step)

    @property
    def samples(self) -> Sequence[PhaseSamples]:
        if not self.phases and not self.has_streams:
            return []
        each = zip(self.first_samples, self.configs, strict=True)
        return [PhaseSamples(first, config.data, config.objective_choices) for first, config in each]

    def number(self, step: int) -> int:
        """The phase of a step, from 0. Args: step: the steps before it, as in all methods."""
        return max(0, bisect_right(self.first_steps, step, hi=len(self.configs)) - 1)

    def config(self, step: int) -> Config:
        return self.configs[self.number(step)]

    def batch_size(self, step: int) -> int:
        return self.timetable.batch_size(step)

    def consumed(self, step: int) -> int:
        return self.timetable.consumed(step)

    @property
    def largest_batch(self) -> int:
        return max(stage.batch_size for stage in self.stages)

    def in_force(self, step: int) -> list[str]:
        number = self.number(step)
        return [f"phase {number + 1}: {self.phases[number]}"] if self.phases else []

    def steps_left(self, step: int) -> float:
        # Steps differ in cost: the rest is weighed by tokens, in units of the step just made.
        begin = left = 0
        for stage in self.stages:
            per_step = stage.batch_size * self.config(begin).row_length
            begin += int(stage.steps)
            left += per_step * min(max(0, begin - step), int(stage.steps))
        return left / (self.batch_size(step - 1) * self.config(step - 1).row_length)

    def lines(self) -> list[str]:
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
        runs = []
        for config, first, end in zip(self.configs, self.first_steps, self.first_steps[1:], strict=False):
            training = replace(config.training, steps=end - first, stop_after_step=None)
            batch, schedule = replace(config.batch, ramp=None), type(config.schedule)()
            changes = {"training": training, "batch": batch, "schedule": schedule}
            runs.append(replace(config, phases=(), profiler=type(config.profiler)(), **changes))
        return runs

    def _batches(self) -> Iterator[tuple[Config, int, int]]:
        for config, begin, end in zip(self.configs, self.first_steps, self.first_steps[1:], strict=False):
            for size in sorted({self.batch_size(step) for step in self._first_of_sizes(begin, end)}):
                yield config, begin, size

    def _first_of_sizes(self, begin: int, end: int) -> Iterator[int]:
        step = 0
        for stage in self.stages:
            if begin <= step < end:
                yield step
            step += int(stage.steps)


def _stages(config: Config, phase: PhaseConfig, rest: int) -> Iterator[Stage]:
    """Batch sizes of a phase. Args: rest: steps of the run from its beginning on.

    Raises: ConfigError for a phase that ends within its ramp.
    """
    batch, ramp = config.batch, config.batch.ramp
    # A ramp is expanded to whole steps, which gives closed forms for the batch and first sample of any step.
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
                f"a phase ends at batch size {stage.batch_size}, before batch.ramp reaches "
                f"{batch.global_batch_size}; make the phase longer, or ramp.samples smaller."
            )


def _of_phase(config: Config, number: int, phase: PhaseConfig) -> Config:
    """The run's configuration with the settings of a phase. Raises: ConfigError naming the phase."""
    names = [corpus.key for corpus in config.data.train]
    for name in phase.weights:
        check(
            names.count(name) == 1,
            f"phases[{number}].weights contains {shown(name)}, which is the name of "
            f"{'no' if name not in names else 'more than one'} corpus of data.train; use one of "
            f"{', '.join(names)}, or set the name of each corpus.",
        )
    run = [choice.name for choice in config.objective_choices]
    for name in phase.objectives:
        check(
            name in run,
            f"phases[{number}].objectives contains {shown(name)}, but the run has {', '.join(run)}; add it to "
            "objectives, or remove it here.",
        )
    try:
        made: Config = build(type(config), phase.settings(to_tree(config), names))
    except ConfigError as error:
        raise ConfigError(f"phases[{number}]: {error}") from None
    idle = phase.objective_settings.keys() - {choice.name for choice in made.objective_choices}
    check(
        not idle,
        f"phases[{number}] sets {', '.join(sorted(idle))}, which the phase does not train; add it to its "
        "objectives, or remove it here.",
    )
    return made
