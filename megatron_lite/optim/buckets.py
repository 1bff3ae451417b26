"""Buckets of parameters: weights in one flat tensor, the sum of their gradients, and this rank's shard of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.optim.lr_multipliers import NO_MULTIPLIERS, LrMultipliers
from megatron_lite.parallel.collectives import Group
from megatron_lite.transformer.tensor_parallel import add_product

ALIGNMENT = 64  # elements between the starts of parameters and of shards: 128 bytes in half precision
# A gradient with at least this number of elements is added by its own kernel: that costs less than passing it through
# memory twice, as the grouped addition of small gradients does.
SINGLE_ADD_NUMEL = 1 << 18
MAX_PENDING_NUMEL = 1 << 24  # elements of gradients that may wait to be added up by the same kernel
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ParamGroup:
    """What the parameters of a bucket have in common. Only parameters with equal groups share a bucket."""

    weight_decay: float
    in_grad_norm: bool  # False where another rank has the same gradient, which then counts there
    # Ranks over which gradients are summed as well, after the data-parallel ranks: those that hold the same parameter
    # and compute a different summand of its gradient.
    extra_reduce_group: Group | None = None
    multipliers: LrMultipliers = NO_MULTIPLIERS
    moments: tuple[str, ...] = MOMENTS  # the optimizer's state of each element
    # True for tables that every pipeline stage holds. They share no bucket with the tied word embedding: a stage counts
    # only one of the two in the gradient norm, so that the buckets of two stages would differ.
    on_all_stages: bool = False
    # False for what is never trained, where the optimizer does not ask for its weights.
    has_state: bool = True
    # The ranks over which gradients are summed and shards divided; None = all data-parallel ranks.
    holders: Group | None = None


def assign_buckets(
    groups: Mapping[nn.Parameter, ParamGroup], bucket_size: int
) -> list[tuple[ParamGroup, list[nn.Parameter]]]:
    """Parameters in the order of their gradients -> buckets in the order in which they are complete."""
    open_buckets: dict[ParamGroup, list[nn.Parameter]] = {}
    full_buckets = []
    last_index = {}  # of a bucket's parameters, by the bucket's id
    for index, (parameter, group) in enumerate(groups.items()):
        # Groups interleave (matrices decay, biases do not), so one bucket of each group is filled at the same time.
        bucket = open_buckets.setdefault(group, [])
        if bucket and sum(p.numel() for p in bucket) + parameter.numel() > bucket_size:
            full_buckets.append((group, bucket))
            bucket = open_buckets[group] = []
        bucket.append(parameter)
        last_index[id(bucket)] = index
    # By the last gradient that a bucket waits for: in this order buckets are complete, and reductions start earliest.
    return sorted([*full_buckets, *open_buckets.items()], key=lambda item: last_index[id(item[1])])


def allocate_moments(
    optimizer: torch.optim.Optimizer, shards: Iterable[torch.Tensor], moments: Iterable[str] = MOMENTS
) -> None:
    """Moments and step count, before the first step, so that saving and loading always find them."""
    for shard in shards:
        state = optimizer.state[shard]
        state["step"] = torch.tensor(0.0, device=shard.device)
        for key in moments:
            state[key] = torch.zeros_like(shard)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


class Bucket:
    """Weights in one flat tensor, the buffer of their gradients, and the fp32 state of this rank's shard.

    A step goes through the attributes in this order:

    - `grad_buffer` fp32 [size]: gradients of this rank, summed over micro-batches;
    - `reduce_work`: the reduce-scatter of the buffer over the data-parallel ranks;
    - `grad_shard` fp32 [size / ranks]: this rank's shard of the sum;
    - `master_shard` fp32 [size / ranks]: the weights that the optimizer updates, or of what is never trained reads;
    - `gather_work`: the all-gather of `weights` [size], which the model computes with.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: ParamGroup, dp: Group, offload: bool):
        self.group, self.holders = group, group.holders or dp
        dp = self.holders
        self.offsets: dict[nn.Parameter, int] = {}  # first element of each parameter
        size = 0
        for parameter in parameters:
            self.offsets[parameter] = size
            size += _round_up(parameter.numel(), ALIGNMENT)
        # A multiple of the ranks: all shards are equal and begin at an aligned element, as reduce-scatter wants.
        self.size = _round_up(size, ALIGNMENT * dp.size)
        self.weights = parameters[0].new_zeros(self.size)
        for parameter in parameters:
            view = self.view(self.weights, parameter)
            view.copy_(parameter.detach())
            # The model computes on the bucket itself, so the weights that an all-gather writes need no copy.
            parameter.data = view
        shard_size = self.size // dp.size
        self.shard_range = slice(dp.rank * shard_size, (dp.rank + 1) * shard_size)  # of this rank
        # What is never trained is read only by saves, which want its exact values: they wait in the host's memory, and
        # where the model is fp32 they are the model's own.
        is_frozen, is_exact = not group.has_state, self.weights.dtype == torch.float32
        device = "cpu" if offload or (is_frozen and not is_exact) else self.weights.device
        # Otherwise a copy also where the model is fp32: other ranks' shards arrive in `weights`, the update reads this
        # one.
        self.master_shard = self.weights[self.shard_range].to(
            device=device, dtype=torch.float32, copy=not is_frozen
        )
        self.grad_buffer: torch.Tensor | None = None
        self._grad_views: dict[nn.Parameter, torch.Tensor] = {}  # of the buffer `_viewed_buffer`
        self._viewed_buffer: torch.Tensor | None = None
        self.grad_shard: torch.Tensor | None = None
        self.reduce_work: dist.Work | None = None
        self.gather_work: dist.Work | None = None
        self.begin_accumulation(1)

    def begin_accumulation(self, backward_passes: int) -> None:
        """Begin a sum with one gradient of each parameter in each of the backward passes."""
        self._expected = backward_passes
        self._arrived: dict[nn.Parameter, int] = {}  # gradients of each parameter so far
        self._total_arrived = 0
        self._num_incomplete = len(self.offsets)  # parameters with fewer gradients than expected
        self._pending: dict[nn.Parameter, None] = {}  # whose gradient is not in `grad_buffer` yet
        self._pending_numel = 0
        self.accumulated: set[nn.Parameter] = set()  # those with a gradient in `grad_buffer`

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of the sum have arrived."""
        return self._num_incomplete == 0

    def view(self, flat: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's elements of a tensor [size]."""
        offset = self.offsets[parameter]
        return flat[offset : offset + parameter.numel()].view_as(parameter)

    def _grad_view(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's elements of `grad_buffer`, which is allocated where there is none."""
        buffer = self._allocated_buffer()
        # Views are cached as long as their buffer lives: making one costs the host as much as a kernel launch.
        if buffer is not self._viewed_buffer:
            self._grad_views, self._viewed_buffer = {}, buffer
        view = self._grad_views.get(parameter)
        if view is None:
            view = self._grad_views[parameter] = self.view(buffer, parameter)
        return view

    def _allocated_buffer(self) -> torch.Tensor:
        if self.grad_buffer is None:
            self.grad_buffer = torch.zeros(self.size, dtype=torch.float32, device=self.weights.device)
        return self.grad_buffer

    def forget_views(self) -> None:
        """Drop the cached views, which would keep the memory of a former buffer."""
        self._grad_views, self._viewed_buffer = {}, None

    def owned_range(self, parameter: nn.Parameter) -> tuple[int, slice] | None:
        """First owned element of the flattened parameter, and the slice of `master_shard` with all owned elements.

        None: this rank owns no element of the parameter.
        """
        offset = self.offsets[parameter]
        start = max(offset, self.shard_range.start)
        stop = min(offset + parameter.numel(), self.shard_range.stop)
        if start >= stop:
            return None
        return start - offset, slice(start - self.shard_range.start, stop - self.shard_range.start)

    def add_gradient(self, parameter: nn.Parameter) -> None:
        """Take in `parameter.grad`, which stays there until enough have arrived to be moved by few kernels."""
        self._pending[parameter] = None
        self._pending_numel += parameter.numel()
        self._count_gradient(parameter)

    def accumulate_weight_grad(
        self, parameter: nn.Parameter, grad: torch.Tensor, inputs: torch.Tensor
    ) -> None:
        """Add the gradient grad^T inputs, which no kernel has computed yet: [T, out], [T, in]."""
        self.write_weight_grad(parameter, grad, inputs, parameter in self.accumulated)
        self.count_weight_grad(parameter)

    def write_weight_grad(
        self, parameter: nn.Parameter, grad: torch.Tensor, inputs: torch.Tensor, accumulate: bool
    ) -> None:
        """Launch the product grad^T inputs, added to the parameter's sum, or written over it."""
        add_product(self._grad_view(parameter), grad, inputs, accumulate)

    def count_weight_grad(self, parameter: nn.Parameter) -> None:
        """Note that `write_weight_grad` has been launched for the parameter."""
        self.accumulated.add(parameter)
        self._count_gradient(parameter)

    def _count_gradient(self, parameter: nn.Parameter) -> None:
        count = self._arrived[parameter] = self._arrived.get(parameter, 0) + 1
        self._num_incomplete -= count == self._expected
        self._total_arrived += 1
        is_end_of_pass = self._total_arrived % len(self.offsets) == 0
        if is_end_of_pass or self._pending_numel >= MAX_PENDING_NUMEL:
            self._move_pending()

    def _move_pending(self) -> None:
        """Move the pending gradients into the buffer, with few kernels."""
        if not self._pending:
            return
        first = [p for p in self._pending if p not in self.accumulated]
        # The first gradient is copied: zeroing the buffer before each step would be another pass over memory.
        if first:
            torch._foreach_copy_([self._grad_view(p) for p in first], [_gradient(p) for p in first])
        later = [p for p in self._pending if p in self.accumulated]
        small = [p for p in later if p.numel() < SINGLE_ADD_NUMEL]
        if small:
            # torch adds many tensors with one kernel only if all have one dtype; it copies between any two.
            in_fp32 = [torch.empty_like(p, dtype=torch.float32) for p in small]
            torch._foreach_copy_(in_fp32, [_gradient(p) for p in small])
            torch._foreach_add_([self._grad_view(p) for p in small], in_fp32)
        for parameter in later:
            if parameter.numel() >= SINGLE_ADD_NUMEL:
                self._grad_view(parameter).add_(_gradient(parameter))
        self.accumulated.update(self._pending)
        for parameter in self._pending:
            parameter.grad = None
        self._pending.clear()
        self._pending_numel = 0

    def finish_accumulation(self) -> torch.Tensor:
        """The gradient buffer with all sums; zeros for parameters that the backward passes did not reach."""
        self._move_pending()
        buffer = self._allocated_buffer()
        for parameter in self.offsets.keys() - self.accumulated:
            self._grad_view(parameter).zero_()
        return buffer
