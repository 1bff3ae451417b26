"""Norms of heads, and what one kernel does between the product of queries, keys and values and their scores."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.kernels.qkv_heads import HeadForm
from megatron_lite.model.tensor_parallel import RMSNorm, TensorParallel


class HeadNorms(nn.Module):
    """Queries and keys over their root mean square, each head by itself, with a scale that the heads share (Qwen3)."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        size, epsilon = config.head_size, config.layernorm_epsilon
        self.query_layernorm, self.key_layernorm = (
            RMSNorm(size, epsilon, TensorParallel()) for _ in range(2)
        )
        self.parallel, self.epsilon = parallel, epsilon

    def scales(self) -> list[torch.Tensor]:
        """Those of queries and of keys, [D] each. A rank has both, and its heads' part of their gradients."""
        return [self.parallel.copy(norm.weight) for norm in (self.query_layernorm, self.key_layernorm)]

    def forward(self, heads: torch.Tensor, key_value_heads: int) -> torch.Tensor:
        """[T, H + 2 K, D] -> the same."""
        queries = heads.shape[1] - 2 * key_value_heads
        *parts, values = heads.split([queries, key_value_heads, key_value_heads], dim=1)
        normed = [
            F.rms_norm(part, part.shape[-1:], scale, self.epsilon)
            for part, scale in zip(parts, self.scales(), strict=True)
        ]
        return torch.cat([*normed, values], dim=1)


def head_form(rotary: Any, norms: HeadNorms | None, key_value_heads: int, factor: float) -> HeadForm:
    """`spread` of rope.py as one kernel takes it. Args: rotary: Rotary, or None."""
    cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
    query, key = (None, None) if norms is None else norms.scales()
    return HeadForm(cos, sin, query, key, 0.0 if norms is None else norms.epsilon, key_value_heads, factor)
