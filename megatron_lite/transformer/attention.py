"""Self-attention of a block: the projections around the attention of a plan (attention_backends).

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.activation_checkpoint import recomputed
from megatron_lite.transformer.attention_backends.interface import EncoderDecoderPlan
from megatron_lite.transformer.disentangled import Disentangled, position_projection
from megatron_lite.transformer.forward_context import ForwardContext
from megatron_lite.transformer.kernels.dropout import AttentionDropout
from megatron_lite.transformer.norms import HeadNorms
from megatron_lite.transformer.position_bias import DistanceScores
from megatron_lite.transformer.rope import Rotary, prepare_qkv
from megatron_lite.transformer.tensor_parallel import (
    ColumnParallelLinear,
    DeferredBias,
    RowParallelLinear,
    TensorParallel,
)


class Attention(nn.Module):
    """Fused Q|K|V projection (contiguous; K and V may have fewer heads), the plan's kernels, output projection."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: bool):
        super().__init__()
        self.head_size = config.head_size
        self.query_factor, self.is_local = config.query_factor, config.is_local
        self.dropout = config.attention_dropout
        self.parallel, self.recompute = parallel, recompute
        heads, key_value_heads = config.num_attention_heads, config.key_value_heads
        # Of this rank: tensor parallelism splits heads.
        self.key_value_heads = key_value_heads // parallel.group.size
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size,
            (heads + 2 * key_value_heads) * self.head_size,
            parallel,
            # Q, K and V are split over the ranks each by itself, in these proportions, so that a rank has matching
            # heads of all.
            parts=(heads // key_value_heads, 1, 1),
            has_bias=config.has_bias("qkv"),
        )
        self.dense = RowParallelLinear(
            config.attention_size, config.hidden_size, parallel, has_bias=config.has_bias("attention")
        )
        self.head_norms: HeadNorms | None = None
        if config.query_key_norm:
            self.head_norms = HeadNorms(config, parallel)
        self.relative: DistanceScores | None = None
        if config.has_distance_scores:
            self.relative = DistanceScores(config, parallel)
        if config.relative == "disentangled":
            self.position_query_key = position_projection(config, parallel, self.query_key_value)

    def forward(
        self, x: torch.Tensor, context: ForwardContext, layer: int, skip_bias_add: bool = False
    ) -> torch.Tensor | DeferredBias:
        """[T, D] -> [T, D]. Args: skip_bias_add: as for RowParallelLinear."""
        qkv = self.query_key_value(x, lora_dropout=context.locally_at_layer(layer))
        if isinstance(context.distances, Disentangled):
            # DeBERTa's positions pass the block's own projection where it has no separate one. Outside of `_attend`,
            # which may be recomputed: a product in there would be computed twice.
            product = self.position_query_key or self.query_key_value
            context = replace(context, distances=context.distances.projected(product, layer))
        # Selective recomputation covers attention only: it is cheap to repeat and keeps most memory without fused
        # kernels.
        out = recomputed(self.recompute, self._attend, qkv, context, layer)
        out = out.reshape(math.prod(context.shape), -1)
        return self.dense(out, skip_bias_add=skip_bias_add, lora_dropout=context.at_layer(layer))

    def _attend(self, qkv: torch.Tensor, context: ForwardContext, layer: int) -> torch.Tensor:
        assert not isinstance(context.plan, EncoderDecoderPlan)
        heads, rotary = qkv.view(len(qkv), -1, self.head_size), self.rotary_of(context, layer)
        # [T, heads + 2 key-value heads, size] -> [T, 3 heads, size]: rotary angles and norms are applied, and K and V
        # repeated for their groups of queries in the same pass.
        heads = prepare_qkv(heads, self.key_value_heads, rotary, self.head_norms, self.query_factor)
        qkv = heads.view(len(qkv), 3, -1, self.head_size)
        if context.condition is not None:
            qkv = context.condition.remembered(qkv, layer)
        qkv = qkv.view(*context.shape, *qkv.shape[1:])
        dropout, bias = self.dropout_of(context, layer), context.bias
        if isinstance(context.distances, Disentangled):
            bias = context.distances.score_bias(qkv)
        elif self.relative is not None:
            assert context.distances is not None
            qkv, bias = self.relative.biased(qkv, context.distances)
        return context.plan.attend(layer, [qkv], dropout, bias)

    def rotary_of(self, context: ForwardContext, layer: int) -> Rotary | None:
        return None if context.rotary is None else context.rotary[self.is_local(layer)]

    def dropout_of(self, context: ForwardContext, layer: int) -> AttentionDropout | None:
        if not self.dropout or context.dropout is None:
            return None
        return context.dropout.attention(self.dropout, layer)
