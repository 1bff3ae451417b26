"""Gradient norms of single layers, on demand: which layer makes the global norm grow.

Each rank adds up the squares of what it owns under ZeRO, each element on one rank only; one reduction of a few numbers
joins them. No gradient is copied or gathered.
"""

from __future__ import annotations

import torch

from megatron_lite.engine import Fragment
from megatron_lite.parallel_context import ParallelContext

_TABLES = ("word_embeddings", "position_embeddings", "block_position_embeddings")


def layer_names(num_layers: int) -> list[str]:
    """The layers of the whole model, in order: three embedding tables, the blocks, the final LayerNorm."""
    tables = [f"embedding.{table}" for table in _TABLES]
    return [*tables, *(f"layers.{i}" for i in range(num_layers)), "final_layernorm"]


class GradientNorms:
    """Norms of one step's gradients: `add` is the observer of `Engine.observed_gradients`."""

    def __init__(self, num_layers: int, context: ParallelContext):
        self._context = context
        self._names = layer_names(num_layers)
        self._squares = torch.zeros(len(self._names), dtype=torch.float64, device=context.device)

    def add(self, fragment: Fragment, gradient: torch.Tensor) -> None:
        if fragment.is_copy:
            return
        layer = ".".join(fragment.name.split(".")[:2]).removesuffix(".weight").removesuffix(".bias")
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        self._squares[self._names.index(layer)] += norm.to(self._squares.device) ** 2

    def norms(self, clip_divisor: float) -> dict[str, float]:
        """Layer -> norm before clipping, over all ranks; called by every rank."""
        norms = self._context.sum(self._squares.clone()).sqrt() * clip_divisor
        return dict(zip(self._names, norms.tolist(), strict=True))
