"""What relative positions add to the scores of attention, for pairs of tokens of one call.

Buckets (T5, UniLMv2): one number for each head and bucket of the distance between two position ids, the same for all
layers of a stack, so that a call's bias is made once per forward pass.

Distances are those of position ids and never of places in a row: documents are packed, and UniLMv2 repeats positions.

Shapes: T tokens of a plan, H heads of this rank, Q queries and K keys of a call.
Source: T5, arXiv:1910.10683, section 2.1; the buckets as in its public code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.tensor_parallel import Partition, TensorParallel, sharded

BUCKETS = 32
LONGEST = 128  # distances from here on share a bucket
Pairs = Sequence[
    tuple[torch.Tensor, torch.Tensor]
]  # of each call: its queries [..., Q] and keys [..., K], in [0, T)


class ScoreBias(Protocol):
    """What a layer adds to its scores, which are scaled already."""

    def __call__(self, call: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[..., H, Q, K] for the tokens of the plan's call of this number."""
        ...


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
    share = torch.log(steps.clamp(min=1).float() / near) / math.log(LONGEST / near)
    far = (near + (share * (buckets - near)).to(distance.dtype)).clamp(max=buckets - 1)
    return (first + torch.where(steps < near, steps, far)).long()


class RelativeBuckets(nn.Module):
    """A number for each bucket and head: weight [32, H], shared by the layers of a stack."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel, *, is_causal: bool):
        super().__init__()
        heads = config.num_attention_heads // parallel.group.size
        self.weight = sharded(nn.Parameter(torch.empty(BUCKETS, heads)), Partition(dim=1))
        self.is_causal = is_causal

    def forward(self, pairs: Pairs, positions: torch.Tensor) -> list[torch.Tensor]:
        """The bias of each call of a plan, [..., H, Q, K]. Args: positions: int [T], in the order of the plan."""
        # Tensors, not a function: DeepSpeed must see them to have the table here in the backward pass at ZeRO 3.
        return [self._of(positions[queries], positions[keys]) for queries, keys in pairs]

    def _of(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        distance = keys[..., None, :] - queries[..., :, None]
        return F.embedding(bucket(distance, self.is_causal), self.weight).movedim(-1, -3)
