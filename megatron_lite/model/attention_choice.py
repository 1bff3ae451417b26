"""Which attention plan a model needs on a device."""

from __future__ import annotations

import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.attention_backends.interface import BatchPlan
from megatron_lite.model.attention_backends.layout import Layout
from megatron_lite.model.attention_backends.plan import plan_attention
from megatron_lite.model.attention_backends.varlen import VarlenPlan
from megatron_lite.model.attention_backends.window import plan_layers
from megatron_lite.model.kernels.fused import kernels_are_wanted


def dense_reason(config: ModelConfig, device: torch.device) -> str | None:
    """Why a model's attention computes all pairs of tokens with a mask, for a warning; None if it does not."""
    if config.relative == "none" or kernels_are_wanted() or device.type != "cuda":
        return None
    return (
        f"model.relative is {config.relative} and training.kernels torch: on GPUs attention computes and stores all "
        "pairs of tokens of a sequence; fused stores none."
    )


def attention_kernel(config: ModelConfig, device: torch.device) -> str:
    """The `kernel` of `plan_attention` that a model needs; "auto" = each batch's layout decides."""
    if dense_reason(config, device) is not None:
        return "dense"
    by_relative = {"none": "auto", "buckets": "blocks", "disentangled": "tables"}
    return by_relative.get(config.relative, "query tables") if device.type == "cuda" else "auto"


def plan_stack(
    layout: Layout,
    device: torch.device,
    config: ModelConfig,
    kernel: str = "auto",
    multiple: int = 1,
    has_graphs: bool = False,
) -> BatchPlan:
    """`plan_attention` for all layers of a stack. Args: has_graphs: the plan has fixed shapes, if it can."""
    if not config.attention_window:
        plan = plan_attention(layout, device, kernel, multiple)
        if has_graphs and isinstance(plan, VarlenPlan):
            return plan.with_fixed_shapes(layout.shape[1])
        return plan
    return plan_layers(layout, device, kernel, multiple, config.attention_window, config.global_every)
