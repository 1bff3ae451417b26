"""What each loss of a step is divided by, and weighted with: the step's loss is divided once, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatron_lite.config.tree import Config
from megatron_lite.model.input.batch import mean_scales, scales_beside_last
from megatron_lite.model.input.model_input import ModelInput
from megatron_lite.train.loop.prefetch import HostStep
from megatron_lite.train.observe.reports import objective_losses


class LossShares:
    """Args:
    names: of the losses.
    language_weight: step -> weight of the mean of all losses but the last, the task's, beside the mean of that one.
    """

    def __init__(
        self,
        config: Config,
        names: Sequence[str],
        dp_size: int,
        language_weight: Callable[[int], float] | None = None,
    ):
        training = config.training
        self._names, self._language_weight = list(names), language_weight
        by_objective = training.loss_normalization == "per_objective"
        self._given = training.loss_weights if by_objective else None  # of each loss's mean, by name
        self.factors = None if self._given is None else [self._given.get(name, 1.0) for name in names]
        self._is_global = training.loss_normalization == "global_tokens"
        self._passes = config.batch.accumulation_steps(dp_size) * dp_size  # of a step, on all ranks

    def micro_batches(self, made: HostStep, loss_weights: Sequence[float], step: int) -> list[ModelInput]:
        """A step's inputs with their shares of its loss. Args: loss_weights: of each loss, all ranks together."""
        loss_weight, scales = sum(loss_weights), self._scales(loss_weights, step)
        if self._language_weight is not None:
            loss_weight = loss_weights[-1]
        if scales is not None:
            for prepared in made.inputs:
                prepared.scale_weights(scales)
        return [
            replace(prepared, loss_factor=self._factor(own_weight, loss_weight))
            for prepared, own_weight in zip(made.inputs, made.own_weights, strict=True)
        ]

    def _scales(self, loss_weights: Sequence[float], step: int) -> np.ndarray | None:
        """What multiplies the weights of each loss."""
        if self.factors is not None:
            return mean_scales(self.factors, loss_weights)
        if self._language_weight is not None:
            return scales_beside_last(self._language_weight(step), loss_weights)
        return None

    def _factor(self, own_weight: float, loss_weight: float) -> float:
        """The factor that makes a micro-batch's loss sum its share of the step's loss.

        Args: own_weight, loss_weight: of the micro-batch, and of the step on all ranks.
        """
        if self.factors is not None:
            return 1.0  # it is in the weights already
        if self._is_global:
            return 1.0 / max(loss_weight, 1.0)
        return 1.0 / max(own_weight, 1.0) / self._passes

    def means(self, sums: np.ndarray) -> dict[str, float]:
        """The loss of training and the mean of each, from [losses, 2]: sum and weight."""
        return objective_losses(sums, self._names, self._given, self._language_weight is not None)
