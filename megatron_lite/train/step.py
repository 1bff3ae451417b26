"""One training step on the host: which samples it takes, this rank's micro-batches of them, and what they count.

What a step needs is a pure function of its position: its number and its first sample. So another thread can make it
ahead (prefetch.py), and a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from data_utils.common.errors import UserError
from data_utils.common.random_streams import derive_seed
from data_utils.loader.mixture import batch_indices
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.config.tree import Config
from megatron_lite.model.batch import Batch, Samples
from megatron_lite.model.model_input import ModelInput
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.control import Requests


class StepPosition(NamedTuple):
    """Where a step is in the run."""

    step: int  # steps before it
    first_sample: int


@dataclass
class StepCounts:
    """What the samples of a step count: of one rank, or summed over all ranks. Exact in fp64 up to 2^53."""

    loss_weights: Sequence[float]  # [losses]: the divisor of each loss
    tokens: float = 0.0  # without padding
    visible_keys: float = 0.0  # sum over tokens of the keys that each attends to, as the mean over the layers
    loss_positions: float = 0.0  # positions that predict a token or a class
    decoder_tokens: float = 0.0  # tokens that a decoder computes, where the model has one
    decoder_keys: float = 0.0  # sum over these of the keys that each attends to
    padded_tokens: float = 0.0  # tokens with padding, as they are computed

    @staticmethod
    def zeros(num_losses: int) -> StepCounts:
        return StepCounts([0.0] * num_losses)

    def add(self, batch: Batch, model: ModelConfig) -> None:
        """Add a micro-batch, except for its padding, which is known when it is prepared."""
        own = batch.loss_weights(len(self.loss_weights)).tolist()
        self.loss_weights = [total + weight for total, weight in zip(self.loss_weights, own, strict=True)]
        self.tokens += batch.tokens
        self.visible_keys += batch.layer_keys(model)
        self.loss_positions += batch.loss_rows
        self.decoder_tokens += batch.targets
        self.decoder_keys += batch.target_keys

    def of_flops(self) -> tuple[int, int, int, int, int]:
        """The counts that `step_flops` takes, in its order."""
        return (
            int(self.tokens),
            int(self.loss_positions),
            int(self.visible_keys),
            int(self.decoder_tokens),
            int(self.decoder_keys),
        )

    def to_vector(self) -> list[float]:
        """The numbers that are summed over the ranks, as `from_vector` reads them."""
        return [
            self.tokens,
            self.visible_keys,
            self.loss_positions,
            self.decoder_tokens,
            self.decoder_keys,
            self.padded_tokens,
            *self.loss_weights,
        ]

    @staticmethod
    def from_vector(values: Sequence[float]) -> StepCounts:
        return StepCounts(values[6:], *values[:6])


@dataclass(frozen=True)
class StepMessage:
    """What ranks tell each other before they compute a step: their counts, and the requests that they received."""

    requests: Requests
    counts: StepCounts

    def to_vector(self) -> list[float]:
        # One vector, one collective: counts and requests are needed at the same moment.
        return [*self.requests.to_vector(), *self.counts.to_vector()]

    @staticmethod
    def from_sums(sums: Sequence[float]) -> StepMessage:
        """Args: sums: of `to_vector` over all ranks."""
        size = len(Requests().to_vector())
        return StepMessage(Requests.from_sums(sums[:size]), StepCounts.from_vector(sums[size:]))


@dataclass
class Progress:
    """How far the run has come; checkpoints hold it."""

    step: int = 0  # steps made
    consumed_samples: int = 0
    consumed_tokens: int = 0  # without padding
    restarts: int = 0  # how often the run was continued from a checkpoint

    @property
    def position(self) -> StepPosition:
        """Of the next step."""
        return StepPosition(self.step, self.consumed_samples)

    def advance(self, position: StepPosition, batch_size: int, totals: StepCounts) -> None:
        """The step at `position` was made. Args: batch_size: samples on all ranks; totals: of all ranks."""
        self.step = position.step + 1
        self.consumed_samples = position.first_sample + batch_size
        self.consumed_tokens += int(totals.tokens)


@dataclass(frozen=True)
class StepInputs:
    """This rank's micro-batches of a step, and what they count."""

    micro_batches: list[ModelInput]
    counts: StepCounts
    micro_batch_weights: list[float] = field(default_factory=list)  # the divisor of each one's losses

    def __len__(self) -> int:
        return len(self.micro_batches)


class PrefetchCancelled(Exception):
    """The prefetched step was cancelled."""


class StepMaker:
    """Position of a step -> this rank's inputs of it. Has no state, so that another thread can call it."""

    def __init__(
        self,
        config: Config,
        phase_plan: PhasePlan,
        context: ParallelContext,
        data: Samples,
        prepare: Callable[[Batch, int | None], ModelInput],
        num_losses: int,
        mean_factors: Callable[[int], Sequence[float] | None] = lambda step: None,
    ):
        """Args:
        prepare: batch and dropout seed -> the model's input (`Engine.prepared`).
        mean_factors: see `LossNormaliser.mean_factors`.
        """
        self._config, self._phase_plan, self._context, self._data = config, phase_plan, context, data
        self._prepare, self._num_losses, self._mean_factors = prepare, num_losses, mean_factors

    def following(self, position: StepPosition) -> StepPosition:
        """The next step, unless a request or the end of the run comes before it."""
        end, step = position.first_sample + self._phase_plan.batch_size(position.step), position.step + 1
        return StepPosition(step, self._config.events.next_sample(end, self._phase_plan.batch_size(step)))

    def make(self, position: StepPosition, is_wanted: Callable[[], bool] = lambda: True) -> StepInputs:
        """Raises: UserError, marked `only_here`, if this rank's samples cannot be read."""
        # By the step alone: the same in every layout and after a resume.
        seed = derive_seed(self._config.training.seed, "dropout", position.step)
        inputs = StepInputs([], StepCounts.zeros(self._num_losses))
        factors = self._mean_factors(position.step)
        # Which losses count at all. Their scale follows after the sum over ranks; what counts for nothing is left out
        # now.
        kept = None if factors is None or all(factors) else [float(factor != 0) for factor in factors]
        for samples in self._samples(position):
            if not is_wanted():
                raise PrefetchCancelled
            batch = read_batch(self._data, samples)
            # Before positions are left out: divisors and FLOPs describe the whole batch.
            inputs.counts.add(batch, self._config.model)
            inputs.micro_batch_weights.append(batch.loss_weight)
            if kept is not None:  # the head leaves out positions whose loss has the factor 0
                batch = batch.as_means(kept, [1.0] * self._num_losses)
            inputs.micro_batches.append(self._prepare(batch, seed))
            inputs.counts.padded_tokens += len(inputs.micro_batches[-1].tokens)
        # The disk reads the text of the following step meanwhile.
        # Only a hint to the operating system; nothing waits for it.
        self._data.prefetch(self._samples(self.following(position)).ravel())
        return inputs

    def _samples(self, position: StepPosition) -> np.ndarray:
        """int64 [micro-batches, micro_batch_size]: this rank's samples of a step."""
        return batch_indices(
            position.first_sample,
            global_batch_size=self._phase_plan.batch_size(position.step),
            micro_batch_size=self._phase_plan.config(position.step).batch.micro_batch_size,
            dp_rank=self._context.dp.rank,
            dp_size=self._context.dp.size,
        )


def read_batch(data: Samples, samples: np.ndarray) -> Batch:
    """A batch. An error of this rank's samples is marked, because no other rank meets it."""
    try:
        made = data.batch(samples)
        # The numbers of the samples go along: dropout is drawn by the sample, not by its index in the micro-batch.
        return made if isinstance(made, Batch) else Batch(made, samples)
    except UserError as error:
        error.only_here = True
        raise
