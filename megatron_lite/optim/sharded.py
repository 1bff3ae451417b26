"""ZeRO stages 1 and 2: every data-parallel rank updates its shard of the weights.

DeepSpeed 0.19.8 has no settings that reduce-scatter fp32 sums during the backward pass (docs/log.md), so its engine
gets this optimizer in place of DeepSpeed's. Parameters lie in buckets, in the order in which the backward pass finishes
their gradients. Each rank owns an equal, contiguous shard of every bucket. A step goes through these methods:

1. `begin`, before the first forward pass.
2. `_on_gradient` and `accumulate_weight_grad` add gradients to the buffers of the buckets while the backward pass runs.
3. `_start_reduce_scatter` of a bucket as soon as its sums are complete, in the same order on all ranks. Stage 1 first
   sums the gradients of all micro-batches, in fp32, and reduces during the last backward pass. Stage 2 reduces in every
   backward pass and keeps only this rank's shard of the sum.
4. `reduce_gradients` finishes the reductions, at the end of a backward pass.
5. `step` computes the global norm, clips, updates the fp32 shards and starts the all-gather of the weights.
6. `wait_for_weights`, before a module computes with its weights in the next forward pass.

The global norm, clipping, and skipping a step whose gradients are not finite happen on the device: ranks agree by one
sum of one number, and the host reads the outcome when it asks for it.

A frozen parameter has a bucket with its fp32 weights, but no gradient: autograd does not compute it. One that is never
trained has no moments either.

Source: ZeRO, arXiv:1910.02054; buckets of equal shards as in Megatron-LM's distributed optimizer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_lite.optim.buckets import Bucket, ParamGroup, allocate_moments, assign_buckets
from megatron_lite.optim.square_sums import square_sums
from megatron_lite.parallel.collectives import (
    all_gather_in_place,
    all_reduce,
    finish,
    reduce_scatter_in_place,
)
from megatron_lite.parallel.context import ParallelContext


class Outcome(NamedTuple):
    """Result of a step, equal on all ranks."""

    grad_norm: float  # of all gradients before clipping; inf when skipped
    skipped: bool  # non-finite gradients: all ranks left their weights unchanged
    loss_scale: float  # of the next step


class AsyncCopy:
    """Values that are being copied from the device to the host."""

    def __init__(self, values: torch.Tensor):
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._values.copy_(values, non_blocking=True)
        self._copied = None
        if values.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        """Wait for the copy, but not for what the device computes after it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


class ShardedOptimizer:
    """An optimizer of this rank's shards of all buckets, with the interface that DeepSpeed's engine expects."""

    overflow = False  # DeepSpeed's engine reads it in every step; here `outcome` has it, without a wait

    def __init__(
        self,
        groups: Mapping[nn.Parameter, ParamGroup],
        context: ParallelContext,
        *,
        stage: int,
        bucket_size: int,
        clip_grad_norm: float,
        communication_type: torch.dtype,
        loss_scaler: Any,
        make_optimizer: Callable[[list[dict[str, Any]], list[Bucket]], torch.optim.Optimizer],
        offload: bool = False,
    ):
        """Args:
        groups: parameters in the order in which the backward pass finishes their gradients, each with its group.
        bucket_size: elements that are reduced at once; a larger parameter has a bucket to itself.
        loss_scaler: DeepSpeed's.
        make_optimizer: called with torch's parameter groups, of the buckets' fp32 shards, and the buckets.
        offload: keep the fp32 state on the CPU and update there.
        """
        self._context, self._stage, self._offload = context, stage, offload
        self._clip_grad_norm, self._communication_type = clip_grad_norm, communication_type
        self.loss_scaler = loss_scaler
        self.buckets = [
            Bucket(parameters, group, context.dp, offload)
            for group, parameters in assign_buckets(groups, bucket_size)
        ]
        self.bucket_by_param = {parameter: bucket for bucket in self.buckets for parameter in bucket.offsets}
        self._buckets_by_module: dict[nn.Module, list[Bucket]] = {}
        for parameter in self.bucket_by_param:
            # Gradients move into the buckets while the backward pass runs: `.grad` of all parameters together would be
            # another copy of the whole gradient.
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        # torch's fused step launches kernels for each group: buckets with equal settings share one.
        torch_groups: dict[Any, dict[str, Any]] = {}
        for bucket in self.buckets:
            shared = {key: getattr(bucket.group, key) for key in ("weight_decay", "multipliers", "moments")}
            torch_group = torch_groups.setdefault(tuple(shared.values()), {"params": [], **shared})
            torch_group["params"].append(bucket.master_shard)
        self.optimizer = make_optimizer(list(torch_groups.values()), self.buckets)
        for bucket in self.buckets:
            allocate_moments(self.optimizer, [bucket.master_shard], bucket.group.moments)
        self.skipped = torch.zeros((), device=context.device)
        # Outcome of the last step. A call waits for the gradient norm, and adapts the loss scale.
        self.outcome: Callable[[], Outcome] = lambda: Outcome(0.0, False, self.loss_factor)
        self.set_step(1)
        self.begin(1)

    def set_step(self, step: int) -> None:
        """Before `begin`: unfreeze the parameters that are trained in this step, freeze all others."""
        self._trained = [bucket for bucket in self.buckets if bucket.group.multipliers.is_trained(step)]
        for bucket in self.buckets:
            for parameter in bucket.offsets:
                parameter.requires_grad_(bucket.group.multipliers.is_trained(step))

    def begin(self, micro_batches: int) -> None:
        """Before the first forward pass of a step with this number of micro-batches."""
        if self.loss_scaler.dynamic:
            self.outcome()  # the next loss scale depends on it
        for bucket in self._trained:
            bucket.grad_shard = None
            bucket.begin_accumulation(micro_batches if self._stage == 1 else 1)
        self._next = 0  # index in `_trained` of the bucket that is reduced next

    # Gradients, as the backward pass computes them

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Autograd's hook after it has written `parameter.grad`."""
        if parameter.grad is None:  # `accumulate_weight_grad` has taken in the product instead
            return
        self.bucket_by_param[parameter].add_gradient(parameter)
        self._reduce_complete_buckets()

    def add_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Take in the gradient of a parameter that the backward pass uses once, and autograd does not know of."""
        if parameter.requires_grad:
            parameter.grad = gradient
            self._on_gradient(parameter)

    @torch.no_grad()
    def accumulate_weight_grad(
        self, parameter: nn.Parameter, grad: torch.Tensor, inputs: torch.Tensor
    ) -> None:
        """Add the gradient grad^T inputs of a parameter that the backward pass uses once: [T, out], [T, in]."""
        if parameter.requires_grad:
            self.bucket_by_param[parameter].accumulate_weight_grad(parameter, grad, inputs)
            self._reduce_complete_buckets()

    # The steps of `accumulate_weight_grad`, for CUDA graphs: they repeat the launches of `write_weight_grad` alone

    def is_accumulated(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's sum has a gradient, to which the next one is added."""
        return parameter in self.bucket_by_param[parameter].accumulated

    @torch.no_grad()
    def write_weight_grad(
        self, parameter: nn.Parameter, grad: torch.Tensor, inputs: torch.Tensor, accumulate: bool
    ) -> None:
        self.bucket_by_param[parameter].write_weight_grad(parameter, grad, inputs, accumulate)

    @torch.no_grad()
    def count_weight_grad(self, parameter: nn.Parameter) -> None:
        self.bucket_by_param[parameter].count_weight_grad(parameter)
        self._reduce_complete_buckets()

    # Reduce-scatter

    def _reduce_complete_buckets(self) -> None:
        # Strictly in order, though a later bucket may be complete first: collectives must match on all ranks.
        while self._next < len(self._trained) and self._trained[self._next].is_complete:
            self._start_reduce_scatter()

    def _start_reduce_scatter(self) -> None:
        """Start the next bucket's reduction. At stage 2, finish the one before, to free its memory."""
        bucket = self._trained[self._next]
        self._next += 1
        sums = bucket.finish_accumulation()
        bucket.grad_buffer = sums.to(self._communication_type)
        # Cast to the communication type: the fp32 sums are free as soon as no view holds them.
        if bucket.grad_buffer is not sums:
            bucket.forget_views()
        bucket.reduce_work = reduce_scatter_in_place(bucket.grad_buffer, bucket.holders)
        if self._stage == 2 and self._next > 1:
            self._finish_reduce_scatter(self._trained[self._next - 2])

    def _finish_reduce_scatter(self, bucket: Bucket) -> None:
        """Take this rank's shard of the sum over the data-parallel ranks; stage 2 adds it to the shard so far."""
        if bucket.grad_buffer is None:
            return
        finish(bucket.reduce_work)
        bucket.reduce_work = None
        shard = bucket.grad_buffer[bucket.shard_range].float()
        if self._stage == 2:
            # Cloned: the shard is a view, and the buffer is freed below.
            bucket.grad_shard = shard.clone() if bucket.grad_shard is None else bucket.grad_shard.add_(shard)
            bucket.begin_accumulation(1)
        else:
            bucket.grad_shard = shard
        if self._stage == 2 or self._communication_type != torch.float32:
            bucket.grad_buffer = None
            bucket.forget_views()

    @torch.no_grad()
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """At the end of a backward pass, at stage 1 of the last one: start and finish all reductions."""
        while self._next < len(self._trained):
            self._start_reduce_scatter()
        for bucket in self._trained:
            self._finish_reduce_scatter(bucket)
        self._next = 0

    overlapping_partition_gradients_reduce_epilogue = reduce_gradients  # DeepSpeed's name at stage 2

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Called by DeepSpeed's engine. Does nothing: `begin` knows the number of backward passes."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Called by DeepSpeed's engine. Does nothing: gradients leave `.grad` as they arise."""

    # Clip, update, all-gather

    @torch.no_grad()
    def step(self) -> None:
        """Clip and update, unless a gradient is not finite; then start to all-gather the weights.

        Follows `reduce_gradients`. It waits for no device, except for the CPU's update with `offload`.
        """
        grads = []
        for bucket in self._trained:
            assert bucket.grad_shard is not None, "a step follows reduce_gradients"
            if bucket.group.extra_reduce_group is not None:
                all_reduce(bucket.grad_shard, bucket.group.extra_reduce_group)
            grads.append(bucket.grad_shard)
        # Shards differ between data-parallel ranks, so the sum over all processes covers them; replicas over tp and pp
        # count once, by `in_grad_norm`.
        counted = [
            grad for bucket, grad in zip(self._trained, grads, strict=True) if bucket.group.in_grad_norm
        ]
        total = (square_sums(counted) if counted else grads[0].new_zeros(1, dtype=torch.float64)).sum()
        scale = float(self.loss_scaler.cur_scale)
        norm = self._context.sum(total).sqrt().float() / scale
        is_skipped = (norm - norm).isnan()  # infinity or NaN: `isfinite` would be four kernels more
        self.skipped = is_skipped.float()
        self.outcome = self._outcome_of(AsyncCopy(torch.stack([norm, self.skipped])))
        factor = torch.full_like(norm, 1 / scale)
        if self._clip_grad_norm > 0:
            factor /= ((norm + 1e-6) / self._clip_grad_norm).clamp(min=1.0)
        factor.masked_fill_(is_skipped, 0.0)  # the padding between parameters stays 0
        # Unscaling and clipping in one pass; the host knows neither number at this point.
        torch._foreach_mul_(grads, factor)
        for bucket, grad in zip(self._trained, grads, strict=True):
            # A copy on the CPU: the next step may overwrite the shard while the CPU is still updating.
            bucket.master_shard.grad = grad.cpu() if self._offload else grad
        skipped = self.skipped.cpu() if self._offload else self.skipped
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # torch's fused kernel leaves weights, moments and step count as they are if this is 1.
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not skipped:  # waits for the device
            self.optimizer.step()
        for bucket in self._trained:
            bucket.master_shard.grad = bucket.grad_shard = None
        self._start_all_gather(self._trained)

    @torch.no_grad()
    def _start_all_gather(self, changed: Sequence[Bucket]) -> None:
        """Copy the fp32 shards of buckets to the model's weights, and start to gather those of all ranks."""
        self.wait_for_weights()
        masters = [bucket.master_shard for bucket in changed]
        shards = [bucket.weights[bucket.shard_range] for bucket in changed]
        torch._foreach_copy_(shards, masters, non_blocking=True)
        # Buckets lie in the order of the backward pass, so reversed is the order in which the forward pass needs them:
        # it computes with the first weights while others are on their way.
        for bucket in reversed(changed):
            bucket.gather_work = all_gather_in_place(bucket.weights, bucket.holders)

    def gather_weights(self) -> None:
        """Copy the fp32 shards of every rank to the model's weights on all ranks, after the shards were changed."""
        self._start_all_gather(self.buckets)
        self.wait_for_weights()

    def wait_for_weights(self, module: nn.Module | None = None) -> None:
        """Before the weights of a module, or all, are read. On CUDA the stream waits, not the host."""
        buckets = self.buckets
        if module is not None:
            if module not in self._buckets_by_module:
                self._buckets_by_module[module] = list(
                    # Biases of routers are in none.
                    dict.fromkeys(
                        self.bucket_by_param[p] for p in module.parameters() if p in self.bucket_by_param
                    )
                )
            buckets = self._buckets_by_module[module]
        for bucket in buckets:
            if bucket.gather_work is not None:
                bucket.gather_work.wait()
                bucket.gather_work = None

    @property
    def loss_factor(self) -> float:
        """Factor of each micro-batch's loss before its backward pass: the loss scale of fp16, else 1."""
        return float(self.loss_scaler.cur_scale)

    def is_skipping(self) -> bool:
        """Whether the step under way leaves the weights unchanged. Waits for the device."""
        return bool(self.skipped)

    def _outcome_of(self, copied: AsyncCopy) -> Callable[[], Outcome]:
        @functools.cache  # the scale changes once per step
        def outcome() -> Outcome:
            norm, skipped = copied.read()
            self.loss_scaler.update_scale(bool(skipped))
            return Outcome(math.inf if skipped else norm, bool(skipped), float(self.loss_scaler.cur_scale))

        return outcome

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    # State for checkpoints

    def owned(self, parameter: nn.Parameter) -> tuple[tuple[int, ...], int, dict[str, torch.Tensor]] | None:
        """The range of a parameter's tensor-parallel shard that this rank owns; None if it owns no element.

        Returns: shape of the shard, first owned element, and the range's state: name -> fp32 [elements].
        """
        bucket = self.bucket_by_param[parameter]
        owned = bucket.owned_range(parameter)
        if owned is None:
            return None
        start, positions = owned
        state = self.optimizer.state[bucket.master_shard]
        tensors = {
            "weight": bucket.master_shard[positions],
            **{key: state[key][positions] for key in bucket.group.moments},
        }
        return tuple(parameter.shape), start, tensors

    def whole_state(self, name: str) -> dict[str, torch.Tensor]:
        """State of a parameter that is not per element: each rank that owns elements of it holds the whole state."""
        return self.optimizer.whole_state(name) if hasattr(self.optimizer, "whole_state") else {}

    def step_count(self, parameter: nn.Parameter) -> torch.Tensor:
        """Adam's count of steps, which the parameters of a bucket share."""
        return self.optimizer.state[self.bucket_by_param[parameter].master_shard]["step"]
