"""Attention weights of texts, head by head, and statistics of what each head attends to.

Kernels return no weights. They are computed again here with a mask of all pairs, and returned only if they give the
kernel's output.
"""

# N tokens, H heads

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from data_utils.common.errors import CheckpointError
from data_utils.tasks.templates.collate import collate
from megatron_lite.analysis.words import Text
from megatron_lite.inference.attention_probe import attention_weights
from megatron_lite.inference.open_run import Run
from megatron_lite.model.attention_backends.dense import DensePlan
from megatron_lite.model.attention_backends.window import LayeredPlan
from megatron_lite.model.micro_batch import MicroBatch
from megatron_lite.model.task_batch import TaskBatch

CLOSE = 1e-4  # most difference of both outputs, as a share of the largest


class _RecordingPlan:
    """A dense plan of one text that appends the weights of each layer, fp32 [H, N, N], to `weights`."""

    def __init__(self, plan: DensePlan, weights: list[torch.Tensor]):
        self._plan, self.weights = plan, weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def attend(self, layer: int, inputs: Any, dropout: Any, bias: Any = None) -> torch.Tensor:
        out = self._plan.attend(layer, inputs, dropout, bias)
        q, k, v = (x.unflatten(0, self._plan.shape) for packed in inputs for x in packed.unbind(1))
        mask = self._plan.mask
        if bias is not None:
            added = bias(0, *self._plan.query_key_pairs(q.device)[0]).float()
            mask = added.masked_fill(~mask, float("-inf"))
        weights = attention_weights(q, k, mask)
        again = torch.einsum("rhnk,rkhd->rnhd", weights, v.float()).flatten(0, 1)
        difference = (again - out.float()).abs().max().item()
        if not difference <= CLOSE * max(1.0, out.abs().max().item()):
            raise CheckpointError(
                f"the weights of layer {layer} give an output that differs by {difference:.2e} from the kernel's; "
                "the checkpoint's activations are not finite or too large; use another checkpoint."
            )
        self.weights.append(weights[0].cpu())
        return out


@torch.no_grad()
def weights_of(run: Run, text: Text) -> torch.Tensor:
    """Weights of all layers over the tokens of a text's document, fp32 [layers, H, N, N]."""
    fields, parts = collate([text.sample])
    batch = TaskBatch(fields, np.zeros(1, np.int64), parts, "tags")
    device = next(run.model.parameters()).device
    given = MicroBatch.from_batch(batch, device, run.config.model, kernel="dense")
    weights: list[torch.Tensor] = []
    recording: Any
    plan = given.plan
    if isinstance(plan, LayeredPlan):
        global_plan: Any = _RecordingPlan(plan.global_plan, weights)  # type: ignore[arg-type]
        local_plan: Any = _RecordingPlan(plan.local_plan, weights)  # type: ignore[arg-type]
        recording = LayeredPlan(global_plan, local_plan, plan.global_every)
    else:
        recording = _RecordingPlan(plan, weights)
    run.model.run(given.tokens, given.ids, recording, None)  # type: ignore[arg-type]
    return torch.stack(weights)


def attention_statistics(weights: torch.Tensor, first: int, last: int) -> dict[str, torch.Tensor]:
    """Means over queries, fp64 [layers, H].

    Args:
        weights: [layers, H, N, N].
        first, last: number of template tokens before and after the text.
    Returns: entropy in nats, distance in tokens, and the shares of weight on template tokens before the text,
        after it, on the query itself, on the token before it, and on the one after it.
    """
    wide = weights.double()
    count = wide.shape[-1]
    places = torch.arange(count)
    away = places[None] - places[:, None]  # key - query

    def on(pairs: torch.Tensor) -> torch.Tensor:
        return (wide * pairs).sum(-1).mean(-1)

    keys = places[None].expand(count, count)
    return {
        "entropy": -(wide * wide.clamp(min=torch.finfo(torch.float64).tiny).log()).sum(-1).mean(-1),
        "distance": on(away.abs()),
        "before_text": on(keys < first),
        "after_text": on(keys >= count - last),
        "itself": on(away == 0),
        "previous": on(away == -1),
        "next": on(away == 1),
    }


def mean_attention_statistics(found: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([one[name] for one in found]).mean(0) for name in found[0]}
