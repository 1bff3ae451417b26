"""The work of an average row of a configuration's batches: tokens, rows with loss, attention's calls.

The rows are those of the configuration's own objectives over random documents. Everything is counted on the host, by
the plans that training makes for a GPU.
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
from megatron_lite.model.attention_backends.varlen import VarlenLaunch, VarlenPlan
from megatron_lite.model.attention_backends.window import LayeredPlan
from megatron_lite.model.batch import Batch
from megatron_lite.model.lengths import few_lengths
from megatron_lite.model.model_input import find_loss_rows, kernel_of, plan_stack

SAMPLED_ROWS = 32  # at least; enough for means within about 2 %
_CUDA = torch.device("cuda")
_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)])  # sums of rows are about normal


@dataclass(frozen=True)
class Call:
    """One call of an attention kernel, per row; its tiles' work forward and backward."""

    queries: float
    gathered: float  # keys that are gathered for it; 0 = its keys are a slice
    keys: float
    pairs: float  # of query and key that see each other
    forward: Work
    backward: Work

    def times(self, factor: float) -> Call:
        return Call(
            factor * self.queries, factor * self.gathered, factor * self.keys, factor * self.pairs,
            self.forward.times(factor), self.backward.times(factor),
        )  # fmt: skip

    def plus(self, other: Call) -> Call:
        return Call(
            self.queries + other.queries, self.gathered + other.gathered, self.keys + other.keys,
            self.pairs + other.pairs, self.forward.plus(other.forward), self.backward.plus(other.backward),
        )  # fmt: skip


@dataclass(frozen=True)
class Stack:
    """The tokens and calls of one stack of blocks, per row; where layers differ, the mean of all."""

    kernel: str  # varlen, blocks or dense
    calls: tuple[Call, ...]
    counts: np.ndarray  # tokens of each sampled row

    def lengths(self, rows: int, table: np.ndarray) -> dict[float, float]:
        """Tokens of a micro-batch of `rows` rows, padded to the table's lengths -> the share of such micro-batches."""
        mean, deviation = self.counts.mean() * rows, self.counts.std() * rows**0.5
        if self.kernel == "dense":  # padded to whole rows
            return {float(mean): 1.0}
        # 16 likely sums of rows instead of the mean, which would hide a wave of tiles that half of the batches
        # begin.
        places = np.searchsorted(table, mean + deviation * _NORMAL).clip(0, len(table) - 1)
        lengths, numbers = np.unique(table[places], return_counts=True)
        return dict(zip(lengths.tolist(), (numbers / len(places)).tolist(), strict=True))


@dataclass(frozen=True)
class Rows:
    """Means over the sampled rows."""

    length: int  # S of a row, padding included
    stack: Stack  # the only one, or the encoder
    decoder: Stack | None
    cross: Call | None  # of the decoder's cross-attention
    tokens: float  # without padding
    loss_rows: float
    borders: float  # of the rows with loss, those that SpanBERT's head predicts as well
    sentences: float  # rows with a class of a sentence
    visible_keys: float
    targets: float
    target_keys: float
    padding: Call  # of 64 tokens

    def multiple(self, rows: int) -> int:
        """The multiple to which the tokens of a micro-batch of `rows` rows are padded."""
        return few_lengths(rows * self.length, _CUDA, torch.bfloat16)


def average_rows(config: Config) -> Rows:
    """Raises ConfigError as the objectives do."""
    micro = config.batch.micro_batch_size
    # Enough rows for the means, whatever the micro-batch.
    if micro * 2 < SAMPLED_ROWS:
        micro *= -(-SAMPLED_ROWS // 2 // micro)
        batch = replace(config.batch, micro_batch_size=micro, global_batch_size=micro)
        config = replace(config, batch=batch)
    batches = random_batches(config, 2)
    rows = sum(len(batch.fields) for batch in batches)
    found = [_one(config, batch) for batch in batches]
    first = found[0]
    means: dict[str, Any] = {
        name: sum(getattr(of_batch, name) for of_batch in found) / rows
        for name in ("tokens", "loss_rows", "borders", "sentences", "visible_keys", "targets", "target_keys")
    }
    stack = _mean([of_batch.stack for of_batch in found], rows)
    decoder = cross = None
    if first.decoder is not None:
        decoder = _mean([of_batch.decoder for of_batch in found if of_batch.decoder is not None], rows)
        cross = _mean_call([of_batch.cross for of_batch in found if of_batch.cross is not None], rows)
    return Rows(first.length, stack, decoder, cross, padding=first.padding, **means)


def _mean(stacks: list[Stack], rows: int) -> Stack:
    most = max((stack.calls for stack in stacks), key=len)
    calls = tuple(
        _mean_call([stack.calls[i] for stack in stacks if i < len(stack.calls)], rows)
        for i in range(len(most))
    )
    return Stack(stacks[0].kernel, calls, np.concatenate([stack.counts for stack in stacks]))


def _mean_call(calls: list[Call], rows: int) -> Call:
    return functools.reduce(Call.plus, calls).times(1 / rows)


def _one(config: Config, batch: Batch) -> Rows:
    """Sums over a batch."""
    model, layout = config.model, batch.layout
    kernel = kernel_of(model, _CUDA)
    stack, *others = [
        _stack(plan_stack(part, _CUDA, model, kernel), part, batch, model)
        for part in (layout.encoder_and_decoder if model.decoder_layers else [layout])
    ]
    cross = _cross(layout, kernel, model) if others else None
    weights, objectives = batch.weights.reshape(-1), batch.fields[:, OBJECTIVE].reshape(-1)
    loss_rows, _ = find_loss_rows(weights, objectives, model)
    return Rows(
        batch.fields.shape[2], stack, others[0] if others else None, cross, batch.tokens,
        len(loss_rows.tokens), len(loss_rows.borders), len(loss_rows.sentences),
        batch.layer_keys(model), batch.targets, batch.target_keys, _call(np.array([64.0]), np.array([64.0]), model),
    )  # fmt: skip


def _stack(plan: Any, layout: Layout, batch: Batch, model: ModelConfig) -> Stack:
    rows, length = len(batch.fields), batch.fields.shape[2]
    counts = np.bincount(layout.batch_index // length, minlength=rows).astype(float)
    if isinstance(plan, LayeredPlan):
        whole, near = (_stack(each, layout, batch, model) for each in (plan.global_plan, plan.local_plan))
        pairs, share = zip(whole.calls, near.calls, strict=True), model.local_share
        calls = tuple(first.times(1 - share).plus(second.times(share)) for first, second in pairs)
        return Stack(whole.kernel, calls, counts)
    if isinstance(plan, DensePlan):  # every place of a row, padding too
        places = float(rows * length)
        call = _whole(places, places, places * length, "dense")
        return Stack("dense", (call,), np.full(rows, float(length)))
    if isinstance(plan, BlockPlan):
        blocks = int(plan.block_lists.partial_counts.sum() + plan.block_lists.full_counts.sum())
        kinds = {"none": "rule", "buckets": "biased", "disentangled": "tables"}
        kind = kinds.get(model.relative, "query tables")
        return Stack("blocks", (_whole(plan.length, plan.length, blocks * BLOCK**2, kind),), counts)
    assert isinstance(plan, VarlenPlan)
    return Stack("varlen", tuple(_varlen(launch, model) for launch in plan.launches), counts)


def _varlen(launch: VarlenLaunch, model: ModelConfig) -> Call:
    queries, keys = (np.diff(ends).astype(float) for ends in (launch.query_ends, launch.key_ends))
    return _call(queries, keys, model, launch.causal, len(launch.gathered), launch.window)


def _call(
    queries: np.ndarray,
    keys: np.ndarray,
    model: ModelConfig,
    causal: bool = False,
    gathered: float = 0.0,
    window: int = 0,
) -> Call:
    """The call of sequences of queries, each with its keys."""
    pairs = float((queries * keys - (queries * (queries - 1) / 2 if causal else 0)).clip(min=0).sum())
    if window:
        pairs = tile_pairs(queries, keys, causal, (1, 1), window)
    works = (
        Work.of(queries, keys, causal, model.head_size, model.attention_dropout, backward, window)
        for backward in (False, True)
    )
    return Call(float(queries.sum()), gathered, float(keys.sum()), pairs, *works)


def _whole(queries: float, keys: float, pairs: float, kind: str) -> Call:
    """The call of a kernel that computes all these pairs."""
    return Call(queries, 0, keys, pairs, Work(pairs, queries, kind), Work(pairs, keys, kind))


def _cross(layout: Layout, kernel: str, model: ModelConfig) -> Call:
    """The call of cross-attention, over all tokens where it is dense."""
    if kernel == "dense":
        whole = float(layout.shape[0] * layout.shape[1])
        return _whole(whole, whole, whole * layout.shape[1], "dense")
    orders = [plan_stack(part, _CUDA, model, kernel).order for part in layout.encoder_and_decoder]
    groups = cross_attention_groups(layout, orders[1], orders[0])
    lengths = np.array([[stop - start for start, stop in group.spans] for group in groups], float)
    queries, keys = lengths.reshape(-1, 2).T
    return replace(_call(queries, keys, model), queries=float(len(orders[1])), gathered=float(keys.sum()))
