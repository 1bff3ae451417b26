"""Which settings hold at which step of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from data_utils.common.errors import ConfigError
from data_utils.loader.config import PhaseSamples

if TYPE_CHECKING:  # tree.py imports this module
    from megatron_lite.config.tree import Config


class PhasePlan:
    """The plan of a run with one phase whose settings never change; varying_phase_plan.py has the plans of other runs.

    A `step` is the number of steps before it, so the first is 0.
    """

    def __init__(self, config: Config) -> None:
        self.configs: list[Config] = [config]  # of each phase
        self.first_steps = [0, config.training.steps]  # of each phase, and the end of the run
        self.first_samples = [0]  # of each phase

    def config(self, step: int) -> Config:
        """The configuration that holds at a step."""
        return self.configs[0]

    @property
    def samples(self) -> Sequence[PhaseSamples]:
        """All that makes the samples of each phase; empty where the run has no phases, regions or max_epochs."""
        config = self.configs[0]
        if not config.data.has_caps:
            return []
        steps = self.first_steps[-1]
        return [PhaseSamples(0, config.data, config.objective_choices, self.consumed(steps), steps)]

    def batch_size(self, step: int) -> int:
        """Samples of a step, on all ranks together."""
        return self.configs[0].batch.global_batch_size

    @property
    def largest_batch(self) -> int:
        return self.batch_size(0)

    def consumed(self, step: int) -> int:
        """Samples used or skipped by `step` steps."""
        return step * self.batch_size(0)

    def learning_rate(self, step: int) -> float | None:
        """The factor of optimizer.lr for a step, counted from 1; None without schedule.parts."""
        return None

    def in_force(self, step: int) -> list[str]:
        """The phase of a step, in words, if the run has phases."""
        return []

    def steps_left(self, step: int) -> float:
        """The rest of the run after `step` steps, one or more, in steps with as many row tokens as the last of them."""
        return self.first_steps[-1] - step

    def lines(self) -> list[str]:
        """Steps, batches and settings of each phase, in words, if the run has phases."""
        return []

    def alone(self) -> list[Config]:
        """Each phase as a run of its own, without a ramp, to be estimated."""
        return self.configs

    def require_ranks(self, data_parallel_size: int) -> None:
        """Raise ConfigError unless every batch of the run is whole micro-batches on each rank."""
        for config, begin, size in self._batches():
            per_pass = config.batch.micro_batch_size * data_parallel_size
            if size % per_pass:
                raise ConfigError(
                    f"batch.global_batch_size ({size}) after step {begin} must be a multiple of "
                    f"batch.micro_batch_size ({config.batch.micro_batch_size}) x data-parallel ranks "
                    f"({data_parallel_size}) = {per_pass}; change the number of processes, or the batch."
                )

    def _batches(self) -> Iterator[tuple[Config, int, int]]:
        """Configuration, first step of the phase and size, of every size of a batch."""
        yield self.configs[0], 0, self.batch_size(0)
