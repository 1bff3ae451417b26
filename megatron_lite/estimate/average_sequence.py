"""The work of an average sequence of a configuration's batches: tokens, predicted positions, attention kernels.

The sequences come from the configuration's objectives over random documents. Everything is counted on the host, from
the attention plans that training makes for a GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from data_utils.common.batch_fields import OBJECTIVE
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.estimate.batches import random_batches
from megatron_lite.transformer.attention_backends.blocks import BlockPlan
from megatron_lite.transformer.attention_backends.dense import DensePlan
from megatron_lite.transformer.attention_backends.layout import Layout
from megatron_lite.transformer.attention_backends.plan import plan_stack
from megatron_lite.transformer.attention_backends.varlen import VarlenPlan
from megatron_lite.transformer.attention_backends.window import LayeredPlan
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.lengths import few_lengths
from megatron_lite.transformer.loss_positions import find_loss_positions

SAMPLED_SEQUENCES = 32  # at least; enough for means within about 2 %
_CUDA = torch.device("cuda")
# A sum of sequences is about normal.
_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)])


@dataclass(frozen=True)
class AttentionLaunch:
    """One launch of an attention kernel, per sequence."""

    queries: float
    gathered: float = 0.0  # keys that are gathered for it; 0 = its keys are a slice

    def times(self, factor: float) -> AttentionLaunch:
        return AttentionLaunch(factor * self.queries, factor * self.gathered)

    def plus(self, other: AttentionLaunch) -> AttentionLaunch:
        return AttentionLaunch(self.queries + other.queries, self.gathered + other.gathered)


@dataclass(frozen=True)
class Stack:
    """The tokens and attention launches of one stack of blocks, per sequence; where layers differ, the mean of all."""

    kernel: str  # varlen, blocks or dense
    attention: tuple[AttentionLaunch, ...]
    counts: np.ndarray  # tokens of each sampled sequence

    def lengths(self, sequences: int, table: np.ndarray) -> dict[float, float]:
        """Tokens of a micro-batch, padded to the table's lengths -> the share of micro-batches of that length."""
        mean, deviation = self.counts.mean() * sequences, self.counts.std() * sequences**0.5
        if self.kernel == "dense":  # every sequence is padded to its full length
            return {float(mean): 1.0}
        # 16 likely lengths instead of the mean, which would hide a wave of tiles that only half of the batches need.
        indices = np.searchsorted(table, mean + deviation * _NORMAL).clip(0, len(table) - 1)
        lengths, numbers = np.unique(table[indices], return_counts=True)
        return dict(zip(lengths.tolist(), (numbers / len(indices)).tolist(), strict=True))


@dataclass(frozen=True)
class AverageSequence:
    """Means over the sampled sequences."""

    length: int  # S, padding included
    stack: Stack  # the only one, or the encoder
    decoder: Stack | None
    tokens: float  # without padding
    loss_tokens: float  # predicted positions
    boundaries: float  # predicted positions that SpanBERT's span boundary head predicts as well
    visible_keys: float
    decoder_tokens: float
    decoder_keys: float

    def multiple(self, sequences: int) -> int:
        """The multiple to which the tokens of a micro-batch are padded."""
        return few_lengths(sequences * self.length, _CUDA, torch.bfloat16)


def average_sequence(config: Config) -> AverageSequence:
    """Raises ConfigError as the objectives do."""
    micro = config.batch.micro_batch_size
    # Enough sequences for the means, whatever the micro-batch.
    if micro * 2 < SAMPLED_SEQUENCES:
        micro *= -(-SAMPLED_SEQUENCES // 2 // micro)
        batch = replace(config.batch, micro_batch_size=micro, global_batch_size=micro)
        config = replace(config, batch=batch)
    batches = random_batches(config, 2)
    count = sum(len(batch.fields) for batch in batches)
    sums = [_sum_batch(config, batch) for batch in batches]
    means: dict[str, Any] = {
        name: sum(getattr(batch_sums, name) for batch_sums in sums) / count
        for name in (
            "tokens",
            "loss_tokens",
            "boundaries",
            "visible_keys",
            "decoder_tokens",
            "decoder_keys",
        )
    }
    stack = _mean_stack([batch_sums.stack for batch_sums in sums], count)
    decoders = [batch_sums.decoder for batch_sums in sums if batch_sums.decoder is not None]
    decoder = _mean_stack(decoders, count) if decoders else None
    return AverageSequence(sums[0].length, stack, decoder, **means)


def _mean_stack(stacks: list[Stack], count: int) -> Stack:
    most = max(len(stack.attention) for stack in stacks)
    attention = tuple(
        _mean_launch([stack.attention[i] for stack in stacks if i < len(stack.attention)], count)
        for i in range(most)
    )
    return Stack(stacks[0].kernel, attention, np.concatenate([stack.counts for stack in stacks]))


def _mean_launch(launches: list[AttentionLaunch], count: int) -> AttentionLaunch:
    return functools.reduce(AttentionLaunch.plus, launches).times(1 / count)


def _sum_batch(config: Config, batch: Batch) -> AverageSequence:
    """Sums over a batch."""
    model, layout = config.model, batch.layout
    stack, *others = [
        _stack(plan_stack(part, _CUDA, model), part, batch, model)
        for part in (layout.encoder_and_decoder if model.decoder_layers else [layout])
    ]
    weights, objectives = batch.weights.reshape(-1), batch.fields[:, OBJECTIVE].reshape(-1)
    positions, _ = find_loss_positions(weights, objectives, model)
    predicted = len(positions.tokens) + batch.further_tokens(model)
    return AverageSequence(
        batch.fields.shape[2], stack, others[0] if others else None, batch.tokens, predicted,
        len(positions.boundaries), batch.layer_keys(model), batch.decoder_tokens, batch.decoder_keys,
    )  # fmt: skip


def _stack(plan: Any, layout: Layout, batch: Batch, model: ModelConfig) -> Stack:
    sequences, length = len(batch.fields), batch.fields.shape[2]
    counts = np.bincount(layout.batch_index // length, minlength=sequences).astype(float)
    if isinstance(plan, LayeredPlan):
        whole, near = (_stack(one, layout, batch, model) for one in (plan.global_plan, plan.local_plan))
        share = model.local_share
        attention = tuple(
            full.times(1 - share).plus(local.times(share))
            for full, local in zip(whole.attention, near.attention, strict=True)
        )
        return Stack(whole.kernel, attention, counts)
    if isinstance(plan, DensePlan):  # every position, padding too
        launch = AttentionLaunch(float(sequences * length))
        return Stack("dense", (launch,), np.full(sequences, float(length)))
    if isinstance(plan, BlockPlan):
        return Stack("blocks", (AttentionLaunch(float(plan.length)),), counts)
    assert isinstance(plan, VarlenPlan)
    launches = [
        AttentionLaunch(float(np.diff(launch.cu_seqlens_q).sum()), float(len(launch.gathered)))
        for launch in plan.launches
    ]
    return Stack("varlen", tuple(launches), counts)
