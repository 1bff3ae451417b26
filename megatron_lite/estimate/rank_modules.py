"""The real modules of one rank, on the device "meta", where they need no memory: estimates count their parts."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.parallel.collectives import Group
from megatron_lite.transformer.block import Block
from megatron_lite.transformer.encoder_decoder import DecoderBlock
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


def tensor_parallel(size: int, is_split: bool = False, sums_at_once: bool = False) -> TensorParallel:
    """That of the first of so many ranks. Args: as for TensorParallel."""
    return TensorParallel(Group(None, 0, size, tuple(range(size))), is_split, sums_at_once)


@functools.lru_cache(maxsize=64)
def rank_block(model: ModelConfig, tp: int, is_decoder: bool) -> Block:
    with torch.device("meta"):
        return (DecoderBlock if is_decoder else Block)(model, tensor_parallel(tp), "none")


@functools.lru_cache(maxsize=64)
def linear_layers(model: ModelConfig, tp: int, is_decoder: bool) -> tuple[LinearLayer, ...]:
    found = []
    for name, module in rank_block(model, tp, is_decoder).named_modules():
        # The vectors of DeBERTa's positions are no tokens.
        if name == "attention.position_query_key":
            continue
        if isinstance(module, RowParallelLinear):
            found.append(LinearLayer(True, module.weight.shape[1], False))
        elif isinstance(module, ColumnParallelLinear):
            found.append(LinearLayer(False, module.weight.shape[0], name == "cross_attention.key_value"))
    return tuple(found)
