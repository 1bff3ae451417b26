"""Which attention plan a model needs on a device, and which implementation its launches run."""

from __future__ import annotations

import torch

from data_utils.common.errors import ConfigError
from megatron_lite.config.attention import Choice, choose, describe, launch_types
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.model.attention_backends.interface import BatchPlan
from megatron_lite.model.attention_backends.layout import Layout
from megatron_lite.model.attention_backends.plan import plan_attention
from megatron_lite.model.attention_backends.varlen import VarlenPlan
from megatron_lite.model.attention_backends.window import plan_layers
from megatron_lite.model.kernels.fused import kernels_are_wanted
from megatron_lite.model.kernels.varlen_kernels import try_attention, use_attention

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def attention_choice(config: Config, device: torch.device) -> Choice | None:
    """The implementation that `training.attention` chooses on a device; None on a CPU, which has its own kernels.

    Raises: ConfigError where a chosen one does not run there.
    """
    if device.type == "cuda":
        return choose(config, torch.cuda.get_device_capability(device))
    if config.training.attention != "auto":
        raise ConfigError(
            f"training.attention is {config.training.attention}, but this process computes on a CPU; set it to auto."
        )
    return None


def describe_attention(config: Config, device: torch.device) -> str | None:
    """What computes attention on a GPU, and why; None on a CPU."""
    choice = attention_choice(config, device)
    return None if choice is None else describe(config, choice)


def set_attention(config: Config, device: torch.device) -> None:
    """Apply `training.attention` in this process. Raises: ConfigError where the chosen one does not run here."""
    choice = attention_choice(config, device)
    if choice is not None:
        use_attention(choice.name)
        try_attention(device, _DTYPES[config.training.precision], launch_types(config))


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
