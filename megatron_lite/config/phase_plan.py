"""Which settings, samples and learning rate each step of a run has.

A run is a list of phases; without `phases` it is one. Each phase is a whole configuration: the run's, with the settings
of the phase. The plan is a pure function of the run's configuration, so that a checkpoint holds no state of it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, check, to_tree
from data_utils.loader.config import PhaseSamples
from megatron_lite.config.learning_rates import named_rate, rate_parts
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.phases import PhaseConfig
from megatron_lite.config.schedule import ScheduleConfig
from megatron_lite.config.sections import ProfilerConfig, RampConfig

if TYPE_CHECKING:  # tree.py imports this module
    from megatron_lite.config.tree import Config

MIN_SEQUENCE_LENGTH = 32  # three boundaries of samples and two documents cost 20 tokens


class Segment(NamedTuple):
    """Steps of one phase with batches of one size, whose samples follow each other."""

    first_step: int  # steps before it
    steps: int
    first_sample: int
    batch_size: int
    phase: int  # from 0


class PhasePlan:
    """The phases of a run: configuration, steps and samples of each.

    A `step` is the number of steps before it, so the first is 0; only `learning_rate` counts from 1.

    Raises: ConfigError for phases that contradict the run or themselves.
    """

    def __init__(self, config: Config) -> None:
        self._run, self.phases = config, config.phases
        # Every rule is checked for every phase, and code reads a setting in the same way with phases and without.
        self.configs = [_phase_config(config, number, each) for number, each in enumerate(config.phases)] or [
            config
        ]
        self.first_steps = [0]  # steps before each phase, and those of the run
        self.first_samples: list[int] = []  # samples used or skipped before each phase
        self.segments: list[Segment] = []
        self._fill(config.training.steps)
        self._check_lengths(config)
        self._rate_parts = rate_parts(config.schedule, config.training.steps, self._tokens)

    def _fill(self, run_steps: int) -> None:
        """Make the segments. Raises: ConfigError for phases that are not as long as the run."""
        step = sample = 0
        for number, phase in enumerate(self.phases or [PhaseConfig()]):
            check(
                phase.has_length or number == len(self.configs) - 1,
                f"phases[{number}] has no length, which only the last phase may leave out; set its steps, samples "
                "or tokens.",
            )
            # What a phase skips counts to it, so that its corpora go on behind the skipped texts.
            self.first_samples.append(sample)
            sample += phase.skip_samples
            for steps, size in _sizes(self.configs[number], phase, run_steps - step):
                self.segments.append(Segment(step, steps, sample, size, number))
                step, sample = step + steps, sample + steps * size
            check(
                step > self.first_steps[-1],
                f"phases[{number}] has no steps left: the phases before it take all of training.steps "
                f"({run_steps:,}); raise training.steps, or remove the phase.",
            )
            self.first_steps.append(step)
        check(
            step == run_steps,
            f"the phases have {step:,} steps in total, but training.steps is {run_steps:,}; set it to {step:,}, "
            "or leave out the length of the last phase.",
        )

    def _check_lengths(self, config: Config) -> None:
        """Raise ConfigError for lengths and regions that exclude each other or contradict the run."""
        lengths = {each.data.sequence_length for each in self.configs}
        self._reads_regions = len(lengths) > 1 or config.data.region > 0
        packing = [
            choice.name
            for each in self.configs
            for choice in each.objective_choices
            if choice.section.whole_documents or choice.section.own_corpora is not None
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

    def _tokens(self, step: int) -> int:
        """Tokens of `step` steps. A phase whose length is in tokens has that many, though its last batch is whole."""
        used = [0] * len(self.configs)
        for segment in self.segments:
            steps = min(max(0, step - segment.first_step), segment.steps)
            used[segment.phase] += (
                steps * segment.batch_size * self.configs[segment.phase].data.sequence_length
            )
        # So schedule.parts and phases of one recipe end at the same steps, whatever ramps and lengths lie between.
        limits = [phase.tokens or sum(used) for phase in self.phases] or used
        return sum(min(pair) for pair in zip(used, limits, strict=True))

    # A step

    def _segment(self, step: int) -> Segment:
        return self.segments[bisect_right(self.segments, step, key=lambda each: each.first_step) - 1]

    def number(self, step: int) -> int:
        """The phase of a step, from 0."""
        return self._segment(step).phase

    def config(self, step: int) -> Config:
        """The configuration that holds at a step."""
        return self.configs[self.number(step)]

    def model(self, steps: int) -> ModelConfig:
        """The options of the model whose last step was the one of this number; without any, those of the run."""
        return self.config(steps - 1).model if steps else self._run.model

    def batch_size(self, step: int) -> int:
        """Samples of a step, on all ranks together."""
        return self._segment(step).batch_size

    def first_sample(self, step: int) -> int:
        segment = self._segment(step)
        return segment.first_sample + (step - segment.first_step) * segment.batch_size

    def consumed(self, step: int) -> int:
        """Samples used or skipped by `step` steps."""
        return self.first_sample(step - 1) + self.batch_size(step - 1) if step else 0

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        peak = self.config(step - 1).optimizer.lr
        if not self._rate_parts:
            return named_rate(step, peak, self._run.schedule, self._run.decay_steps)
        part = next((each for each in self._rate_parts if step <= each.end), self._rate_parts[-1])
        return peak * part.factor(step)

    def in_force(self, step: int) -> list[str]:
        """The phase of a step, in words, if the run has phases."""
        number = self.number(step)
        return [f"phase {number + 1}: {self.phases[number]}"] if self.phases else []

    def steps_left(self, step: int) -> float:
        """The rest of the run after `step` steps, one or more, in steps with as many row tokens as the last of them."""
        rows = [each.row_length for each in self.configs]
        left = sum(
            segment.batch_size
            * rows[segment.phase]
            * min(max(0, segment.first_step + segment.steps - step), segment.steps)
            for segment in self.segments
        )
        return left / (self.batch_size(step - 1) * rows[self.number(step - 1)])

    # The run

    @property
    def samples(self) -> Sequence[PhaseSamples]:
        """All that makes the samples of each phase; empty where the run has no phases, regions or max_epochs."""
        if not self.phases and not self._reads_regions and not self.configs[0].data.has_caps:
            return []
        last = self.consumed(self.first_steps[-1])
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

    @property
    def largest_batch(self) -> int:
        return max(segment.batch_size for segment in self.segments)

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
        return [
            replace(
                config,
                training=replace(config.training, steps=end - first, stop_after_step=None),
                batch=replace(config.batch, ramp=None),
                schedule=ScheduleConfig(),
                profiler=ProfilerConfig(),
                phases=(),
            )
            for config, (first, end) in zip(self.configs, itertools.pairwise(self.first_steps), strict=True)
        ]

    def require_ranks(self, data_parallel_size: int) -> None:
        """Raise ConfigError unless every batch of the run is whole micro-batches on each rank."""
        for segment in self.segments:
            batch = self.configs[segment.phase].batch
            per_pass = batch.micro_batch_size * data_parallel_size
            if segment.batch_size % per_pass:
                raise ConfigError(
                    f"batch.global_batch_size ({segment.batch_size}) after step {segment.first_step} must be a "
                    f"multiple of batch.micro_batch_size ({batch.micro_batch_size}) x data-parallel ranks "
                    f"({data_parallel_size}) = {per_pass}; change the number of processes, or the batch."
                )


def _sizes(config: Config, phase: PhaseConfig, rest: int) -> Iterator[tuple[int, int]]:
    """(steps, batch size), one after another, of a phase. Args: rest: steps of the run that remain for it.

    Raises: ConfigError for a phase that ends within its ramp.
    """
    size, ramp = config.batch.global_batch_size, config.batch.ramp
    growths = [] if ramp is None else list(ramp_sizes(size, ramp))
    samples: float = math.inf if phase.samples is None else phase.samples
    if phase.tokens is not None:
        samples = -(-phase.tokens // config.data.sequence_length)
    left: float = phase.steps if phase.steps is not None else math.inf if samples < math.inf else max(rest, 0)
    for steps_of_size, batch_size in [*growths, (math.inf, size)]:
        steps = min(steps_of_size, left, -(-samples // batch_size) if samples < math.inf else math.inf)
        if steps:
            yield int(steps), batch_size
        left, samples = left - steps, max(0, samples - steps * batch_size)
        if not (left and samples) and batch_size < size:
            raise ConfigError(
                f"a phase ends at batch size {batch_size}, before batch.ramp reaches {size}; make the phase longer, or "
                "ramp.samples smaller."
            )


def ramp_sizes(size: int, ramp: RampConfig) -> Iterator[tuple[int, int]]:
    """(steps, batch size) of batches that grow to `size`, without the steps at `size`.

    Megatron's rule at x consumed samples: start + x // (samples / ((size - start) / by)) * by, in whole steps.
    """
    consumed, growths = 0, (size - ramp.start) // ramp.by
    for number in range(growths):
        batch_size = ramp.start + number * ramp.by
        until = -(-(number + 1) * ramp.samples // growths)  # the first sample of the next size
        # Megatron asks at each step how many samples are consumed; the same rule, expanded, is a list.
        steps = max(0, -(-(until - consumed) // batch_size))
        if steps:
            yield steps, batch_size
        consumed += steps * batch_size


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
    check(
        phase.rotary_base is None or (config.model.positions == "rotary" and config.decoder is None),
        f"phases[{number}].rotary_base is {phase.rotary_base}, but the model has no rotary positions, or has a decoder "
        "section; remove it.",
    )
    idle = phase.objective_settings.keys() - {choice.name for choice in phase_config.objective_choices}
    check(
        not idle,
        f"phases[{number}] sets {', '.join(sorted(idle))}, which the phase does not train; add it to its "
        "objectives, or remove it here.",
    )
    return phase_config
