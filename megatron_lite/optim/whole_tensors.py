"""Optimizers that read whole tensors, of which each rank holds flat pieces.

Under ZeRO 1 and 2 a rank owns a part of every bucket, cut wherever the bucket's equal parts end. What such an optimizer
needs of a whole tensor are sums: each rank adds up its own elements in fp64, and one reduction over all ranks joins
them, so that no result depends on layout or buckets. Tensors are those of the reference: each block of a fused
parameter (Q, K, V; gate, up) is one by itself.
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
from megatron_lite.model.tensor_parallel import Partition, partition_of, whole_shape
from megatron_lite.optim.buckets import MOMENTS, Bucket
from megatron_lite.parallel.context import ParallelContext

BLOCKS = 3  # at most, of a fused parameter: Q, K and V


@dataclass(frozen=True)
class Piece:
    """Elements of one tensor that this rank owns: a box of it, and their place in a flat tensor."""

    tensor: int  # number of the tensor, the same on all ranks
    box: ShardSlice
    place: slice
    counts: bool  # in sums; False where another rank counts the same elements


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the reference, of which this pipeline stage holds pieces."""

    name: str
    shape: tuple[int, int]
    decays: bool  # neither bias nor norm

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


def whole_blocks(shape: tuple[int, ...], partition: Partition, tp: int) -> tuple[tuple[int, int], ...]:
    """Rows and columns of each block of the whole parameter, from the shape of one of `tp` shards."""
    rows, columns = matrix_shape(whole_shape(shape, partition, tp))
    return tuple((part, columns) for part in partition.block_rows(rows))


@dataclass
class Layout:
    """The tensors of the model, and where this rank's pieces of them are."""

    shapes: Mapping[str, tuple[int, ...]]  # of all parameters of all stages, in an order that all ranks share
    context: ParallelContext
    precision: str  # of the training
    tensors: dict[int, WholeTensor] = field(default_factory=dict)  # of this stage, by their numbers
    members: dict[torch.Tensor, list[int]] = field(
        default_factory=dict
    )  # of each bucket, by its fp32 weights
    pieces: dict[torch.Tensor, list[Piece]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """One more than the largest number of a tensor."""
        return BLOCKS * len(self.shapes)

    def members_of(self, flat: torch.Tensor) -> torch.Tensor:
        """On its device: what a step copies there would be waited for."""
        return torch.tensor(self.members[flat], device=flat.device)

    def add(self, bucket: Bucket, names: Mapping[nn.Parameter, str], decays: Callable[[str], bool]) -> None:
        """Take in a bucket. Args: names: global ones of its parameters."""
        tp, order = self.context.tp, list(self.shapes)
        found, members = self.pieces.setdefault(bucket.master, []), self.members.setdefault(bucket.master, [])
        for parameter in bucket.starts:
            name, shape, partition = names[parameter], tuple(parameter.shape), partition_of(parameter)
            # Numbers with room for three blocks each: the same on all ranks, whichever parameters a rank holds.
            first = BLOCKS * order.index(name)
            blocks = whole_blocks(shape, partition, tp.size)
            bounds = [0, *accumulate(rows for rows, _ in blocks)]
            for block, size in enumerate(blocks):
                self.tensors[first + block] = WholeTensor(name, size, decays(name))
                members.append(first + block)
            owned = bucket.owned(parameter)
            if owned is None:
                continue
            start, place = owned
            # The ranges of checkpoints: they know how a flat range of a shard lies in the whole parameter.
            for flat in flattened_ranges(shape, partition, tp.rank, tp.size, start, place.stop - place.start):
                whole = flat.slice
                block = sum(row <= whole.row for row in bounds[1:-1])
                box = ShardSlice(whole.row - bounds[block], whole.row_stop - bounds[block], *_columns(whole))
                begin = place.start + flat.start - start
                where = slice(begin, begin + box.size)
                found.append(Piece(first + block, box, where, bucket.group.counts))


def _columns(box: ShardSlice) -> tuple[int, int]:
    return box.column, box.column_stop


@dataclass(eq=False)
class Part:
    """This rank's part of a bucket: fp32 weights [length], their state and settings."""

    weights: torch.Tensor
    group: dict[str, Any]  # of the optimizer: lr, weight_decay, moments
    state: dict[str, torch.Tensor]
    members: torch.Tensor  # the tensors of the whole bucket
    pieces: list[Piece]  # of this part

    @property
    def gradient(self) -> torch.Tensor:
        assert self.weights.grad is not None
        return self.weights.grad

    @property
    def step(self) -> torch.Tensor:
        """Number of the step under way, from 1."""
        return self.state["step"].clamp(min=1)

    @cached_property
    def counted(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.counts]

    @cached_property
    def counted_tensors(self) -> torch.Tensor:
        return torch.tensor([piece.tensor for piece in self.counted], device=self.weights.device)

    @cached_property
    def _segments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensor (-1 between pieces) and length of each stretch of the part."""
        stretches, at = [], 0
        for piece in sorted(self.pieces, key=lambda piece: piece.place.start):
            stretches += [(-1, piece.place.start - at), (piece.tensor, piece.box.size)]
            at = piece.place.stop
        stretches.append((-1, len(self.weights) - at))
        tensors, lengths = torch.tensor(stretches, device=self.weights.device).T
        return tensors, lengths

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """A value for each tensor [tensors] -> that of each element [length]; 0 between the pieces."""
        tensors, lengths = self._segments
        # Number -1 between pieces reads the padded 0. `output_size` spares the wait that repeat_interleave needs to
        # know it.
        return F.pad(values, (0, 1))[tensors].repeat_interleave(lengths, output_size=len(self.weights))

    def move_moments(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Take in the gradient. Args: the shares of it in the new moments."""
        self.state["exp_avg"].lerp_(self.gradient, first)
        self.state["exp_avg_sq"].lerp_(self.gradient.square(), second)


class TensorOptimizer(torch.optim.Optimizer):
    """An optimizer of parts of buckets. It waits for no device: `found_inf` 1 leaves everything as it is."""

    _step_supports_amp_scaling = True  # so the caller sets `found_inf`
    found_inf: torch.Tensor  # fp32 scalar: 1 for gradients that are not finite

    def __init__(self, groups: list[dict[str, Any]], layout: Layout, settings: OptimizerConfig):
        super().__init__(groups, {"lr": 0.0})
        self.layout, self.settings = layout, settings
        self.parts = [
            Part(flat, group, self.state[flat], layout.members_of(flat), layout.pieces[flat])
            for group in self.param_groups
            for flat in group["params"]
        ]
        self.device = self.parts[0].weights.device

    def eps(self, part: Part) -> float:
        return self.settings.eps * part.group["multipliers"].eps_factor

    @staticmethod
    def moments(name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        """The state of each element of a parameter."""
        return MOMENTS

    def whole_state(self, name: str) -> dict[str, torch.Tensor]:
        """State of a parameter that all ranks with a piece of it hold whole: kind -> fp32 [rows] or matrix."""
        return {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # A factor and not a branch: the host does not know yet whether the step is skipped.
        self.share = 1 - self.found_inf
        parts = [part for part in self.parts if part.weights.grad is not None]
        for part in parts:
            # 0 times infinity is NaN, so the factor alone would not do.
            part.gradient.masked_fill_(self.found_inf.bool(), 0.0)
            part.state["step"] += self.share
        self.update(parts)

    def update(self, parts: list[Part]) -> None:
        """Update weights and state of the parts that have a gradient, by `share` of a step. May overwrite gradients."""
        raise NotImplementedError

    def square_sums(self, parts: list[Part], *values: Callable[[Part], torch.Tensor]) -> torch.Tensor:
        """fp64 [values, tensors]: sums of squares over the whole tensors. Args: values: a part's, as [length]."""
        sums = torch.zeros(len(values), self.layout.count, dtype=torch.float64, device=self.device)
        for part in parts:
            if not part.counted:
                continue
            for row, values_of in zip(sums, values, strict=True):
                flat = values_of(part)
                # One launch for all pieces; a loop over pieces would be hundreds.
                norms = torch._foreach_norm([flat[p.place] for p in part.counted], 2, torch.float64)
                row.index_add_(0, part.counted_tensors, torch.stack(norms).square())
        return self.layout.context.sum(sums)

    def per_tensor(self, values: Callable[[WholeTensor], float]) -> torch.Tensor:
        """fp32 [tensors]: a number of each tensor of this stage; 1 for others."""
        numbers = [1.0] * self.layout.count
        for number, tensor in self.layout.tensors.items():
            numbers[number] = values(tensor)
        return torch.tensor(numbers, device=self.device)
