"""The parameters of one rank, stage by stage, and the buckets in which their gradients are exchanged."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron_lite.config.lora import LORA
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.parameter_groups import has_words_on_last_stage
from megatron_lite.engine.stage_counts import stage_shares
from megatron_lite.estimate.block_costs import tensor_parallel
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.optim.buckets import ALIGNMENT
from megatron_lite.optim.factory import element_state
from megatron_lite.transformer.flops import EXPERTS, WORDS
from megatron_lite.transformer.tensor_parallel import is_partial
from megatron_lite.transformer.transformer import Transformer


@dataclass(frozen=True)
class RankParameter:
    """A parameter of this rank."""

    name: str
    numbers: int
    is_partial: bool  # its gradient is summed over the tensor-parallel ranks
    moments: tuple[str, ...]  # the optimizer's state per number, without the fp32 weight
    is_trained: bool  # with LoRA its updates are, and nothing else; biases of routers never

    @property
    def decays(self) -> bool:
        return not (self.name.endswith("bias") or "layernorm" in self.name)

    @property
    def is_of_expert(self) -> bool:
        """Whether expert-parallel ranks have others."""
        return EXPERTS in self.name


@dataclass(frozen=True, eq=False)
class StageParameters:
    """One pipeline stage."""

    first_block: int
    blocks: int
    is_first: bool
    is_last: bool
    parameters: tuple[RankParameter, ...]  # in the model's order

    @cached_property
    def numbers(self) -> int:
        return sum(parameter.numbers for parameter in self.parameters)

    def block_counts(self, encoder_layers: int) -> tuple[int, int]:
        """Blocks of the encoder, which is the whole of a model without a decoder, and blocks of the decoder.

        Args: encoder_layers: with the block of further tokens.
        """
        encoders = max(0, min(self.first_block + self.blocks, encoder_layers) - self.first_block)
        return encoders, self.blocks - encoders

    @cached_property
    def trained(self) -> tuple[RankParameter, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.is_trained)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters whose gradients are exchanged together."""

    parameters: list[RankParameter]
    is_summed: bool  # over tensor-parallel ranks or tied stages too

    @property
    def decays(self) -> bool:
        return self.parameters[0].decays

    @property
    def moments(self) -> tuple[str, ...]:
        return self.parameters[0].moments

    def holders(self, sizes: Sizes) -> int:
        """Ranks that each own a shard of it."""
        is_of_expert = self.parameters[0].is_of_expert
        return sizes.dp // sizes.config.parallel.expert_parallel_size if is_of_expert else sizes.dp

    @cached_property
    def numbers(self) -> int:
        return sum(-(-p.numbers // ALIGNMENT) * ALIGNMENT for p in self.parameters)


@functools.lru_cache(maxsize=64)
def _rank_parameters(
    model: ModelConfig, tp: int, is_split: bool, sums_at_once: bool, kind: str, ep: int
) -> tuple[RankParameter, ...]:
    with torch.device("meta"):
        module = Transformer(model, parallel=tensor_parallel(tp, is_split, sums_at_once, ep))
    return tuple(
        RankParameter(
            name, p.numel(), is_partial(p), element_state(kind, name, p),
            p.requires_grad and (model.lora is None or LORA in name),
        )
        for name, p in module.named_parameters()
    )  # fmt: skip


def stages(config: Config) -> list[StageParameters]:
    """The pipeline stages of a layout, in order, with the parameters of the first rank of each."""
    parallel, shares = config.parallel, tuple(stage_shares(config))
    tp, is_split, is_zero_3 = (
        parallel.tensor_parallel_size,
        parallel.sequence_parallel,
        parallel.zero_stage == 3,
    )
    ep = parallel.expert_parallel_size
    return _stages(config.model, shares, tp, is_split, is_zero_3, config.optimizer.kind, ep)


@functools.lru_cache(maxsize=256)
def _stages(
    model: ModelConfig,
    shares: tuple[tuple[int, bool, bool], ...],
    tp: int,
    is_split: bool,
    is_zero_3: bool,
    kind: str,
    ep: int,
) -> list[StageParameters]:
    parameters = _rank_parameters(model, tp, is_split, is_zero_3, kind, ep)
    result, start = [], 0
    for blocks, is_first, is_last in shares:
        stage_blocks = range(start, start + blocks)
        stage_parameters = [
            p for p in parameters if _is_within(p.name, stage_blocks, is_first, is_last, model)
        ]
        result.append(StageParameters(start, blocks, is_first, is_last, tuple(stage_parameters)))
        start += blocks
    return result


def _is_within(name: str, blocks: range, is_first: bool, is_last: bool, model: ModelConfig) -> bool:
    path = name.split(".")
    if path[0] == "layers":
        return model.share_layers != "none" or int(path[1]) in blocks
    if name == WORDS and has_words_on_last_stage(model):
        return is_first or is_last
    if path[0].endswith("relative_bias"):
        return True
    if path[0] == "encoder_layernorm":
        return model.num_layers in blocks
    if path[0] in ("final_layernorm", "heads"):
        return is_last
    return is_first


def buckets(stage: StageParameters, sizes: Sizes) -> list[Bucket]:
    """As the optimizer fills those that are trained: in the reverse order of the parameters."""
    is_tied = sizes.pp > 1 and has_words_on_last_stage(sizes.config.model)
    return _buckets(stage, sizes.bucket_size, is_tied)


@functools.lru_cache(maxsize=1024)
def _buckets(stage: StageParameters, limit: int, is_tied: bool) -> list[Bucket]:
    filling: dict[Any, Bucket] = {}
    filled: dict[Any, int] = {}
    full = []
    for parameter in reversed(stage.trained):
        is_copied = is_tied and parameter.name == WORDS
        key = parameter.decays, parameter.is_partial, is_copied, parameter.moments, parameter.is_of_expert
        if key not in filling or filled[key] + parameter.numbers > limit:
            full += [filling[key]] if key in filling else []
            filling[key], filled[key] = Bucket([], parameter.is_partial or is_copied), 0
        filling[key].parameters.append(parameter)
        filled[key] += parameter.numbers
    return [*full, *filling.values()]
