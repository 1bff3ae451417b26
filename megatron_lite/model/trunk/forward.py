"""Inputs of the blocks for a micro-batch, made alike in a model, in a pipeline stage and with a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from data_utils.base.planes import BLOCK_POSITION_IDS, ID_PLANES
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.attention.calls import AttentionPlan, BiasedPlan, PartsPlan
from megatron_lite.model.kernels.dropout import Dropout
from megatron_lite.model.layers.rotary import Rotary
from megatron_lite.model.layers.tensor_parallel import TensorParallel
from megatron_lite.model.trunk.block import Condition, Flow, own_tokens

if TYPE_CHECKING:
    from megatron_lite.model.layers.relative import RelativeBuckets

# Number of a block and its input [T, D] -> the input that it takes instead.
BeforeBlock = Callable[[int, torch.Tensor], torch.Tensor]


def flow_of(
    config: ModelConfig,
    shape: tuple[int, ...],
    ids: torch.Tensor,
    plan: AttentionPlan | PartsPlan,
    dropout: Dropout | None,
    parallel: TensorParallel,
    condition: Condition | None = None,
) -> Flow:
    """The layers' inputs beside the hidden state. Args: shape: of the tokens. ids: int [len(ID_PLANES), T]."""
    rotary = Rotary.of(config, ids) if config.positions == "rotary" else None
    distances = None
    if config.has_distance_scores:
        from megatron_lite.model.layers.relative import Distances

        distances = Distances.of(config, ids, plan, dropout)
    return Flow.of(shape, plan, dropout, parallel, rotary, distances, condition)


def relative_tables(config: ModelConfig, parallel: TensorParallel) -> dict[str, RelativeBuckets]:
    """The tables of relative positions, which all layers of a stack share, under their names in the model."""
    if config.relative != "buckets":
        return {}
    from megatron_lite.model.layers.relative import RelativeBuckets

    tables = {
        "relative_bias": RelativeBuckets(config, parallel, is_causal=False)
    }  # of the one stack, or the encoder
    if config.decoder_layers:
        tables["decoder_relative_bias"] = RelativeBuckets(config, parallel, is_causal=True)
    return tables


def with_bias(flow: Flow, table: RelativeBuckets | None, positions: torch.Tensor) -> Flow:
    """The flow with the bias that all layers of a stack share. Args: positions: int [T]."""
    if table is None:
        return flow
    made = table(cast(BiasedPlan, flow.plan).pairs(positions.device), positions)
    return replace(flow, bias=lambda call, queries, keys: made[call])


def detached_memory(
    ids: torch.Tensor, plan: AttentionPlan | PartsPlan, parallel: TensorParallel
) -> BeforeBlock:
    """Stops the gradient at the states of a memory that enter each block; weights still learn from their keys.

    Args: ids: int [len(ID_PLANES), T]; a memory has block_position_ids 1.
    """
    own = own_tokens(ids, plan, parallel)
    is_memory = (own[ID_PLANES.index(BLOCK_POSITION_IDS)] > 0)[:, None]
    return lambda layer, hidden: torch.where(is_memory, hidden.detach(), hidden)
