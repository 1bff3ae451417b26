"""The work of an average sequence of a configuration's batches: tokens, predicted positions, attention kernels.

The sequences come from the configuration's objectives over random documents. Everything is counted on the host, from
the attention plans that training makes for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from data_utils.common.batch_fields import OBJECTIVE
from megatron_lite.config.tree import Config
from megatron_lite.estimate.batches import random_batches
from megatron_lite.transformer.attention_backends.dense import DensePlan
from megatron_lite.transformer.attention_backends.layout import Layout
from megatron_lite.transformer.attention_backends.plan import plan_stack
from megatron_lite.transformer.attention_backends.window import LayeredPlan
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.lengths import few_lengths
from megatron_lite.transformer.loss_positions import find_loss_positions

SAMPLED_SEQUENCES = 32  # at least; enough for means within about 2 %
_CUDA = torch.device("cuda")
# A sum of sequences is about normal.
_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 16) for i in range(16)])


@dataclass(frozen=True)
class Stack:
    """The tokens of one stack of blocks."""

    is_dense: bool  # every sequence is padded to its full length
    counts: np.ndarray  # tokens of each sampled sequence

    def lengths(self, sequences: int, table: np.ndarray) -> dict[float, float]:
        """Tokens of a micro-batch, padded to the table's lengths -> the share of micro-batches of that length."""
        mean, deviation = self.counts.mean() * sequences, self.counts.std() * sequences**0.5
        if self.is_dense:
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
    batch: Batch  # some of the sequences

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
    stack = _joined([batch_sums.stack for batch_sums in sums])
    decoders = [batch_sums.decoder for batch_sums in sums if batch_sums.decoder is not None]
    decoder = _joined(decoders) if decoders else None
    return AverageSequence(sums[0].length, stack, decoder, **means, batch=batches[0])


def _joined(stacks: list[Stack]) -> Stack:
    return Stack(stacks[0].is_dense, np.concatenate([stack.counts for stack in stacks]))


def _sum_batch(config: Config, batch: Batch) -> AverageSequence:
    """Sums over a batch."""
    model, layout = config.model, batch.layout
    stack, *others = [
        _stack(plan_stack(part, _CUDA, model), part, batch)
        for part in (layout.encoder_and_decoder if model.decoder_layers else [layout])
    ]
    weights, objectives = batch.weights.reshape(-1), batch.fields[:, OBJECTIVE].reshape(-1)
    positions, _ = find_loss_positions(weights, objectives, model)
    predicted = len(positions.tokens) + batch.further_tokens(model)
    return AverageSequence(
        batch.fields.shape[2], stack, others[0] if others else None, batch.tokens, predicted,
        len(positions.boundaries), batch.layer_keys(model), batch.decoder_tokens, batch.decoder_keys, batch,
    )  # fmt: skip


def _stack(plan: Any, layout: Layout, batch: Batch) -> Stack:
    sequences, length = len(batch.fields), batch.fields.shape[2]
    if isinstance(plan, LayeredPlan):
        plan = plan.global_plan
    if isinstance(plan, DensePlan):
        return Stack(True, np.full(sequences, float(length)))
    return Stack(False, np.bincount(layout.batch_index // length, minlength=sequences).astype(float))
