"""Initial weights: a pure function of the seed and each parameter's name, the same in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from data_utils.common.seeds import derive_seed
from megatron_lite.config.lora import LORA
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.mup import is_hidden
from megatron_lite.transformer.tensor_parallel import TensorParallel, local_shard, partition_of, whole_shape


def _initial_std(name: str, config: ModelConfig) -> float:
    words, into_block = config.init_words_std, config.hidden_size**-0.5
    by_ending = {"word_embeddings.weight": words, "position_embeddings.weight": config.init_positions_std}
    if config.init == "t5":
        by_ending |= {
            "word_embeddings.weight": words or 1.0,
            "query_key_value.weight": into_block,
            "cross_attention.query.weight": into_block * config.head_size**-0.5,
            "cross_attention.key_value.weight": into_block,
            "attention.dense.weight": config.attention_size**-0.5,
            "mlp.dense_h_to_4h.weight": into_block,
            "mlp.dense_4h_to_h.weight": config.inner_size**-0.5,
            "relative_bias.weight": into_block,
        }
    elif config.init == "gpt2":
        output = config.init_std / math.sqrt(2 * config.num_layers)
        by_ending |= {"attention.dense.weight": output, "dense_4h_to_h.weight": output}
    return next((std for end, std in by_ending.items() if std and name.endswith(end)), config.init_std)


@torch.no_grad()
def initialize_parameters(
    named: Iterable[tuple[str, nn.Parameter]],
    config: ModelConfig,
    seed: int,
    parallel: TensorParallel | None = None,
) -> None:
    """Draw every parameter whole, as a pure function of (seed, name), and keep this rank's shard.

    Weights are normal with mean 0 (`_deviation`; `init: uniform`: within it), biases 0, LayerNorm 1 and 0; padding rows
    of the vocabulary 0. LoRA's factors: A uniform within 1 / sqrt(in), B 0.
    """
    group = (parallel or TensorParallel()).group
    for name, parameter in named:
        if "layernorm" in name:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias") or (LORA in name and name.endswith(".b")):
            parameter.zero_()
        else:
            partition = partition_of(parameter)
            shape = whole_shape(tuple(parameter.shape), partition, group.size)
            # On the CPU, and one generator for each name: values depend neither on device and ranks nor on other
            # parameters.
            generator = torch.Generator().manual_seed(derive_seed(seed, name))
            # Drawn whole, then cut: the same model for any tensor-parallel size.
            whole = torch.empty(shape)
            blocks = whole.split(partition.block_rows(shape[0]))
            first, *others = (_deviation(name, index, block, config) for index, block in enumerate(blocks))
            if LORA in name:
                # peft's: Kaiming's uniform with a = sqrt(5).
                whole.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
            elif config.init == "uniform":
                whole.uniform_(-first, first, generator=generator)
            elif config.init_cutoff and first:
                most = config.init_cutoff * first
                nn.init.trunc_normal_(whole, 0.0, first, -most, most, generator=generator)
            else:
                whole.normal_(0.0, first, generator=generator)
            for block, std in zip(blocks[1:], others, strict=True):
                # One draw for the fused parameter, scaled block by block.
                block *= std / first
            parameter.copy_(local_shard(whole, partition, group.rank, group.size, len(parameter)))


def _deviation(name: str, index: int, block: torch.Tensor, config: ModelConfig) -> float:
    """Standard deviation of the initial values of a block of a parameter, such as V of Q|K|V.

    init_std, or a table's own setting; with `init: gpt2` output projections over sqrt(2L) (GPT-2's scheme, as in the
    reference), with `init: t5` by the widths of each matrix, as T5's code has it; times muP's factor. DeepNorm: the
    matrices of blocks Xavier's, of values, output projections and FFN over sqrt(2L) (arXiv:2210.02414, section 2.1).
    Adapters start at 0.
    """
    is_fused = name.endswith("query_key_value.weight")
    if name.endswith("_adapter.up.weight"):
        return 0.0
    if config.init == "deepnorm" and name.startswith("layers."):
        xavier = math.sqrt(2 / sum(block.shape))
        return xavier if is_fused and index < 2 else xavier / math.sqrt(2 * config.num_layers)
    std = _initial_std(name, config)
    if config.init == "t5" and is_fused and index == 0:  # queries: T5 does not scale the scores
        std *= config.head_size**-0.5
    if config.mup is not None:
        std *= config.width_ratio**-0.5 if is_hidden(name) else 1.0
    return std
