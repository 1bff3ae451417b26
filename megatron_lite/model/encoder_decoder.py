"""The decoder of a model with an encoder and a decoder: T5, BART and MASS on the blocks of block.py.

The first `num_layers` blocks are the encoder's and see its rows; `decoder_layers` blocks follow, each with
cross-attention between attention and MLP. Between layers the rows of the two are two token matrices, [Te, D] and
[Td, D]: a block rewrites its own. cross_attention.py says which rows are whose, and makes the plans.

Word embedding, segments, tasks, block positions and heads are shared. Where positions are learned, or embeddings have
a norm, the decoder has its own (BART). A pre-norm encoder ends in a norm; its counterpart is the final LayerNorm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.attention_backends.calls import AttentionPlan, PartsPlan
from megatron_lite.model.block import Block, PositionEmbeddings, Stream, recomputed
from megatron_lite.model.forward_context import Flow, own_lengths
from megatron_lite.model.kernels.dropout import Dropout
from megatron_lite.model.kernels.fused import Biased
from megatron_lite.model.tensor_parallel import (
    ColumnParallelLinear,
    LayerNorm,
    RMSNorm,
    RowParallelLinear,
    TensorParallel,
    make_norm,
)


@dataclass(frozen=True)
class DecoderFlow(Flow):
    """Inputs of the decoder's blocks for one micro-batch, those of cross-attention included."""

    cross: AttentionPlan = field(kw_only=True)
    both: Dropout | None = field(kw_only=True)  # of the encoder's rows and then the decoder's


def part_flows(flow: Flow, parallel: TensorParallel) -> tuple[Flow, DecoderFlow]:
    """The inputs of encoder and decoder for one micro-batch, whose plan is a PartsPlan."""
    plan, both = flow.plan, flow.dropout
    assert isinstance(plan, PartsPlan)
    encoder, decoder = _split(both, plan.lengths)
    own_encoder, own_decoder = _split(flow.own_dropout, own_lengths(plan, parallel))
    return (
        Flow(plan.lengths[:1], plan.encoder, encoder, own_encoder),
        DecoderFlow(plan.lengths[1:], plan.decoder, decoder, own_decoder, cross=plan.cross, both=both),
    )


def _split(dropout: Dropout | None, lengths: Sequence[int]) -> list[Dropout | None]:
    if dropout is None:
        return [None, None]
    return [replace(dropout, keys=keys) for keys in dropout.keys.split(list(lengths))]


class DecoderEmbedding(nn.Module):
    """Parameters of the decoder's embedding that the encoder does not share. `PositionEmbeddings` adds them."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.position_embeddings = PositionEmbeddings.position_table(config)
        self.layernorm = PositionEmbeddings.norm(config, parallel)
        parallel.mark_replicated(*self.parameters())


def encoder_layernorm(config: ModelConfig, parallel: TensorParallel) -> LayerNorm | RMSNorm | None:
    """The norm at the end of a pre-norm encoder."""
    return make_norm(config, config.hidden_size, parallel) if config.norm == "pre" else None


class CrossAttention(nn.Module):
    """Queries of the decoder's rows over keys and values of the encoder's (K|V projection, contiguous halves)."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: bool):
        super().__init__()
        hidden, size, has_bias = config.hidden_size, config.attention_size, config.has_bias("qkv")
        self.head_size = config.head_size
        self.query_factor = config.query_factor
        self.dropout = config.attention_dropout
        self.recompute = recompute
        self.query = ColumnParallelLinear(hidden, size, parallel, has_bias=has_bias)
        self.key_value = ColumnParallelLinear(hidden, 2 * size, parallel, parts=2, has_bias=has_bias)
        self.dense = RowParallelLinear(size, hidden, parallel, has_bias=config.has_bias("attention"))

    def forward(self, hidden: torch.Tensor, encoded: torch.Tensor, flow: DecoderFlow, layer: int) -> Biased:
        """[Td, D], [Te, D] -> [Td, D]; under sequence parallelism of this rank's tokens."""
        q = self.query(hidden).x.unflatten(1, (1, -1, self.head_size))
        q = q if self.query_factor == 1.0 else q * self.query_factor
        key_value = self.key_value(encoded).x.unflatten(1, (2, -1, self.head_size))
        out = recomputed(self.recompute, self._attend, q, key_value, flow, layer)
        return self.dense(out.flatten(1))

    def _attend(
        self, q: torch.Tensor, key_value: torch.Tensor, flow: DecoderFlow, layer: int
    ) -> torch.Tensor:
        dropout = None
        if self.dropout and flow.both is not None:
            dropout = flow.both.attention(self.dropout, layer)
        return flow.cross.attend(layer, [q, key_value], dropout)


class DecoderBlock(Block):
    """A block with cross-attention between attention and MLP.

    Pre-norm: `cross_layernorm` lies before cross-attention, `post_attention_layernorm` before the MLP. Post-norm: each
    lies after what it is named for.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: str):
        super().__init__(config, parallel, recompute)
        self.cross_attention = CrossAttention(config, parallel, recompute == "selective")
        self.cross_layernorm = make_norm(config, config.hidden_size, parallel)
        self.layers_to_cross = config.decoder_layers  # to dropout cross-attention is a layer of its own

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, encoded: torch.Tensor, flow: DecoderFlow, layer: int
    ) -> torch.Tensor:
        """[Td, D], [Te, D] -> [Td, D]"""
        return recomputed(self.recompute, self._forward_over, hidden, encoded, flow, layer)

    def _forward_over(
        self, hidden: torch.Tensor, encoded: torch.Tensor, flow: DecoderFlow, layer: int
    ) -> torch.Tensor:
        after_attention, after_cross = self.cross_layernorm, self.post_attention_layernorm
        if self.output_layernorm is not None:
            after_attention, after_cross = after_cross, after_attention
        hidden, normed = self._attended(Stream(hidden), flow, layer, after_attention)
        residual = hidden if self.output_layernorm is None else normed
        cross = layer + self.layers_to_cross
        x = self.cross_attention(normed, encoded, flow, cross)
        dropout = flow.features(self.dropout, cross, "attended")
        return self._expanded(*after_cross.after_sum(residual, x, dropout), flow, layer).summed()
