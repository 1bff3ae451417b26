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
from megatron_lite.estimate.roofline import Work, tile_pairs
from megatron_lite.model.attention_backends.blocks import BLOCK, BlockPlan
from megatron_lite.model.attention_backends.cross_attention import cross_attention_groups
from megatron_lite.model.attention_backends.dense import DensePlan
from megatron_lite.model.attention_backends.layout import Layout
from megatron_lite.model.attention_backends.varlen import VarlenPlan
from megatron_lite.model.attention_backends.window import LayeredPlan
from megatron_lite.model.attention_choice import attention_kernel, plan_stack
from megatron_lite.model.batch import Batch
from megatron_lite.model.lengths import few_lengths
from megatron_lite.model.loss_positions import find_loss_positions

SAMPLED_SEQUENCES = 32  # at least; enough for means within about 2 %
_CUDA = torch.device("cuda")
# A sum of sequences is about normal.
_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)])


@dataclass(frozen=True)
class AttentionLaunch:
    """One launch of an attention kernel, per sequence, and the work of its tiles forward and backward."""

    queries: float
    gathered: float  # keys that are gathered for it; 0 = its keys are a slice
    keys: float
    pairs: float  # pairs of a query and a key that it sees
    forward: Work
    backward: Work

    def times(self, factor: float) -> AttentionLaunch:
        return AttentionLaunch(
            factor * self.queries, factor * self.gathered, factor * self.keys, factor * self.pairs,
            self.forward.times(factor), self.backward.times(factor),
        )  # fmt: skip

    def plus(self, other: AttentionLaunch) -> AttentionLaunch:
        return AttentionLaunch(
            self.queries + other.queries, self.gathered + other.gathered, self.keys + other.keys,
            self.pairs + other.pairs, self.forward.plus(other.forward), self.backward.plus(other.backward),
        )  # fmt: skip


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
    cross: AttentionLaunch | None  # the decoder's cross-attention
    tokens: float  # without padding
    loss_tokens: float  # predicted positions
    borders: float  # predicted positions that SpanBERT's span boundary head predicts as well
    sentences: float  # sequences with a sentence class
    visible_keys: float
    decoder_tokens: float
    decoder_keys: float
    padding: AttentionLaunch  # of 64 tokens

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
    first = sums[0]
    means: dict[str, Any] = {
        name: sum(getattr(batch_sums, name) for batch_sums in sums) / count
        for name in (
            "tokens",
            "loss_tokens",
            "borders",
            "sentences",
            "visible_keys",
            "decoder_tokens",
            "decoder_keys",
        )
    }
    stack = _mean_stack([batch_sums.stack for batch_sums in sums], count)
    decoder = cross = None
    if first.decoder is not None:
        decoder = _mean_stack(
            [batch_sums.decoder for batch_sums in sums if batch_sums.decoder is not None], count
        )
        cross = _mean_launch([batch_sums.cross for batch_sums in sums if batch_sums.cross is not None], count)
    return AverageSequence(first.length, stack, decoder, cross, padding=first.padding, **means)


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
    kernel, implementation = attention_kernel(model, _CUDA), _implementation(config)
    stack, *others = [
        _stack(plan_stack(part, _CUDA, model, kernel), part, batch, model, implementation)
        for part in (layout.encoder_and_decoder if model.decoder_layers else [layout])
    ]
    cross = _cross(layout, kernel, model, implementation) if others else None
    weights, objectives = batch.weights.reshape(-1), batch.fields[:, OBJECTIVE].reshape(-1)
    positions, _ = find_loss_positions(weights, objectives, model)
    return AverageSequence(
        batch.fields.shape[2], stack, others[0] if others else None, cross, batch.tokens,
        len(positions.tokens), len(positions.borders), len(positions.sentences),
        batch.layer_keys(model), batch.decoder_tokens, batch.decoder_keys,
        _flash_launch(np.array([64.0]), np.array([64.0]), model, implementation),
    )  # fmt: skip


def _implementation(config: Config) -> str:
    """The implementation of attention that is estimated: see `with_choice` of config/attention.py."""
    return "fa2" if config.training.attention == "auto" else config.training.attention


def _stack(plan: Any, layout: Layout, batch: Batch, model: ModelConfig, implementation: str) -> Stack:
    sequences, length = len(batch.fields), batch.fields.shape[2]
    counts = np.bincount(layout.batch_index // length, minlength=sequences).astype(float)
    if isinstance(plan, LayeredPlan):
        whole, near = (
            _stack(layer_plan, layout, batch, model, implementation)
            for layer_plan in (plan.global_plan, plan.local_plan)
        )
        share = model.local_share
        attention = tuple(
            full.times(1 - share).plus(local.times(share))
            for full, local in zip(whole.attention, near.attention, strict=True)
        )
        return Stack(whole.kernel, attention, counts)
    if isinstance(plan, DensePlan):  # every position, padding too
        positions = float(sequences * length)
        launch = _all_pairs(positions, positions, positions * length, "dense")
        return Stack("dense", (launch,), np.full(sequences, float(length)))
    if isinstance(plan, BlockPlan):
        blocks = int(plan.block_lists.partial_counts.sum() + plan.block_lists.full_counts.sum())
        kinds = {"none": "rule", "buckets": "biased", "disentangled": "tables"}
        kind = kinds.get(model.relative, "query tables")
        return Stack("blocks", (_all_pairs(plan.length, plan.length, blocks * BLOCK**2, kind),), counts)
    assert isinstance(plan, VarlenPlan)
    launches = []
    for call in plan.launches:
        queries, keys = (np.diff(ends).astype(float) for ends in (call.query_ends, call.key_ends))
        launches.append(
            _flash_launch(queries, keys, model, implementation, call.causal, len(call.gathered), call.window)
        )
    return Stack("varlen", tuple(launches), counts)


def _flash_launch(
    queries: np.ndarray,
    keys: np.ndarray,
    model: ModelConfig,
    implementation: str,
    causal: bool = False,
    gathered: float = 0.0,
    window: int = 0,
) -> AttentionLaunch:
    """A launch of FlashAttention.

    Args: queries, keys: lengths of each range of queries and of the keys that it sees.
    """
    pairs = float((queries * keys - (queries * (queries - 1) / 2 if causal else 0)).clip(min=0).sum())
    if window:
        pairs = tile_pairs(queries, keys, causal, (1, 1), window)
    works = (
        Work.flash(
            queries, keys, causal, model.head_size, model.attention_dropout, backward, window, implementation
        )
        for backward in (False, True)
    )
    return AttentionLaunch(float(queries.sum()), gathered, float(keys.sum()), pairs, *works)


def _all_pairs(queries: float, keys: float, pairs: float, kind: str) -> AttentionLaunch:
    """A launch of a kernel that computes all these pairs."""
    return AttentionLaunch(queries, 0, keys, pairs, Work(pairs, queries, kind), Work(pairs, keys, kind))


def _cross(layout: Layout, kernel: str, model: ModelConfig, implementation: str) -> AttentionLaunch:
    """The launch of cross-attention, over all tokens where it is dense."""
    if kernel == "dense":
        positions = float(layout.shape[0] * layout.shape[1])
        return _all_pairs(positions, positions, positions * layout.shape[1], "dense")
    orders = [plan_stack(part, _CUDA, model, kernel).order for part in layout.encoder_and_decoder]
    groups = cross_attention_groups(layout, orders[1], orders[0])
    lengths = np.array([[stop - start for start, stop in group.spans] for group in groups], float)
    queries, keys = lengths.reshape(-1, 2).T
    return replace(
        _flash_launch(queries, keys, model, implementation),
        queries=float(len(orders[1])),
        gathered=float(keys.sum()),
    )
