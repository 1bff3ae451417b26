"""Layers that every tensor-parallel rank computes whole: a linear layer, and one with activation and norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.kernels import fused
from megatron_lite.transformer.norms import make_norm
from megatron_lite.transformer.tensor_parallel import TensorParallel, linear


class Linear(nn.Module):
    """y = factor x W^T + b, whole on every rank."""

    def __init__(self, in_features: int, out_features: int, factor: float = 1.0, has_bias: bool = True):
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias: Any = nn.Parameter(torch.empty(out_features)) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x if self.factor == 1.0 else x * self.factor, self.weight, self.bias)


def embedding_table(rows: int, size: int) -> nn.Embedding:
    """A table whose weights init.py or a checkpoint sets, as those of all layers here.

    nn.Embedding draws some, for which torch imports torch._dynamo where the device is "meta": 3 CPU seconds.
    """
    return nn.Embedding.from_pretrained(torch.empty(rows, size), freeze=False)


class Transform(nn.Module):
    """norm(activation(dense(x)))."""

    def __init__(self, in_features: int, out_features: int, config: ModelConfig):
        super().__init__()
        self.dense = Linear(in_features, out_features, has_bias=config.head_transform_bias)
        self.layernorm = make_norm(config, out_features, TensorParallel())
        self.activation = config.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layernorm(fused.activated(self.dense(x), self.activation))
