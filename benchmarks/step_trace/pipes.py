"""A pipeline stage without the others: what the first stage sends answers what every later one receives.

Stages send each other tensors whose values matter: shapes of what follows, and parts of the batch. The fake process
group brings none, so the trace of the first stage writes down what it sends, and that of a later one reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from megatron_lite.parallel.context import ParallelContext

Sent = list[
    list[Any]
]  # values of each tensor that went to the next stage, in order; [] where they do not matter


def connect_stages(context: ParallelContext, blocks: int, received: Sent | None) -> Sent:
    """Cut this rank's stage to `blocks` blocks, and answer its receive calls with `received`.

    Returns: a list that fills with what the rank sends to the next stage.
    """
    from deepspeed.runtime.pipe import p2p

    from megatron_lite.engine import pipeline

    stage, sent = context.pp.rank, []  # type: ignore[var-annotated]
    bounds, send, receive = pipeline.stage_bounds, p2p.send, p2p.recv
    inbox = iter(received or ())

    def cut(costs: list[float], stages: int) -> list[int]:
        own = bounds(costs, stages)
        extra = blocks - _blocks(own, stage, len(costs))
        if stage == stages - 1:
            own[stage] -= extra
        else:
            own[stage + 1] += extra
        return own

    def sending(tensor: torch.Tensor, to: int, *args: Any) -> Any:
        if to == stage + 1:
            sent.append(_values(tensor))
        return send(tensor, to, *args)

    def receiving(tensor: torch.Tensor, source: int, *args: Any) -> Any:
        result = receive(tensor, source, *args)
        if source == stage - 1:
            values = next(inbox)
            if values:
                with unset_fake_temporarily():
                    tensor.host_values = torch.tensor(values, dtype=tensor.dtype).view(tensor.shape)  # type: ignore[attr-defined]
        return result

    pipeline.stage_bounds, p2p.send, p2p.recv = cut, sending, receiving
    return sent


def _blocks(bounds: list[int], stage: int, layers: int) -> int:
    """Blocks of a stage. Layers: words, positions, the blocks, final norm, words again."""
    return max(0, min(bounds[stage + 1], layers - 2) - max(bounds[stage], 2))


def _values(tensor: torch.Tensor) -> list[Any]:
    known = getattr(tensor, "host_values", None) if isinstance(tensor, FakeTensor) else tensor
    if known is None or tensor.dtype.is_floating_point:
        return []
    with unset_fake_temporarily():
        return known.flatten().tolist()
