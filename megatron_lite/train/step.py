"""The inputs of one training step: its samples, this rank's micro-batches of them, and their counts.

The inputs are a pure function of the number of steps before it. So another thread can make them ahead (prefetch.py),
and a resumed run repeats the uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from data_utils.common.errors import UserError
from data_utils.common.losses import MTP
from data_utils.common.seeds import derive_seed
from data_utils.loader.mixture import batch_indices
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.config.tree import Config
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.control import Requests
from megatron_lite.transformer.batch import Batch, Samples
from megatron_lite.transformer.micro_batch import MicroBatch


@dataclass
class StepCounts:
    """Counts over the samples of a step: of one rank, or summed over all ranks. Exact in fp64 up to 2^53."""

    loss_divisors: list[float]  # [losses]
    tokens: float = 0.0  # without padding
    visible_keys: float = 0.0  # sum over tokens of the keys that each attends to, as the mean over the layers
    loss_tokens: float = 0.0  # tokens that the vocabulary's head predicts
    decoder_tokens: float = 0.0  # tokens that a decoder computes, where the model has one
    decoder_keys: float = 0.0  # sum over these of the keys that each attends to
    padded_tokens: float = 0.0  # tokens with padding, as they are computed

    @staticmethod
    def zeros(num_losses: int) -> StepCounts:
        return StepCounts([0.0] * num_losses)

    def add(self, batch: Batch, model: ModelConfig) -> None:
        """Add a micro-batch, except for its padding, which is known when it is prepared."""
        divisors = batch.loss_divisors(len(self.loss_divisors)).tolist()
        self.loss_divisors = [total + more for total, more in zip(self.loss_divisors, divisors, strict=True)]
        self.tokens += batch.tokens
        self.visible_keys += batch.layer_keys(model)
        self.loss_tokens += batch.loss_tokens + batch.further_tokens(model)
        if model.mtp_layers:
            self.loss_divisors[MTP.number] += float(batch.further[2].sum())
        self.decoder_tokens += batch.decoder_tokens
        self.decoder_keys += batch.decoder_keys

    def flops_counts(self) -> tuple[int, int, int, int, int]:
        """The counts that `step_flops` takes, in its order."""
        return (
            int(self.tokens),
            int(self.loss_tokens),
            int(self.visible_keys),
            int(self.decoder_tokens),
            int(self.decoder_keys),
        )

    def to_vector(self) -> list[float]:
        """The numbers that are summed over the ranks, as `from_vector` reads them."""
        return [*(getattr(self, name) for name in _SCALAR_COUNTS), *self.loss_divisors]

    @staticmethod
    def from_vector(values: Sequence[float]) -> StepCounts:
        scalars = dict(zip(_SCALAR_COUNTS, values, strict=False))
        return StepCounts(list(values[len(_SCALAR_COUNTS) :]), **scalars)


_SCALAR_COUNTS = tuple(each.name for each in fields(StepCounts) if each.name != "loss_divisors")


@dataclass(frozen=True)
class StepMessage:
    """What the ranks exchange before they compute a step: their counts, and the requests that they received."""

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

    step: int = 0  # steps done
    consumed_samples: int = 0
    consumed_tokens: int = 0  # without padding
    restarts: int = 0  # how often the run was continued from a checkpoint

    def advance(self, step: int, consumed_samples: int, totals: StepCounts) -> None:
        """Count a step as done. Args: consumed_samples: until its end; totals: counts of all ranks."""
        self.step, self.consumed_samples = step, consumed_samples
        self.consumed_tokens += int(totals.tokens)


@dataclass(frozen=True)
class StepInputs:
    """This rank's micro-batches of a step, on the host, and their counts."""

    micro_batches: list[MicroBatch]
    counts: StepCounts
    micro_batch_divisors: list[float] = field(default_factory=list)  # the divisor of each one's losses

    def __len__(self) -> int:
        return len(self.micro_batches)


class PrefetchCancelled(Exception):
    """The prefetched step was cancelled."""


class StepMaker:
    """Makes this rank's inputs of a step from the number of steps before it. Has no state, for another thread."""

    def __init__(
        self,
        config: Config,
        phase_plan: PhasePlan,
        context: ParallelContext,
        data: Samples,
        prepare: Callable[[Batch, int | None], MicroBatch],
        num_losses: int,
        scales_ahead: Callable[[int], np.ndarray | None] = lambda step: None,
    ):
        """Args:
        prepare: batch and dropout seed -> micro-batch (`Engine.prepared`).
        scales_ahead: see `LossNormalizer.scales_ahead`.
        """
        self._config, self._phase_plan, self._context, self._data = config, phase_plan, context, data
        self._prepare, self._num_losses, self._scales_ahead = prepare, num_losses, scales_ahead

    def make(self, step: int, is_wanted: Callable[[], bool] = lambda: True) -> StepInputs:
        """Raises: UserError, marked `only_here`, if this rank's samples cannot be read."""
        # By the step alone: the same in every layout and after a resume.
        seed = derive_seed(self._config.training.seed, "dropout", step)
        inputs = StepInputs([], StepCounts.zeros(self._num_losses))
        scales = self._scales_ahead(step)
        for samples in self._samples(step):
            if not is_wanted():
                raise PrefetchCancelled
            batch = read_batch(self._data, samples)
            # Before positions are left out: divisors and FLOPs describe the whole batch.
            inputs.counts.add(batch, self._config.model)
            inputs.micro_batch_divisors.append(batch.loss_divisor)
            if scales is not None:
                batch = batch.with_scaled_weights(scales)
            micro_batch = self._prepare(batch, seed)
            inputs.micro_batches.append(micro_batch)
            inputs.counts.padded_tokens += len(micro_batch.tokens)
        # A hint to the operating system to read the text of the following step; nothing waits for it.
        self._data.prefetch(self._samples(step + 1).ravel())
        return inputs

    def _samples(self, step: int) -> np.ndarray:
        """int64 [micro-batches, micro_batch_size]: this rank's samples of a step."""
        return batch_indices(
            self._phase_plan.first_sample(step),
            global_batch_size=self._phase_plan.batch_size(step),
            micro_batch_size=self._phase_plan.config(step).batch.micro_batch_size,
            dp_rank=self._context.dp.rank,
            dp_size=self._context.dp.size,
        )


def read_batch(data: Samples, samples: np.ndarray) -> Batch:
    """The batch of samples int64 [B]. A UserError is marked `only_here`: no other rank reads these samples."""
    try:
        loaded = data.batch(samples)
        # The numbers of the samples go along: dropout is drawn by the sample, not by its index in the micro-batch.
        return loaded if isinstance(loaded, Batch) else Batch(loaded, samples)
    except UserError as error:
        error.only_here = True
        raise
