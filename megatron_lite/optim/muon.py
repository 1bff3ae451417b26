"""Muon: momentum of the blocks' matrices, made orthogonal; AdamW for all else.

    B = mu B + (1 - mu) g;  u = (1 - mu) g + mu B
    w = (1 - lr weight_decay) w - lr 0.2 sqrt(max(rows, columns)) NS(u)

NS takes the singular values of a matrix near to 1. With this factor a step is as large as AdamW's, so that learning
rate and weight decay of AdamW serve both. Each matrix has an owner: ranks send it their slices of u and get the slices
of NS(u) back, in one exchange each way. Momentum stays with the slices.

Source: Keller Jordan, Muon; the factor of Moonlight, arXiv:2502.16982; iteration as torch.optim.Muon.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.checkpoint.shard_slices import ShardSlice
from megatron_lite.config.sections import OptimizerConfig
from megatron_lite.optim.buckets import MOMENTS
from megatron_lite.optim.square_sums import square_sums
from megatron_lite.optim.uncompiled import AdamW
from megatron_lite.optim.whole_tensors import BucketShard, OwnedSlice, TensorIndex, TensorOptimizer
from megatron_lite.parallel.context import ParallelContext

ORIGIN = ShardSlice(0, 0, 0, 0)  # a region relative to it has indices into the whole matrix
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
ADAMW_RMS = 0.2  # root mean square of AdamW's steps


def orthogonal(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The matrices with singular values near to 1, each computed in its own precision."""
    if not matrices:
        return []
    # The Frobenius norm bounds the largest singular value, so all begin in [0, 1], where the iteration converges.
    norms = square_sums(matrices).sqrt().clamp(min=1e-7).to(matrices[0].dtype)
    return [_iterate(matrix, norm) for matrix, norm in zip(matrices, norms.unbind(), strict=True)]


def _iterate(matrix: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    # The short side first: X X^T is then the smaller of the two Gram matrices.
    x = (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix) / norm
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def is_orthogonalized(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon updates a parameter, and not AdamW."""
    # Matrices between hidden states only: embeddings, heads and vectors have no singular values that should be equal.
    return "layers." in name and name.endswith(".weight") and parameter.dim() == 2


def multiply_adds(shape: tuple[int, int]) -> int:
    """Multiply-adds of `orthogonal`."""
    short, long = sorted(shape)
    return ITERATIONS * (2 * short**2 * long + short**3)


def assign_owners(shapes: dict[int, tuple[int, int]], ranks: int) -> dict[int, int]:
    """Matrix -> the rank that makes it orthogonal: the costliest first, each to the rank with least work."""
    work, owners = [0] * ranks, {}
    for number in sorted(shapes, key=lambda number: (-multiply_adds(shapes[number]), number)):
        owners[number] = min(range(ranks), key=work.__getitem__)
        work[owners[number]] += multiply_adds(shapes[number])
    return owners


class Muon(TensorOptimizer):
    def __init__(self, groups: list[dict[str, Any]], index: TensorIndex, settings: OptimizerConfig):
        super().__init__(groups, index, settings)
        adamw_groups = [group for group in self.param_groups if group["moments"] == MOMENTS]
        for group in adamw_groups:
            group["eps"] = settings.eps * group["multipliers"].eps_factor
        betas = settings.beta1, settings.beta2
        self._adamw = AdamW(adamw_groups, lr=0.0, betas=betas, fused=True)
        # One state for both, so that checkpoints find the moments of all parameters in this optimizer.
        self._adamw.state = self.state
        self.shards = [shard for shard in self.shards if shard.group["moments"] != MOMENTS]
        slices = [owned for shard in self.shards for owned in shard.slices]
        self._factors = [ADAMW_RMS * math.sqrt(max(index.tensors[owned.tensor].shape)) for owned in slices]
        self._exchange = MatrixExchange(index, slices)

    @staticmethod
    def moments(name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        return ("exp_avg",) if is_orthogonalized(name, parameter) else MOMENTS

    def update(self, shards: list[BucketShard]) -> None:
        # torch's fused AdamW then leaves everything as it is in a skipped step, without a wait for the device.
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        momentum = self.settings.momentum
        for shard in shards:
            shard.state["exp_avg"].lerp_(shard.gradient, (1 - momentum) * self.step_factor)
            # Nesterov's momentum: the gradient has a weight in u besides its weight in B.
            shard.gradient.lerp_(shard.state["exp_avg"], momentum)
        # The exchange has fixed sizes, so the slices of frozen matrices take part as zeros.
        directions = [
            shard.gradient if shard in shards else torch.zeros_like(shard.weights) for shard in self.shards
        ]
        slices = [
            direction[owned.positions]
            for direction, shard in zip(directions, self.shards, strict=True)
            for owned in shard.slices
        ]
        self._exchange.make_orthogonal(slices)
        if slices:
            torch._foreach_mul_(slices, self._factors)
        for shard in shards:
            rate = shard.group["lr"] * self.step_factor
            shard.weights.mul_(1 - rate * shard.group["weight_decay"])
            shard.weights.addcmul_(shard.gradient, rate, value=-1)


class MatrixExchange:
    """Slices of matrices on the ranks of a pipeline stage, each matrix made orthogonal by its owner."""

    def __init__(self, index: TensorIndex, slices: list[OwnedSlice]):
        context = index.context
        size = context.dp.size * context.tp.size
        ranks = range(context.pp.rank * size, (context.pp.rank + 1) * size)
        # bf16 halves the exchange; the iteration's result needs no more digits. Runs in fp32 keep theirs.
        self._dtype = torch.float32 if index.precision == "fp32" else torch.bfloat16
        self._device = context.device
        self._group = None
        if size > 1:
            assert context.process_groups is not None
            self._group = context.process_groups.group(ranks)
        # Once, at the start: every rank knows which slices all others own, so that steps exchange values only.
        # The shapes too, since an expert is on some of the ranks only.
        described = [
            (owned.tensor, *index.tensors[owned.tensor].shape, *dataclasses.astuple(owned.region))
            for owned in slices
        ]
        gathered = _gather_descriptions(described, context)[ranks.start : ranks.stop]
        self._shapes = {
            number: (rows, columns) for of_rank in gathered for number, rows, columns, *_ in of_rank
        }
        slices_by_rank = [
            [(number, ShardSlice(*region)) for number, _, _, *region in of_rank] for of_rank in gathered
        ]
        owners = assign_owners(self._shapes, size)
        # An exchange is ordered by rank, and within a rank by the order in which it listed its slices.
        self._order = sorted(range(len(slices)), key=lambda i: owners[slices[i].tensor])
        self._send_sizes = [
            sum(owned.region.size for owned in slices if owners[owned.tensor] == rank) for rank in range(size)
        ]
        this_rank = context.rank - ranks.start
        received = [
            [(number, region) for number, region in of_rank if owners[number] == this_rank]
            for of_rank in slices_by_rank
        ]
        self._receive_sizes = [sum(region.size for _, region in of_rank) for of_rank in received]
        self._received = [matrix_slice for of_rank in received for matrix_slice in of_rank]

    def make_orthogonal(self, slices: list[torch.Tensor]) -> None:
        """Replace slices of matrices by the slices of the orthogonal matrices, in place.

        Args: slices: fp32 [elements] each, in the order in which the exchange was made.
        """
        ordered = [slices[i] for i in self._order]
        # The empty tensor, for a rank without slices: torch.cat needs at least one.
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        sent = torch.cat([empty, *(flat.to(self._dtype) for flat in ordered)])
        received = self._all_to_all(sent, self._send_sizes, self._receive_sizes)
        flats = received.split([region.size for _, region in self._received])
        matrices: dict[int, torch.Tensor] = {}
        for (number, region), flat in zip(self._received, flats, strict=True):
            matrix = matrices.setdefault(number, flat.new_empty(self._shapes[number]))
            matrix[region.within(ORIGIN)] = flat.view(region.shape)
        matrices = dict(zip(matrices, orthogonal(list(matrices.values())), strict=True))
        for (number, region), flat in zip(self._received, flats, strict=True):
            flat.view(region.shape).copy_(matrices[number][region.within(ORIGIN)])
        returned = self._all_to_all(received, self._receive_sizes, self._send_sizes)
        for flat, new in zip(ordered, returned.split([len(flat) for flat in ordered]), strict=True):
            flat.copy_(new)

    def _all_to_all(
        self, values: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]
    ) -> torch.Tensor:
        """Values [sum of send_sizes], ordered by the rank that gets them -> [sum of receive_sizes], by sender."""
        if self._group is None:
            return values
        out = values.new_empty(sum(receive_sizes))
        dist.all_to_all_single(out, values, receive_sizes, send_sizes, group=self._group)
        return out


def _gather_descriptions(described: list[tuple[int, ...]], context: ParallelContext) -> list[list[list[int]]]:
    """The descriptions (seven numbers each) of the slices of every rank, by rank."""
    count = torch.tensor([len(described)], device=context.device)
    counts = [int(each) for each in context.gather(count)]
    # Ranks own different numbers of slices, and a gather needs equal shapes.
    padded = torch.zeros(max(counts), 7, dtype=torch.int64, device=context.device)
    if described:
        padded[: len(described)] = torch.tensor(described, device=context.device)
    return [each[:number].tolist() for each, number in zip(context.gather(padded), counts, strict=True)]
