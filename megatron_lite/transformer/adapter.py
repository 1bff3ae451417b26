"""Adapters: small layers in the residual branches of a block, which fine-tuning trains instead of the model."""

from __future__ import annotations

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.dense import Linear
from megatron_lite.transformer.kernels.fused import activated
from megatron_lite.transformer.tensor_parallel import TensorParallel, linear


class Adapter(nn.Module):
    """x + up(gelu(down(x))) in a residual branch, [T, D]. `up` is initialized to 0, so the model is unchanged at first.

    Source: Houlsby et al., arXiv:1902.00751.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.down = Linear(config.hidden_size, config.adapter_size)
        self.up = Linear(config.adapter_size, config.hidden_size)
        self.parallel = parallel
        parallel.mark_replicated(*self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Adapters are small, so they are between tensor-parallel regions: every rank has all of them.
        parameters = (self.down.weight, self.down.bias, self.up.weight, self.up.bias)
        down, down_bias, up, up_bias = map(self.parallel.replicated, parameters)
        inner = activated(linear(x, down, down_bias), "gelu_erf")
        return x + linear(inner, up, up_bias)
