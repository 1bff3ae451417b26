"""The decoder of a model with an encoder and a decoder: T5, BART and MASS on the blocks of block.py.

The first `num_layers` blocks are the encoder's; `decoder_layers` blocks follow, each with cross-attention between
attention and MLP. Between layers the tokens of the two are two matrices, [Te, D] and [Td, D]: a block rewrites one of
them. cross_attention.py says which tokens are whose, and makes the plans.

Word embedding, segments, tasks, block positions and heads are shared. Where positions are learned, or embeddings have
a norm, the decoder has its own (BART). A pre-norm encoder ends in a norm; its counterpart is the final LayerNorm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import gather_tokens_to_split
from megatron_lite.transformer.activation_checkpoint import recomputed
from megatron_lite.transformer.attention_backends.interface import AttentionPlan, EncoderDecoderPlan
from megatron_lite.transformer.block import Block, deferred
from megatron_lite.transformer.embedding import PositionEmbeddings
from megatron_lite.transformer.forward_context import ForwardContext, local_lengths
from megatron_lite.transformer.kernels.dropout import Dropout
from megatron_lite.transformer.kernels.fused import has_kernels
from megatron_lite.transformer.lora import add_updates
from megatron_lite.transformer.norms import LayerNorm, RMSNorm, make_norm
from megatron_lite.transformer.pooling import PlacedVectors, pool
from megatron_lite.transformer.residual import Residual, materialize
from megatron_lite.transformer.tensor_parallel import (
    ColumnParallelLinear,
    DeferredBias,
    RowParallelLinear,
    TensorParallel,
)


@dataclass(frozen=True)
class DecoderContext(ForwardContext):
    """Inputs of the decoder's blocks for one micro-batch, with the inputs of cross-attention."""

    cross: AttentionPlan = field(kw_only=True)
    both: Dropout | None = field(kw_only=True)  # of the encoder's tokens and then the decoder's
    encoder: ForwardContext | None = field(default=None, kw_only=True)  # None where nothing is dropped


def encoder_decoder_contexts(
    context: ForwardContext, parallel: TensorParallel
) -> tuple[ForwardContext, DecoderContext]:
    """The inputs of encoder and decoder for one micro-batch, whose plan is an EncoderDecoderPlan."""
    plan, both = context.plan, context.dropout
    assert isinstance(plan, EncoderDecoderPlan)
    encoder, decoder = _split(both, plan.lengths)
    # `dropout` has the keys of all tokens, for attention; `local_dropout` those of this rank, under sequence
    # parallelism.
    local_encoder, local_decoder = _split(context.local_dropout, local_lengths(plan, parallel))
    routed = (None, None) if context.routed is None else context.routed.split(plan.lengths)
    encoder_context = ForwardContext(plan.lengths[:1], plan.encoder, encoder, local_encoder, routed=routed[0])
    return (
        encoder_context,
        DecoderContext(
            plan.lengths[1:], plan.decoder, decoder, local_decoder, cross=plan.cross, both=both,
            encoder=encoder_context, routed=routed[1],
        ),
    )  # fmt: skip


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


def only_vectors(encoded: torch.Tensor, vectors: PlacedVectors, parallel: TensorParallel) -> torch.Tensor:
    """The encoder's states [Te, D] with the vector of each text at the one token of it that the decoder sees."""
    is_split = parallel.sequence_parallel
    if is_split:
        encoded = gather_tokens_to_split(encoded, parallel.group)
    pooled = pool(encoded, vectors).to(encoded.dtype)
    encoded = encoded.index_copy(0, vectors.slots.long(), pooled)
    return encoded.chunk(parallel.group.size)[parallel.group.rank] if is_split else encoded


class CrossAttention(nn.Module):
    """Queries of the decoder's tokens over keys and values of the encoder's (K|V projection, contiguous halves)."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: bool):
        super().__init__()
        hidden, size, has_bias = config.hidden_size, config.attention_size, config.has_bias("qkv")
        self.head_size = config.head_size
        self.query_factor = config.query_factor
        self.dropout = config.attention_dropout
        self.recompute = recompute
        self.query = ColumnParallelLinear(hidden, size, parallel, has_bias=has_bias)
        # `parts`: K and V are split over the ranks each by itself, so that a rank has both for its heads.
        self.key_value = ColumnParallelLinear(hidden, 2 * size, parallel, parts=2, has_bias=has_bias)
        self.dense = RowParallelLinear(size, hidden, parallel, has_bias=config.has_bias("attention"))

    def forward(
        self,
        x: torch.Tensor,
        encoded: torch.Tensor,
        context: DecoderContext,
        layer: int,
        skip_bias_add: bool = False,
    ) -> torch.Tensor | DeferredBias:
        """[Td, D], [Te, D] -> [Td, D]; under sequence parallelism of this rank's tokens.

        Args: skip_bias_add: as for RowParallelLinear.
        """
        q = self.query(x, lora_dropout=context.locally_at_layer(layer))
        q = q.unflatten(1, (1, -1, self.head_size))
        # The plan scales by 1 / sqrt(D). Models that scale otherwise (T5: not at all) fold the ratio into the queries.
        q = q if self.query_factor == 1.0 else q * self.query_factor
        of_encoder = None if context.encoder is None else context.encoder.locally_at_layer(layer)
        key_value = self.key_value(encoded, lora_dropout=of_encoder).unflatten(1, (2, -1, self.head_size))
        out = recomputed(self.recompute, self._attend, q, key_value, context, layer)
        lora_dropout = context.at_layer(layer)
        return self.dense(out.flatten(1), skip_bias_add=skip_bias_add, lora_dropout=lora_dropout)

    def _attend(
        self, q: torch.Tensor, key_value: torch.Tensor, context: DecoderContext, layer: int
    ) -> torch.Tensor:
        dropout = None
        if self.dropout and context.both is not None:
            # Keys of the hash for both sides: attention drops pairs of a decoder token and an encoder token.
            dropout = context.both.attention(self.dropout, layer)
        return context.cross.attend(layer, [q, key_value], dropout)


class DecoderBlock(Block):
    """A block with cross-attention between attention and MLP.

    Pre-norm: `cross_layernorm` lies before cross-attention, `post_attention_layernorm` before the MLP. Post-norm: each
    lies after what it is named for.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel, recompute: str, layer: int):
        super().__init__(config, parallel, recompute, layer)
        self.cross_attention = CrossAttention(config, parallel, recompute == "selective")
        self.cross_layernorm = make_norm(config, config.hidden_size, parallel)
        add_updates(self, config)  # of cross-attention; the others are there
        self.layers_to_cross = config.decoder_layers  # to dropout cross-attention is a layer of its own

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, encoded: torch.Tensor, context: DecoderContext, layer: int
    ) -> torch.Tensor:
        """[Td, D], [Te, D] -> [Td, D]"""
        return recomputed(self.recompute, self._forward_over, x, encoded, context, layer)

    def _forward_over(
        self, x: torch.Tensor, encoded: torch.Tensor, context: DecoderContext, layer: int
    ) -> torch.Tensor:
        # A new dropout site within the layer would change the masks of all models. Numbers beyond the last block are
        # free.
        cross_layer = layer + self.layers_to_cross
        after_attention, after_cross = self.post_attention_layernorm, self.cross_layernorm
        if self.is_pre_norm:
            # A sum is made with the norm that reads it. Pre-norm: the next sublayer's norm, so the two are exchanged.
            after_attention, after_cross = after_cross, after_attention
        total, normed = self.attend(Residual(x), context, layer, after_attention)
        x_cross = self.cross_attention(
            normed, encoded, context, cross_layer, skip_bias_add=has_kernels(normed)
        )
        dropout = context.features(self.dropout, cross_layer, "attended")
        # Pre-norm continues with the sum, post-norm with the norm of the sum.
        residual = Residual(total if self.is_pre_norm else normed, deferred(x_cross), dropout)
        total, normed = residual.norm(after_cross)
        return materialize(self.expand(total, normed, context, layer))
