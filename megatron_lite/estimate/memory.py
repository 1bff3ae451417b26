"""Bytes of GPU memory at the peak of a step: what is allocated throughout, plus the largest of a few moments.

Activations are the tensors that a block's functions save, see block.py and fused_block.py. Workspaces of libraries and
fragmentation are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.estimate.average_sequence import AttentionLaunch
from megatron_lite.estimate.communication import LIVE_PARAMETERS
from megatron_lite.estimate.parameters import StageParameters, buckets
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.transformer.cuda_graphs import MOST_SHAPES, RESULTS

STAGE_3_BUCKET = (
    500_000_000  # numbers of DeepSpeed's buffer for gradients at ZeRO 3, unless reduce_bucket_size is set
)
_SUMS = 64 * 4  # bytes of partial sums per feature, in the gradient of the activation's bias


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
    saved = sum(_saved(s, is_decoder) * count for is_decoder, count in _blocks(stage, s))
    # 1F1B: a stage holds as many micro-batches as there are stages from it to the end.
    micro_batches = min(s.pp - stage_index, s.micro_batches) if s.pp > 1 else 1
    # Buffers between stages: a hidden state received for each micro-batch, and one sent.
    between = s.all_tokens / s.share * s.width * s.element
    saved = saved * micro_batches + (between * (micro_batches + 1) if s.pp > 1 else 0.0)
    moments = [_block_backward(s, is_decoder) + block_buckets for is_decoder, _ in _blocks(stage, s)]
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
    pool = _saved(s, False) * stage.blocks + _block_backward(s, False) if len(lengths) > 1 else 0.0
    return RESULTS * hidden * stage.blocks + pool


def _blocks(stage: StageParameters, s: Sizes) -> list[tuple[bool, int]]:
    """(is_decoder, number) of the stage's blocks."""
    encoders, decoders = stage.block_counts(s.config.model.num_layers + s.config.model.mtp_layers)
    return [(is_decoder, count) for is_decoder, count in ((False, encoders), (True, decoders)) if count]


def attention_launches(s: Sizes, is_decoder: bool) -> list[AttentionLaunch]:
    """The attention launches of a micro-batch; padding is queries of the first one."""
    stack, micro = s.stack(is_decoder), s.config.batch.micro_batch_size
    launches = [launch.times(micro) for launch in stack.attention]
    if stack.kernel == "varlen" and launches:
        padding = max(0.0, s.tokens(is_decoder) - sum(launch.queries for launch in launches))
        launches[0] = launches[0].plus(AttentionLaunch(padding))
    return launches


def _table_bytes(s: Sizes, is_decoder: bool) -> float:
    """A layer's products of queries, or of keys, with the vectors of buckets or of distances."""
    rows = s.distances if s.config.model.has_distance_scores else s.config.model.position_rows
    return s.tokens(is_decoder) * s.heads * rows * s.element


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


def _saved(s: Sizes, is_decoder: bool) -> float:
    """Bytes that a block saves for its backward pass."""
    model, e = s.config.model, s.element
    T = s.tokens(is_decoder)
    t, recompute = T / s.share, s.config.training.recompute
    if recompute == "full":  # the block's input alone
        return t * s.width * e
    return _saved_inside(s, is_decoder) + (t * s.width * e if model.norm == "pre" else 0.0)


def _saved_inside(s: Sizes, is_decoder: bool) -> float:
    """Bytes that a block saves, without its input."""
    model, e = s.config.model, s.element
    T = s.tokens(is_decoder)
    t, is_kernel = T / s.share, s.config.training.kernels == "fused"
    hidden, layers = t * s.width * e, s.linear_layers(is_decoder)
    # Attention, MLP, in a decoder cross-attention: a sum and a norm each. The input of a pre-norm block is one of them.
    sublayers = sum(layer.is_row_parallel for layer, _ in layers)
    total = (2 * sublayers - (model.norm == "pre")) * hidden + 16 * t
    if model.rms_norm and not is_kernel:  # the input and the normed one in fp32
        total += sublayers * 8 * t * s.width
    elif not is_kernel:
        total += 2 * hidden
    total += sum(layer.width * tokens for layer, tokens in layers) * e
    needs_copy = (
        model.query_key_norm or model.query_factor != 1.0 or model.key_value_heads < model.num_attention_heads
    )
    # A fused block rotates queries and keys in place if nothing else changes them.
    is_spread = is_kernel and (needs_copy or (model.positions == "rotary" and not s.is_fused))
    if is_spread and not model.query_key_norm:  # the QKV product is freed
        total -= T * s.qkv * e
    total += 3 * T * s.attended * e * (is_spread or (model.positions == "rotary" and not is_kernel))
    if s.config.training.recompute != "selective":
        total += _attention_state(s, is_decoder)
    if model.ffn == "gated" and not is_kernel:
        total += 2 * T * s.inner * e
    if (
        model.experts is not None
    ):  # tokens by expert, their outputs, and these by token again; logits and scores
        total += 3 * T * model.experts.per_token * s.width * e + 12 * T * model.experts.count
    return total


def _attention_state(s: Sizes, is_decoder: bool) -> float:
    model, e = s.config.model, s.element
    launches = attention_launches(s, is_decoder)
    total = 2 * sum(launch.gathered for launch in launches) * s.attended * e
    total += sum(launch.queries for launch in launches) * s.heads * 4  # log-sum-exps in fp32
    if model.query_key_norm and s.config.training.kernels != "fused":
        # Queries and keys in fp32, before and after the norm.
        total += 8 * s.tokens(is_decoder) * s.normed
    pairs = launches[0].queries * s.sequence.length  # under dense attention
    if s.stack(is_decoder).kernel == "dense":  # the mask, the bias under it, and the output before its zeros
        total += pairs * (1 + (s.heads * e if model.relative != "none" else e))
        total += s.tokens(is_decoder) * s.attended * e
    elif model.relative == "disentangled":  # vectors of buckets, scaled, and their inputs
        total += model.position_rows * (2 * s.attended + s.width + s.qkv) * e
    elif model.has_distance_scores:  # two further queries, vectors of distances, and their sinusoids
        total += (2 * s.tokens() * s.attended + s.distances * (s.attended + s.width)) * e
    if s.stack(is_decoder).kernel != "dense":
        return total
    if model.relative == "disentangled":  # scaled queries, and queries and keys by sequence
        total += 5 * s.tokens() * s.attended * e
    elif model.has_query_terms:
        # Queries with both biases, scores of all distances, and which of them a pair has.
        scores = s.tokens() * s.heads * s.distances * e
        total += 3 * s.tokens() * s.attended * e + scores + 16 * pairs
    return total


def _block_backward(s: Sizes, is_decoder: bool) -> float:
    """Peak bytes of a block's backward pass beyond what was saved: at the gradients of the FFN's products."""
    e, T, model = s.element, s.tokens(is_decoder), s.config.model
    hidden, inner = T / s.share * s.width * e, T * s.inner * e
    if s.is_fused:
        moment = 2 * hidden + 2 * inner + s.inner * _SUMS
    else:
        # Under sequence parallelism the gradient of the gathered input exists whole before it is scattered.
        whole = T * s.width * e if s.share > 1 else 0.0
        moment = 2 * hidden + whole + T * s.expanded * e
    if model.has_query_terms and s.stack(is_decoder).kernel == "blocks":
        # Or at attention's two tables (XLNet: one of twice the size) and their gradients, when the FFN's tensors are
        # freed.
        tables = 4 * _table_bytes(s, is_decoder) + T * s.qkv * e
        moment = max(moment, tables - T * s.expanded * e - inner)
    if s.config.training.recompute == "full":
        # One block at a time saves everything again.
        moment += _saved_inside(s, is_decoder)
    return moment


def _head_backward(s: Sizes) -> float:
    """Peak bytes of the LM head: at the gradient of the logits."""
    e, positions, chunks = s.element, s.losses, s.loss_chunks  # only predicted positions have logits
    logits = max(chunks) * s.vocabulary * e
    weights = s.vocabulary * s.embedding * (e + 4 * (len(chunks) > 1))  # gradient; chunks are summed in fp32
    if s.config.model.lora is not None:
        weights = 0
    is_copied = s.config.training.kernels != "fused" or s.config.model.logit_soft_cap is not None
    return 3 * positions * s.width * e + logits + weights + logits * is_copied
