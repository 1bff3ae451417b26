"""Disentangled attention: positions have queries and keys, made of an embedding of each bucket of distances.

With Q, K of tokens, and P, R of the bucket r of the distance p_q - p_k, the score of a query q and a key k is

    (Q_q K_k + Q_q R_r + P_r K_k) / sqrt(3 d)

The first term is computed by a kernel with queries over sqrt(3), the others are its bias. The embeddings are shared by
the layers of a stack, and P and R are projections of them, by the layer's query and key projections of tokens or by
separate ones.

Shapes: T tokens of a plan, H heads of this rank, Q queries and K keys computed together, N buckets of both directions,
D hidden size, d size of a head, S the longest distance of two tokens.
Source: DeBERTa, arXiv:2006.03654 and 2111.09543; the buckets in fp32 as in the class of transformers 5.23.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends.blocks import BlockPlan
from megatron_lite.transformer.attention_backends.interface import BiasedPlan
from megatron_lite.transformer.attention_backends.tables import TableBias
from megatron_lite.transformer.kernels.dropout import Dropout
from megatron_lite.transformer.kernels.fused import dropout_add
from megatron_lite.transformer.kernels.rule_attention import table_slots
from megatron_lite.transformer.norms import make_norm
from megatron_lite.transformer.tensor_parallel import ColumnParallelLinear, TensorParallel


@functools.lru_cache(maxsize=8)
def distance_buckets(buckets: int, positions: int, device: torch.device) -> torch.Tensor:
    """The bucket of each distance from -2 positions to 2 positions, int64; all beyond are in the last ones.

    Near distances have a bucket each, far ones share buckets of logarithmic width. Computed on the host: the logarithms
    of devices differ, and with them the buckets of some distances.

    Args: buckets: of each direction; 0 = one for each distance below `positions`.
    """
    distance = torch.arange(-2 * positions, 2 * positions + 1)
    half, most = buckets // 2, buckets or positions
    if buckets:
        steps = distance.abs().clamp(min=half)
        log_ratio = torch.log(steps / half) / torch.log(torch.tensor((positions - 1) / half))
        far = (torch.ceil(log_ratio * (half - 1)) + half) * distance.sign()
        distance = torch.where(distance.abs() <= half, distance, far.long())
    return (distance + most).clamp(0, 2 * most - 1).to(device)


@functools.lru_cache(maxsize=8)
def distance_slots(buckets: int, positions: int, longest: int, device: torch.device) -> torch.Tensor:
    """`table_slots` of the bucket of each distance from -longest to longest, key less query: int32 [2 S + 1]."""
    apart = torch.arange(longest, -longest - 1, -1).clamp(-2 * positions, 2 * positions)
    bucket = distance_buckets(buckets, positions, torch.device("cpu"))
    return table_slots(bucket[apart + 2 * positions]).to(device)


class PositionVectors(NamedTuple):
    """Embeddings of buckets, and which bucket each pair of tokens has; the layers of a stack share both."""

    vectors: torch.Tensor  # [N, D], normed
    # int64 [..., 1, Q, K] for each of the plan's `query_key_pairs`: the bucket of each pair. For a BlockPlan one, int32
    # [2 S + 1], see TableBias.
    slots: tuple[torch.Tensor, ...]


class BucketEmbeddings(nn.Module):
    """An embedding for each bucket of both directions: weight [N, D], whole on every rank."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.position_rows, config.hidden_size))
        self.layernorm = (
            make_norm(config, config.hidden_size, TensorParallel()) if config.position_norm else None
        )
        self.buckets, self.positions = config.position_buckets, config.max_position + 1
        self.parallel = parallel
        self.dropout, self.factor = config.output_dropout, config.query_factor

    def forward(self, plan: BiasedPlan | BlockPlan, positions: torch.Tensor) -> PositionVectors:
        """Args: positions: int [T], in the order of the plan."""
        # A new tensor: at ZeRO 3 the parameter is released when this module returns.
        vectors = self.weight * 1.0 if self.layernorm is None else self.layernorm(self.weight)
        if isinstance(plan, BlockPlan):
            slots = distance_slots(self.buckets, self.positions, plan.row_length, positions.device)
            return PositionVectors(self.parallel.copy(vectors), (slots,))
        bucket = distance_buckets(self.buckets, self.positions, positions.device)
        most = 2 * self.positions
        buckets = []
        for queries, keys in plan.query_key_pairs(positions.device):
            apart = positions[queries][..., :, None] - positions[keys][..., None, :]
            buckets.append(bucket[apart.clamp(-most, most).long() + most].unsqueeze(-3))
        # `copy`: each rank has the gradient by its own heads; their sum is the gradient of the vectors.
        return PositionVectors(self.parallel.copy(vectors), tuple(buckets))


@dataclass(frozen=True)
class Disentangled:
    """The positions of a batch, and their terms in a layer."""

    shared: PositionVectors
    dropout: Dropout | None
    p: float  # of the embeddings, in each layer
    factor: float  # of the queries, those of tokens and of positions
    projections: torch.Tensor | None = None  # of a layer, [N, 2 H d]: P and R

    def projected(self, product: ColumnParallelLinear, layer: int) -> Disentangled:
        """With the layer's projections. Args: product: its first outputs are of queries and of keys."""
        vectors = self.shared.vectors
        # The bucket's number keys dropout: the same mask on all ranks and for all pairs of the layer.
        numbers = torch.arange(len(vectors), device=vectors.device, dtype=torch.int32)
        dropout = None if self.dropout is None else self.dropout.distances(self.p, numbers, layer)
        if dropout is not None:
            vectors = dropout_add(vectors, None, dropout)
        return replace(self, projections=product(vectors, whole_rows=True))

    def score_bias(self, qkv: torch.Tensor) -> Any:
        """A ScoreBias, or the TableBias of a BlockPlan. Args: qkv: [T, 3, H, d], queries times the factor."""
        if self.shared.slots[0].dim() > 1:
            return functools.partial(self._bias, qkv)
        position_queries, position_keys = self._position_queries_and_keys(qkv)
        vectors = torch.stack([position_keys, position_queries * self.factor])
        return TableBias(vectors, self.shared.slots[0])

    def _position_queries_and_keys(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """P and R, [N, H, d] each."""
        assert self.projections is not None
        heads, size = qkv.shape[-2:]
        return self.projections[:, : 2 * heads * size].unflatten(-1, (2, heads, size)).unbind(-3)

    def _bias(self, qkv: torch.Tensor, index: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """A ScoreBias: [..., H, Q, K]."""
        position_queries, position_keys = self._position_queries_and_keys(qkv)
        scale = qkv.shape[-1] ** -0.5
        # Products with all N buckets, then a gather by pair: N is far smaller than the number of pairs.
        query_scores = torch.einsum("...qhd,nhd->...hqn", qkv[:, 0][queries], position_keys * scale)
        scaled_queries = position_queries * (self.factor * scale)
        key_scores = torch.einsum("...khd,nhd->...hnk", qkv[:, 1][keys], scaled_queries)
        bucket = self.shared.slots[index].expand(*query_scores.shape[:-1], key_scores.shape[-1])
        return query_scores.gather(-1, bucket) + key_scores.gather(-2, bucket)


def position_projection(
    config: ModelConfig, parallel: TensorParallel, query_key_value: ColumnParallelLinear
) -> ColumnParallelLinear | None:
    """A layer's separate projection of positions; None where `query_key_value` projects them too."""
    if not config.position_projections:
        query_key_value.weight.is_used_twice = True  # type: ignore[attr-defined]  # see `accumulate_in_backward`
        return None
    width = 2 * config.attention_size
    return ColumnParallelLinear(config.hidden_size, width, parallel, parts=2, has_bias=config.has_bias("qkv"))
