"""torch's parameter groups of a model, and AdamW on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import OptimizerConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine import nvidia_apex
from megatron_lite.optim.buckets import MOMENTS, ParamGroup
from megatron_lite.optim.factory import element_state
from megatron_lite.optim.lr_multipliers import NO_MULTIPLIERS, LrMultipliers, by_width
from megatron_lite.optim.uncompiled import AdamW
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.transformer.build import model_spec
from megatron_lite.transformer.flops import EXPERTS
from megatron_lite.transformer.tensor_parallel import is_partial, partition_of

TIED = "embedding.word_embeddings.weight"  # also on the last pipeline stage, if `has_words_on_last_stage`


def has_words_on_last_stage(model: ModelConfig) -> bool:
    """Whether the last pipeline stage has the word embedding too: as output projection, or for further tokens."""
    return model.tie_word_embeddings or model.mtp_layers > 0


# Tables that all layers of a stack share, so that each pipeline stage has a copy.
SHARED_BY_STAGES = ("relative_bias.", "decoder_relative_bias.")


@dataclass(frozen=True)
class GroupRules:
    """The group that each parameter has in the optimizer of ZeRO 1 and 2, by its global name."""

    config: Config
    context: ParallelContext
    multipliers: Mapping[str, LrMultipliers]

    def group(self, name: str, parameter: nn.Parameter) -> ParamGroup:
        tp, pp = self.context.tp, self.context.pp
        # `in_grad_norm`: the norm is over the whole model, so an element that several ranks hold counts on one of them.
        is_split = partition_of(parameter).dim is not None
        multipliers = self.multipliers.get(name, NO_MULTIPLIERS)
        # A parameter that several ranks hold, each with only a part of its gradient: the ranks over which it is summed.
        extra_reduce_group = None
        if is_partial(parameter):
            extra_reduce_group = tp
        elif name.startswith(SHARED_BY_STAGES) and pp.size > 1:
            extra_reduce_group = pp
        elif pp.size > 1 and name == TIED and has_words_on_last_stage(self.config.model):
            extra_reduce_group = self.context.pipeline_ends()
        return ParamGroup(
            weight_decay=weight_decay(name, self.config) * multipliers.decay_factor,
            in_grad_norm=(is_split or tp.rank == 0) and not is_tied_copy(name, self.context),
            extra_reduce_group=extra_reduce_group,
            multipliers=multipliers,
            moments=self.moments(name, parameter),
            on_all_stages=name.startswith(SHARED_BY_STAGES),
            has_state=self.has_state(name),
            # Each of these ranks has the gradient of the tokens that its group of expert-parallel ranks sent to it.
            holders=self.context.edp if EXPERTS in name and self.context.ep.size > 1 else None,
        )

    def moments(self, name: str, parameter: nn.Parameter) -> tuple[str, ...]:
        """The optimizer's state of each element of a parameter."""
        optimizer = self.config.optimizer.kind
        if not self.has_state(name):
            return ()
        return MOMENTS if optimizer == "adamw" else element_state(optimizer, name, parameter)

    def has_state(self, name: str) -> bool:
        # The other optimizers look at all shards, also where they change none.
        is_frozen = self.multipliers.get(name, NO_MULTIPLIERS).is_never_trained
        return not (is_frozen and self.config.optimizer.kind == "adamw")

    def by_width(self, name: str, parameter: nn.Parameter) -> LrMultipliers:
        """The multipliers of muP."""
        # Muon keeps one moment of what it makes orthogonal; other optimizers may keep one of everything.
        is_muon = self.config.optimizer.kind == "muon"
        is_orthogonal = is_muon and self.moments(name, parameter) == MOMENTS[:1]
        return by_width(self.multipliers.get(name, NO_MULTIPLIERS), name, self.config, is_orthogonal)


def is_tied_copy(name: str, context: ParallelContext) -> bool:
    """True for another pipeline stage's copy of the word embedding, or of a table that all stages share."""
    return name.startswith(("embedding.", *SHARED_BY_STAGES)) and context.pp.rank > 0


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
