"""The MLP of a block, gated or not."""

from __future__ import annotations

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.forward_context import Flow
from megatron_lite.model.kernels.fused import Biased, activated
from megatron_lite.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallel


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.activation = config.activation
        self.dropout = config.activation_dropout
        inner, has_bias = config.inner_size, config.has_bias("mlp")
        self.is_gated = config.ffn == "gated"
        parts = 2 if self.is_gated else 1
        self.first_feature = inner // parallel.group.size * parallel.group.rank
        self.dense_h_to_4h = ColumnParallelLinear(
            config.hidden_size, parts * inner, parallel, parts=parts, has_bias=has_bias, leaves_bias=True
        )
        self.dense_4h_to_h = RowParallelLinear(inner, config.hidden_size, parallel, has_bias=has_bias)

    def forward(self, hidden: torch.Tensor, flow: Flow, layer: int) -> Biased:
        dropout = None
        if self.dropout and flow.dropout is not None:
            of_all = flow.dropout.features(self.dropout, layer, "activated")
            dropout = of_all and of_all.from_feature(self.first_feature)
        x = self.dense_h_to_4h(hidden)
        return self.dense_4h_to_h(activated(x, self.activation, gated=self.is_gated, dropout=dropout))
