"""ZeRO stages 1 and 2: every data-parallel rank updates its part of the weights.

DeepSpeed 0.19.8 has no settings that reduce-scatter fp32 sums during the backward pass (docs/log.md), so its engine
gets this optimizer instead of one of its own. Parameters lie in buckets, in the order in which the backward pass
finishes their gradients. Each rank owns an equal, contiguous part of every bucket, so that one reduce-scatter of a
bucket gives every rank the sums it needs, and one all-gather the updated weights. Buckets are reduced in the same order
on all ranks, each as soon as its gradients are complete:

- stage 1 adds up the gradients of a step's micro-batches first, in fp32, and reduces during the last backward pass;
- stage 2 reduces in every backward pass and keeps only this rank's part of the sum.

The global norm, clipping, and skipping a step whose gradients are not finite happen on the device: ranks agree by one
sum of one number, and the host reads the outcome when it asks for it.

A frozen parameter has a bucket with its fp32 weights, but no gradient: autograd does not compute it.

Source: ZeRO, arXiv:1910.02054; buckets of equal parts as in Megatron-LM's distributed optimizer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_lite.optim.buckets import Bucket, ParamGroup, allocate_moments, assign
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


class ToHost:
    """Values on their way from the device to the host."""

    def __init__(self, values: torch.Tensor):
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._values.copy_(values, non_blocking=True)
        self._arrived = None
        if values.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[float]:
        """Waits until they have arrived, but not for what the device computes after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


class ShardedOptimizer:
    """An optimizer of this rank's parts of all buckets, with the interface of those of DeepSpeed's engine."""

    overflow = False  # DeepSpeed would read it in every step; `outcome` says it

    def __init__(
        self,
        group_of: Mapping[nn.Parameter, ParamGroup],
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
        group_of: parameters in the order in which the backward pass finishes their gradients.
        bucket_size: elements that are reduced at once; a larger parameter is a bucket of its own.
        loss_scaler: DeepSpeed's.
        make_optimizer: of groups of the buckets' fp32 weights, and the buckets.
        offload: keep the fp32 state on the CPU and update there.
        """
        self._context, self._stage, self._offload = context, stage, offload
        self._clip_grad_norm, self._communication_type = clip_grad_norm, communication_type
        self.loss_scaler = loss_scaler
        self.buckets = [
            Bucket(parameters, group, context.dp, offload)
            for group, parameters in assign(group_of, bucket_size)
        ]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.starts}
        self._buckets_of: dict[nn.Module, list[Bucket]] = {}
        for parameter in self.bucket_of:
            # Moves gradients into the buckets while the backward pass runs; `.grad` of all parameters would be the full
            # gradient.
            parameter.register_post_accumulate_grad_hook(self._take)
        # torch's fused step launches kernels for each group: buckets with equal settings share one.
        torch_groups: dict[Any, dict[str, Any]] = {}
        for bucket in self.buckets:
            shared = {key: getattr(bucket.group, key) for key in ("weight_decay", "multipliers", "moments")}
            torch_group = torch_groups.setdefault(tuple(shared.values()), {"params": [], **shared})
            torch_group["params"].append(bucket.master)
        self.optimizer = make_optimizer(list(torch_groups.values()), self.buckets)
        for bucket in self.buckets:
            allocate_moments(self.optimizer, [bucket.master], bucket.group.moments)
        self.skipped = torch.zeros((), device=context.device)
        # Outcome of the last step. The call waits for the gradient norm, and adapts the loss scale.
        self.outcome: Callable[[], Outcome] = lambda: Outcome(0.0, False, self.loss_factor)
        self.set_step(1)
        self.begin(1)

    def set_step(self, step: int) -> None:
        """Before `begin`: train what has its turn in this step, freeze all else."""
        self._trained = [bucket for bucket in self.buckets if bucket.group.multipliers.is_trained(step)]
        for bucket in self.buckets:
            for parameter in bucket.starts:
                parameter.requires_grad_(bucket.group.multipliers.is_trained(step))

    # The backward passes of a step

    def begin(self, micro_batches: int) -> None:
        """Before the first forward pass of a step with this number of micro-batches."""
        if self.loss_scaler.dynamic:
            self.outcome()  # the next loss scale depends on it
        for bucket in self._trained:
            bucket.part = None
            bucket.await_gradients(micro_batches if self._stage == 1 else 1)
        self._next = 0  # the bucket that is reduced next

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:  # its product was taken
            return
        self.bucket_of[parameter].add(parameter)
        self._reduce_complete()

    def take(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Take in the gradient of a parameter that the backward pass uses once, and autograd does not know of."""
        if parameter.requires_grad:
            parameter.grad = gradient
            self._take(parameter)

    @torch.no_grad()
    def accumulate_weight_grad(self, parameter: nn.Parameter, grad: torch.Tensor, rows: torch.Tensor) -> None:
        """Take in the gradient grad^T rows of a parameter that the backward pass uses once."""
        if parameter.requires_grad:
            self.bucket_of[parameter].add_product(parameter, grad, rows)
            self._reduce_complete()

    # Both parts of `accumulate_weight_grad`, for CUDA graphs, which repeat the first

    def has_begun(self, parameter: nn.Parameter) -> bool:
        return parameter in self.bucket_of[parameter].begun

    @torch.no_grad()
    def write_product(self, parameter: nn.Parameter, *arguments: Any) -> None:
        self.bucket_of[parameter].write_product(parameter, *arguments)

    @torch.no_grad()
    def count_product(self, parameter: nn.Parameter) -> None:
        self.bucket_of[parameter].count_product(parameter)
        self._reduce_complete()

    def _reduce_complete(self) -> None:
        # Strictly in order, though a later bucket may be complete first: collectives must match on all ranks.
        while self._next < len(self._trained) and not self._trained[self._next].incomplete:
            self._reduce_next()

    def _reduce_next(self) -> None:
        """Start the next bucket's reduction. At stage 2, take in the sum of the one before, to free its memory."""
        bucket = self._trained[self._next]
        self._next += 1
        sums = bucket.complete()
        bucket.summed = sums.to(self._communication_type)
        # Cast to the communication type: the fp32 sums are free as soon as no view holds them.
        if bucket.summed is not sums:
            bucket.forget_views()
        bucket.work = reduce_scatter_in_place(bucket.summed, self._context.dp)
        if self._stage == 2 and self._next > 1:
            self._collect(self._trained[self._next - 2])

    def _collect(self, bucket: Bucket) -> None:
        """Take in this rank's part of the bucket's sum over the data-parallel ranks."""
        if bucket.summed is None:
            return
        finish(bucket.work)
        bucket.work = None
        part = bucket.summed[bucket.own].float()
        if self._stage == 2:
            bucket.part = part.clone() if bucket.part is None else bucket.part.add_(part)
            bucket.await_gradients(1)
        else:
            bucket.part = part
        if self._stage == 2 or self._communication_type != torch.float32:
            bucket.summed = None
            bucket.forget_views()

    @torch.no_grad()
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """At the end of a backward pass, at stage 1 of the last one: start and finish all reductions."""
        while self._next < len(self._trained):
            self._reduce_next()
        for bucket in self._trained:
            self._collect(bucket)
        self._next = 0

    overlapping_partition_gradients_reduce_epilogue = reduce_gradients  # DeepSpeed's name at stage 2

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """DeepSpeed tells its optimizers so; `begin` was told how many backward passes there are."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is left: gradients move into the buckets as they arise."""

    # The update

    @torch.no_grad()
    def step(self) -> None:
        """Clip and update, unless a gradient is not finite; then give all ranks the weights. Waits for no device."""
        parts = [self._final_part(bucket) for bucket in self._trained]
        norms = torch._foreach_norm(parts)
        # Parts differ between data-parallel ranks, so the sum over all processes covers them; replicas over tp and pp
        # count once, by `counts`.
        counted = [norms[i] for i, bucket in enumerate(self._trained) if bucket.group.counts]
        # fp64: the square of a norm that carries the loss scale could overflow fp32.
        total = torch.stack(counted or [torch.zeros_like(norms[0])]).double().square().sum()
        scale = float(self.loss_scaler.cur_scale)
        norm = self._context.sum(total).sqrt().float() / scale
        is_skipped = (norm - norm).isnan()  # infinity or NaN: `isfinite` would be four kernels more
        self.skipped = is_skipped.float()
        self.outcome = self._on_the_host(ToHost(torch.stack([norm, self.skipped])))
        factor = torch.full_like(norm, 1 / scale)
        if self._clip_grad_norm > 0:
            factor /= ((norm + 1e-6) / self._clip_grad_norm).clamp(min=1.0)
        factor.masked_fill_(is_skipped, 0.0)  # what lies between the parameters stays 0
        # Unscaling and clipping in one pass; the host knows neither number at this point.
        torch._foreach_mul_(parts, factor)
        self._update(parts)
        for bucket in self._trained:
            bucket.part = None
        self._start_to_publish(self._trained)

    def _final_part(self, bucket: Bucket) -> torch.Tensor:
        assert bucket.part is not None, "a step follows reduce_gradients"
        if bucket.group.summed_over is not None:
            all_reduce(bucket.part, bucket.group.summed_over)
        return bucket.part

    def _update(self, parts: list[torch.Tensor]) -> None:
        for bucket, part in zip(self._trained, parts, strict=True):
            # On the CPU only after the copy: the next step may overwrite the part while the CPU is still updating.
            bucket.master.grad = part.cpu() if self._offload else part
        skipped = self.skipped.cpu() if self._offload else self.skipped
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # torch's fused kernel leaves weights, moments and step count as they are if this is 1
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not skipped:  # waits for the device
            self.optimizer.step()
        for bucket in self._trained:
            bucket.master.grad = None

    def publish_weights(self) -> None:
        """Copy the fp32 weights of every rank's part to the model on all ranks."""
        self._start_to_publish(self.buckets)
        self.await_weights()

    @torch.no_grad()
    def _start_to_publish(self, changed: Sequence[Bucket]) -> None:
        """In the order of the forward pass, which computes with the first weights while others are on their way."""
        self.await_weights()
        masters = [bucket.master for bucket in changed]
        torch._foreach_copy_([bucket.weights[bucket.own] for bucket in changed], masters, non_blocking=True)
        # Buckets lie in the order of the backward pass, so reversed is the order in which the forward pass needs them.
        for bucket in reversed(changed):
            bucket.gathering = all_gather_in_place(bucket.weights, self._context.dp)

    def await_weights(self, part: nn.Module | None = None) -> None:
        """Before the weights of a part of the model, or all, are read. On CUDA the stream waits, not the host."""
        buckets = self.buckets
        if part is not None:
            if part not in self._buckets_of:
                self._buckets_of[part] = list(dict.fromkeys(self.bucket_of[p] for p in part.parameters()))
            buckets = self._buckets_of[part]
        for bucket in buckets:
            if bucket.gathering is not None:
                bucket.gathering.wait()
                bucket.gathering = None

    @property
    def loss_factor(self) -> float:
        """Factor of each micro-batch's loss before its backward pass: the loss scale of fp16, else 1."""
        return float(self.loss_scaler.cur_scale)

    def is_skipping(self) -> bool:
        """Whether the step under way leaves the weights unchanged. Waits for the device."""
        return bool(self.skipped)

    def _on_the_host(self, values: ToHost) -> Callable[[], Outcome]:
        @functools.cache  # the scale changes once per step
        def outcome() -> Outcome:
            norm, skipped = values.read()
            self.loss_scaler.update_scale(bool(skipped))
            return Outcome(math.inf if skipped else norm, bool(skipped), float(self.loss_scaler.cur_scale))

        return outcome

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    # State for checkpoints

    def owned(self, parameter: nn.Parameter) -> tuple[tuple[int, ...], int, dict[str, torch.Tensor]] | None:
        """Shape of the shard; first element and state of the range that this rank owns; None if it owns nothing."""
        bucket = self.bucket_of[parameter]
        found = bucket.owned(parameter)
        if found is None:
            return None
        start, place = found
        state = self.optimizer.state[bucket.master]
        tensors = {
            "weight": bucket.master[place],
            **{key: state[key][place] for key in bucket.group.moments},
        }
        return tuple(parameter.shape), start, tensors

    def whole_state(self, name: str) -> dict[str, torch.Tensor]:
        """State of a parameter that each rank with a part of it holds whole."""
        return self.optimizer.whole_state(name) if hasattr(self.optimizer, "whole_state") else {}

    def step_count(self, parameter: nn.Parameter) -> torch.Tensor:
        """Adam's count of steps, which the parameter shares with others of the same multipliers."""
        return self.optimizer.state[self.bucket_of[parameter].master]["step"]
