"""An estimate of parameters, memory of the fullest rank, FLOPs and tokens/s of a layout, without a GPU.

Parameters are exact. Memory is the sum of weights, gradients and optimizer state as sharded.py stores them, at ZeRO 3
as DeepSpeed 0.19.8 does, and of what autograd stores of a block (arXiv:2205.05198, section 4.1, without the attention
matrix, which fused kernels do not store). Fragmentation, CUDA and NCCL add 1 to 3 GiB in most cases. Speed assumes a
share of the devices' peak, the MFU, which a short run measures better.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megatron_lite.config.deepspeed_options import default_bucket_size
from megatron_lite.config.parameter_count import parameter_count
from megatron_lite.config.tree import Config

DEFAULT_PEAK_TFLOPS = 989.0  # bf16 on an H100
MFU = 0.4
FILLED = 0.96  # share of a row's tokens that are not padding (docs/log.md)
STAGE_3_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default
LOGIT_BYTES = 10  # per loss row and token of the vocabulary: logits, their fp32 copy, gradient


@dataclass(frozen=True)
class Estimate:
    parameters: int  # of the model, padding rows of the vocabulary included
    rank_parameters: int  # of the fullest rank
    memory: dict[str, float]  # bytes on the fullest rank by use
    tokens_per_step: float  # without padding
    flops_per_step: float  # of the model, all ranks together, without recomputation
    seconds_per_step: float

    @property
    def bytes_total(self) -> float:
        return sum(self.memory.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds_per_step


@dataclass(frozen=True)
class Stage:
    """The layers and parameters of one pipeline stage."""

    blocks: int
    has_embedding: bool
    has_head: bool
    parameters: int  # on one rank


def stages(config: Config) -> list[Stage]:
    """The pipeline stages of a layout, in order. Parameters are counted on layers of the device "meta"."""
    import torch
    from torch import nn

    from megatron_lite.model.glm import Block, PositionEmbeddings, final_layernorm
    from megatron_lite.model.heads import Heads
    from megatron_lite.model.tensor_parallel import TensorParallel, VocabParallelEmbedding
    from megatron_lite.parallel.collectives import Group

    def count(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    model, tp = config.model, config.parallel.tensor_parallel_size
    parallel = TensorParallel(Group(None, 0, tp, tuple(range(tp))), config.parallel.sequence_parallel)
    with torch.device("meta"):
        words, block = count(VocabParallelEmbedding(model, parallel)), count(Block(model, parallel, "none"))
        embedding = count(PositionEmbeddings(model, parallel))
        readout = count(final_layernorm(model)) + count(Heads(model, parallel))
    stages = []
    for blocks, first, last in stage_shares(config):
        own_blocks = min(blocks, 1) if model.share_layers else blocks
        # The first and the last stage each have a copy of the tied word embedding.
        total = own_blocks * block + words * (first or last) + embedding * first + readout * last
        stages.append(Stage(blocks, first, last, total))
    return stages


def stage_shares(config: Config) -> list[tuple[int, bool, bool]]:
    """Blocks of each stage, and whether it begins with the embedding and ends with the head."""
    layers, size = config.model.num_layers, config.parallel.pipeline_parallel_size
    if size == 1:
        return [(layers, True, True)]
    from megatron_lite.train.pipeline import layer_costs, stage_bounds  # imports DeepSpeed

    bounds = stage_bounds(layer_costs(config.model, config.loss_share), size)
    # Layers: words, positions, the blocks, final norm, words again.
    return [
        (max(0, min(end, 2 + layers) - max(first, 2)), first == 0, end == layers + 4)
        for first, end in itertools.pairwise(bounds)
    ]


def estimate(config: Config, world_size: int) -> Estimate:
    """Args: config: with model.vocab_size. Raises ConfigError if the processes do not fit layout or batch."""
    parallel, batch = config.parallel, config.batch
    dp = parallel.data_parallel_size(world_size)
    micro_batches = batch.accumulation_steps(dp)
    ranks = []
    for number, stage in enumerate(stages(config)):
        # One-forward-one-backward: the first stage has the most micro-batches between their two passes.
        in_flight = min(parallel.pipeline_parallel_size - number, micro_batches)
        ranks.append((stage.parameters, _memory(config, stage, dp, in_flight)))
    rank_parameters, memory = max(ranks, key=lambda rank: sum(rank[1].values()))

    tokens = batch.global_batch_size * config.row_length * FILLED
    flops = _step_flops(config, tokens)
    recomputed = 4 / 3 if config.training.recompute == "full" else 1.0
    peak = (config.run.peak_tflops or DEFAULT_PEAK_TFLOPS) * 1e12
    bubble = 1.0 + (parallel.pipeline_parallel_size - 1) / micro_batches
    seconds = flops * recomputed * bubble / (world_size * peak * MFU)
    return Estimate(parameter_count(config.model), rank_parameters, memory, tokens, flops, seconds)


def _step_flops(config: Config, tokens: float) -> float:
    from megatron_lite.train.reports import step_flops  # imports torch

    loss_rows = tokens * config.loss_share
    visible_keys = tokens * config.row_length * FILLED  # at most: one document that sees all of itself
    return step_flops(config.model, int(tokens), int(loss_rows), int(visible_keys))


def _memory(config: Config, stage: Stage, dp: int, in_flight: int) -> dict[str, float]:
    """Bytes on one rank of a stage."""
    parallel, count = config.parallel, stage.parameters
    half = config.training.precision != "fp32"
    width = 2 if half else 4
    zero = parallel.zero_stage
    weights = count * width / (dp if zero == 3 else 1)
    # The fp32 sums over micro-batches; from stage 2 on each rank keeps its share.
    gradients = count * 4 / (1 if zero == 1 else dp)
    # At stage 2 one bucket is filled while the one before is reduced.
    bucket = config.deepspeed_options().get("zero_optimization", {}).get("reduce_bucket_size")
    buckets = {
        1: 0,
        2: min(2 * (bucket or default_bucket_size(dp)), count) * 4,
        3: min(bucket or STAGE_3_BUCKET_ELEMENTS, count) * width,
    }[zero]
    tokens = config.batch.micro_batch_size * config.row_length
    head = tokens * config.loss_share * LOGIT_BYTES * stage.has_head
    recompute = config.training.recompute
    recomputed = (
        _block_bytes(config, "none") if recompute == "full" else 0.0
    )  # of the block in its backward pass
    assert config.model.vocab_size is not None
    return {
        "weights": weights,
        "gradients": gradients,
        # fp32 weights and both Adam moments
        "optimizer state": 0 if parallel.offload_optimizer else count * 12 / dp,
        "communication": buckets,
        "activations": in_flight * _block_bytes(config, recompute) * stage.blocks + recomputed,
        "logits": head * config.model.vocab_size / parallel.tensor_parallel_size,
    }


def _block_bytes(config: Config, recompute: str) -> float:
    """Bytes that autograd stores of one block and micro-batch."""
    tp = config.parallel.tensor_parallel_size
    outside = tp if config.parallel.sequence_parallel else 1  # of the tensor-parallel regions
    elements = config.batch.micro_batch_size * config.row_length * config.model.hidden_size
    width = 1 if config.training.precision != "fp32" else 2  # the figures below are for 2 bytes an element
    if recompute == "full":
        return elements * width * 2 / outside
    return elements * width * (10 / outside + 24 / tp)


def report(config: Config, world_size: int) -> str:
    """The estimate in words, for a terminal."""
    result = estimate(config, world_size)
    parallel = config.parallel
    dp = parallel.data_parallel_size(world_size)
    micro_batches = config.batch.accumulation_steps(dp)
    peak = config.run.peak_tflops or DEFAULT_PEAK_TFLOPS
    layout = (
        f"{world_size} processes: pipeline {parallel.pipeline_parallel_size} x data {dp} x tensor "
        f"{parallel.tensor_parallel_size}, ZeRO {parallel.zero_stage}, {micro_batches} micro-batches of "
        f"{config.batch.micro_batch_size} x {config.row_length} tokens a step"
    )
    lines = [
        f"parameters        {result.parameters:,}; on the fullest rank {result.rank_parameters:,}",
        f"layout            {layout}",
        "memory            GiB on the fullest rank; CUDA, NCCL and fragmentation need 1 to 3 more",
    ]
    lines += [f"  {name:15} {size / 2**30:8.2f}" for name, size in result.memory.items()]
    lines += [
        f"  {'total':15} {result.bytes_total / 2**30:8.2f}",
        f"a step            {result.tokens_per_step:,.0f} tokens, {result.flops_per_step:.3g} FLOPs",
        f"speed             {result.tokens_per_second:,.0f} tokens/s, {result.seconds_per_step:.3g} s a step, if "
        f"{MFU:.0%} of {peak:g} TFLOP/s (run.peak_tflops) are reached",
        f"the run           {config.training.steps:,} steps, "
        f"{config.training.steps * result.seconds_per_step / 86400:.3g} days",
    ]
    return "\n".join(lines)
