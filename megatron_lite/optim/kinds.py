"""The optimizers beside AdamW, by the values of `optimizer.kind`; each is one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_lite.config.tree import Config
from megatron_lite.model.build import model_spec
from megatron_lite.optim.adafactor import AdaFactor
from megatron_lite.optim.buckets import MOMENTS, Bucket
from megatron_lite.optim.lamb import Lamb
from megatron_lite.optim.muon import Muon
from megatron_lite.optim.stable_adamw import StableAdamW
from megatron_lite.optim.whole_tensors import Layout, TensorOptimizer
from megatron_lite.parallel.context import ParallelContext

KINDS: dict[str, type[TensorOptimizer]] = {
    "lamb": Lamb,
    "stable_adamw": StableAdamW,
    "adafactor": AdaFactor,
    "muon": Muon,
}


def moments_of(kind: str, name: str, parameter: nn.Parameter) -> tuple[str, ...]:
    """The state that an optimizer keeps of each element of a parameter."""
    return KINDS[kind].moments(name, parameter) if kind in KINDS else MOMENTS


def make_optimizer(
    groups: list[dict[str, Any]],
    buckets: Sequence[Bucket],
    names: Mapping[nn.Parameter, str],
    decays: Callable[[str], bool],
    config: Config,
    context: ParallelContext,
) -> torch.optim.Optimizer:
    """The optimizer of a configuration that is not AdamW's, of the fp32 weights of buckets."""
    layout = Layout(model_spec(config).shapes(config), context, config.training.precision)
    for bucket in buckets:
        layout.add(bucket, names, decays)
    return KINDS[config.optimizer.kind](groups, layout, config.optimizer)
