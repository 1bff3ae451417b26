"""Bytes of GPU memory at the peak of a step: what is allocated throughout, plus the largest of a few moments.

What blocks save is measured (block_costs.py). Workspaces of libraries and fragmentation are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.estimate.communication import LIVE_PARAMETERS
from megatron_lite.estimate.parameters import StageParameters, buckets
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.transformer.cuda_graphs import MOST_SHAPES, RESULTS

STAGE_3_BUCKET = (
    500_000_000  # numbers of DeepSpeed's buffer for gradients at ZeRO 3, unless reduce_bucket_size is set
)


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on the first rank of a stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # of all micro-batches in flight, at the peak
    rest: float  # logits, gradients of activations and of the vocabulary, buckets in exchange
    graphs: float = 0.0  # CUDA graphs' own memory

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def peak_memory(stage: StageParameters, stage_index: int, s: Sizes) -> PeakMemory:
    weights, gradients, optimizer = _state(stage, s)
    block_buckets, vocabulary_bucket = _exchanged_buckets(stage, s)
    blocks = _blocks(stage, s)
    saved = sum(s.block(is_decoder).saved * count for is_decoder, count in blocks)
    # 1F1B: a stage holds as many micro-batches as there are stages from it to the end.
    micro_batches = min(s.pp - stage_index, s.micro_batches) if s.pp > 1 else 1
    # Buffers between stages: a hidden state received for each micro-batch, and one sent.
    between = s.all_tokens / s.share * s.width * s.element
    saved = saved * micro_batches + (between * (micro_batches + 1) if s.pp > 1 else 0.0)
    moments = [s.block(is_decoder).backward + block_buckets for is_decoder, _ in blocks]
    vocabulary, is_tied = s.vocabulary * s.embedding * s.element, s.config.model.tie_word_embeddings
    if s.config.model.lora is not None:  # no gradient
        vocabulary = 0
    if stage.is_last:
        # A tied embedding's first gradient waits for the second one; an untied head's goes into its bucket.
        moments = [moment + (vocabulary if is_tied else vocabulary_bucket) for moment in moments]
        moments.append(_head_backward(s) + (0.0 if is_tied else vocabulary_bucket))
    # These moments follow each other, so only the largest counts.
    rest = max(moments)
    both = 3 * vocabulary if is_tied and stage.is_last else vocabulary
    # At the end of the backward pass blocks save nothing any more. There are the gradients of the embedding; a tied
    # one has two and their sum.
    end = (
        max(both, vocabulary + vocabulary_bucket)
        + block_buckets / 2
        + 2 * s.all_tokens * s.embedding * s.element
    )
    if stage.is_first and saved + rest < end:
        saved, rest = 0.0, end
    graphs = _graphs(stage, s) if s.config.training.cuda_graphs else 0.0
    return PeakMemory(weights, gradients, optimizer, saved, rest, graphs)


def _graphs(stage: StageParameters, s: Sizes) -> float:
    """Results of each block for each captured length, and the pool in which all captured passes keep their tensors.

    Passes of other lengths do not use the pool, so it counts in addition where there are several lengths.
    """
    lengths = sorted(s.lengths[0], reverse=True)
    hidden = sum(lengths[:MOST_SHAPES]) * s.width * s.element
    block = s.block(False)
    pool = block.saved * stage.blocks + block.backward if len(lengths) > 1 else 0.0
    return RESULTS * hidden * stage.blocks + pool


def _blocks(stage: StageParameters, s: Sizes) -> list[tuple[bool, int]]:
    """(is_decoder, number) of the stage's blocks."""
    encoders, decoders = stage.block_counts(s.config.model.num_layers + s.config.model.mtp_layers)
    return [(is_decoder, count) for is_decoder, count in ((False, encoders), (True, decoders)) if count]


def _state(stage: StageParameters, s: Sizes) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of this rank."""
    zero, e = s.config.parallel.zero_stage, s.element
    on_device = 0.0 if s.config.parallel.offload_optimizer else 1.0
    trained = sum(parameter.numbers for parameter in stage.trained)
    # DeepSpeed's stage 3: 12 bytes for fp32 weights and both moments; `LIVE_PARAMETERS` may be gathered at once.
    if zero == 3:
        shard = trained / s.dp
        live = min(stage.numbers, LIVE_PARAMETERS) * e
        return stage.numbers / s.dp * e + live, (shard + STAGE_3_BUCKET) * 4, shard * 12 * on_device
    stage_buckets = buckets(stage, s)
    numbers = sum(bucket.numbers for bucket in stage_buckets)
    shard = sum(bucket.numbers / bucket.holders(s) for bucket in stage_buckets)
    fp32_bytes = 4 * (1 + (s.config.ema.decay is not None))  # weights, and their averages
    state = sum(
        bucket.numbers * (fp32_bytes + 4 * len(bucket.moments)) / bucket.holders(s)
        for bucket in stage_buckets
    )
    # ZeRO 2 keeps this rank's shard, and only between micro-batches.
    gradients = numbers if zero == 1 else shard if s.micro_batches > 1 else 0.0
    # Weights that are never trained: their fp32 values are in the host's memory, or are these.
    return (numbers + stage.numbers - trained) * e, gradients * 4, state * on_device


def _exchanged_buckets(stage: StageParameters, s: Sizes) -> tuple[float, float]:
    """ZeRO 2: bytes of the blocks' buckets that are filled or exchanged at a time, and of the vocabulary's bucket."""
    if s.config.parallel.zero_stage != 2:
        return 0.0, 0.0
    words = s.vocabulary * s.embedding
    largest = sorted((b.numbers for b in buckets(stage, s) if b.numbers < words), reverse=True)
    at_once = 1 if s.config.training.recompute == "none" else 2
    return 4.0 * sum(largest[:at_once]), 4.0 * words


def _head_backward(s: Sizes) -> float:
    """Peak bytes of the LM head: at the gradient of the logits."""
    e, positions, chunks = s.element, s.losses, s.loss_chunks  # only predicted positions have logits
    logits = max(chunks) * s.vocabulary * e
    weights = s.vocabulary * s.embedding * (e + 4 * (len(chunks) > 1))  # gradient; chunks are summed in fp32
    if s.config.model.lora is not None:
        weights = 0
    is_copied = s.config.training.kernels != "fused" or s.config.model.logit_soft_cap is not None
    return 3 * positions * s.width * e + logits + weights + logits * is_copied
