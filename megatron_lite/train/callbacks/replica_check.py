"""A check that weights which should be equal on several ranks are equal, bit for bit.

Layer norms that drifted apart because one rank skipped clipping have spoiled real runs without a sign in the loss. The
ranks that hold the same values compare a fingerprint of every weight: data-parallel replicas (except at ZeRO 3, where
every rank holds its own shard), tensor-parallel ranks for parameters that are not split, and the first and last
pipeline stage for a tied word embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from data_utils.common.errors import TrainingError
from megatron_lite.engine.engine import Engine, StepResult
from megatron_lite.parallel.collectives import Group
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.control import Requests
from megatron_lite.runtime.watchdog import Section
from megatron_lite.train.callbacks.callback import Callback, Pause, is_multiple
from megatron_lite.transformer.flops import EXPERTS
from megatron_lite.transformer.tensor_parallel import partition_of

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that a flipped bit always changes the sum


def fingerprint(parameter: torch.Tensor) -> torch.Tensor:
    """int64 scalar of the bits and positions of all elements; any single flipped bit changes it."""
    # Bits, not values: NaN equals nothing, and -0 equals 0.
    bits = (
        parameter.detach()
        .flatten()
        .view(torch.int16 if parameter.element_size() == 2 else torch.int32)
        .long()
    )
    weights = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)  # odd; the arithmetic wraps
    return (bits * weights * _MULTIPLIER).sum()


@dataclass
class ReplicaCheck(Callback):
    """Raises TrainingError on every rank if weights differ. Attributes: interval: in steps; run: for the message."""

    engine: Engine
    context: ParallelContext
    zero_stage: int
    interval: int
    run: Path
    pause: Pause

    def on_step_end(self, step: int, result: StepResult, requests: Requests) -> None:
        if not is_multiple(step, self.interval):
            return
        with self.pause(Section.STEP, "replica check"):
            differing = differing_replicas(self.engine.named_parameters, self.context, self.zero_stage)
        if differing:
            raise TrainingError(
                f"after step {step} these weights differ between ranks that should hold the same: "
                f"{'; '.join(differing[:5])}{' ...' if len(differing) > 5 else ''}. Look for a faulty device, and go "
                f"back to before the fault with `scripts/checkpoints.py rewind {self.run} STEP`."
            )


@torch.no_grad()
def differing_replicas(
    named: Mapping[str, nn.Parameter], context: ParallelContext, zero_stage: int
) -> list[str]:
    """The differences, as `NAME on ranks [..] and ranks [..]`, the same list on every rank; empty if all are equal."""
    # All three comparisons are made by every rank, differences or not: they are collectives.
    lines = _compare_ends(named, context.pp)
    if zero_stage < 3:
        lines += _compare({n: p for n, p in named.items() if EXPERTS not in n}, context.dp)
        lines += _compare({n: p for n, p in named.items() if EXPERTS in n}, context.edp)
        lines += _compare({n: p for n, p in named.items() if partition_of(p).dim is None}, context.tp)
    return _on_every_rank(lines, context)


def _compare(named: Mapping[str, nn.Parameter], group: Group) -> list[str]:
    if group.size == 1 or not named:
        return []
    local = torch.stack([fingerprint(parameter) for parameter in named.values()])
    gathered = [torch.empty_like(local) for _ in group.ranks]
    dist.all_gather(gathered, local, group=group.handle)
    by_parameter = torch.stack(gathered, dim=1).tolist()  # fingerprints [parameters][ranks]
    return [
        _describe(name, fingerprints, group)
        for name, fingerprints in zip(named, by_parameter, strict=True)
        if len(set(fingerprints)) > 1
    ]


def _compare_ends(named: Mapping[str, nn.Parameter], stages: Group) -> list[str]:
    """The word embedding of the first and last stage, if both have it."""
    if stages.size == 1:
        return []
    name = next((name for name in named if name.endswith("word_embeddings.weight")), "")
    # Every stage takes part in the collective; one without the embedding sends another fingerprint and False.
    value = fingerprint(named[name] if name else next(iter(named.values())))
    local = torch.stack([value, torch.full_like(value, bool(name))])
    gathered = [torch.empty_like(local) for _ in stages.ranks]
    dist.all_gather(gathered, local, group=stages.handle)
    (first, has_first), (last, has_last) = gathered[0].tolist(), gathered[-1].tolist()
    if not name or first == last or not (has_first and has_last):
        return []
    return [f"{name} on ranks [{stages.ranks[0]}] and ranks [{stages.ranks[-1]}]"]


def _describe(name: str, fingerprints: list[int], group: Group) -> str:
    holders: dict[int, list[int]] = {}
    for rank, value in zip(group.ranks, fingerprints, strict=True):
        holders.setdefault(value, []).append(rank)
    return f"{name} on " + " and ".join(f"ranks {ranks}" for ranks in holders.values())


def _on_every_rank(lines: list[str], context: ParallelContext) -> list[str]:
    """The lines of all ranks, sorted, each once: a rank only sees its own groups."""
    if context.world_size == 1:
        return sorted(set(lines))
    # As bytes in tensors: torch's object collectives are pickle.
    text = torch.tensor(list("\n".join(lines).encode()), dtype=torch.uint8, device=context.device)
    lengths = context.gather(torch.tensor([len(text)], device=context.device))
    longest = max(int(length) for length in lengths)
    if longest == 0:
        return []
    padded = torch.zeros(longest, dtype=torch.uint8, device=context.device)
    padded[: len(text)] = text
    texts = context.gather(padded)
    of_all = {line for t in texts for line in bytes(t.tolist()).rstrip(b"\0").decode().split("\n") if line}
    return sorted(of_all)
