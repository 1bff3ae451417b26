"""The parameters of one rank, stage by stage, and the buckets in which their gradients are exchanged."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.engine.stage_counts import stage_shares
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.model.flops import WORDS
from megatron_lite.model.tensor_parallel import TensorParallel, is_partial, partition_of
from megatron_lite.model.transformer import GLM
from megatron_lite.optim.buckets import ALIGNMENT, MAX_PENDING_NUMEL, SINGLE_ADD_NUMEL
from megatron_lite.optim.factory import element_state
from megatron_lite.optim.whole_tensors import block_shapes
from megatron_lite.parallel.collectives import Group


@dataclass(frozen=True)
class Counted:
    """A parameter of this rank."""

    name: str
    numbers: int
    is_partial: bool  # its gradient is summed over the tensor-parallel ranks
    is_matrix: bool  # a product's, whose gradient goes into the sums where it is computed
    tensors: tuple[tuple[int, int], ...]  # the whole shape of each block of it
    moments: tuple[str, ...]  # the optimizer's state of each number, beside the fp32 weight

    @property
    def decays(self) -> bool:
        return not (self.name.endswith("bias") or "layernorm" in self.name)


@dataclass(frozen=True, eq=False)
class Stage:
    """One pipeline stage."""

    first_block: int
    blocks: int
    is_first: bool
    is_last: bool
    parameters: tuple[Counted, ...]  # in the model's order

    @cached_property
    def numbers(self) -> int:
        return sum(parameter.numbers for parameter in self.parameters)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters whose gradients are exchanged together."""

    parameters: list[Counted]
    is_summed: bool  # over other ranks than the data-parallel ones

    @property
    def decays(self) -> bool:
        return self.parameters[0].decays

    @property
    def moments(self) -> tuple[str, ...]:
        return self.parameters[0].moments

    @cached_property
    def numbers(self) -> int:
        return sum(-(-p.numbers // ALIGNMENT) * ALIGNMENT for p in self.parameters)


@functools.lru_cache(maxsize=64)
def _counted(
    model: ModelConfig, tp: int, is_split: bool, sums_at_once: bool, kind: str
) -> tuple[Counted, ...]:
    group = Group(None, 0, tp, tuple(range(tp)))
    with torch.device("meta"):
        module = GLM(model, parallel=TensorParallel(group, is_split, sums_at_once))
    return tuple(
        Counted(
            name, p.numel(), is_partial(p),
            p.dim() == 2 and name.startswith("layers.") and "adapter" not in name and not hasattr(p, "is_used_twice"),
            block_shapes(tuple(p.shape), partition_of(p), tp), element_state(kind, name, p),
        )
        for name, p in module.named_parameters()
    )  # fmt: skip


def stages(sizes: Sizes) -> list[Stage]:
    """The pipeline stages of a layout, in order, with the parameters of the first rank of each."""
    config = sizes.config
    of_stage_3 = config.parallel.zero_stage == 3
    shares = tuple(stage_shares(config))
    return _stages(config.model, shares, sizes.tp, sizes.share > 1, of_stage_3, config.optimizer.kind)


@functools.lru_cache(maxsize=256)
def _stages(
    model: ModelConfig,
    shares: tuple[tuple[int, bool, bool], ...],
    tp: int,
    is_split: bool,
    of_stage_3: bool,
    kind: str,
) -> list[Stage]:
    every = _counted(model, tp, is_split, of_stage_3, kind)
    found, begin = [], 0
    for blocks, is_first, is_last in shares:
        within = range(begin, begin + blocks)
        own = [p for p in every if _is_within(p.name, within, is_first, is_last, model)]
        found.append(Stage(begin, blocks, is_first, is_last, tuple(own)))
        begin += blocks
    return found


def _is_within(name: str, blocks: range, is_first: bool, is_last: bool, model: ModelConfig) -> bool:
    place = name.split(".")
    if place[0] == "layers":
        return model.share_layers != "none" or int(place[1]) in blocks
    if name == WORDS and model.tie_word_embeddings:
        return is_first or is_last
    if place[0].endswith("relative_bias"):
        return True
    if place[0] == "encoder_layernorm":
        return model.num_layers in blocks
    if place[0] in ("final_layernorm", "heads"):
        return is_last
    return is_first


def buckets(stage: Stage, sizes: Sizes) -> list[Bucket]:
    """As `assign` of the optimizer fills them: in the reverse order of the parameters."""
    is_tied = sizes.pp > 1 and sizes.config.model.tie_word_embeddings
    return _buckets(stage, sizes.bucket_size, is_tied)


@functools.lru_cache(maxsize=1024)
def _buckets(stage: Stage, limit: int, is_tied: bool) -> list[Bucket]:
    filling: dict[Any, Bucket] = {}
    filled: dict[Any, int] = {}
    full = []
    for parameter in reversed(stage.parameters):
        copied = is_tied and parameter.name == WORDS
        key = parameter.decays, parameter.is_partial, copied, parameter.moments
        if key not in filling or filled[key] + parameter.numbers > limit:
            full += [filling[key]] if key in filling else []
            filling[key], filled[key] = Bucket([], parameter.is_partial or copied), 0
        filling[key].parameters.append(parameter)
        filled[key] += parameter.numbers
    return [*full, *filling.values()]


@functools.lru_cache(maxsize=8192)
def moves(bucket: Bucket) -> list[list[Counted]]:
    """The groups in which gradients that no product's kernel adds up move into the sums, in a backward pass."""
    groups: list[list[Counted]] = []
    waiting: list[Counted] = []
    elements = 0
    for parameter in bucket.parameters:
        if parameter.is_matrix:
            continue
        waiting.append(parameter)
        elements += parameter.numbers
        if elements >= MAX_PENDING_NUMEL:
            groups.append(waiting)
            waiting, elements = [], 0
    return [*groups, waiting] if waiting else groups


def is_small(parameter: Counted) -> bool:
    """Whether its gradient is added together with others."""
    return parameter.numbers < SINGLE_ADD_NUMEL
