"""A mixture of experts in the FFN of a block: a router chooses a few of many FFNs for each token. None is dropped.

    y = factor sum over the chosen experts e of gate_e FFN_e(x) + FFN_shared(x)

Shapes: T tokens, D hidden size, k experts for each token.
Source: GLM-4.5, arXiv:2508.06471.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import all_gather, exchange
from megatron_lite.transformer.forward_context import ForwardContext
from megatron_lite.transformer.kernels.fused import activated
from megatron_lite.transformer.mlp import MLP
from megatron_lite.transformer.router import Choice, Router
from megatron_lite.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    linear,
)


class Expert(nn.Module):
    """An FFN without biases, split over the tensor-parallel ranks; what calls it communicates."""

    def __init__(self, config: ModelConfig, width: int, parallel: TensorParallel):
        super().__init__()
        self.activation, self.is_gated = config.activation, config.ffn == "gated"
        parts = 2 if self.is_gated else 1
        self.dense_h_to_4h = ColumnParallelLinear(
            config.hidden_size, parts * width, parallel, parts=parts, has_bias=False
        )
        self.dense_4h_to_h = RowParallelLinear(width, config.hidden_size, parallel, has_bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, D] -> [n, D], of which ranks hold terms."""
        inner = linear(x, self.dense_h_to_4h.weight)
        inner = activated(inner, self.activation, bias=None, gated=self.is_gated, dropout=None)
        return linear(inner, self.dense_4h_to_h.weight)


class _Take(torch.autograd.Function):
    """Rows of x [n, D] in another order, k of each: a sum in a fixed order in the backward pass, unlike torch's."""

    @staticmethod
    def forward(ctx, x, order, place, k):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(place)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (place,) = ctx.saved_tensors
        return grad[place].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class Experts(nn.Module):
    """The experts of a block in place of its MLP: [T, D] -> [T, D]."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        assert config.experts is not None
        settings = self.settings = config.experts
        self.parallel = parallel
        self.router = Router(config, settings, parallel)
        # A module for each, named by its number: initial weights, checkpoints and exports follow from the names, on
        # whatever rank an expert is.
        group, local = parallel.expert_group, settings.count // parallel.expert_group.size
        numbers = range(group.rank * local, (group.rank + 1) * local)
        self.experts = nn.ModuleDict({str(e): Expert(config, settings.width, parallel) for e in numbers})
        self.shared = MLP(config, parallel, settings.shared * settings.width) if settings.shared else None

    def forward(
        self, x: torch.Tensor, context: ForwardContext, layer: int, skip_bias_add: bool = False
    ) -> torch.Tensor:
        """[T, D] -> [T, D]. Args: as for `MLP`; there is no bias."""
        choice = self.router(x, context)
        y = self.parallel.leave(self._routed(self.parallel.enter(x), choice))
        if self.shared is not None:
            y = y + self.shared(x, context, layer)
        return y

    def _routed(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """The sum of the chosen experts' outputs, or this tensor-parallel rank's term of it: [T, D]."""
        k, chosen = self.settings.per_token, choice.experts.flatten()
        order = chosen.argsort(stable=True)  # of the T k pairs of a token and an expert, by expert
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        # Not bincount, which waits for the device to look for the largest number.
        counts = order.new_zeros(self.settings.count).scatter_add_(0, chosen, torch.ones_like(chosen))
        y = self._computed(_Take.apply(x, order, place, k), counts)
        y = _Take.apply(y, place, order, 1).unflatten(0, (-1, k))
        # Each rank has terms of the outputs, and so of the gates' gradients.
        gates = self.parallel.copy(choice.gates)
        return (y * gates[..., None].to(y.dtype)).sum(1)

    def _computed(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Tokens by expert [n, D] -> their experts' outputs. Args: counts: int [all experts], tokens of each."""
        group, experts = self.parallel.expert_group, list(self.experts.values())
        table = self._table(rows, counts)
        sent, received = [sum(to) for to in table[group.rank]], [sum(each[group.rank]) for each in table]
        sizes = [count for each in table for count in each[group.rank]]
        parts = exchange(rows, sent, received, group).split(sizes)
        outputs = []
        for e, expert in enumerate(experts):
            # Each expert is computed, if for no token: its gradient is then zero, and there when its bucket needs it.
            y = expert(torch.cat(parts[e :: len(experts)]))
            outputs.append(y.split(sizes[e :: len(experts)]))
        y = torch.cat([part for of_rank in zip(*outputs, strict=True) for part in of_rank])
        return exchange(y, received, sent, group)

    def _table(self, rows: torch.Tensor, counts: torch.Tensor) -> list[list[list[int]]]:
        """Tokens by the rank that sends them, the rank that has the expert, and the expert; its read of the device."""
        group = self.parallel.expert_group
        gathered = counts if group.size == 1 else all_gather(counts, group)
        return gathered.view(group.size, group.size, -1).cpu().tolist()


def feed_forward(config: ModelConfig, parallel: TensorParallel, layer: int) -> MLP | Experts:
    """The FFN of a block."""
    return Experts(config, parallel) if config.has_experts(layer) else MLP(config, parallel)
