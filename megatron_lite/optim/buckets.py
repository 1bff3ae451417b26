"""Buckets of parameters: weights in one flat tensor, the sum of their gradients, and this rank's part of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.model.tensor_parallel import add_product
from megatron_lite.optim.lr_multipliers import NO_MULTIPLIERS, LrMultipliers
from megatron_lite.parallel.collectives import Group

ALIGNMENT = 64  # elements between the starts of parameters and of parts: 128 bytes in half precision
# Elements for which a kernel of its own costs less than passing the gradient through memory twice.
ADDED_ALONE = 1 << 18
MOVED_AT_ONCE = 1 << 24  # elements of gradients that may wait to be added up by the same kernel
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ParamGroup:
    """What the parameters of a bucket have in common. Only parameters with equal groups share a bucket."""

    weight_decay: float
    counts: bool  # in the gradient norm; False where another rank counts the same gradient
    summed_over: Group | None = (
        None  # ranks whose gradients are added up, in addition to the data-parallel ranks
    )
    multipliers: LrMultipliers = NO_MULTIPLIERS
    moments: tuple[str, ...] = MOMENTS  # the optimizer's state of each element
    # True for tables that every pipeline stage holds. They share no bucket with the tied word embedding: a stage counts
    # only one of the two in the gradient norm, so that the buckets of two stages would differ.
    is_of_stages: bool = False


def assign(
    group_of: Mapping[nn.Parameter, ParamGroup], bucket_size: int
) -> list[tuple[ParamGroup, list[nn.Parameter]]]:
    """Parameters in the order of their gradients -> buckets in the order in which they are complete."""
    filling: dict[ParamGroup, list[nn.Parameter]] = {}
    full = []
    last = {}
    for place, (parameter, group) in enumerate(group_of.items()):
        # Groups interleave (matrices decay, biases do not), so one bucket of each group is filled at the same time.
        bucket = filling.setdefault(group, [])
        if bucket and sum(p.numel() for p in bucket) + parameter.numel() > bucket_size:
            full.append((group, bucket))
            bucket = filling[group] = []
        bucket.append(parameter)
        last[id(bucket)] = place
    full += filling.items()
    # By the last gradient that a bucket waits for: in this order buckets are complete, and reductions start earliest.
    return sorted(full, key=lambda item: last[id(item[1])])


def allocate_moments(
    optimizer: torch.optim.Optimizer, flats: Iterable[torch.Tensor], moments: Iterable[str] = MOMENTS
) -> None:
    """Moments and step count, before the first step, so that saving and loading always find them."""
    for flat in flats:
        state = optimizer.state[flat]
        state["step"] = torch.tensor(0.0, device=flat.device)
        for key in moments:
            state[key] = torch.zeros_like(flat)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _aligned(count: int, unit: int = ALIGNMENT) -> int:
    return -(-count // unit) * unit


class Bucket:
    """Weights in one flat tensor, and the fp32 state of this rank's part of them."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ParamGroup, dp: Group, offload: bool):
        self.group = group
        self.starts: dict[nn.Parameter, int] = {}
        size = 0
        for parameter in parameters:
            self.starts[parameter] = size
            size += _aligned(parameter.numel())
        # A multiple of the ranks: every part is equal and begins at an aligned element, as reduce-scatter wants.
        self.size = _aligned(size, ALIGNMENT * dp.size)
        self.weights = parameters[0].new_zeros(self.size)
        for parameter in parameters:
            view = self.view(self.weights, parameter)
            view.copy_(parameter.detach())
            # The model computes on the bucket itself, so that an all-gather into it publishes the weights without a
            # copy.
            parameter.data = view
        length = self.size // dp.size
        self.own = slice(dp.rank * length, (dp.rank + 1) * length)
        device = "cpu" if offload else self.weights.device
        # fp32 also where the model is fp32: `weights` is what other ranks' parts arrive in, `master` what the update
        # reads.
        self.master = self.weights[self.own].to(device=device, dtype=torch.float32, copy=True)
        self.summed: torch.Tensor | None = None  # fp32 [size]: this rank's gradients
        self._views: dict[nn.Parameter, torch.Tensor] = {}  # of the tensor `_viewed`
        self._viewed: torch.Tensor | None = None
        self.part: torch.Tensor | None = None  # fp32 [length]: this rank's part of all ranks' sum
        self.work: dist.Work | None = None  # the reduction of `summed`
        self.gathering: dist.Work | None = None  # of `weights`
        self.await_gradients(1)

    def await_gradients(self, count: int) -> None:
        """Begin a sum of `count` gradients of each parameter."""
        self.awaited = count
        self.arrived: dict[nn.Parameter, int] = {}  # gradients of each parameter so far
        self.incomplete = len(self.starts)  # parameters with fewer
        self.arrivals = 0
        self.waiting: dict[nn.Parameter, None] = {}  # whose gradient is not in `summed` yet
        self.waiting_elements = 0
        self.begun: set[nn.Parameter] = set()  # which have a gradient in `summed`

    def view(self, flat: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's elements of a tensor [size]."""
        start = self.starts[parameter]
        return flat[start : start + parameter.numel()].view_as(parameter)

    def _sum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The parameter's part of `summed`, kept as long as that: to make a view costs the host as much as a launch."""
        summed = self._sums()
        if summed is not self._viewed:
            self._views, self._viewed = {}, summed
        found = self._views.get(parameter)
        if found is None:
            found = self._views[parameter] = self.view(summed, parameter)
        return found

    def forget_views(self) -> None:
        """They would keep the memory of former sums."""
        self._views, self._viewed = {}, None

    def owned(self, parameter: nn.Parameter) -> tuple[int, slice] | None:
        """First owned element of the flattened parameter, and where in `master` its owned elements are."""
        start = max(self.starts[parameter], self.own.start)
        stop = min(self.starts[parameter] + parameter.numel(), self.own.stop)
        if start >= stop:
            return None
        return start - self.starts[parameter], slice(start - self.own.start, stop - self.own.start)

    def add(self, parameter: nn.Parameter) -> None:
        """Take in the parameter's gradient, which stays where it is until enough have arrived to move them at once."""
        self.waiting[parameter] = None
        self.waiting_elements += parameter.numel()
        self._count(parameter)

    def add_product(self, parameter: nn.Parameter, grad: torch.Tensor, rows: torch.Tensor) -> None:
        """Take in grad^T rows, which no kernel has computed yet."""
        self.write_product(parameter, grad, rows, parameter in self.begun)
        self.count_product(parameter)

    def write_product(
        self, parameter: nn.Parameter, grad: torch.Tensor, rows: torch.Tensor, begun: bool
    ) -> None:
        """The launches of `add_product`. Args: begun: whether there is a sum already."""
        add_product(self._sum_of(parameter), grad, rows, begun)

    def count_product(self, parameter: nn.Parameter) -> None:
        self.begun.add(parameter)
        self._count(parameter)

    def _count(self, parameter: nn.Parameter) -> None:
        count = self.arrived[parameter] = self.arrived.get(parameter, 0) + 1
        self.incomplete -= count == self.awaited
        self.arrivals += 1
        is_pass_over = self.arrivals % len(self.starts) == 0
        if is_pass_over or self.waiting_elements >= MOVED_AT_ONCE:
            self._move()

    def _sums(self) -> torch.Tensor:
        if self.summed is None:
            self.summed = torch.zeros(self.size, dtype=torch.float32, device=self.weights.device)
        return self.summed

    def _move(self) -> None:
        """Move the waiting gradients into the sums, with few kernels."""
        if not self.waiting:
            return
        first = [p for p in self.waiting if p not in self.begun]
        # The first gradient is copied: zeroing the sums before each step would be another pass over memory.
        if first:
            torch._foreach_copy_([self._sum_of(p) for p in first], [_gradient(p) for p in first])
        later = [p for p in self.waiting if p in self.begun]
        small = [p for p in later if p.numel() < ADDED_ALONE]
        if small:
            # torch adds many tensors with one kernel only if all are of one type; it copies any.
            wide = [torch.empty_like(p, dtype=torch.float32) for p in small]
            torch._foreach_copy_(wide, [_gradient(p) for p in small])
            torch._foreach_add_([self._sum_of(p) for p in small], wide)
        for parameter in later:
            if parameter.numel() >= ADDED_ALONE:
                self._sum_of(parameter).add_(_gradient(parameter))
        self.begun.update(self.waiting)
        for parameter in self.waiting:
            parameter.grad = None
        self.waiting.clear()
        self.waiting_elements = 0

    def complete(self) -> torch.Tensor:
        """The sums; zeros for parameters that took no part."""
        self._move()
        summed = self._sums()
        for parameter in self.starts.keys() - self.begun:
            self._sum_of(parameter).zero_()
        return summed
