"""Bias of attention scores by relative positions, for queries and keys that a plan computes together.

Buckets (T5, UniLMv2): one number for each head and bucket of the distance between two position ids, the same for all
layers of a stack, so that the biases are made once per forward pass.

XLNet: with learned vectors u, v, w of each head, and g of whether two tokens are of different segments, the score is

    (q + u) k  +  (q + v) W s(distance)  +  (q + w) g[segments differ]

all over sqrt(d); s are sinusoids. The first term is computed by a kernel with the queries q + u, the others are its
bias. For a BlockPlan the bias comes from a table of the queries.

DeBERTa's terms are in disentangled.py.

Distances are differences of position ids, never of indices in a row: documents are packed, and UniLMv2 repeats
positions.

Shapes: T tokens of a plan, H heads of this rank, Q queries and K keys computed together, D hidden size, d size of
a head, S tokens of a row.
Source: T5, arXiv:1910.10683, section 2.1, the buckets as in its public code; XLNet, arXiv:1906.08237, with
Transformer-XL, arXiv:1901.02860, section 3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from data_utils.common.batch_fields import ID_FIELDS, POSITION_IDS, SEGMENT_IDS
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends.blocks import BlockPlan
from megatron_lite.transformer.attention_backends.interface import BiasedPlan
from megatron_lite.transformer.attention_backends.tables import QueryBias, segment_columns, vector_count
from megatron_lite.transformer.disentangled import BucketEmbeddings
from megatron_lite.transformer.kernels.dropout import Dropout
from megatron_lite.transformer.kernels.fused import dropout_add
from megatron_lite.transformer.tensor_parallel import Partition, TensorParallel, linear, sharded

BUCKETS = 32
LONGEST = 128  # distances from here on share a bucket


def bucket(distance: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """The bucket of each distance (position of the key minus that of the query), int64.

    Near distances have a bucket each, far ones share buckets of logarithmic width. Where both directions occur each
    has half of the buckets; a causal stack has no keys ahead.
    """
    buckets = BUCKETS if is_causal else BUCKETS // 2
    first = torch.zeros_like(distance) if is_causal else (distance > 0) * buckets
    steps = (-distance).clamp(min=0) if is_causal else distance.abs()
    near = buckets // 2
    # In fp32, as the systems compute it: the buckets of some distances depend on it. 1: not the logarithm of 0.
    log_ratio = torch.log(steps.clamp(min=1).float() / near) / math.log(LONGEST / near)
    far = (near + (log_ratio * (buckets - near)).to(distance.dtype)).clamp(max=buckets - 1)
    return (first + torch.where(steps < near, steps, far)).long()


class RelativeBuckets(nn.Module):
    """A number for each bucket and head: weight [32, H], shared by the layers of a stack."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, *, is_causal: bool):
        super().__init__()
        heads = config.num_attention_heads // parallel.group.size
        # Split by heads, as attention is: a rank needs the numbers of its own heads only.
        self.weight = sharded(nn.Parameter(torch.empty(BUCKETS, heads)), Partition(dim=1))
        self.is_causal = is_causal

    def forward(self) -> torch.Tensor:
        """[32, H]: a new tensor, as ZeRO 3 releases the parameter when this module returns.

        One, whatever the batch: at ZeRO 3 each tensor that a module returns is a use of it in the backward pass, and
        ranks whose uses differ wait for each other.
        """
        return self.weight * 1.0

    def biases(
        self, plan: BiasedPlan | BlockPlan, positions: torch.Tensor
    ) -> list[torch.Tensor] | tuple[torch.Tensor, torch.Tensor]:
        """The bias for each of a plan's `query_key_pairs`, [..., H, Q, K]; a BlockPlan: what `DistanceBias.of` takes.

        Args: positions: int [T], in the order of the plan.
        """
        table = self()
        if isinstance(plan, BlockPlan):
            line = torch.arange(-plan.row_length, plan.row_length + 1, device=positions.device)
            return table, bucket(line, self.is_causal).int()
        distances = [
            positions[keys][..., None, :] - positions[queries][..., :, None]
            for queries, keys in plan.query_key_pairs(positions.device)
        ]
        return [F.embedding(bucket(each, self.is_causal), table).movedim(-1, -3) for each in distances]


@dataclass(frozen=True)
class Distances:
    """Positions, segments and sinusoids of a batch, which XLNet's layers share."""

    positions: torch.Tensor  # int [T]
    segments: torch.Tensor  # int [T]
    longest: int  # no distance is larger
    sinusoids: torch.Tensor  # fp32 [N, D], of the N distances from -longest on
    columns: torch.Tensor | None  # of a QueryBias

    @staticmethod
    def of(
        config: ModelConfig, ids: torch.Tensor, plan: BiasedPlan | BlockPlan, dropout: Dropout | None
    ) -> Distances:
        """The distances of a batch's tokens. Args: ids: int [len(ID_FIELDS), T].

        The sinusoids are dropped out as the embeddings are, once for all layers, as in XLNet's code.
        """
        positions, segments = (ids[ID_FIELDS.index(field)] for field in (POSITION_IDS, SEGMENT_IDS))
        columns: torch.Tensor | None = None
        # Reading the largest position would wait for a GPU.
        longest = (
            plan.row_length
            if positions.device.type != "cpu" or isinstance(plan, BlockPlan)
            else int(positions.max())
        )
        steps = torch.arange(0, config.hidden_size, 2.0, device=ids.device) / config.hidden_size
        count = 2 * longest + 1
        if isinstance(plan, BlockPlan):
            count, columns = vector_count(longest), segment_columns(plan.columns, segments, longest)
        line = torch.arange(-longest, count - longest, device=ids.device, dtype=torch.int32)
        angles = line[:, None].float() / 10000.0**steps
        sinusoids = torch.cat([angles.sin(), angles.cos()], dim=1)
        sinusoid_dropout = None if dropout is None else dropout.distances(config.embedding_dropout, line)
        if sinusoid_dropout is not None:
            sinusoids = dropout_add(sinusoids, None, sinusoid_dropout)
        return Distances(positions, segments, longest, sinusoids, columns)


class DistanceTerms(NamedTuple):
    """Relative terms of the queries of one layer, from which the bias of each pair is selected."""

    content: torch.Tensor  # q + u, [T, H, d]
    position: torch.Tensor  # q + v, [T, H, d]
    distances: torch.Tensor  # W s, [N, H, d]
    segments: torch.Tensor  # (q + w) g, [T, H, 2]

    def bias(self, distances: Distances, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """A ScoreBias: [..., H, Q, K]."""
        heads, size = self.content.shape[1:]
        # Scores for all N distances, then one gather for each pair: [H, Q, N] instead of a vector for each pair.
        all_scores = torch.einsum("...qhd,nhd->...hqn", self.position[queries], self.distances)
        apart = distances.positions[queries][..., :, None] - distances.positions[keys][..., None, :]
        distance_index = (apart + distances.longest).long()[..., None, :, :]
        differ = distances.segments[queries][..., :, None] != distances.segments[keys][..., None, :]
        segments = self.segments[queries].movedim(-2, -3)
        shape = (*apart.shape[:-2], heads, *apart.shape[-2:])
        scores = all_scores.gather(-1, distance_index.expand(shape))
        return (scores + segments.gather(-1, differ.long()[..., None, :, :].expand(shape))) * size**-0.5


class DistanceScores(nn.Module):
    """The learned part of XLNet's positions and segments in one layer."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        heads, size = config.num_attention_heads // parallel.group.size, config.head_size

        def per_head(*shape: int) -> nn.Parameter:
            return sharded(nn.Parameter(torch.empty(heads, *shape)), Partition(dim=0))

        self.size = size
        self.weight = sharded(nn.Parameter(torch.empty(heads * size, config.hidden_size)), Partition(dim=0))
        self.content_query, self.position_query, self.segment_query = (per_head(size) for _ in range(3))
        self.segment_keys = per_head(2, size)

    def biased(self, qkv: torch.Tensor, distances: Distances) -> tuple[torch.Tensor, Any]:
        """The operands of the first term, [..., 3, H, d], and a ScoreBias, or the QueryBias of a BlockPlan."""
        q, key_value = qkv.split([1, 2], dim=-3)
        terms: DistanceTerms = self(q.squeeze(-3), distances)
        qkv = torch.cat([terms.content.unsqueeze(-3), key_value], dim=-3)
        if distances.columns is None:
            return qkv, lambda index, queries, keys: terms.bias(distances, queries, keys)
        operands = terms.position, terms.distances, terms.segments
        return qkv, QueryBias(distances.columns, *operands, distances.longest)

    def forward(self, q: torch.Tensor, distances: Distances) -> DistanceTerms:
        """Args: q: queries [T, H, d]."""
        line = linear(distances.sinusoids.to(q.dtype), self.weight).unflatten(-1, (-1, self.size))
        segments = torch.einsum("thd,hsd->ths", q + self.segment_query, self.segment_keys)
        return DistanceTerms(q + self.content_query, q + self.position_query, line, segments)


Table = RelativeBuckets | BucketEmbeddings


def relative_tables(config: ModelConfig, parallel: TensorParallel) -> dict[str, Table]:
    """The tables of relative positions, which all layers of a stack share, under their names in the model."""
    if config.relative == "disentangled":
        return {"relative_bias": BucketEmbeddings(config, parallel)}
    if config.relative != "buckets":
        return {}
    # The one of a single stack, or the encoder's.
    tables: dict[str, Table] = {"relative_bias": RelativeBuckets(config, parallel, is_causal=False)}
    if config.decoder_layers:
        tables["decoder_relative_bias"] = RelativeBuckets(config, parallel, is_causal=True)
    return tables
