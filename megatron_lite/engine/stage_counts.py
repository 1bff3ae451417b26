"""The pipeline stages of a layout and their parameters, counted on layers of the device "meta"."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config


@dataclass(frozen=True)
class StageSize:
    """The layers and parameters of one pipeline stage."""

    blocks: int
    parameters: int  # on one rank


def stages(config: Config) -> list[StageSize]:
    """The pipeline stages of a layout, in order. Parameters are counted on layers of the device "meta"."""
    import torch
    from torch import nn

    from megatron_lite.parallel.collectives import Group
    from megatron_lite.transformer.block import stack
    from megatron_lite.transformer.embedding import PositionEmbeddings
    from megatron_lite.transformer.encoder_decoder import DecoderBlock, DecoderEmbedding, encoder_layernorm
    from megatron_lite.transformer.lm_head import Heads
    from megatron_lite.transformer.norms import final_layernorm
    from megatron_lite.transformer.position_bias import relative_tables
    from megatron_lite.transformer.tensor_parallel import TensorParallel, VocabParallelEmbedding

    def count(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    model, tp = config.model, config.parallel.tensor_parallel_size
    parallel = TensorParallel(Group(None, 0, tp, tuple(range(tp))), config.parallel.sequence_parallel)
    with torch.device("meta"):
        # Layers as pipeline.py builds them, so that a dry run counts what a stage really holds.
        words = count(VocabParallelEmbedding(model, parallel))
        embedding = count(PositionEmbeddings(model, parallel))
        readout = count(final_layernorm(model)) + count(Heads(model, parallel))
        block_parameters = [count(block) for block in stack(model, parallel, "none")]
        if model.decoder_layers:
            embedding += count(DecoderEmbedding(model, parallel))
            block_parameters += [count(DecoderBlock(model, parallel, "none"))] * model.decoder_layers
            norm = encoder_layernorm(model, parallel)  # the first block of the decoder has it
            block_parameters[model.num_layers] += 0 if norm is None else count(norm)
        tables = sum(count(table) for table in relative_tables(model, parallel).values())  # on each stage
    stages, begin = [], 0
    for blocks, first, last in stage_shares(config):
        # The first and the last stage each have a copy of a tied word embedding.
        has_words = first or (last and model.tie_word_embeddings)
        total = sum(block_parameters[begin : begin + blocks]) + words * has_words
        stages.append(StageSize(blocks, total + tables + embedding * first + readout * last))
        begin += blocks
    return stages


def stage_shares(config: Config) -> list[tuple[int, bool, bool]]:
    """Blocks of each stage, and whether it begins with the embedding and ends with the head."""
    return list(_shares(config.model, config.loss_share, config.parallel.pipeline_parallel_size))


@functools.lru_cache(maxsize=256)
def _shares(model: ModelConfig, loss_share: float, size: int) -> tuple[tuple[int, bool, bool], ...]:
    layers = model.total_layers
    if size == 1:
        return ((layers, True, True),)
    from megatron_lite.engine.pipeline import stage_bounds  # imports DeepSpeed
    from megatron_lite.transformer.flops import layer_costs

    bounds = stage_bounds(layer_costs(model, loss_share), size)
    # Layers: words, positions, the blocks, final norm, words again.
    return tuple(
        (max(0, min(end, 2 + layers) - max(first, 2)), first == 0, end == layers + 4)
        for first, end in itertools.pairwise(bounds)
    )
