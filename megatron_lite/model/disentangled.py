"""Disentangled attention: positions have queries and keys, made of an embedding of each bucket of distances.

With Q, K of tokens, and P, R of the bucket r of the distance p_q - p_k, the score of a query q and a key k is

    (Q_q K_k + Q_q R_r + P_r K_k) / sqrt(3 d)

The first term is that of a kernel with queries over sqrt(3), the rest is its bias. The embeddings are shared by the
layers of a stack, and P and R are projections of them: those of the tokens, or a layer's own.

Shapes: T tokens of a plan, H heads of this rank, Q queries and K keys of a call, N buckets of both directions, D hidden
size, d size of a head.
Source: DeBERTa, arXiv:2006.03654 and 2111.09543; the buckets in fp32 as in the class of transformers 5.23.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.attention_backends.blocks import BlockPlan
from megatron_lite.model.attention_backends.interface import BiasedPlan
from megatron_lite.model.attention_backends.tables import TableBias
from megatron_lite.model.kernels.dropout import Dropout
from megatron_lite.model.kernels.fused import dropout_add
from megatron_lite.model.kernels.rule_attention import table_slots
from megatron_lite.model.norms import make_norm
from megatron_lite.model.tensor_parallel import ColumnParallelLinear, TensorParallel


@functools.lru_cache(maxsize=8)
def bucket_line(buckets: int, positions: int, device: torch.device) -> torch.Tensor:
    """The bucket of each distance from -2 positions to 2 positions, int64; all beyond are in the last ones.

    Near distances have a bucket each, far ones share buckets of logarithmic width. Computed on the host: the logarithms
    of devices differ, and with them the buckets of some distances.

    Args: buckets: of each direction; 0 = one for each distance below `positions`.
    """
    distance = torch.arange(-2 * positions, 2 * positions + 1)
    half, most = buckets // 2, buckets or positions
    if buckets:
        steps = distance.abs().clamp(min=half)
        share = torch.log(steps / half) / torch.log(torch.tensor((positions - 1) / half))
        far = (torch.ceil(share * (half - 1)) + half) * distance.sign()
        distance = torch.where(distance.abs() <= half, distance, far.long())
    return (distance + most).clamp(0, 2 * most - 1).to(device)


@functools.lru_cache(maxsize=8)
def place_line(buckets: int, positions: int, longest: int, device: torch.device) -> torch.Tensor:
    """`table_slots` of the bucket of each distance from -longest to longest, key less query: int32."""
    apart = torch.arange(longest, -longest - 1, -1).clamp(-2 * positions, 2 * positions)
    line = bucket_line(buckets, positions, torch.device("cpu"))
    return table_slots(line[apart + 2 * positions]).to(device)


class PositionRows(NamedTuple):
    """Embeddings and buckets, which the layers of a stack share."""

    rows: torch.Tensor  # [N, D], normed
    # int64 [..., 1, Q, K] for each call: the bucket of each pair. For a BlockPlan one, int32 [2 S + 1], see TableBias.
    places: tuple[torch.Tensor, ...]


class BucketEmbeddings(nn.Module):
    """An embedding for each bucket of both directions: weight [N, D], whole on every rank."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.position_rows, config.hidden_size))
        self.layernorm = (
            make_norm(config, config.hidden_size, TensorParallel()) if config.position_norm else None
        )
        self.buckets, self.positions, self.parallel = (
            config.position_buckets,
            config.max_position + 1,
            parallel,
        )
        self.dropout, self.factor = config.output_dropout, config.query_factor

    def forward(self, plan: BiasedPlan | BlockPlan, positions: torch.Tensor) -> PositionRows:
        """Args: positions: int [T], in the order of the plan."""
        # A new tensor: at ZeRO 3 the parameter is released when this module returns.
        rows = self.weight * 1.0 if self.layernorm is None else self.layernorm(self.weight)
        if isinstance(plan, BlockPlan):
            line = place_line(self.buckets, self.positions, plan.row_length, positions.device)
            return PositionRows(self.parallel.copy(rows), (line,))
        line = bucket_line(self.buckets, self.positions, positions.device)
        most = 2 * self.positions
        places = []
        for queries, keys in plan.query_key_pairs(positions.device):
            apart = positions[queries][..., :, None] - positions[keys][..., None, :]
            places.append(line[apart.clamp(-most, most).long() + most].unsqueeze(-3))
        # Each rank has a part of the gradient: that of its heads.
        return PositionRows(self.parallel.copy(rows), tuple(places))


@dataclass(frozen=True)
class Disentangled:
    """The positions of a batch, and their terms in a layer."""

    shared: PositionRows
    dropout: Dropout | None
    p: float  # of the embeddings, in each layer
    factor: float  # of queries, those of tokens and of positions
    of_layer: torch.Tensor | None = None  # [N, 2 H d]: P and R

    def projected(self, product: ColumnParallelLinear, layer: int) -> Disentangled:
        """With the layer's projections. Args: product: its first outputs are of queries and of keys."""
        rows = self.shared.rows
        # The bucket's number keys dropout: the same mask on all ranks and for every call of the layer.
        numbers = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
        dropped = None if self.dropout is None else self.dropout.distances(self.p, numbers, layer)
        if dropped is not None:
            rows = dropout_add(rows, None, dropped)
        return replace(self, of_layer=product(rows, whole_rows=True))

    def bias_of(self, qkv: torch.Tensor) -> Any:
        """A ScoreBias, or the TableBias of a BlockPlan. Args: qkv: [T, 3, H, d], queries times the factor."""
        if self.shared.places[0].dim() > 1:
            return functools.partial(self._bias, qkv)
        of_queries, of_keys = self._projections(qkv)
        return TableBias(torch.stack([of_keys, of_queries * self.factor]), self.shared.places[0])

    def _projections(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """P and R, [N, H, d] each."""
        assert self.of_layer is not None
        heads, size = qkv.shape[-2:]
        return self.of_layer[:, : 2 * heads * size].unflatten(-1, (2, heads, size)).unbind(-3)

    def _bias(self, qkv: torch.Tensor, call: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Score bias of one call: [..., H, Q, K]."""
        of_queries, of_keys = self._projections(qkv)
        size = qkv.shape[-1]
        scale = size**-0.5
        # Products with all N buckets, then a gather by pair: N is far smaller than the number of pairs.
        to_keys = torch.einsum("...qhd,nhd->...hqn", qkv[:, 0][queries], of_keys * scale)
        to_queries = torch.einsum("...khd,nhd->...hnk", qkv[:, 1][keys], of_queries * (self.factor * scale))
        place = self.shared.places[call].expand(*to_keys.shape[:-1], to_queries.shape[-1])
        return to_keys.gather(-1, place) + to_queries.gather(-2, place)


def own_projection(
    config: ModelConfig, parallel: TensorParallel, of_tokens: ColumnParallelLinear
) -> ColumnParallelLinear | None:
    """A layer's product of positions; None where it is that of the tokens."""
    if not config.position_projections:
        of_tokens.weight.is_used_twice = True  # type: ignore[attr-defined]  # see `accumulate_in_backward`
        return None
    width = 2 * config.attention_size
    return ColumnParallelLinear(config.hidden_size, width, parallel, parts=2, has_bias=config.has_bias("qkv"))
