"""torch's parameter groups of a model, and AdamW on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron_lite.config.sections import OptimizerConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine import nvidia_apex
from megatron_lite.optim.lr_multipliers import NO_MULTIPLIERS, LrMultipliers
from megatron_lite.optim.uncompiled import AdamW
from megatron_lite.transformer.build import model_spec


def parameter_groups(
    named: Mapping[str, nn.Parameter], config: Config, multipliers: Mapping[str, LrMultipliers] | None = None
) -> list[dict[str, Any]]:
    """torch's parameter groups, one for each weight decay and multipliers.

    Matrices have weight decay. Norms, biases, and heads that do not take part in the loss have none.
    """
    groups: dict[tuple[float, LrMultipliers], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        factors = (multipliers or {}).get(name, NO_MULTIPLIERS)
        key = weight_decay(name, config) * factors.decay_factor, factors
        groups.setdefault(key, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "multipliers": factors}
        for (decay, factors), parameters in groups.items()
    ]


def weight_decay(name: str, config: Config) -> float:
    return config.optimizer.weight_decay if decays(name, config) else 0.0


def decays(name: str, config: Config) -> bool:
    """Whether a parameter has weight decay."""
    return not (name.endswith("bias") or "layernorm" in name or model_spec(config).is_unused(name, config))


def make_adamw(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW of torch or apex."""
    groups = [{**group, "eps": settings.eps * group["multipliers"].eps_factor} for group in groups]
    # The learning rate is set at every step; DeepSpeed makes one of its own to allocate state at ZeRO 3.
    common: dict[str, Any] = {"lr": 0.0, "betas": (settings.beta1, settings.beta2)}
    if settings.kernel == "apex":
        return nvidia_apex.make_adamw(groups, **common)
    return AdamW(groups, fused=True, **common)
