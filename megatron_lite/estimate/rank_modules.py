"""The real modules of one rank, on the device "meta", where they need no memory: estimates count their parts."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import Group
from megatron_lite.transformer.block import Block
from megatron_lite.transformer.encoder_decoder import DecoderBlock
from megatron_lite.transformer.experts import Expert
from megatron_lite.transformer.mlp import MLP
from megatron_lite.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
)


class LinearLayer(NamedTuple):
    """A linear layer of a block that reads tokens."""

    is_row_parallel: bool  # the last one of attention, cross-attention or MLP
    width: (
        int  # of what tensor parallelism splits, on this rank: its inputs if row-parallel, else its outputs
    )
    reads_encoder: bool  # the encoder's tokens, in a block of the decoder


def tensor_parallel(
    size: int, is_split: bool = False, sums_at_once: bool = False, experts: int = 1
) -> TensorParallel:
    """That of the first of so many ranks. Args: as for TensorParallel. experts: ranks that split the experts."""
    group, expert_group = (Group(None, 0, ranks, tuple(range(ranks))) for ranks in (size, experts))
    return TensorParallel(group, is_split, sums_at_once, expert_group)


@functools.lru_cache(maxsize=64)
def rank_block(model: ModelConfig, tp: int, is_decoder: bool) -> Block:
    with torch.device("meta"):
        # The last block: the first may lack a norm, or experts.
        layer = max(1, model.total_layers - 1 if is_decoder else model.num_layers - 1)
        return (DecoderBlock if is_decoder else Block)(model, tensor_parallel(tp), "none", layer)


def ffn_widths(block: Block) -> tuple[int, int]:
    """Widths of the FFN's two products of a token, on this rank: of all its experts together."""
    if isinstance(block.mlp, MLP):
        return _widths(block.mlp)
    experts, expert = block.mlp, next(iter(block.mlp.experts.values()))
    assert isinstance(expert, Expert)
    shared = (0, 0) if experts.shared is None else _widths(experts.shared)
    own = _widths(expert)
    return own[0] * experts.settings.per_token + shared[0], own[1] * experts.settings.per_token + shared[1]


def _widths(ffn: MLP | Expert) -> tuple[int, int]:
    return ffn.dense_h_to_4h.weight.shape[0], ffn.dense_4h_to_h.weight.shape[1]


@functools.lru_cache(maxsize=64)
def linear_layers(model: ModelConfig, tp: int, is_decoder: bool) -> tuple[LinearLayer, ...]:
    found, block = [], rank_block(model, tp, is_decoder)
    for name, module in block.named_modules():
        if name.startswith("mlp."):
            continue
        # The vectors of DeBERTa's positions are no tokens.
        if name == "attention.position_query_key":
            continue
        if isinstance(module, RowParallelLinear):
            found.append(LinearLayer(True, module.weight.shape[1], False))
        elif isinstance(module, ColumnParallelLinear):
            found.append(LinearLayer(False, module.weight.shape[0], name == "cross_attention.key_value"))
    expanded, inner = ffn_widths(block)
    return (*found, LinearLayer(False, expanded, False), LinearLayer(True, inner, False))
