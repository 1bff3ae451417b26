"""Optimizers that need sums over whole tensors, of which each rank owns flat ranges.

Under ZeRO 1 and 2 a rank owns a shard of every bucket, cut wherever the bucket's equal shards end. Such an optimizer
needs only sums over a whole tensor: each rank adds up its own elements in fp64, and one reduction over all ranks joins
the sums, so that no result depends on parallel sizes or buckets. Tensors are those of the reference: each block of a
fused parameter (Q, K, V; gate, up) is one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.checkpoint.shard_slices import ShardSlice, flattened_ranges, matrix_shape
from megatron_lite.config.sections import OptimizerConfig
from megatron_lite.optim.buckets import MOMENTS, Bucket
from megatron_lite.optim.square_sums import square_sums
from megatron_lite.optim.uncompiled import Optimizer
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.tensor_parallel import Partition, partition_of, whole_shape

BLOCKS = 3  # at most, of a fused parameter: Q, K and V


@dataclass(frozen=True)
class OwnedSlice:
    """Elements of one tensor that this rank owns."""

    tensor: int  # number of the tensor, the same on all ranks
    region: ShardSlice  # rows and columns of the tensor
    positions: slice  # of the elements in the bucket shard, row by row
    in_sums: bool  # False where another rank owns the same elements, which then count there


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the reference, of which ranks of this pipeline stage own slices."""

    name: str  # of its parameter
    shape: tuple[int, int]
    has_weight_decay: bool  # neither bias nor norm

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


def block_shapes(shape: tuple[int, ...], partition: Partition, tp: int) -> tuple[tuple[int, int], ...]:
    """Rows and columns of each block of the whole parameter, from the shape of one of `tp` shards."""
    rows, columns = matrix_shape(whole_shape(shape, partition, tp))
    return tuple((block, columns) for block in partition.block_rows(rows))


@dataclass
class TensorIndex:
    """The tensors of the model by number, and the slices of them that this rank owns."""

    shapes: Mapping[str, tuple[int, ...]]  # of all parameters of all stages, in an order that all ranks share
    context: ParallelContext
    precision: str  # of the training
    tensors: dict[int, WholeTensor] = field(default_factory=dict)  # of this stage, by number
    # By a bucket's `master_shard`: numbers of all tensors of the bucket, and the slices in this rank's shard.
    bucket_tensors: dict[torch.Tensor, list[int]] = field(default_factory=dict)
    slices: dict[torch.Tensor, list[OwnedSlice]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """One more than the largest number of a tensor."""
        return BLOCKS * len(self.shapes)

    def add(
        self, bucket: Bucket, names: Mapping[nn.Parameter, str], has_weight_decay: Callable[[str], bool]
    ) -> None:
        """Take in a bucket. Args: names: global names of its parameters."""
        tp, order = self.context.tp, list(self.shapes)
        slices = self.slices.setdefault(bucket.master_shard, [])
        numbers = self.bucket_tensors.setdefault(bucket.master_shard, [])
        for parameter in bucket.offsets:
            name, shape, partition = names[parameter], tuple(parameter.shape), partition_of(parameter)
            # Numbers with room for three blocks each: the same on all ranks, whichever parameters a rank holds.
            first = BLOCKS * order.index(name)
            blocks = block_shapes(shape, partition, tp.size)
            block_starts = [0, *accumulate(rows for rows, _ in blocks)]
            for block, block_shape in enumerate(blocks):
                self.tensors[first + block] = WholeTensor(name, block_shape, has_weight_decay(name))
                numbers.append(first + block)
            owned = bucket.owned_range(parameter)
            if owned is None:
                continue
            start, positions = owned
            # As in checkpoints: where a flat range of a tensor-parallel shard lies in the whole parameter.
            count = positions.stop - positions.start
            for flat_range in flattened_ranges(shape, partition, tp.rank, tp.size, start, count):
                whole = flat_range.slice
                block = sum(block_start <= whole.row for block_start in block_starts[1:-1])
                first_row = block_starts[block]
                region = ShardSlice(
                    whole.row - first_row, whole.row_stop - first_row, whole.column, whole.column_stop
                )
                begin = positions.start + flat_range.start - start
                slices.append(
                    OwnedSlice(
                        first + block,
                        region,
                        slice(begin, begin + region.size),
                        bucket.group.in_grad_norm,
                    )
                )


@dataclass(eq=False)
class BucketShard:
    """This rank's shard of a bucket: fp32 weights [elements], their state and settings."""

    weights: torch.Tensor
    group: dict[str, Any]  # of the optimizer: lr, weight_decay, moments
    state: dict[str, torch.Tensor]
    tensors: torch.Tensor  # numbers of all tensors of the bucket
    slices: list[OwnedSlice]  # of this shard

    @property
    def gradient(self) -> torch.Tensor:
        assert self.weights.grad is not None
        return self.weights.grad

    @property
    def step(self) -> torch.Tensor:
        """Number of the step under way, from 1."""
        return self.state["step"].clamp(min=1)

    @cached_property
    def summed_slices(self) -> list[OwnedSlice]:
        return [owned for owned in self.slices if owned.in_sums]

    @cached_property
    def summed_tensors(self) -> torch.Tensor:
        """The tensor of each of `summed_slices`."""
        return torch.tensor([owned.tensor for owned in self.summed_slices], device=self.weights.device)

    @cached_property
    def _runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensor and length of each run of elements of the shard; tensor -1 for the padding between slices."""
        runs, end = [], 0
        for owned in sorted(self.slices, key=lambda owned: owned.positions.start):
            runs += [(-1, owned.positions.start - end), (owned.tensor, owned.region.size)]
            end = owned.positions.stop
        runs.append((-1, len(self.weights) - end))
        tensors, lengths = torch.tensor(runs, device=self.weights.device).T
        return tensors, lengths

    def per_element(self, values: torch.Tensor) -> torch.Tensor:
        """A value of each tensor [tensors] -> the value of each element's tensor [elements]; 0 in the padding."""
        tensors, lengths = self._runs
        # Number -1 reads the 0 that is appended. `output_size` spares the wait for the device that repeat_interleave
        # needs to know it.
        return F.pad(values, (0, 1))[tensors].repeat_interleave(lengths, output_size=len(self.weights))

    def update_moments(self, first_weight: torch.Tensor, second_weight: torch.Tensor) -> None:
        """Average the gradient into both moments. Args: the weight of the gradient, and of its square."""
        self.state["exp_avg"].lerp_(self.gradient, first_weight)
        self.state["exp_avg_sq"].lerp_(self.gradient.square(), second_weight)


class TensorOptimizer(Optimizer):
    """An optimizer of bucket shards. It waits for no device: with `found_inf` 1 a step changes nothing."""

    _step_supports_amp_scaling = True  # so the caller sets `found_inf`
    found_inf: torch.Tensor  # fp32 scalar: 1 for gradients that are not finite

    def __init__(self, groups: list[dict[str, Any]], index: TensorIndex, settings: OptimizerConfig):
        super().__init__(groups, {"lr": 0.0})
        self.index, self.settings = index, settings
        self.shards = [
            BucketShard(
                weights,
                group,
                self.state[weights],
                # On the device from the start: copying them there in a step would wait for it.
                torch.tensor(index.bucket_tensors[weights], device=weights.device),
                index.slices[weights],
            )
            for group in self.param_groups
            for weights in group["params"]
        ]
        self.device = self.shards[0].weights.device

    def eps(self, shard: BucketShard) -> float:
        return self.settings.eps * shard.group["multipliers"].eps_factor

    @staticmethod
    def moments(name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        """The state of each element of a parameter."""
        return MOMENTS

    def whole_state(self, name: str) -> dict[str, torch.Tensor]:
        """State of a parameter that is not per element: name -> fp32 [rows] or matrix.

        Every rank that owns elements of the parameter holds it whole.
        """
        return {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # 1, or 0 in a skipped step: a factor of updates, since the host does not know yet whether to skip.
        self.step_factor = 1 - self.found_inf
        shards = [shard for shard in self.shards if shard.weights.grad is not None]
        for shard in shards:
            # 0 times infinity is NaN, so the factor alone would not do.
            shard.gradient.masked_fill_(self.found_inf.bool(), 0.0)
            shard.state["step"] += self.step_factor
        self.update(shards)

    def update(self, shards: list[BucketShard]) -> None:
        """Update weights and state of the shards that have a gradient, and may overwrite gradients.

        Every change is multiplied by `step_factor`.
        """
        raise NotImplementedError

    def square_sums(
        self, shards: list[BucketShard], *values: Callable[[BucketShard], torch.Tensor]
    ) -> torch.Tensor:
        """Sums of squares over whole tensors: fp64 [values, tensors]. Args: values: shard -> [elements]."""
        sums = torch.zeros(len(values), self.index.count, dtype=torch.float64, device=self.device)
        for shard in shards:
            if not shard.summed_slices:
                continue
            for sums_of_value, value in zip(sums, values, strict=True):
                flat = value(shard)
                # One launch for all slices; a loop over slices would be hundreds.
                sums_of_slices = square_sums([flat[owned.positions] for owned in shard.summed_slices])
                sums_of_value.index_add_(0, shard.summed_tensors, sums_of_slices)
        return self.index.context.sum(sums)

    def per_tensor(self, value: Callable[[WholeTensor], float]) -> torch.Tensor:
        """A number of each tensor of this stage, 1 for all others: fp32 [tensors]."""
        numbers = [1.0] * self.index.count
        for number, tensor in self.index.tensors.items():
            numbers[number] = value(tensor)
        return torch.tensor(numbers, device=self.device)
