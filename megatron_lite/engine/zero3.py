"""ZeRO stage 3: DeepSpeed's stage-3 optimizer behind the interface of `ShardedOptimizer`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from megatron_lite.optim.buckets import MOMENTS, allocate_moments
from megatron_lite.optim.lr_multipliers import LrMultipliers
from megatron_lite.optim.sharded import Outcome
from megatron_lite.parallel.collectives import Group


class Zero3:
    """Reads and writes this rank's state in DeepSpeed's stage-3 optimizer (0.19.8).

    DeepSpeed cannot freeze a parameter and train it later. So to DeepSpeed a parameter is trained if it is in any step;
    the gradient, the learning rate and the step count of one that is frozen are set to 0. One that is never trained
    needs no gradient and no state, but DeepSpeed keeps no fp32 weights of it either: they are here, for checkpoints.
    """

    def __init__(self, optimizer: Any, dp: Group, multipliers: Mapping[nn.Parameter, LrMultipliers]):
        self._deepspeed = optimizer
        self._dp = dp
        # Before the first step, when DeepSpeed has none yet: a load must find tensors to fill.
        allocate_moments(self.optimizer, optimizer.fp32_partitioned_groups_flat)
        # This rank's range, fp32: the weights themselves, or a copy in the host's memory, which only saves read.
        parameters: dict[Any, LrMultipliers] = dict(multipliers)
        self._never_trained = {
            p: p.ds_tensor.data if p.ds_tensor.dtype == torch.float32 else p.ds_tensor.data.float().cpu()
            for p, factors in parameters.items()
            if factors.is_never_trained
        }
        self._no_steps = torch.zeros(())
        # Parameters that are frozen in the first steps.
        self._frozen_at_first = {
            p: factors
            for p, factors in multipliers.items()
            if factors.first_step > 1 and p not in self._never_trained
        }
        for parameter, factors in self._frozen_at_first.items():
            parameter.register_hook(functools.partial(self._masked_gradient, factors))
        # The step has counted frozen parameters too; their bias correction must begin when they are first trained.
        self.optimizer.register_step_post_hook(self._reset_frozen_counts)
        self.set_step(1)

    def set_step(self, step: int) -> None:
        """The number of the next step, as `ShardedOptimizer.set_step`."""
        self._step = step
        states = [
            self._state(p) for p, factors in self._frozen_at_first.items() if not factors.is_trained(step)
        ]
        # Parameters share the state of a flat partition, so each state is listed once.
        self._frozen_states = list({id(state): state for state in states}.values())

    def _reset_frozen_counts(self, *_: Any) -> None:
        for state in self._frozen_states:
            state["step"].zero_()

    def _masked_gradient(self, multipliers: LrMultipliers, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if multipliers.is_trained(self._step) else torch.zeros_like(gradient)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of flat fp32 partitions."""
        return self._deepspeed.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._deepspeed.param_groups

    @property
    def loss_scaler(self) -> Any:
        return self._deepspeed.loss_scaler

    @property
    def loss_factor(self) -> float:
        """DeepSpeed scales the loss itself, and takes the mean over the data-parallel ranks, where a sum is wanted."""
        return float(self._dp.size)

    def begin(self, micro_batches: int) -> None:
        """DeepSpeed counts them itself."""

    @property
    def outcome(self) -> Callable[[], Outcome]:
        """Outcome of the last step, which DeepSpeed has waited for."""
        skipped = bool(self._deepspeed.overflow)
        norm = math.inf if skipped else float(self._deepspeed._global_grad_norm)
        outcome = Outcome(norm, skipped, float(self.loss_scaler.cur_scale))
        return lambda: outcome

    def wait_for_weights(self, module: nn.Module | None = None) -> None:
        """DeepSpeed gathers weights when they are used."""

    def is_skipping(self) -> bool:
        """DeepSpeed calls the inner optimizer only for gradients that are finite."""
        return False

    def owned(self, parameter: Any) -> tuple[tuple[int, ...], int, dict[str, torch.Tensor]] | None:
        """As `ShardedOptimizer.owned`: an equal range of every parameter, the last ones padded."""
        length = parameter.ds_tensor.numel()
        start = self._dp.rank * length
        count = min(length, parameter.ds_numel - start)
        # The padding of the last ranks: the parameter is shorter than the ranges of all ranks together.
        if count <= 0:
            return None
        if parameter in self._never_trained:
            return tuple(parameter.ds_shape), start, {"weight": self._never_trained[parameter][:count]}
        # Without a key DeepSpeed gives the fp32 weight.
        keys = {"weight": None, **{key: key for key in MOMENTS}}
        read = self._deepspeed._get_fp32_opt_state_partition
        tensors = {name: read(parameter, True, key)[0][:count] for name, key in keys.items()}
        return tuple(parameter.ds_shape), start, tensors

    def whole_state(self, name: str) -> dict[str, torch.Tensor]:
        """None: AdamW alone runs at stage 3."""
        return {}

    def gather_weights(self) -> None:
        """Copy the fp32 shards of every rank to the model's weights on all ranks, after the shards were changed."""
        for group in range(len(self._deepspeed.fp32_partitioned_groups_flat)):
            self._deepspeed._reassign_or_swap_out_partitioned_parameters(group)
        for parameter, weight in self._never_trained.items():
            parameter.ds_tensor.data.copy_(weight)
        if self._deepspeed.persistent_parameters:  # small ones, whole on every rank
            self._deepspeed.persistent_parameters[0].all_gather(self._deepspeed.persistent_parameters)

    def step_count(self, parameter: Any) -> torch.Tensor:
        """Adam's count of a parameter's steps, as `ShardedOptimizer.step_count`."""
        return self._no_steps if parameter in self._never_trained else self._state(parameter)["step"]

    def _state(self, parameter: Any) -> dict[str, torch.Tensor]:
        """Adam's state of the parameter's flat partition, which only parameters with equal multipliers share."""
        group, *_ = self._deepspeed.grad_position[self._deepspeed.get_param_id(parameter)]
        return self.optimizer.state[self._deepspeed.fp32_partitioned_groups_flat[group]]
