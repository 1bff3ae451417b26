"""The MLP of a block, gated or not."""

from __future__ import annotations

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.forward_context import ForwardContext
from megatron_lite.transformer.kernels.fused import activated
from megatron_lite.transformer.tensor_parallel import (
    ColumnParallelLinear,
    DeferredBias,
    RowParallelLinear,
    TensorParallel,
)


class MLP(nn.Module):
    """Two linear layers with an activation between them. If it is gated, the first one also computes the gate."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, inner_size: int | None = None):
        """Args: inner_size: None = the model's."""
        super().__init__()
        self.activation = config.activation
        self.dropout = config.activation_dropout
        inner, has_bias = inner_size or config.inner_size, config.has_bias("mlp")
        self.is_gated = config.ffn == "gated"
        # Gate and value are sharded separately, so that a rank has the same features of both.
        parts = 2 if self.is_gated else 1
        self.first_feature = inner // parallel.group.size * parallel.group.rank
        self.dense_h_to_4h = ColumnParallelLinear(
            config.hidden_size, parts * inner, parallel, parts=parts, has_bias=has_bias
        )
        self.dense_4h_to_h = RowParallelLinear(inner, config.hidden_size, parallel, has_bias=has_bias)

    def forward(
        self, x: torch.Tensor, context: ForwardContext, layer: int, skip_bias_add: bool = False
    ) -> torch.Tensor | DeferredBias:
        """[T, D] -> [T, D]. Args: skip_bias_add: of both products, see ColumnParallelLinear."""
        dropout = None
        if self.dropout and context.dropout is not None:
            # For all tokens: inside the MLP, ranks share features and not tokens.
            dropout = context.dropout.features(self.dropout, layer, "activated")
            if dropout is not None:
                dropout = dropout.from_feature(self.first_feature)
        lora_dropout = context.locally_at_layer(layer)
        inner, bias = self.dense_h_to_4h(x, skip_bias_add=skip_bias_add, lora_dropout=lora_dropout), None
        if skip_bias_add:
            inner, bias = inner
        inner = activated(inner, self.activation, bias=bias, gated=self.is_gated, dropout=dropout)
        lora_dropout = context.at_layer(layer)
        return self.dense_4h_to_h(inner, skip_bias_add=skip_bias_add, lora_dropout=lora_dropout)
