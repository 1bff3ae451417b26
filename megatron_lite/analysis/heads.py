"""Which attention heads a model needs (Michel et al., arXiv:1905.10650).

A gate of value 1 multiplies the output of each head before the output projection. The importance of a head is the mean
over examples of the absolute derivative of the loss by its gate: a first-order estimate of what removing the head
costs. A head is removed by setting its columns of the output projection to 0. The bias stays, and the model gets no
faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from megatron_lite.transformer.attention_backends.interface import EncoderDecoderPlan
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import MicroBatch, prepare
from megatron_lite.transformer.transformer import Transformer


class Head(NamedTuple):
    """One head of attention. Args: group: a key of `projections`. number: from 0."""

    group: str
    number: int


@dataclass(frozen=True)
class Examples:
    """A micro-batch. Args: owner: int [B], the example of each sequence, from 0."""

    batch: Batch
    owner: np.ndarray


def projections(model: Transformer) -> dict[str, nn.Module]:
    """The output projections of attention, by group: "layer 3", "decoder 0", "cross 0".

    Blocks that share weights have one group, that of the first block.
    """
    groups: dict[str, nn.Module] = {}
    encoder_layers = len(model.layers) - model.config.decoder_layers - model.config.mtp_layers
    blocks = list(model.layers)[: encoder_layers + model.config.decoder_layers]
    for number, block in enumerate(cast("list[Any]", blocks)):
        is_decoder = number >= encoder_layers
        stack, layer = ("decoder", number - encoder_layers) if is_decoder else ("layer", number)
        if block.attention.dense not in groups.values():
            groups[f"{stack} {layer}"] = block.attention.dense
        if is_decoder:
            groups[f"cross {layer}"] = block.cross_attention.dense
    return groups


def all_heads(model: Transformer) -> list[Head]:
    count = model.config.num_attention_heads
    return [Head(group, number) for group in projections(model) for number in range(count)]


def importance(
    model: Transformer, examples: Iterable[Examples], *, per_token: bool = False
) -> dict[str, torch.Tensor]:
    """Mean absolute derivative of the loss by each head's gate: group -> fp64 [heads], nats.

    Args: per_token: each token has its own gate, and the mean is over tokens. False: one gate for each example.
    """
    groups, heads = projections(model), model.config.num_attention_heads
    device = next(model.parameters()).device
    sums: dict[str, Any] = dict.fromkeys(groups, 0.0)  # on the device
    counts = dict.fromkeys(groups, 0)
    for micro_batch in examples:
        prepared = prepare(micro_batch.batch, device, model.config)
        indices = {
            name: _gate_indices(prepared.plan, name, micro_batch, per_token).to(device) for name in groups
        }
        gates = {}
        for name, index in indices.items():
            size = len(index) if per_token else int(micro_batch.owner.max()) + 1
            gates[name] = torch.ones(size, heads, device=device, requires_grad=True)
            counts[name] += size
        with _gated(groups, gates, indices):
            loss = loss_sum(model, prepared.to(device))
        for name, gradient in zip(gates, torch.autograd.grad(loss, list(gates.values())), strict=True):
            sums[name] += gradient.abs().sum(0).double()
    return {name: total.cpu() / counts[name] for name, total in sums.items()}


def loss_sum(model: Transformer, micro_batch: MicroBatch) -> torch.Tensor:
    """The sum of the losses of a micro-batch, nats: of a task, or of its tokens."""
    if micro_batch.extra_inputs is not None:
        return model(micro_batch)[0]
    return (model.losses(micro_batch) * micro_batch.weights).sum()


def _gate_indices(plan: Any, group: str, examples: Examples, per_token: bool) -> torch.Tensor:
    """The gate of each token of a group's stack, in the order of its plan: int64 [T]. Padding may have any gate."""
    order = plan.order
    if isinstance(plan, EncoderDecoderPlan):
        encoder_tokens = plan.lengths[0]
        order = order[:encoder_tokens] if group.startswith("layer") else order[encoder_tokens:]
    if per_token:
        return torch.arange(len(order))
    sequences = np.maximum(order, 0) // examples.batch.fields.shape[2]
    return torch.from_numpy(examples.owner[sequences].astype(np.int64))


@contextlib.contextmanager
def _gated(
    groups: dict[str, nn.Module], gates: dict[str, torch.Tensor], indices: dict[str, torch.Tensor]
) -> Iterator[None]:
    """Context in which the output of each head is multiplied by its gate.

    Args: gates: [G, heads] of each group. indices: int64 [T] of each group, the gate of each token.
    """

    def make_hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor]], torch.Tensor]:
        def multiply(module: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            by_head = inputs[0].unflatten(1, (gates[name].shape[1], -1))
            return (by_head * gates[name][indices[name]].unsqueeze(2)).flatten(1)

        return multiply

    handles = [module.register_forward_pre_hook(make_hook(name)) for name, module in groups.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def without(model: Transformer, heads: Iterable[Head]) -> Iterator[None]:
    """Context in which the model lacks these heads."""
    kept = {head: _columns(model, head).clone() for head in heads}
    remove(model, kept)
    try:
        yield
    finally:
        with torch.no_grad():
            for head, columns in kept.items():
                _columns(model, head).copy_(columns)


@torch.no_grad()
def remove(model: Transformer, heads: Iterable[Head]) -> None:
    """Set the heads' columns of the output projections to 0."""
    for head in heads:
        _columns(model, head).zero_()


def _columns(model: Transformer, head: Head) -> torch.Tensor:
    """The columns of a head's output projection, [D, head size], a view."""
    size = model.config.head_size
    weight = cast(torch.Tensor, projections(model)[head.group].weight)
    return weight.detach()[:, head.number * size : (head.number + 1) * size]


Score = Callable[[], float]  # higher is better


def ablated(model: Transformer, score: Score, heads: Sequence[Head]) -> dict[Head, float]:
    """The score without each head alone."""
    scores = {}
    for head in heads:
        with without(model, [head]):
            scores[head] = score()
    return scores


def alone(model: Transformer, score: Score, heads: Sequence[Head]) -> dict[Head, float]:
    """The score with each head as the only one of its group."""
    scores = {}
    for head in heads:
        with without(model, [other for other in heads if other.group == head.group and other != head]):
            scores[head] = score()
    return scores


def greedy(model: Transformer, score: Score, count: int) -> list[tuple[Head, float]]:
    """Remove `count` heads one by one, each time the head whose removal costs least.

    Returns: the heads in that order, each with the score after its removal.
    """
    removed: list[tuple[Head, float]] = []
    remaining = all_heads(model)
    for _ in range(count):
        with without(model, [head for head, _ in removed]):
            scores = ablated(model, score, remaining)
        cheapest = max(remaining, key=lambda head: scores[head])
        remaining.remove(cheapest)
        removed.append((cheapest, scores[cheapest]))
    return removed


def lowest(
    importances: dict[str, torch.Tensor],
    count: int,
    *,
    keep: int,
    raw: bool = False,
    removed: Sequence[Head] = (),
) -> list[Head]:
    """The `count` least important heads that are not yet removed. Each group keeps at least `keep` heads.

    Args: raw: compare importances between groups as they are. False: divided by the norm of their group.
    """
    compared = dict(importances)
    if not raw:
        least = torch.finfo(torch.float64).tiny
        compared = {name: values / values.norm().clamp(min=least) for name, values in importances.items()}
    order = sorted(
        (Head(name, number) for name, values in compared.items() for number in range(len(values))),
        key=lambda head: (float(compared[head.group][head.number]), head),
    )
    remaining = {name: len(values) for name, values in importances.items()}
    for head in removed:
        remaining[head.group] -= 1
    chosen: list[Head] = []
    for head in order:
        if len(chosen) < count and head not in removed and remaining[head.group] > keep:
            chosen.append(head)
            remaining[head.group] -= 1
    return chosen


def prune(
    model: Transformer,
    importances: dict[str, torch.Tensor],
    count: int,
    step: int,
    measure: Callable[[], dict[str, torch.Tensor]],
    *,
    keep: int,
    raw: bool,
) -> list[Head]:
    """Remove the least important heads from a model. Returns them in that order; `keep` may allow fewer than `count`.

    Args: step: number of heads to remove before `measure` measures the importances again.
    """
    removed: list[Head] = []
    while len(removed) < count:
        if removed:
            importances = measure()
        chosen = lowest(importances, min(step, count - len(removed)), keep=keep, raw=raw, removed=removed)
        if not chosen:
            break
        remove(model, chosen)
        removed += chosen
    return removed
