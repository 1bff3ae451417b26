"""Which heads of attention a run needs (Michel et al., arXiv:1905.10650).

A gate multiplies what a head hands to the output projection. A head's importance is the mean over examples of the
size of the loss's derivative by its gate, at 1: a first-order estimate of what its removal costs. A removed head's
columns of the output projection are 0; the bias stays, and so does the time of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from megatron_lite.model.attention_backends.interface import EncoderDecoderPlan
from megatron_lite.model.batch import Batch
from megatron_lite.model.micro_batch import MicroBatch, prepare
from megatron_lite.model.transformer import GLM


class Head(NamedTuple):
    """Args: group: a key of `projections`. number: from 0."""

    group: str
    number: int


@dataclass(frozen=True)
class Examples:
    """A micro-batch. Args: owner: int [rows]: the example of each sequence, from 0."""

    batch: Batch
    owner: np.ndarray


def projections(model: GLM) -> dict[str, nn.Module]:
    """The output projections of attention, by group: "layer 3", "decoder 0", "cross 0". Shared ones are layer 0."""
    found: dict[str, nn.Module] = {}
    first = len(model.layers) - model.config.decoder_layers
    for number, block in enumerate(cast("list[Any]", list(model.layers))):
        part, place = ("layer", number) if number < first else ("decoder", number - first)
        if block.attention.dense not in found.values():
            found[f"{part} {place}"] = block.attention.dense
        if number >= first:
            found[f"cross {place}"] = block.cross_attention.dense
    return found


def heads_of(model: GLM) -> list[Head]:
    count = model.config.num_attention_heads
    return [Head(group, number) for group in projections(model) for number in range(count)]


def importance(
    model: GLM, examples: Iterable[Examples], *, per_token: bool = False
) -> dict[str, torch.Tensor]:
    """Mean size of the derivative by each head's gate: group -> fp64 [heads], nats.

    Args: per_token: the mean over tokens with a gate of their own, not over examples.
    """
    groups, heads = projections(model), model.config.num_attention_heads
    device = next(model.parameters()).device
    sums: dict[str, Any] = dict.fromkeys(groups, 0.0)  # on the device
    counts = dict.fromkeys(groups, 0)
    for one in examples:
        host = prepare(one.batch, device, model.config)
        owners = {name: _of_group(host.plan, name, one, per_token).to(device) for name in groups}
        gates = {}
        for name, owner in owners.items():
            size = len(owner) if per_token else int(one.owner.max()) + 1
            gates[name] = torch.ones(size, heads, device=device, requires_grad=True)
            counts[name] += size
        with _gated(groups, gates, owners):
            loss = loss_of(model, host.to(device))
        for name, gradient in zip(gates, torch.autograd.grad(loss, list(gates.values())), strict=True):
            sums[name] += gradient.abs().sum(0).double()
    return {name: total.cpu() / counts[name] for name, total in sums.items()}


def loss_of(model: GLM, given: MicroBatch) -> torch.Tensor:
    """The sum of the losses of a micro-batch, nats: of a task, or of its tokens."""
    if given.extra_inputs is not None:
        return model(given)[0]
    return (model.losses(given) * given.weights).sum()


def _of_group(plan: Any, group: str, one: Examples, per_token: bool) -> torch.Tensor:
    """The gate of each token of a group's stack, in the order of its plan: int64 [T]. Padding has any."""
    order = plan.order
    if isinstance(plan, EncoderDecoderPlan):
        first = plan.lengths[0]
        order = order[:first] if group.startswith("layer") else order[first:]
    if per_token:
        return torch.arange(len(order))
    rows = np.maximum(order, 0) // one.batch.fields.shape[2]
    return torch.from_numpy(one.owner[rows].astype(np.int64))


@contextlib.contextmanager
def _gated(
    groups: dict[str, nn.Module], gates: dict[str, torch.Tensor], owners: dict[str, torch.Tensor]
) -> Iterator[None]:
    """Within, what each head hands on is multiplied by its gate. Args: gates: [G, heads]. owners: [T], below G."""

    def gate(name: str) -> Callable[[nn.Module, tuple[torch.Tensor]], torch.Tensor]:
        def multiply(module: nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
            own = gates[name]
            by_head = given[0].unflatten(1, (own.shape[1], -1))
            return (by_head * own[owners[name]].unsqueeze(2)).flatten(1)

        return multiply

    handles = [module.register_forward_pre_hook(gate(name)) for name, module in groups.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def without(model: GLM, heads: Iterable[Head]) -> Iterator[None]:
    """Within, the model lacks these heads."""
    kept = {head: _columns(model, head).clone() for head in heads}
    remove(model, kept)
    try:
        yield
    finally:
        with torch.no_grad():
            for head, columns in kept.items():
                _columns(model, head).copy_(columns)


@torch.no_grad()
def remove(model: GLM, heads: Iterable[Head]) -> None:
    for head in heads:
        _columns(model, head).zero_()


def _columns(model: GLM, head: Head) -> torch.Tensor:
    """The columns of a head's output projection, [D, head size], a view."""
    size = model.config.head_size
    weight = cast(torch.Tensor, projections(model)[head.group].weight)
    return weight.detach()[:, head.number * size : (head.number + 1) * size]


Score = Callable[[], float]  # higher is better


def ablated(model: GLM, score: Score, heads: Sequence[Head]) -> dict[Head, float]:
    """The score without each head alone."""
    found = {}
    for head in heads:
        with without(model, [head]):
            found[head] = score()
    return found


def alone(model: GLM, score: Score, heads: Sequence[Head]) -> dict[Head, float]:
    """The score with each head as the only one of its group."""
    found = {}
    for head in heads:
        with without(model, [other for other in heads if other.group == head.group and other != head]):
            found[head] = score()
    return found


def greedy(model: GLM, score: Score, count: int) -> list[tuple[Head, float]]:
    """`count` heads in the order in which they are removed, each the one that costs least then, and the score after."""
    removed: list[tuple[Head, float]] = []
    rest = heads_of(model)
    for _ in range(count):
        with without(model, [head for head, _ in removed]):
            found = ablated(model, score, rest)
        chosen = max(rest, key=lambda head: found[head])
        rest.remove(chosen)
        removed.append((chosen, found[chosen]))
    return removed


def lowest(
    sizes: dict[str, torch.Tensor], count: int, *, keep: int, raw: bool = False, removed: Sequence[Head] = ()
) -> list[Head]:
    """The `count` least important heads that are not yet removed; `keep` or more stay in each group.

    Args: raw: sizes are compared between groups as they are, not as shares of the norm of their group.
    """
    shares = dict(sizes)
    if not raw:
        least = torch.finfo(torch.float64).tiny
        shares = {name: values / values.norm().clamp(min=least) for name, values in sizes.items()}
    order = sorted(
        (Head(name, number) for name, values in shares.items() for number in range(len(values))),
        key=lambda head: (float(shares[head.group][head.number]), head),
    )
    left = {name: len(values) for name, values in sizes.items()}
    for head in removed:
        left[head.group] -= 1
    found: list[Head] = []
    for head in order:
        if len(found) < count and head not in removed and left[head.group] > keep:
            found.append(head)
            left[head.group] -= 1
    return found


def prune(
    model: GLM,
    sizes: dict[str, torch.Tensor],
    count: int,
    step: int,
    measure: Callable[[], dict[str, torch.Tensor]],
    *,
    keep: int,
    raw: bool,
) -> list[Head]:
    """Remove the least important heads from a model. Returns them in their order, `count` or as many as `keep` allows.

    Args: sizes: their importance. step: heads that are removed before `measure` is asked for the importance again.
    """
    removed: list[Head] = []
    while len(removed) < count:
        if removed:
            sizes = measure()
        chosen = lowest(sizes, min(step, count - len(removed)), keep=keep, raw=raw, removed=removed)
        if not chosen:
            break
        remove(model, chosen)
        removed += chosen
    return removed
