"""Inputs of the blocks for a micro-batch, made alike in a model, in a pipeline stage and with a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch

from data_utils.common.batch_fields import BLOCK_POSITION_IDS, ID_FIELDS
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends.blocks import BlockPlan, DistanceBias
from megatron_lite.transformer.attention_backends.interface import (
    AttentionPlan,
    BiasedPlan,
    EncoderDecoderPlan,
)
from megatron_lite.transformer.disentangled import BucketEmbeddings, Disentangled
from megatron_lite.transformer.kernels.dropout import Dropout, FeatureDropout, LayerDropout
from megatron_lite.transformer.kernels.fused import dropout_add
from megatron_lite.transformer.position_bias import Distances, Table
from megatron_lite.transformer.rope import Rotary
from megatron_lite.transformer.routed_tokens import RoutedTokens
from megatron_lite.transformer.tensor_parallel import TensorParallel

# Number of a block and its input [T, D] -> the input that it takes instead.
BeforeBlock = Callable[[int, torch.Tensor], torch.Tensor]


def order_by_rank(
    x: torch.Tensor, plan: AttentionPlan | EncoderDecoderPlan, parallel: TensorParallel
) -> torch.Tensor:
    """Tokens [..., T] in the order in which sequence parallelism splits them.

    Each rank has its share of the encoder's tokens and its share of the decoder's.
    """
    if not parallel.sequence_parallel or not isinstance(plan, EncoderDecoderPlan):
        return x
    encoder, decoder = (stack.chunk(parallel.group.size, -1) for stack in x.split(plan.lengths, -1))
    return torch.cat([share for pair in zip(encoder, decoder, strict=True) for share in pair], -1)


def local_tokens(
    x: torch.Tensor, plan: AttentionPlan | EncoderDecoderPlan, parallel: TensorParallel
) -> torch.Tensor:
    """This rank's tokens of [..., T] outside tensor-parallel layers: all, or 1 / tp under sequence parallelism."""
    if not parallel.sequence_parallel:
        return x
    return order_by_rank(x, plan, parallel).chunk(parallel.group.size, -1)[parallel.group.rank]


def local_lengths(plan: EncoderDecoderPlan, parallel: TensorParallel) -> list[int]:
    """Number of encoder and decoder tokens on this rank."""
    size = parallel.group.size if parallel.sequence_parallel else 1
    return [length // size for length in plan.lengths]


class Condition(Protocol):
    """A condition on which the texts of a stack depend in addition to their tokens, such as latent vectors."""

    @property
    def added(self) -> torch.Tensor | None:
        """[T, D], added to the embeddings of all tokens; None = nothing is."""
        ...

    def remembered(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        """Queries, keys and values of a layer, [T, 3, H, size of a head], some of them replaced."""
        ...


@dataclass(frozen=True)
class ForwardContext:
    """Inputs of all layers for one micro-batch, apart from the hidden state."""

    shape: tuple[int, ...]  # of the tokens: [T] in training
    plan: AttentionPlan | EncoderDecoderPlan
    dropout: Dropout | None  # of all tokens
    local_dropout: Dropout | None  # of this rank's tokens: all but under sequence parallelism
    bias: Any = None  # of all layers' scores: a ScoreBias, or what a BlockPlan takes
    # For all tokens, in global layers and in local ones.
    rotary: tuple[Rotary, Rotary] | None = field(default=None, kw_only=True)
    distances: Distances | Disentangled | None = field(default=None, kw_only=True)  # of all tokens
    condition: Condition | None = field(default=None, kw_only=True)
    routed: RoutedTokens | None = field(default=None, kw_only=True)  # None: routers have no losses

    @staticmethod
    def of(
        shape: tuple[int, ...],
        plan: AttentionPlan | EncoderDecoderPlan,
        dropout: Dropout | None,
        parallel: TensorParallel,
        rotary: tuple[Rotary, Rotary] | None = None,
        distances: Distances | None = None,
        condition: Condition | None = None,
        routed: RoutedTokens | None = None,
    ) -> ForwardContext:
        local_dropout = dropout
        if dropout is not None:
            # The same keys, cut as the tokens are: a token's mask does not depend on the rank that computes it.
            local_dropout = replace(dropout, keys=local_tokens(dropout.keys, plan, parallel))
        return ForwardContext(
            shape, plan, dropout, local_dropout, rotary=rotary, distances=distances, condition=condition,
            routed=routed,
        )  # fmt: skip

    def features(self, p: float, layer: int, site: str) -> FeatureDropout | None:
        """Dropout of this rank's hidden states, None if there is none. Args: as for `Dropout.features`."""
        return None if self.local_dropout is None else self.local_dropout.features(p, layer, site)

    def at_layer(self, layer: int) -> LayerDropout | None:
        """Dropout of all tokens within a layer, for `named`."""
        return None if self.dropout is None else LayerDropout(self.dropout, layer)

    def locally_at_layer(self, layer: int) -> LayerDropout | None:
        """The same of this rank's tokens."""
        return None if self.local_dropout is None else LayerDropout(self.local_dropout, layer)

    def last(self, x: torch.Tensor, p: float, layer: int) -> torch.Tensor:
        """The end of a stack, [T, D], after dropout. Args: layer: its last one."""
        dropout = self.features(p, layer, "final")
        return x if dropout is None else dropout_add(x, None, dropout)


def make_context(
    config: ModelConfig,
    shape: tuple[int, ...],
    ids: torch.Tensor,
    plan: AttentionPlan | EncoderDecoderPlan,
    dropout: Dropout | None,
    parallel: TensorParallel,
    condition: Condition | None = None,
    routed: RoutedTokens | None = None,
) -> ForwardContext:
    """The layers' inputs apart from the hidden state. Args: shape: of the tokens. ids: int [len(ID_FIELDS), T]."""
    rotary = None
    if config.positions == "rotary":
        # Global and local layers may have different bases (ModernBERT).
        global_rotary = local_rotary = Rotary.of(config, ids)
        if config.rotary_base_local is not None:
            local_rotary = Rotary.of(config, ids, config.rotary_base_local)
        rotary = (global_rotary, local_rotary)
    distances = None
    if config.has_distance_scores:
        distances = Distances.of(config, ids, cast(BiasedPlan | BlockPlan, plan), dropout)
    return ForwardContext.of(shape, plan, dropout, parallel, rotary, distances, condition, routed)


def with_bias(context: ForwardContext, table: Table | None, positions: torch.Tensor) -> ForwardContext:
    """A context with the relative positions that all layers share. Args: positions: int [T]."""
    if table is None:
        return context
    plan = cast(BiasedPlan | BlockPlan, context.plan)
    if isinstance(table, BucketEmbeddings):
        vectors = table(plan, positions)
        return replace(context, distances=Disentangled(vectors, context.dropout, table.dropout, table.factor))
    biases = table.biases(plan, positions)
    if isinstance(biases, tuple):
        return replace(context, bias=DistanceBias.of(*biases))
    # Made once, for all layers.
    return replace(context, bias=lambda index, queries, keys: biases[index])


def detached_memory(
    ids: torch.Tensor, plan: AttentionPlan | EncoderDecoderPlan, parallel: TensorParallel
) -> BeforeBlock:
    """Stops the gradient at the states of a memory that enter each block; weights still learn from them.

    Args: ids: int [len(ID_FIELDS), T]; a memory has block_position_ids 1.
    """
    local_ids = local_tokens(ids, plan, parallel)
    is_memory = (local_ids[ID_FIELDS.index(BLOCK_POSITION_IDS)] > 0)[:, None]
    return lambda layer, hidden: torch.where(is_memory, hidden.detach(), hidden)
