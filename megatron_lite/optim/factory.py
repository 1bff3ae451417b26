"""The optimizers other than AdamW, by the values of `optimizer.kind`; each is one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_lite.config.tree import Config
from megatron_lite.optim.adafactor import AdaFactor
from megatron_lite.optim.buckets import MOMENTS, Bucket
from megatron_lite.optim.lamb import Lamb
from megatron_lite.optim.muon import Muon
from megatron_lite.optim.stable_adamw import StableAdamW
from megatron_lite.optim.whole_tensors import TensorIndex, TensorOptimizer
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.build import model_spec

OPTIMIZERS: dict[str, type[TensorOptimizer]] = {
    "lamb": Lamb,
    "stable_adamw": StableAdamW,
    "adafactor": AdaFactor,
    "muon": Muon,
}


def element_state(kind: str, name: str, parameter: nn.Parameter) -> tuple[str, ...]:
    """The state that an optimizer keeps of each element of a parameter."""
    return OPTIMIZERS[kind].moments(name, parameter) if kind in OPTIMIZERS else MOMENTS


def make_optimizer(
    groups: list[dict[str, Any]],
    buckets: Sequence[Bucket],
    names: Mapping[nn.Parameter, str],
    has_weight_decay: Callable[[str], bool],
    config: Config,
    context: ParallelContext,
) -> torch.optim.Optimizer:
    """The optimizer of a configuration that is not AdamW's, of the fp32 shards of buckets."""
    index = TensorIndex(model_spec(config).shapes(config), context, config.training.precision)
    for bucket in buckets:
        index.add(bucket, names, has_weight_decay)
    return OPTIMIZERS[config.optimizer.kind](groups, index, config.optimizer)
