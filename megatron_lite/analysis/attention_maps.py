"""Attention weights of texts, head by head, and statistics of what each head attends to.

Kernels do not return weights. They are computed again here with a mask of all pairs, and returned only if they
reproduce the kernel's output.

Shapes: B batch, N tokens, H heads, D head size.
"""

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
from megatron_lite.transformer.attention_backends.dense import DensePlan
from megatron_lite.transformer.attention_backends.window import LayeredPlan
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.task_batch import TaskBatch

TOLERANCE = 1e-4  # of both outputs, relative to the largest value beyond 1


class _RecordingPlan:
    """A dense plan of one text. It appends the weights of each layer, fp32 [H, N, N], to `weights`."""

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
        recomputed = torch.einsum("bhnk,bkhd->bnhd", weights, v.float()).flatten(0, 1)
        difference = (recomputed - out.float()).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, out.abs().max().item()):
            raise CheckpointError(
                f"the weights of layer {layer} give an output that differs by {difference:.2e} from the kernel's; "
                "the checkpoint's activations are not finite or too large; use another checkpoint."
            )
        self.weights.append(weights[0].cpu())
        return out


@torch.no_grad()
def text_weights(run: Run, text: Text) -> torch.Tensor:
    """Weights of all layers over the tokens of a text's document, fp32 [layers, H, N, N]."""
    fields, targets = collate([text.sample])
    batch = TaskBatch(fields, np.zeros(1, np.int64), targets, "tags")
    device = next(run.model.parameters()).device
    micro_batch = MicroBatch.from_batch(batch, device, run.config.model, kernel="dense")
    weights: list[torch.Tensor] = []
    recording: Any
    plan = micro_batch.plan
    if isinstance(plan, LayeredPlan):
        global_plan: Any = _RecordingPlan(plan.global_plan, weights)  # type: ignore[arg-type]
        local_plan: Any = _RecordingPlan(plan.local_plan, weights)  # type: ignore[arg-type]
        recording = LayeredPlan(global_plan, local_plan, plan.global_every)
    else:
        recording = _RecordingPlan(plan, weights)
    run.model.run(micro_batch.tokens, micro_batch.ids, recording, None)  # type: ignore[arg-type]
    return torch.stack(weights)


def attention_statistics(weights: torch.Tensor, first: int, last: int) -> dict[str, torch.Tensor]:
    """Means over queries, fp64 [layers, H].

    Args:
        weights: [layers, H, N, N].
        first, last: number of special tokens before and after the text.
    Returns: entropy in nats; distance in tokens; and the shares of the weight on the special tokens before the text,
        on those after it, on the query itself, on the token before it, and on the token after it.
    """
    weights = weights.double()
    count = weights.shape[-1]
    positions = torch.arange(count)
    offsets = positions[None] - positions[:, None]  # key - query

    def mean(values: torch.Tensor) -> torch.Tensor:
        """The weighted mean of values of pairs, [N, N], over the keys, and its mean over queries."""
        return (weights * values).sum(-1).mean(-1)

    keys = positions[None].expand(count, count)
    logarithms = weights.clamp(min=torch.finfo(torch.float64).tiny).log()  # 0 log 0 is 0
    return {
        "entropy": -(weights * logarithms).sum(-1).mean(-1),
        "distance": mean(offsets.abs()),
        "before_text": mean(keys < first),
        "after_text": mean(keys >= count - last),
        "itself": mean(offsets == 0),
        "previous": mean(offsets == -1),
        "next": mean(offsets == 1),
    }


def mean_attention_statistics(statistics: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of the statistics of several texts, by name."""
    return {name: torch.stack([each[name] for each in statistics]).mean(0) for name in statistics[0]}
