"""One training step: which samples it takes, what of them this rank computes, and what divides its loss.

What a step needs is a pure function of its place: its number and its first sample. The loss is divided once, by what
all ranks count together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from data_utils.common.errors import UserError
from data_utils.common.losses import BY_TOKENS
from data_utils.common.random_streams import derive_seed
from data_utils.loader.mixture import batch_indices
from megatron_lite.config.plan import Plan
from megatron_lite.config.tree import Config
from megatron_lite.metrics.reports import objective_losses
from megatron_lite.model.batch import Batch, Samples, mean_scales
from megatron_lite.model.model_input import ModelInput
from megatron_lite.parallel.context import ParallelContext

LEAVE_SECONDS = 10.0  # that the end of a run waits for the thread; storage may never answer


class Place(NamedTuple):
    """Where a step stands in the run."""

    step: int  # steps before it
    first_sample: int


@dataclass(frozen=True)
class HostStep:
    """This rank's part of a step before any rank knows of the others'."""

    inputs: list[ModelInput]  # of its micro-batches
    own_weights: list[float]  # sum of each one's loss weights
    counts: (
        np.ndarray
    )  # float64 [6]: tokens, visible keys, loss rows, targets, keys of targets, tokens with padding
    loss_weights: np.ndarray  # float64 [losses]: weight of each loss


class Abandoned(Exception):
    """Nobody wants the step any more."""


Make = Callable[[Place, Callable[[], bool]], HostStep]  # place, whether it is still wanted


class StepMaker:
    """Place of a step -> what this rank needs of it. Has no state, so that another thread can call it."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        context: ParallelContext,
        data: Samples,
        prepare: Callable[[Batch, int | None], ModelInput],
        num_losses: int,
        factors: Callable[[int], Sequence[float] | None] = lambda step: None,
    ):
        """Args:
        prepare: batch and dropout seed -> the model's input (`Engine.prepared`).
        factors: steps before a step -> factor of each loss's mean, if weights become means.
        """
        self._config, self._plan, self._context, self._data = config, plan, context, data
        self._prepare, self._num_losses, self._factors = prepare, num_losses, factors

    def following(self, place: Place) -> Place:
        """The next step, unless a request or an end comes before it."""
        end, step = place.first_sample + self._plan.batch_size(place.step), place.step + 1
        return Place(step, self._config.events.next_sample(end, self._plan.batch_size(step)))

    def make(self, place: Place, is_wanted: Callable[[], bool] = lambda: True) -> HostStep:
        """Raises: UserError, marked `only_here`, if this rank's samples cannot be read."""
        seed = derive_seed(self._config.training.seed, "dropout", place.step)
        made = HostStep([], [], np.zeros(6), np.zeros(self._num_losses))
        factors = self._factors(place.step)
        counted = None if factors is None or all(factors) else [float(f != 0) for f in factors]
        for samples in self._samples(place):
            if not is_wanted():
                raise Abandoned
            batch = read(self._data, samples)
            made.counts[:5] += (
                batch.tokens,
                batch.layer_keys(self._config.model),
                batch.loss_rows,
                batch.targets,
                batch.target_keys,
            )
            made.loss_weights[:] += batch.loss_weights(self._num_losses)
            made.own_weights.append(batch.loss_weight)
            if counted is not None:  # the head leaves out rows without weight
                batch = batch.as_means(counted, [1.0] * self._num_losses)
            made.inputs.append(self._prepare(batch, seed))
            made.counts[5] += len(made.inputs[-1].tokens)
        # The disk reads the text of the step after it meanwhile.
        self._data.prefetch(self._samples(self.following(place)).ravel())
        return made

    def _samples(self, place: Place) -> np.ndarray:
        """int64 [micro-batches, micro_batch_size]: this rank's samples of a step."""
        return batch_indices(
            place.first_sample,
            global_batch_size=self._plan.batch_size(place.step),
            micro_batch_size=self._plan.config(place.step).batch.micro_batch_size,
            dp_rank=self._context.dp.rank,
            dp_size=self._context.dp.size,
        )


class Prefetch:
    """Makes the next step in a thread while this one computes: read, counted, planned, laid out in pinned memory.

    The trainer says which place probably follows, and takes what the place of the step demands. Anything else that was
    made is thrown away. The thread never communicates, and an error in it is raised where its step begins. It works on
    one step at a time, so a rank holds at most one step's inputs more than it computes.
    """

    def __init__(self, make: Make, device: torch.device):
        self._make, self._device = make, device
        self._making: _Making | None = None

    def begin(self, place: Place) -> None:
        """Start to make a step, unless that is the one being made."""
        if self._making is not None and self._making.place == place:
            return
        self.close()
        self._making = _Making(self._make, place, self._device)
        self._making.start()

    def take(self, place: Place) -> HostStep:
        """The step of a place, made ahead or now. Raises what making it raised."""
        self.begin(place)
        making, self._making = self._making, None
        assert making is not None
        return making.result()

    def close(self) -> None:
        """Throw away what was made, and end the thread."""
        if self._making is not None:
            self._making.abandon()
            self._making = None


class _Making(threading.Thread):
    """A daemon, so that it never keeps the process alive."""

    def __init__(self, make: Make, place: Place, device: torch.device):
        super().__init__(name="prefetch", daemon=True)
        self.place = place
        self._make, self._device = make, device
        self._is_wanted = True
        self._made: HostStep | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            if self._device.type == "cuda":  # a new thread would pin memory for device 0
                torch.cuda.set_device(self._device)
            self._made = self._make(self.place, lambda: self._is_wanted)
        except BaseException as error:  # `result` raises it
            self._error = error

    def result(self) -> HostStep:
        self.join()
        if self._error is not None:
            raise self._error
        assert self._made is not None
        return self._made

    def abandon(self) -> None:
        self._is_wanted = False
        self.join(LEAVE_SECONDS)


def read(data: Samples, samples: np.ndarray) -> Batch:
    """A batch. An error of this rank's samples is marked, because no other rank meets it."""
    try:
        made = data.batch(samples)
        return made if isinstance(made, Batch) else Batch(made, samples)
    except UserError as error:
        error.only_here = True
        raise


def same_passes(data: Samples, count: int, size: int, context: ParallelContext) -> list[Batch]:
    """This rank's batches of the first `count` samples. All ranks get the same number, of `size` rows each."""
    samples, dp = np.arange(count), context.dp
    per_pass = size * dp.size
    return [
        read(data, samples[start : start + per_pass][dp.rank :: dp.size]).padded(size)
        for start in range(0, count, per_pass)
    ]


def scales_beside_last(factor: float, totals: Sequence[float]) -> np.ndarray:
    """Scales of all losses but the last, fp32 [losses]: their sum becomes factor * their mean * total of the last.

    Divided by that total it is added to the last loss's mean.
    """
    *others, last = totals
    return np.full(len(totals), factor * last / max(sum(others), 1.0), np.float32)


class LossShares:
    """Divisor and weight of each loss of a step.

    Args:
        names: of the losses.
        language_weight: step -> weight of the language-model loss relative to the task's loss, which is the last.
    """

    def __init__(
        self,
        plan: Plan,
        names: Sequence[str],
        dp_size: int,
        language_weight: Callable[[int], float] | None = None,
    ):
        self._names, self._language_weight = list(names), language_weight
        self._plan, self._dp_size = plan, dp_size
        self._normalization = plan.configs[0].training.loss_normalization

    def _given(self, step: int) -> Mapping[str, float] | None:
        """Factor of each loss's mean, by name, if weights become means. Args: step: the steps before it."""
        if self._normalization != "per_objective":
            return None
        return self._plan.config(step).training.loss_weights

    def factors(self, step: int) -> list[float] | None:
        """As `_given`, in the order of the losses."""
        given = self._given(step)
        return None if given is None else [given.get(name, 1.0) for name in self._names]

    def micro_batches(self, made: HostStep, loss_weights: Sequence[float], step: int) -> list[ModelInput]:
        """A step's inputs with their shares of its loss.

        Args: loss_weights: of each loss, all ranks together. step: the steps before it.
        """
        loss_weight, scales = sum(loss_weights), self._scales(loss_weights, step)
        passes = len(made.inputs) * self._dp_size  # of the step, on all ranks
        if self._language_weight is not None:
            loss_weight = loss_weights[-1]
        if scales is not None:
            for prepared in made.inputs:
                prepared.scale_weights(scales)
        return [
            replace(prepared, loss_factor=self._factor(own_weight, loss_weight, passes))
            for prepared, own_weight in zip(made.inputs, made.own_weights, strict=True)
        ]

    def _scales(self, loss_weights: Sequence[float], step: int) -> np.ndarray | None:
        """Factor of the token weights of each loss, fp32 [losses]; None = 1."""
        factors = self.factors(step)
        if factors is not None:
            return mean_scales(factors, loss_weights)
        if self._language_weight is not None:
            return scales_beside_last(self._language_weight(step + 1), loss_weights)
        return None

    def _factor(self, own_weight: float, loss_weight: float, passes: int) -> float:
        """The factor that makes a micro-batch's loss sum its share of the step's loss.

        Args: own_weight, loss_weight: of the micro-batch, and of the step on all ranks.
        """
        if self._normalization == "per_objective":
            return 1.0  # it is in the weights already
        if self._normalization == "global_tokens":
            return 1.0 / max(loss_weight, 1.0)
        return 1.0 / max(own_weight, 1.0) / passes

    def divided(
        self, sums: torch.Tensor, loss_weights: Sequence[float], step: int | None = None
    ) -> torch.Tensor:
        """Sums of one step or evaluation: the weights of the losses `BY_TOKENS` become their tokens, in place.

        Args:
            sums: [losses, 2 or 3]. loss_weights: of the same samples. Both are those of all ranks.
            step: as in `micro_batches`, whose scales are in the sums of a step; None = there are none.
        """
        for number in BY_TOKENS:
            if number < len(sums) and loss_weights[number]:
                scales = None if step is None else self._scales(loss_weights, step)
                sums[number, 1] = loss_weights[number] * (1.0 if scales is None else float(scales[number]))
        return sums

    def means(self, sums: np.ndarray, step: int) -> dict[str, float]:
        """The losses of training, from [losses, 3]: sum, weight, z-loss. Args: step: after its end."""
        given = self._given(max(0, step - 1))
        return objective_losses(sums, self._names, given, self._language_weight is not None)
