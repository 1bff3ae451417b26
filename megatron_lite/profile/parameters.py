"""The parameters of one rank, stage by stage, and the buckets in which their gradients are exchanged."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_lite.config.deepspeed_options import default_bucket_size
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.layers.tensor_parallel import TensorParallel, is_partial
from megatron_lite.model.trunk.counts import WORDS
from megatron_lite.model.trunk.glm import GLM
from megatron_lite.parallel.collectives import Group
from megatron_lite.profile.sizes import Sizes
from megatron_lite.train.engine.sharded import ADDED_ALONE, ALIGNMENT, MOVED_AT_ONCE
from megatron_lite.train.engine.stage_counts import stage_shares


@dataclass(frozen=True)
class Counted:
    """A parameter of this rank."""

    name: str
    numbers: int
    is_partial: bool  # its gradient is summed over the tensor-parallel ranks
    is_matrix: bool  # a product's, whose gradient goes into the sums where it is computed

    @property
    def decays(self) -> bool:
        return not (self.name.endswith("bias") or "layernorm" in self.name)


@dataclass(frozen=True)
class Stage:
    """One pipeline stage."""

    first_block: int
    blocks: int
    is_first: bool
    is_last: bool
    parameters: tuple[Counted, ...]  # in the model's order

    @property
    def numbers(self) -> int:
        return sum(parameter.numbers for parameter in self.parameters)


@dataclass
class Bucket:
    parameters: list[Counted]
    decays: bool
    is_summed: bool  # over other ranks than the data-parallel ones

    @property
    def numbers(self) -> int:
        return sum(-(-p.numbers // ALIGNMENT) * ALIGNMENT for p in self.parameters)


@functools.lru_cache(maxsize=64)
def _counted(model: ModelConfig, tp: int, is_split: bool, sums_at_once: bool) -> tuple[Counted, ...]:
    group = Group(None, 0, tp, tuple(range(tp)))
    with torch.device("meta"):
        module = GLM(model, parallel=TensorParallel(group, is_split, sums_at_once))
    return tuple(
        Counted(
            name, p.numel(), is_partial(p), p.dim() == 2 and name.startswith("layers.") and "adapter" not in name
        )
        for name, p in module.named_parameters()
    )  # fmt: skip


def stages(sizes: Sizes) -> list[Stage]:
    """The pipeline stages of a layout, in order, with the parameters of the first rank of each."""
    config, model = sizes.config, sizes.config.model
    every = _counted(model, sizes.tp, sizes.share > 1, config.parallel.zero_stage == 3)
    found, begin = [], 0
    for blocks, is_first, is_last in stage_shares(config):
        within = range(begin, begin + blocks)
        own = [p for p in every if _is_within(p.name, within, is_first, is_last, model)]
        found.append(Stage(begin, blocks, is_first, is_last, tuple(own)))
        begin += blocks
    return found


def _is_within(name: str, blocks: range, is_first: bool, is_last: bool, model: ModelConfig) -> bool:
    place = name.split(".")
    if place[0] == "layers":
        return model.share_layers or int(place[1]) in blocks
    if name == WORDS and model.tie_word_embeddings:
        return is_first or is_last
    if place[0] == "encoder_layernorm":
        return model.num_layers in blocks
    if place[0] in ("final_layernorm", "heads"):
        return is_last
    return is_first


def buckets(stage: Stage, sizes: Sizes) -> list[Bucket]:
    """As `assign` of the optimizer fills them: in the reverse order of the parameters."""
    options = sizes.config.deepspeed_options(sizes.dp)["zero_optimization"]
    limit = options.get("reduce_bucket_size", default_bucket_size(sizes.dp))
    is_tied = sizes.pp > 1 and sizes.config.model.tie_word_embeddings
    filling: dict[tuple[bool, bool, bool], Bucket] = {}
    full = []
    for parameter in reversed(stage.parameters):
        copied = is_tied and parameter.name == WORDS
        key = parameter.decays, parameter.is_partial, copied
        bucket = filling.get(key)
        if bucket is None or bucket.parameters and _sum(bucket.parameters) + parameter.numbers > limit:
            if bucket is not None:
                full.append(bucket)
            bucket = filling[key] = Bucket([], parameter.decays, parameter.is_partial or copied)
        bucket.parameters.append(parameter)
    return [*full, *filling.values()]


def _sum(parameters: Sequence[Counted]) -> int:
    return sum(parameter.numbers for parameter in parameters)


def moves(bucket: Bucket) -> list[list[Counted]]:
    """The groups in which gradients that no product's kernel adds up move into the sums, in a backward pass."""
    groups: list[list[Counted]] = []
    waiting: list[Counted] = []
    for parameter in bucket.parameters:
        if parameter.is_matrix:
            continue
        waiting.append(parameter)
        if _sum(waiting) >= MOVED_AT_ONCE:
            groups.append(waiting)
            waiting = []
    return [*groups, waiting] if waiting else groups


def is_small(parameter: Counted) -> bool:
    """Whether its gradient is added together with others."""
    return parameter.numbers < ADDED_ALONE
