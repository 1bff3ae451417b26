"""Embeddings: tokens and their ids -> the hidden state before the first block.

Shapes: T tokens, D hidden size, E embedding size (D unless factorised).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from data_utils.common.batch_fields import ID_FIELDS, ORD
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends.interface import EncoderDecoderPlan
from megatron_lite.transformer.dense import Linear, embedding_table
from megatron_lite.transformer.forward_context import (
    ForwardContext,
    local_lengths,
    local_tokens,
    order_by_rank,
)
from megatron_lite.transformer.kernels.fused import dropout_add
from megatron_lite.transformer.norms import LayerNorm, RMSNorm, make_norm
from megatron_lite.transformer.tensor_parallel import TensorParallel, VocabParallelEmbedding, linear


class _ShrinkGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):  # type: ignore[no-untyped-def]
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * ctx.alpha, None


class UnsharedEmbedding(Protocol):
    """Parameters of the embedding that encoder and decoder do not share."""

    position_embeddings: nn.Embedding | None
    layernorm: LayerNorm | RMSNorm | None


class PositionEmbeddings(nn.Module):
    """Adds the embeddings of `ID_FIELDS` to those of the words, then norm and dropout: [T, E] -> [T, D].

    The configuration says which tables there are, and whether there is a norm. With a factorised embedding (ALBERT)
    all are of size E, and the result is projected to D.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        size = config.embedding_size or config.hidden_size
        self.position_embeddings = self.position_table(config)
        has_blocks = config.positions == "learned_blocks" or config.block_positions == "table"
        self.block_position_embeddings = _table(config.max_position + 1 if has_blocks else 0, config)
        self.segment_embeddings = _table(config.segments, config)
        self.task_embeddings = _table(config.task_types, config)
        # Initial embedding of XLNet's query stream.
        has_vector = config.has_distance_scores
        self.query_vector = nn.Parameter(torch.empty(size)) if has_vector else None
        self.layernorm = self.norm(config, parallel)
        self.projection: Linear | None = None
        if config.embedding_size is not None:
            self.projection = Linear(size, config.hidden_size)
        self.parallel = parallel
        parallel.mark_replicated(*self.parameters())
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.dropout = config.embedding_dropout
        self.gradient_shrink = config.embedding_gradient_shrink

    @staticmethod
    def position_table(config: ModelConfig) -> nn.Embedding | None:
        return _table(config.max_position + 1 if config.positions.startswith("learned") else 0, config)

    @staticmethod
    def norm(config: ModelConfig, parallel: TensorParallel) -> LayerNorm | RMSNorm | None:
        size = config.embedding_size or config.hidden_size
        return make_norm(config, size, parallel) if config.embedding_norm else None

    def forward(
        self,
        words: torch.Tensor,
        ids: torch.Tensor,
        context: ForwardContext,
        decoder: UnsharedEmbedding | None = None,
    ) -> torch.Tensor:
        """The hidden state before the first block.

        Args:
            words: [T, E], or this rank's tokens of it under sequence parallelism.
            ids: int [len(ID_FIELDS), T].
            decoder: positions and norm of the decoder's tokens, if there is a decoder.
        """
        if self.gradient_shrink != 1.0:
            # GLM-130B's shrink, as a scale of the gradient: e * a + detached e * (1 - a) would round e itself.
            words = _ShrinkGradient.apply(words, self.gradient_shrink)
        # Words come already split by the vocabulary-parallel look-up; ids of the same tokens are cut here.
        ids = local_tokens(ids, context.plan, self.parallel)
        if self.query_vector is not None:
            is_query = ids[ID_FIELDS.index(ORD)] < 0
            words = torch.where(is_query[:, None], self.parallel.replicated(self.query_vector), words)
        # No product by 1: it would be a pass over the hidden state, and another rounding in half precision.
        hidden = words if self.scale == 1.0 else words * self.scale
        if decoder is None:
            hidden = self._sum(hidden, ids, self)
        else:
            assert isinstance(context.plan, EncoderDecoderPlan)
            lengths = local_lengths(context.plan, self.parallel)
            encoded, decoded = hidden.split(lengths)
            encoder_ids, decoder_ids = ids.split(lengths, dim=1)
            # Encoder and decoder differ in positions and norm, and share all other tables.
            hidden = torch.cat(
                [self._sum(encoded, encoder_ids, self), self._sum(decoded, decoder_ids, decoder)]
            )
        if context.condition is not None and context.condition.added is not None:
            hidden = hidden + context.condition.added
        dropout = context.features(self.dropout, -1, "embedding")
        if dropout is not None:
            hidden = dropout_add(hidden, None, dropout)
        if self.projection is not None:
            # After norm and dropout, as ALBERT's code has it.
            weight, bias = map(self.parallel.replicated, (self.projection.weight, self.projection.bias))
            hidden = linear(hidden, weight, bias)
        return hidden

    def _sum(self, hidden: torch.Tensor, ids: torch.Tensor, unshared: UnsharedEmbedding) -> torch.Tensor:
        """All embeddings of tokens, and the norm: [T, E] -> [T, E]. Args: unshared: has the positions and the norm."""
        shared = (self.block_position_embeddings, self.segment_embeddings, self.task_embeddings)
        tables = (unshared.position_embeddings, *shared)
        for table, field in zip(tables, ids[: len(tables)], strict=True):
            if table is not None:
                hidden = hidden + F.embedding(field, self.parallel.replicated(table.weight))
        return hidden if unshared.layernorm is None else unshared.layernorm.after_sum(hidden)[1]


def _table(rows: int, config: ModelConfig) -> nn.Embedding | None:
    return embedding_table(rows, config.embedding_size or config.hidden_size) if rows else None


class Embedding(PositionEmbeddings):
    """All embeddings: int [T], int [len(ID_FIELDS), T] -> [T, D]."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__(config, parallel)
        self.word_embeddings = VocabParallelEmbedding(config, parallel)

    def forward(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        context: ForwardContext,
        decoder: UnsharedEmbedding | None = None,
    ) -> torch.Tensor:
        words = self.word_embeddings(order_by_rank(tokens, context.plan, self.parallel))
        return super().forward(words, ids, context, decoder)
