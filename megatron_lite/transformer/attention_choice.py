"""The library whose kernel attention launches in this process (attention_backends/plan.py decides which need it)."""

from __future__ import annotations

import torch

from data_utils.common.errors import ConfigError
from megatron_lite.config.attention import Choice, choose, describe, launch_types
from megatron_lite.config.tree import Config
from megatron_lite.transformer.kernels.varlen_kernels import try_attention, use_attention

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
