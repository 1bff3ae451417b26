"""Muon: momentum of the blocks' matrices, made orthogonal; AdamW for all else.

    B = mu B + (1 - mu) g;  u = (1 - mu) g + mu B
    w = (1 - lr weight_decay) w - lr 0.2 sqrt(max(rows, columns)) NS(u)

NS takes the singular values of a matrix near to 1. With this factor a step is as large as AdamW's, so that learning
rate and weight decay of AdamW serve both. Each matrix has an owner: ranks send it their pieces of u and get those of
NS(u) back, in one exchange each way. Momentum stays with the pieces.

Source: Keller Jordan, Muon; the factor of Moonlight, arXiv:2502.16982; iteration as torch.optim.Muon.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.checkpoint.shard_slices import ShardSlice
from megatron_lite.config.sections import OptimizerConfig
from megatron_lite.optim.buckets import MOMENTS
from megatron_lite.optim.whole_tensors import Layout, Part, Piece, TensorOptimizer
from megatron_lite.parallel.context import ParallelContext

ORIGIN = ShardSlice(0, 0, 0, 0)  # boxes within it are indices into a whole matrix
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
AS_ADAM = 0.2  # rms of AdamW's steps


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with singular values near to 1, computed in its own precision (Newton-Schulz iterations)."""
    a, b, c = COEFFICIENTS
    # The short side first: X X^T is then the smaller of the two Gram matrices.
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    # The Frobenius norm bounds the largest singular value, so all begin in [0, 1], where the iteration converges.
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def is_served(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon updates a parameter, and not AdamW."""
    # Matrices between hidden states only: embeddings, heads and vectors have no singular values that should be equal.
    return "layers." in name and name.endswith(".weight") and parameter.dim() == 2


def cost(shape: tuple[int, int]) -> int:
    """Multiply-adds of `orthogonal`."""
    short, long = sorted(shape)
    return ITERATIONS * (2 * short**2 * long + short**3)


def owners(shapes: dict[int, tuple[int, int]], ranks: int) -> dict[int, int]:
    """Tensor -> the rank that makes it orthogonal: the longest first, each to the rank with least work."""
    work, found = [0] * ranks, {}
    for number in sorted(shapes, key=lambda number: (-cost(shapes[number]), number)):
        found[number] = min(range(ranks), key=work.__getitem__)
        work[found[number]] += cost(shapes[number])
    return found


class Muon(TensorOptimizer):
    def __init__(self, groups: list[dict[str, Any]], layout: Layout, settings: OptimizerConfig):
        super().__init__(groups, layout, settings)
        others = [group for group in self.param_groups if group["moments"] == MOMENTS]
        for group in others:
            group["eps"] = settings.eps * group["multipliers"].eps_factor
        betas = settings.beta1, settings.beta2
        self._adamw = torch.optim.AdamW(others, lr=0.0, betas=betas, fused=True)
        # One state for both, so that checkpoints find all moments in the same place.
        self._adamw.state = self.state
        self.parts = [part for part in self.parts if part.group["moments"] != MOMENTS]
        self._factors = self.per_tensor(lambda tensor: AS_ADAM * math.sqrt(max(tensor.shape)))
        self._exchange = Exchange(layout, [piece for part in self.parts for piece in part.pieces])

    @staticmethod
    def moments(name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        return ("exp_avg",) if is_served(name, parameter) else MOMENTS

    def update(self, parts: list[Part]) -> None:
        # torch's fused AdamW then leaves everything as it is in a skipped step, without a wait for the device.
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        momentum = self.settings.momentum
        for part in parts:
            part.state["exp_avg"].lerp_(part.gradient, (1 - momentum) * self.share)
            # Nesterov's form: the gradient is looked at once more on top of the momentum.
            part.gradient.lerp_(part.state["exp_avg"], momentum)
        steps = [
            # The exchange has fixed sizes, so frozen matrices send zeros.
            part.gradient if part in parts else torch.zeros_like(part.weights)  # frozen
            for part in self.parts
        ]
        self._exchange.make_orthogonal(
            [step[piece.place] for step, part in zip(steps, self.parts, strict=True) for piece in part.pieces]
        )
        for part in parts:
            rate, decay = part.group["lr"], part.group["weight_decay"]
            part.weights.mul_(1 - rate * decay * self.share)
            part.weights.addcmul_(part.gradient, part.spread(rate * self._factors * self.share), value=-1)


class Exchange:
    """Pieces of matrices on the ranks of a pipeline stage, each matrix made orthogonal by one of them."""

    def __init__(self, layout: Layout, pieces: list[Piece]):
        context = layout.context
        size = context.dp.size * context.tp.size
        ranks = range(context.pp.rank * size, (context.pp.rank + 1) * size)
        # bf16 halves the exchange; the iteration's result needs no more digits. Runs in fp32 keep theirs.
        self._type = torch.float32 if layout.precision == "fp32" else torch.bfloat16
        self._group = None
        if size > 1:
            assert context.process_groups is not None
            self._group = context.process_groups.of(ranks)
        listed = [(piece.tensor, *dataclasses.astuple(piece.box)) for piece in pieces]
        # Once, at the start: every rank knows which pieces all others hold, so that steps exchange values only.
        held = _of_all_ranks(listed, context)[ranks.start : ranks.stop]
        self._shapes = {row[0]: layout.tensors[row[0]].shape for of_rank in held for row in of_rank}
        owner = owners(self._shapes, size)
        # Pieces travel in the order of the ranks that they go to or come from; of each in its own order.
        self._order = sorted(range(len(pieces)), key=lambda place: owner[pieces[place].tensor])
        self._sent = [sum(p.box.size for p in pieces if owner[p.tensor] == rank) for rank in range(size)]
        mine = context.rank - ranks.start
        come = [[(row[0], ShardSlice(*row[1:])) for row in rows if owner[row[0]] == mine] for rows in held]
        self._received = [sum(box.size for _, box in rows) for rows in come]
        self._boxes = [row for rows in come for row in rows]

    def make_orthogonal(self, pieces: list[torch.Tensor]) -> None:
        """Replace pieces of matrices by those of the orthogonal ones, in place. Args: pieces: as at the beginning."""
        ordered = [pieces[place] for place in self._order]
        sent = (
            torch.cat([piece.to(self._type) for piece in ordered])
            if ordered
            else torch.empty(0, dtype=self._type)
        )
        received = self._exchanged(sent, self._sent, self._received)
        parts = received.split([box.size for _, box in self._boxes])
        matrices: dict[int, torch.Tensor] = {}
        for (number, box), part in zip(self._boxes, parts, strict=True):
            matrix = matrices.setdefault(number, part.new_empty(self._shapes[number]))
            matrix[box.within(ORIGIN)] = part.view(box.shape)
        for number, matrix in matrices.items():
            matrices[number] = orthogonal(matrix)
        for (number, box), part in zip(self._boxes, parts, strict=True):
            part.view(box.shape).copy_(matrices[number][box.within(ORIGIN)])
        back = self._exchanged(received, self._received, self._sent)
        for piece, new in zip(ordered, back.split([len(piece) for piece in ordered]), strict=True):
            piece.copy_(new)

    def _exchanged(self, values: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """One exchange of as many elements with each rank of the stage."""
        if self._group is None:
            return values
        size = values.element_size()
        # As bytes: an exchange does no arithmetic, so any backend can carry any type.
        out = torch.empty(sum(received) * size, dtype=torch.uint8, device=values.device)
        splits = [count * size for count in received], [count * size for count in sent]
        dist.all_to_all_single(out, values.view(torch.uint8), *splits, group=self._group)
        return out.view(self._type)


def _of_all_ranks(rows: list[tuple[int, ...]], context: ParallelContext) -> list[list[list[int]]]:
    """The rows of five numbers of every rank, by rank."""
    count = torch.tensor([len(rows)], device=context.device)
    counts = [int(each) for each in context.gather(count)]
    # Ranks have different numbers of pieces, and a gather wants equal shapes.
    padded = torch.zeros(max(counts), 5, dtype=torch.int64, device=context.device)
    if rows:
        padded[: len(rows)] = torch.tensor(rows, device=context.device)
    return [each[:kept].tolist() for each, kept in zip(context.gather(padded), counts, strict=True)]
