"""The kernels and collectives of a step outside its blocks: embedding, heads, gradients, the update, pipeline stages.

Fractional factors are means over several small kernels, fitted to traces of a step, not derived."""

from __future__ import annotations

import itertools

from megatron_lite.estimate.block_costs import BlockCosts
from megatron_lite.estimate.gpus import Gpu
from megatron_lite.estimate.optimizer_costs import add_update
from megatron_lite.estimate.parameters import Bucket, Stage, buckets, is_small, moves
from megatron_lite.estimate.roofline import ISSUE, SORT_KERNELS
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.estimate.tally import Tally
from megatron_lite.model.kernels.sums import sum_programs

# Counted in traces: kernels over single numbers, or over one number per predicted position.
_LOSS_FORWARD, _LOSS_BACKWARD, _PARALLEL_LOSS = 5, 3, 5
_STEP, _CLIPPING, _PER_GROUP = 15, 4, 3
# DeepSpeed's defaults at ZeRO 3: numbers kept for their next use; gathered ahead at once; of a parameter that is not
# split.
LIVE_PARAMETERS, GATHERED_AHEAD, STAYS_WHOLE = 1_000_000_000, 50_000_000, 100_000
_ALONE = 0.6  # gathers per large parameter beyond LIVE_PARAMETERS; fitted to traces, not derived
STAGE_3_BUCKET = 500_000_000  # numbers of its buffer for gradients, unless reduce_bucket_size is set


def stage_tally(stage: Stage, sizes: Sizes, gpu: Gpu) -> Tally:
    """A whole step on the first rank of a stage."""
    micro_batch, step = Tally(gpu), Tally(gpu)
    _blocks(micro_batch, stage, sizes)
    if stage.is_first:
        _embedding(micro_batch, sizes)
        _pair_tables(micro_batch, sizes)
    if stage.is_last:
        _head(micro_batch, sizes)
    if sizes.pp > 1:  # hidden states and their gradients, sent and received
        hidden = sizes.all_tokens / sizes.share * sizes.width * sizes.element
        neighbours = 2 - stage.is_first - stage.is_last
        micro_batch.collective("send", hidden, sizes.neighbours, 2 * neighbours)
        micro_batch.small(1 + (not stage.is_first) + stage.is_last)
    step.add(micro_batch, sizes.micro_batches)
    if sizes.config.parallel.zero_stage == 3:
        _zero_3(step, stage, sizes)
    else:
        add_gradients(step, buckets(stage, sizes), sizes)
    return step


def _blocks(tally: Tally, stage: Stage, s: Sizes) -> None:
    model = s.config.model
    encoders = max(0, min(stage.first_block + stage.blocks, model.num_layers) - stage.first_block)
    for count, is_decoder in ((encoders, False), (stage.blocks - encoders, True)):
        # Averaged over likely lengths: the mean length would hide a wave that only half of the batches need.
        for length, share in s.lengths[is_decoder].items() if count else ():
            block, costs = Tally(tally.gpu), BlockCosts(s, is_decoder, length)
            costs.forward(block)
            costs.backward(block)
            if s.config.training.cuda_graphs:
                # A captured block is one launch forward and one backward.
                block.launches, block.public_calls = 2.0, 0.0
            tally.add(block, count * share)
    ends_with_sum = s.config.training.recompute != "full" and s.config.parallel.zero_stage < 3
    if model.norm == "pre" and not model.decoder_layers and ends_with_sum:
        # The first block's input is not a sum, and the last one's output is: kernels that inner blocks do not have.
        size = s.tokens() / s.share * s.width * s.element
        tally.kernel(3 * size)
        tally.micros["elementwise"] -= 2 * size / tally.gpu.bandwidth_tbs / 1e6  # type: ignore[assignment]
        tally.kernel(2 * size)
        programs = sum_programs(s.width, tally.gpu.processors)
        tally.finish(8 * programs * s.width, programs)
        tally.micros["elementwise"] -= size / tally.gpu.bandwidth_tbs / 1e6  # type: ignore[assignment]


def _embedding(tally: Tally, s: Sizes) -> None:
    model, e = s.config.model, s.element
    T, t = s.all_tokens, s.all_tokens / s.share
    size, local = T * s.embedding * e, t * s.embedding * e
    words = s.vocabulary * s.embedding * e
    tables = (model.positions.startswith("learned")) + (model.positions == "learned_blocks")
    tables += (model.segments > 0) + (model.task_types > 0)
    tally.kernel(2 * size)
    tally.kernel(2 * local, tables)
    tally.kernel(3 * local, tables)
    if s.tp > 1:
        tally.kernel(8 * T, 5)
        tally.kernel(2 * size, 2)  # words of other ranks are set to zero, and so are their gradients
        if s.share > 1:
            tally.collective("scatter", size, s.tp_group)
            tally.collective("gather", size, s.tp_group)
        else:
            tally.kernel(2 * size)
            tally.collective("all_reduce", size, s.tp_group)
    kernels = (model.embedding_norm, model.embedding_dropout > 0)
    tally.kernel(2 * local, sum(kernels))
    tally.kernel(3 * local if model.embedding_norm else 2 * local, sum(kernels))
    if model.embedding_norm:
        programs = sum_programs(s.embedding, tally.gpu.processors)
        tally.finish(8 * programs * s.embedding, programs)
    if model.embedding_size is not None:
        tally.product(t, s.embedding, s.width, e)
        tally.product(t, s.width, s.embedding, e)
        tally.product(s.embedding, t, s.width, e)
    # The gradient of a table is torch's sorted, deterministic sum over ids.
    sorts = tally.gpu.least_us * SORT_KERNELS
    tally.micros["elementwise"] += (1 + tables) * sorts  # type: ignore[assignment]
    tally.kernel(local, tables)  # gradients of the tables
    tally.kernel(size + words)
    if model.tie_word_embeddings and s.pp == 1:
        tally.kernel(3 * words)


def _pair_tables(tally: Tally, s: Sizes) -> None:
    """The mask of dense attention and its bias by distance, made once for all layers."""
    model, micro = s.config.model, s.config.batch.micro_batch_size
    for stack in (s.sequence.stack, s.sequence.decoder):
        if stack is None or stack.kernel == "varlen":
            continue
        if stack.kernel == "blocks":
            # The bias and the bucket of each distance, or sinusoids and columns.
            tally.small(30 * (model.relative == "buckets" or model.has_distance_scores))
            continue
        pairs = stack.attention[0].pairs * micro
        tally.kernel(3 * pairs, 7)
        if model.relative == "buckets":
            bias = pairs * s.heads * s.element
            tally.kernel(7.7 * pairs, 18)
            tally.kernel(2 * bias + 8 * pairs)
            tally.kernel(bias + 8 * pairs)  # the gradient of the table


def _head(tally: Tally, s: Sizes) -> None:
    model, e, positions = s.config.model, s.element, s.predicted
    micro = s.config.batch.micro_batch_size
    T = s.tokens(s.sequence.decoder is not None)
    size = positions * s.width * e
    if s.share > 1:
        tally.collective("gather", T * s.width * e, s.tp_group)
        tally.kernel(0.0)  # this rank's slice of the gradient
    tally.kernel(2 * size)
    tally.kernel(T * s.width * e)  # the gradient of all tokens
    tally.kernel(2 * T * s.width * e + size)
    if model.norm == "pre":
        tally.kernel(2 * size)
        tally.kernel(3 * size)
    if model.head_transform or model.embedding_size is not None:
        tally.product(positions, s.width, s.embedding, e)
        tally.product(positions, s.embedding, s.width, e)
        tally.product(s.width, positions, s.embedding, e)
        tally.kernel(3 * size, 7)
    borders = s.sequence.borders * micro
    if borders:
        tally.product(borders, 2 * s.width, s.width, e)
        tally.product(borders, s.width, 2 * s.width, e)
        tally.product(2 * s.width, borders, s.width, e)
        tally.kernel(3 * borders * s.width * e, 20)
    if s.sequence.sentences:
        tally.kernel(T * s.width * e, 3)
        tally.small(28)
    positions += borders
    chunks = loss_chunks(s)
    for chunk in chunks:
        _logits(tally, s, chunk, len(chunks) > 1)
    if len(chunks) > 1:
        tally.kernel(
            (4 + e) * s.vocabulary * s.embedding
        )  # the weight's gradient, summed in fp32, to its type
        tally.small(2)
    if s.tp > 1:
        tally.small(_PARALLEL_LOSS)
        tally.collective("all_reduce", 4 * positions, s.tp_group, 3)
        tally.kernel(2 * positions * s.embedding * e)
        tally.collective("all_reduce", positions * s.embedding * e, s.tp_group)
    tally.kernel(size)
    tally.small(_LOSS_FORWARD + _LOSS_BACKWARD + 3)


def loss_chunks(s: Sizes) -> list[float]:
    """Predicted positions of each chunk of logits, see `training.loss_rows`."""
    most, positions = s.config.training.loss_rows, s.predicted
    borders = s.sequence.borders * s.config.batch.micro_batch_size
    if not 0 < most < positions + borders:
        return [positions + borders]
    chunks = [[most] * int(total // most) + [total % most] for total in (positions, borders)]
    return [chunk for chunk in itertools.chain(*chunks) if chunk]


def _logits(tally: Tally, s: Sizes, positions: float, is_chunked: bool) -> None:
    """Logits of some positions, forward and backward, and their losses; chunks recompute the logits."""
    model, e, is_fused = s.config.model, s.element, s.config.training.kernels == "fused"
    logits = positions * s.vocabulary * e
    for _ in range(1 + is_chunked):
        tally.product(positions, s.embedding, s.vocabulary, e)
        if model.logit_soft_cap is not None:
            tally.kernel(2 * logits, 3)
    for kernel, passes in (("log_sums", 1), ("write_gradient", 2)):
        tally.kernel(passes * logits, issued=ISSUE[kernel] * positions * s.vocabulary * is_fused)
    if model.head_bias:
        tally.kernel(logits)
    if model.lora is None:
        tally.product(
            s.vocabulary, positions, s.embedding, e, 8 * is_chunked
        )  # chunks add to the sum in fp32
    tally.product(positions, s.vocabulary, s.embedding, e)
    if not is_fused:
        tally.kernel(2 * logits, 6)
    if s.config.training.label_smoothing:
        tally.kernel(logits)
        tally.kernel(2 * logits, 2)
    if model.logit_soft_cap is not None:
        tally.kernel(2 * logits, 3)
    if is_chunked:
        tally.kernel(2 * positions * s.embedding * e)  # into the gradient of all positions


def add_gradients(tally: Tally, stage_buckets: list[Bucket], s: Sizes) -> None:
    """Sums of a step's gradients, their exchange, and the update at ZeRO 1 and 2."""
    first, later = (
        Tally(tally.gpu),
        Tally(tally.gpu),
    )  # a step's first micro-batch writes the sums, later ones add
    is_zero_2 = s.config.parallel.zero_stage == 2
    for bucket in stage_buckets:
        for waiting in moves(bucket):
            numbers = sum(p.numbers for p in waiting)
            first.kernel(numbers * (8 + s.element))
            small = [p for p in waiting if is_small(p)]
            if small:
                numbers = sum(p.numbers for p in small)
                later.kernel(numbers * (8 + s.element))
                later.kernel(numbers * 12)
            for p in waiting:
                if not is_small(p):
                    later.kernel(p.numbers * (8 + s.element))
        if is_zero_2:
            first.kernel(4 * bucket.numbers)
            first.kernel(12 * bucket.numbers / s.dp)
    passes = s.micro_batches
    tally.add(first, passes if is_zero_2 else 1)
    tally.add(later, 0 if is_zero_2 else passes - 1)
    shard = sum(bucket.numbers for bucket in stage_buckets) / s.dp
    for bucket in stage_buckets:
        # 4 bytes: gradients are summed over ranks in fp32. ZeRO 2 exchanges them in every micro-batch, ZeRO 1 once.
        tally.collective("scatter", 4 * bucket.numbers, s.dp_group, passes if is_zero_2 else 1)
        tally.collective("gather", s.element * bucket.numbers, s.dp_group)
        if bucket.is_summed:
            group = s.tp_group if bucket.parameters[0].is_partial else s.ends
            tally.collective("all_reduce", 4 * bucket.numbers / s.dp, group)
    if not s.config.parallel.offload_optimizer:
        tally.kernel((4 + 2 * s.element) * shard, 1, "optimizer")
    tally.small(_STEP + _CLIPPING * (s.config.optimizer.clip_grad_norm > 0), "optimizer")
    tally.kernel(4 * shard, 1, "optimizer")
    tally.kernel(8 * shard, 1, "optimizer")
    if s.config.optimizer.kind != "adamw":
        add_update(tally, stage_buckets, s)
    for decays in {bucket.decays for bucket in stage_buckets} if s.config.optimizer.kind == "adamw" else ():
        # AdamW: 32 bytes of traffic for each parameter, of weight, gradient and two moments in fp32.
        updated = sum(bucket.numbers for bucket in stage_buckets if bucket.decays == decays) / s.dp
        if not s.config.parallel.offload_optimizer:
            tally.kernel(32 * updated, 1, "optimizer")
            tally.small(_PER_GROUP - 1, "optimizer")
    tally.collective("all_reduce", 8, s.world)
    tally.small(1 + passes)


def _zero_3(tally: Tally, stage: Stage, s: Sizes) -> None:
    """DeepSpeed's own ZeRO 3: weights are gathered before their use, gradients exchanged in every micro-batch.

    Small parameters are gathered one by one after the update, weights with a distant next use in the backward pass too.
    """
    numbers, e = stage.numbers, s.element
    large = sum(parameter.numbers > STAYS_WHOLE for parameter in stage.parameters)
    beyond, again = (max(0.0, 1 - live / numbers) for live in (LIVE_PARAMETERS, LIVE_PARAMETERS / 2))
    gathers = -(-min(numbers, LIVE_PARAMETERS) // GATHERED_AHEAD) + _ALONE * large * (
        beyond and beyond + again
    )
    micro_batch = Tally(tally.gpu)
    micro_batch.kernel(2 * numbers * e / max(1, large), large * (1 + again))
    trained, gradients = sum(parameter.numbers for parameter in stage.trained), len(stage.trained)
    micro_batch.kernel(trained / gradients * (4 + 2 * e), gradients)  # gradients to fp32
    micro_batch.kernel(8 * trained, 2)
    micro_batch.kernel(12 * trained / s.dp / gradients, gradients)
    exchanges = -(-trained // STAGE_3_BUCKET)
    micro_batch.collective("scatter", 4 * trained / exchanges, s.dp_group, exchanges)
    micro_batch.collective("gather", e * numbers * (1 + again) / gathers, s.dp_group, gathers)
    tally.add(micro_batch, s.micro_batches)
    shard = trained / s.dp
    tally.kernel(8 * shard / gradients, 2 * gradients, "optimizer")
    tally.kernel((8 + 8 + 32 + 8) * shard / 8, 8, "optimizer")
    tally.small(60, "optimizer")
    # DeepSpeed gathers parameters of up to `STAYS_WHOLE` numbers one by one after the update.
    tally.collective("gather", e * numbers / len(stage.parameters), s.dp_group, len(stage.parameters) - large)
    tally.collective("all_reduce", 8, s.world, 2)
