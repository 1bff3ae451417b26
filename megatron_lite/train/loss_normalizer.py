"""Loss normalization: the one place that decides by what the losses of a step are divided, and what each weighs.

A model sums the losses of its micro-batch, each prediction times its weight, and the engine multiplies the sum by the
micro-batch's `loss_factor`. Both numbers come from here:

- `scales_ahead`: weights of losses that count for nothing become 0 before the batch is prepared.
- `micro_batches`: the factors, and where losses are means of their own (`per_objective`), scales of the weights. They
  wait for the divisors summed over all ranks, by which a loss is divided once, so that it depends on no layout. The
  loss of further tokens (MTP) is the mean over those of the step, times `training.mtp_weight`: a scale, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from data_utils.common.losses import BY_TOKENS, MTP
from megatron_lite.config.phase_plan import PhasePlan
from megatron_lite.telemetry.reports import objective_losses
from megatron_lite.train.step import StepInputs
from megatron_lite.transformer.micro_batch import MicroBatch


class LossNormalizer:
    """Steps are given as the number of steps before them.

    Args:
        names: of the losses.
        language_weight: step -> weight of the language-model losses relative to the task's loss, which is the last.
    """

    def __init__(
        self,
        phase_plan: PhasePlan,
        names: Sequence[str],
        dp_size: int,
        language_weight: Callable[[int], float] | None = None,
    ):
        self._names, self._language_weight = list(names), language_weight
        self._phase_plan, self._dp_size = phase_plan, dp_size
        self._has_further = phase_plan.configs[0].model.mtp_layers > 0
        self._normalization = phase_plan.configs[0].training.loss_normalization

    def micro_batches(
        self, inputs: StepInputs, loss_divisors: Sequence[float], step: int
    ) -> list[MicroBatch]:
        """A step's micro-batches with the factors that divide their losses.

        Args: loss_divisors: the divisor of each loss [losses], summed over all ranks.
        """
        divisor, scales = self._divisor(loss_divisors), self._weight_scales(loss_divisors, step)
        if self._language_weight is not None:
            # The task's divisor divides all: the weights of the language-model losses are scaled relative to its loss.
            divisor = loss_divisors[-1]
        if scales is not None:
            for micro_batch in inputs.micro_batches:
                # In the prepared buffer: the prefetch thread cannot know the sum over ranks.
                micro_batch.scale_weights(scales)
        count = len(inputs) * self._dp_size  # micro-batches of the step on all ranks
        return [
            replace(
                micro_batch,
                loss_factor=self._loss_factor(micro_batch_divisor, divisor, count),
                step_share=1.0 / count,
            )
            for micro_batch, micro_batch_divisor in zip(
                inputs.micro_batches, inputs.micro_batch_divisors, strict=True
            )
        ]

    def _loss_factor(self, micro_batch_divisor: float, divisor: float, micro_batches: int) -> float:
        """The factor of a micro-batch's loss sum, so that the sum over all micro-batches is the step's loss.

        Args: divisor: of the step on all ranks. micro_batches: of the step on all ranks.
        """
        if self._normalization == "per_objective":
            return 1.0  # the weights are scaled already
        # Both divisors are at least 1: a step whose samples have no loss has the loss 0, not NaN.
        if self._normalization == "global_tokens":
            return 1.0 / max(divisor, 1.0)
        # Mean of the micro-batches' means, as trainers without a global count have it: tokens of short batches weigh
        # more.
        return 1.0 / max(micro_batch_divisor, 1.0) / micro_batches

    def scales_ahead(self, step: int) -> np.ndarray | None:
        """0 for losses that count for nothing in a step, which the head then leaves out, else 1; None = all count."""
        factors = self._mean_factors(step)
        return None if factors is None or all(factors) else np.array(factors, bool).astype(np.float32)

    def _mean_factors(self, step: int) -> list[float] | None:
        """The factor of each loss's mean under `per_objective`, where a step's loss is a sum of means; else None."""
        by_name = self._mean_factors_by_name(step)
        return None if by_name is None else [by_name.get(name, 1.0) for name in self._names]

    def _mean_factors_by_name(self, step: int) -> Mapping[str, float] | None:
        if self._normalization != "per_objective":
            return None
        return self._phase_plan.config(step).training.loss_weights

    def _divisor(self, loss_divisors: Sequence[float]) -> float:
        """Of all losses together; further tokens (MTP) are no part of it."""
        return sum(loss_divisors) - (loss_divisors[MTP.number] if self._has_further else 0.0)

    def _weight_scales(self, loss_divisors: Sequence[float], step: int) -> np.ndarray | None:
        """The factor of each loss's token weights, fp32 [losses]; None = 1."""
        factors = self._mean_factors(step)
        if factors is not None:
            return mean_scales(factors, loss_divisors)
        if self._has_further:
            weight = self._phase_plan.config(step).training.mtp_weight
            return further_scales(weight, self._divisor(loss_divisors), loss_divisors)
        if self._language_weight is not None:
            return scales_relative_to_last(self._language_weight(step + 1), loss_divisors)
        return None

    def with_token_counts(
        self, sums: torch.Tensor, loss_divisors: Sequence[float], step: int | None = None
    ) -> torch.Tensor:
        """Sums of a step or an evaluation, in which losses of `BY_TOKENS` have their tokens as weight; in place.

        Such a loss (masked diffusion) weighs its masked tokens, but is divided by all tokens, masked or not.

        Args:
            sums: [losses, 2 or 3], loss_divisors: [losses], both of the same samples on all ranks.
            step: as in `micro_batches`, whose scales are in the sums of a step; None = of an evaluation: no scales.
        """
        for number in BY_TOKENS:
            if number < len(sums) and loss_divisors[number]:
                scales = None if step is None else self._weight_scales(loss_divisors, step)
                sums[number, 1] = loss_divisors[number] * (1.0 if scales is None else float(scales[number]))
        return sums

    def means(self, sums: np.ndarray, step: int) -> dict[str, float]:
        """The losses by name, from [losses, 3]: sum, weight, z-loss. Args: step: of which they are, from 1."""
        by_name = self._mean_factors_by_name(max(0, step - 1))
        return objective_losses(sums, self._names, by_name, self._language_weight is not None)


def mean_scales(factors: Sequence[float], totals: Sequence[float]) -> np.ndarray:
    """Each loss's factor over its total in the step, fp32 [losses]: weights times it make sums means."""
    scales = [f / total if total else 0.0 for f, total in zip(factors, totals, strict=True)]
    return np.array(scales, np.float32)


def further_scales(weight: float, divisor: float, totals: Sequence[float]) -> np.ndarray:
    """Scales of all losses, fp32 [losses], so that the mean of the further tokens, times their weight, is added.

    Args: divisor: of the other losses, by which the sum of all is divided.
    """
    scales = np.ones(len(totals), np.float32)
    scales[MTP.number] = weight * max(divisor, 1.0) / max(totals[MTP.number], 1.0)
    return scales


def scales_relative_to_last(factor: float, totals: Sequence[float]) -> np.ndarray:
    """Scales of all losses but the last, fp32 [losses]: their sum becomes factor * their mean * total of the last.

    Divided by that total it is added to the last loss's mean.
    """
    *others, last = totals
    return np.full(len(totals), factor * last / max(sum(others), 1.0), np.float32)
