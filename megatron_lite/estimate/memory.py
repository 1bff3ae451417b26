"""Bytes of GPU memory at the peak of a step: what lies there all the time, and the largest of a few moments.

Activations are those that a block's functions save, see block.py and fused_block.py. Workspaces of libraries and
fragmentation are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.estimate.block_costs import BlockCosts
from megatron_lite.estimate.parameters import Stage, buckets
from megatron_lite.estimate.relative_costs import table_bytes
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.estimate.step_costs import LIVE_PARAMETERS, STAGE_3_BUCKET, loss_parts
from megatron_lite.model.cuda_graphs import MOST_SHAPES, RESULTS

_SUMS = 64 * 4  # bytes of GELU's sums for each feature


@dataclass(frozen=True)
class Peak:
    """Bytes on the first rank of a stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # of all micro-batches under way, at the peak
    rest: float  # logits, gradients of activations and of the vocabulary, buckets under way
    graphs: float = 0.0  # that CUDA graphs hold beside them

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def peak(stage: Stage, place: int, sizes: Sizes) -> Peak:
    """Args: place: the stage's number."""
    s = sizes
    weights, gradients, optimizer = _state(stage, s)
    of_blocks, of_words = _in_exchange(stage, s)
    kept = sum(_kept(s, is_decoder) * count for is_decoder, count in _blocks(stage, s))
    # 1F1B: a stage holds as many micro-batches as there are stages from it to the end.
    micro_batches = min(s.pp - place, s.micro_batches) if s.pp > 1 else 1
    # What waits between the stages: a hidden state received and one sent.
    between = s.all_tokens / s.share * s.width * s.element
    kept = kept * micro_batches + (between * (micro_batches + 1) if s.pp > 1 else 0.0)
    moments = [_backward(s, is_decoder) + of_blocks for is_decoder, _ in _blocks(stage, s)]
    vocabulary, is_tied = s.vocabulary * s.embedding * s.element, s.config.model.tie_word_embeddings
    if stage.is_last:
        # A tied embedding's first gradient waits for the second one; another matrix's goes into its bucket.
        moments = [moment + (vocabulary if is_tied else of_words) for moment in moments]
        moments.append(_head(s) + (0.0 if is_tied else of_words))
    # Moments follow each other, so only the largest counts.
    rest = max(moments)
    both = 3 * vocabulary if is_tied and stage.is_last else vocabulary
    # At the end of the backward pass, when blocks keep nothing any more: the gradients of the embedding, of
    # which the tied one's two are added.
    end = max(both, vocabulary + of_words) + of_blocks / 2 + 2 * s.all_tokens * s.embedding * s.element
    if stage.is_first and kept + rest < end:
        kept, rest = 0.0, end
    return Peak(
        weights, gradients, optimizer, kept, rest, _graphs(stage, s) if s.config.training.cuda_graphs else 0.0
    )


def _graphs(stage: Stage, s: Sizes) -> float:
    """Results of each block for each captured length, and the pool in which all captured passes keep their tensors.

    Passes of other lengths run beside the pool, so that it is counted besides wherever there are several.
    """
    lengths = sorted(s.lengths[0], reverse=True)
    hidden = sum(lengths[:MOST_SHAPES]) * s.width * s.element
    pool = _kept(s, False) * stage.blocks + _backward(s, False) if len(lengths) > 1 else 0.0
    return RESULTS * hidden * stage.blocks + pool


def _blocks(stage: Stage, s: Sizes) -> list[tuple[bool, int]]:
    """(is a decoder's, number) of the stage's blocks."""
    encoders = max(0, min(stage.first_block + stage.blocks, s.config.model.num_layers) - stage.first_block)
    counts = ((False, encoders), (True, stage.blocks - encoders))
    return [(is_decoder, count) for is_decoder, count in counts if count]


def _state(stage: Stage, s: Sizes) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of this rank."""
    zero, e = s.config.parallel.zero_stage, s.element
    on_device = 0.0 if s.config.parallel.offload_optimizer else 1.0
    # DeepSpeed's stage 3: 12 bytes for fp32 weights and both moments; `LIVE_PARAMETERS` may be gathered at
    # once.
    if zero == 3:
        own = stage.numbers / s.dp
        live = min(stage.numbers, LIVE_PARAMETERS) * e
        return own * e + live, own * 4 + STAGE_3_BUCKET * 4, own * 12 * on_device
    found = buckets(stage, s)
    numbers = sum(bucket.numbers for bucket in found)
    own = numbers / s.dp
    kept = 4 * (1 + (s.config.ema.decay is not None))  # weights, and their averages
    state = sum(bucket.numbers * (kept + 4 * len(bucket.moments)) for bucket in found) / s.dp
    # ZeRO 2 keeps this rank's part between micro-batches only.
    gradients = numbers if zero == 1 else own if s.micro_batches > 1 else 0.0
    return numbers * e, gradients * 4, state * on_device


def _in_exchange(stage: Stage, s: Sizes) -> tuple[float, float]:
    """ZeRO 2: bytes of the blocks' buckets that are being filled or exchanged, and of that of the vocabulary."""
    if s.config.parallel.zero_stage != 2:
        return 0.0, 0.0
    found = buckets(stage, s)
    words = s.vocabulary * s.embedding
    largest = sorted((b.numbers for b in found if b.numbers < words), reverse=True)
    at_once = 1 if s.config.training.recompute == "none" else 2
    return 4.0 * sum(largest[:at_once]), 4.0 * words


def _kept(s: Sizes, is_decoder: bool) -> float:
    """Bytes that a block keeps for its backward pass."""
    model, e = s.config.model, s.element
    T = s.tokens(is_decoder)
    t, recompute = T / s.share, s.config.training.recompute
    # Only the block's input is kept.
    if recompute == "full":
        return t * s.width * e
    return _inside(s, is_decoder) + (t * s.width * e if model.norm == "pre" else 0.0)


def _inside(s: Sizes, is_decoder: bool) -> float:
    """The same without the input."""
    model, e = s.config.model, s.element
    T = s.tokens(is_decoder)
    t, is_kernel = T / s.share, s.config.training.kernels == "fused"
    hidden, attended, inner = t * s.width * e, T * s.attended * e, T * s.inner * e
    total = 3 * hidden + 16 * t  # the sum after attention, and both norms
    if model.rms_norm and not is_kernel:  # the input and the normed one in fp32
        total += (3 if is_decoder else 2) * 8 * t * s.width
    elif not is_kernel:
        total += 2 * hidden
    costs = BlockCosts(s, is_decoder).heads
    is_spread = is_kernel and costs.changes and not costs.is_in_place
    if not is_spread or model.query_key_norm:  # else the product is gone after it
        total += T * s.qkv * e
    total += attended + 3 * attended * (is_spread or (model.positions == "rotary" and not is_kernel))
    if s.config.training.recompute != "selective":
        total += _attention_state(s, is_decoder)
    if model.norm != "pre":
        total += hidden
    if is_decoder:
        encoded = s.tokens()
        total += 2 * hidden + 2 * attended + 2 * encoded * s.attended * e
    total += T * s.expanded * e + inner
    if model.ffn == "gated" and not is_kernel:
        total += 2 * inner
    return total


def _attention_state(s: Sizes, is_decoder: bool) -> float:
    model, e = s.config.model, s.element
    calls = BlockCosts(s, is_decoder).calls()
    total = 2 * sum(call.gathered for call in calls) * s.attended * e
    total += sum(call.queries for call in calls) * s.heads * 4
    if (
        model.query_key_norm and s.config.training.kernels != "fused"
    ):  # queries and keys in fp32, before and after
        total += 8 * s.tokens(is_decoder) * s.normed
    if s.stack(is_decoder).kernel == "dense":  # the mask, the bias under it, and the output before its zeros
        total += calls[0].pairs * (1 + (s.heads * e if model.relative != "none" else e))
        total += s.tokens(is_decoder) * s.attended * e
    elif model.relative == "disentangled":  # vectors of buckets, with their factor, and what they are made of
        total += model.position_rows * (2 * s.attended + s.width + s.qkv) * e
    elif model.has_distance_scores:  # two more queries, vectors of distances, and their sinusoids
        total += (2 * s.tokens() * s.attended + s.distances * (s.attended + s.width)) * e
    if s.stack(is_decoder).kernel != "dense":
        return total
    if model.relative == "disentangled":  # queries with their factor, and queries and keys by rows
        total += 5 * s.tokens() * s.attended * e
    elif model.has_query_terms:
        # Queries with both biases, scores of all distances, and which of them a pair has.
        scores = s.tokens() * s.heads * s.distances * e
        total += 3 * s.tokens() * s.attended * e + scores + 16 * calls[0].pairs
    return total


def _backward(s: Sizes, is_decoder: bool) -> float:
    """Most bytes within a block's backward pass, beside what was kept: at the gradients of the FFN's products."""
    e, T, model = s.element, s.tokens(is_decoder), s.config.model
    hidden, inner = T / s.share * s.width * e, T * s.inner * e
    if s.is_fused:
        moment = 2 * hidden + 2 * inner + s.inner * _SUMS
    else:
        # Under sequence parallelism the gradient of the gathered input exists whole before it is scattered.
        whole = T * s.width * e if s.share > 1 else 0.0
        moment = 2 * hidden + whole + T * s.expanded * e
    if model.has_query_terms and s.stack(is_decoder).kernel == "blocks":
        # At attention's two tables, or one of twice the rows, and their gradients, where what the FFN had kept is gone.
        of_tables = 4 * table_bytes(BlockCosts(s, is_decoder)) + T * s.qkv * e
        moment = max(moment, of_tables - T * s.expanded * e - inner)
    if s.config.training.recompute == "full":
        # A block that is recomputed keeps everything again, for one block at a time.
        moment += _inside(s, is_decoder)
    return moment


def _head(s: Sizes) -> float:
    """At the gradient of the logits."""
    e, micro = s.element, s.config.batch.micro_batch_size
    # Only rows with a loss have logits.
    rows = s.predicted + s.rows.borders * micro
    parts = loss_parts(s)
    logits = max(parts) * s.vocabulary * e
    weights = s.vocabulary * s.embedding * (e + 4 * (len(parts) > 1))  # in parts their sum is in fp32
    more = (
        logits if s.config.training.kernels != "fused" or s.config.model.logit_soft_cap is not None else 0.0
    )
    return 3 * rows * s.width * e + logits + weights + more
