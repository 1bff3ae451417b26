"""The plan of a run whose settings change: phases, a ramp of the batch, parts of the schedule, skipped samples.

Each phase has a whole configuration: the run's, with the settings of the phase. The plan is a pure function of the
run's configuration, so that a checkpoint holds no state of it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, check, to_tree
from data_utils.loader.config import PhaseSamples
from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.config.phases import PhaseConfig
from megatron_lite.config.rate_parts import rate_parts
from megatron_lite.config.schedule import ScheduleConfig
from megatron_lite.config.sections import ProfilerConfig
from megatron_lite.config.timetable import Stage, Timetable, ramp_stages

if TYPE_CHECKING:  # tree.py imports this module
    from megatron_lite.config.tree import Config

MIN_SEQUENCE_LENGTH = 32  # three borders of samples and two documents cost 20 tokens


class VaryingPhasePlan(PhasePlan):
    """The phases of a run: configuration, steps and samples of each. A run without `phases` is one phase.

    Raises: ConfigError for phases that contradict the run or themselves.
    """

    def __init__(self, config: Config) -> None:
        steps = config.training.steps
        self.phases = config.phases
        # Each phase has a whole configuration, so that every rule is checked for every phase, and code reads a setting
        # in the same way with phases and without.
        self.configs = [
            _phase_config(config, number, phase) for number, phase in enumerate(config.phases)
        ] or [config]
        self.stages: list[Stage] = []
        self.first_steps = [0]  # steps before each phase, and those of the run
        for number, phase_config in enumerate(self.configs):
            phase = config.phases[number] if config.phases else PhaseConfig()
            is_last = number == len(self.configs) - 1
            check(
                phase.has_length or is_last,
                f"phases[{number}] has no length, which only the last phase may leave out; set its steps, samples "
                "or tokens.",
            )
            stages = list(_phase_stages(phase_config, phase, steps - self.first_steps[-1]))
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
        # The run's micro-batch too, since the pipeline is made from it.
        micro_batches = {each.batch.micro_batch_size for each in self.configs} | {
            config.batch.micro_batch_size
        }
        check(
            len(micro_batches) == 1 or config.parallel.pipeline_parallel_size == 1,
            f"the phases have micro-batches of {', '.join(map(str, sorted(micro_batches)))} samples, but "
            "pipeline stages need a single size; set batch.micro_batch_size once, outside phases.",
        )
        self.timetable = Timetable(self.stages, config.events)
        self.rate_parts = rate_parts(config.schedule, steps, self._tokens)
        # Samples that are skipped when a phase begins count to this phase.
        self.first_samples = [self.timetable.consumed(step) for step in self.first_steps[:-1]]

    def _check_lengths(self, config: Config) -> None:
        """Raise ConfigError for lengths and regions that exclude each other or contradict the run."""
        lengths = {each.data.sequence_length for each in self.configs}
        row_lengths = {each.row_length for each in self.configs}
        self._reads_regions = len(lengths) > 1 or config.data.region > 0
        packing = [
            choice.name
            for each in self.configs
            for choice in each.objective_choices
            if choice.section.whole_documents or choice.section.token_annotation == "labels"
        ]
        check(
            not self._reads_regions or not packing,
            f"{packing and packing[0]} packs whole documents for one sequence_length; remove it from the phases, "
            "and set data.region to 0.",
        )
        check(
            not self._reads_regions or min(lengths) >= MIN_SEQUENCE_LENGTH,
            f"the phases have samples of {min(lengths)} tokens; with phases that change sequence_length, or "
            f"with data.region, samples need at least {MIN_SEQUENCE_LENGTH} tokens.",
        )
        check(
            len(row_lengths) == 1 or config.parallel.pipeline_parallel_size == 1,
            f"the phases have sequences of {', '.join(map(str, sorted(row_lengths)))} tokens, but pipeline stages "
            f"need a single size; set data.row_length to {max(row_lengths)}, or pipeline_parallel_size to 1.",
        )

    def _tokens(self, step: int) -> int:
        """Tokens of `step` steps. A phase whose length is in tokens has that many, though its last batch is whole."""
        used, begin = [0] * len(self.configs), 0
        for stage in self.stages:
            number, steps = self.number(begin), min(max(0, step - begin), int(stage.steps))
            used[number] += steps * stage.batch_size * self.configs[number].data.sequence_length
            begin += int(stage.steps)
        # A phase with a length in tokens counts exactly these, so that schedule.parts and phases of one recipe end at
        # the same steps, whatever ramps and lengths lie between.
        limits = [phase.tokens or sum(used) for phase in self.phases] or used
        return sum(min(pair) for pair in zip(used, limits, strict=True))

    def learning_rate(self, step: int) -> float | None:
        if not self.rate_parts:
            return None
        return next((part for part in self.rate_parts if step <= part.end), self.rate_parts[-1]).factor(step)

    @property
    def samples(self) -> Sequence[PhaseSamples]:
        data = self.configs[0].data
        if not self.phases and not self._reads_regions and not data.has_caps:
            return []
        last = self.timetable.consumed(self.first_steps[-1])
        return [
            PhaseSamples(first_sample, config.data, config.objective_choices, stop_sample, end - begin)
            for first_sample, stop_sample, config, (begin, end) in zip(
                self.first_samples,
                [*self.first_samples[1:], last],
                self.configs,
                itertools.pairwise(self.first_steps),
                strict=True,
            )
        ]

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
        # Steps differ in cost: the rest is counted in tokens, and divided by the tokens of the last step.
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
            alone = replace(
                config,
                training=replace(config.training, steps=end - first, stop_after_step=None),
                batch=replace(config.batch, ramp=None),
                schedule=ScheduleConfig(),
                profiler=ProfilerConfig(),
                phases=(),
            )
            runs.append(alone)
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


def _phase_stages(config: Config, phase: PhaseConfig, rest: int) -> Iterator[Stage]:
    """The stages of a phase: steps with one batch size. Args: rest: steps of the run that remain for it.

    Raises: ConfigError for a phase that ends within its ramp.
    """
    batch, ramp = config.batch, config.batch.ramp
    # A ramp is expanded to stages of whole steps, from which the first sample of any step follows in closed form.
    all_stages = [Stage(math.inf, batch.global_batch_size)]
    if ramp is not None:
        all_stages = list(ramp_stages(batch.global_batch_size, ramp.start, ramp.by, ramp.samples))
    samples: float = math.inf if phase.samples is None else phase.samples
    if phase.tokens is not None:
        samples = -(-phase.tokens // config.data.sequence_length)
    left: float = phase.steps if phase.steps is not None else math.inf if samples < math.inf else max(rest, 0)
    for stage in all_stages:
        steps = min(stage.steps, left, -(-samples // stage.batch_size) if samples < math.inf else math.inf)
        if steps:
            yield Stage(int(steps), stage.batch_size)
        left, samples = left - steps, max(0, samples - steps * stage.batch_size)
        if not (left and samples) and stage is not all_stages[-1]:
            raise ConfigError(
                f"a phase ends at batch size {stage.batch_size}, before batch.ramp reaches "
                f"{batch.global_batch_size}; make the phase longer, or ramp.samples smaller."
            )


def _phase_config(config: Config, number: int, phase: PhaseConfig) -> Config:
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
        phase_config: Config = build(type(config), phase.settings(to_tree(config), names))
    except ConfigError as error:
        raise ConfigError(f"phases[{number}]: {error}") from None
    idle = phase.objective_settings.keys() - {choice.name for choice in phase_config.objective_choices}
    check(
        not idle,
        f"phases[{number}] sets {', '.join(sorted(idle))}, which the phase does not train; add it to its "
        "objectives, or remove it here.",
    )
    return phase_config
