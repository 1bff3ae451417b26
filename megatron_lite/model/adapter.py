"""Adapters: small layers within the residual branches of a block, which fine-tuning trains instead of the model."""

from __future__ import annotations

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.dense import Linear
from megatron_lite.model.kernels.fused import activated
from megatron_lite.model.tensor_parallel import TensorParallel, linear


class Adapter(nn.Module):
    """x + up(gelu(down(x))) within a residual branch, [T, D]. `up` begins as 0: the model is what it was.

    Source: Houlsby et al., arXiv:1902.00751.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.down = Linear(config.hidden_size, config.adapter_size)
        self.up = Linear(config.adapter_size, config.hidden_size)
        self.parallel = parallel
        parallel.mark_replicated(*self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.down.weight, self.down.bias, self.up.weight, self.up.bias)
        # Adapters stand between tensor-parallel regions: small, and whole on every rank.
        down, down_bias, up, up_bias = map(self.parallel.replicated, parts)
        inner = activated(linear(x, down, down_bias), "gelu_erf")
        return x + linear(inner, up, up_bias)
