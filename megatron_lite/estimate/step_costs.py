"""The kernels and collectives of a step beside its blocks: embedding, heads, gradients, the update, pipeline stages."""

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

# Kernels on single numbers, or one for each row with loss.
_LOSS_FORWARD, _LOSS_BACKWARD, _PARALLEL_LOSS = 5, 3, 5
_STEP, _CLIPPING, _PER_GROUP = 15, 4, 3
# DeepSpeed's defaults at ZeRO 3: numbers kept for their next use, gathered ahead at once, of a parameter kept whole.
LIVE_PARAMETERS, GATHERED_AHEAD, STAYS_WHOLE = 1_000_000_000, 50_000_000, 100_000
_ALONE = 0.6  # gathers of a parameter beyond that number, where few are gathered ahead, as in traces
STAGE_3_BUCKET = 500_000_000  # numbers of its buffer for gradients, unless reduce_bucket_size says else


def stage_tally(stage: Stage, sizes: Sizes, gpu: Gpu) -> Tally:
    """A whole step on the first rank of a stage."""
    # pass_ is a micro-batch, total the step.
    pass_, total = Tally(gpu), Tally(gpu)
    _blocks(pass_, stage, sizes)
    if stage.is_first:
        _embedding(pass_, sizes)
        _pairs_once(pass_, sizes)
    if stage.is_last:
        _head(pass_, sizes)
    _Pipe(stage, sizes).exchange(pass_)
    total.add(pass_, sizes.micro_batches)
    if sizes.config.parallel.zero_stage == 3:
        _stage_3(total, stage, sizes)
    else:
        add_gradients(total, buckets(stage, sizes), sizes)
    return total


def _blocks(tally: Tally, stage: Stage, s: Sizes) -> None:
    model = s.config.model
    encoders = max(0, min(stage.first_block + stage.blocks, model.num_layers) - stage.first_block)
    for count, is_decoder in ((encoders, False), (stage.blocks - encoders, True)):
        # Averaged over likely lengths: the mean length hides a wave that half of the batches begin.
        for length, share in s.lengths[is_decoder].items() if count else ():
            one, costs = Tally(tally.gpu), BlockCosts(s, is_decoder, length)
            costs.forward(one)
            costs.backward(one)
            if s.config.training.cuda_graphs:
                # A captured block is one launch forward and one backward.
                one.launches = 2.0
            tally.add(one, count * share)
    ends_with_sum = s.config.training.recompute != "full" and s.config.parallel.zero_stage < 3
    if model.norm == "pre" and not model.decoder_layers and ends_with_sum:
        # The first block's input is no sum; the last one's output is: kernels that a block between does not have.
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
    size, own = T * s.embedding * e, t * s.embedding * e
    words = s.vocabulary * s.embedding * e
    tables = (model.positions.startswith("learned")) + (model.positions == "learned_blocks")
    tables += (model.segments > 0) + (model.task_types > 0)
    tally.kernel(2 * size)
    tally.kernel(2 * own, tables)
    tally.kernel(3 * own, tables)
    if s.tp > 1:
        tally.kernel(8 * T, 5)
        tally.kernel(2 * size, 2)  # what other ranks hold is zero, and so is its gradient
        if s.share > 1:
            tally.collective("scatter", size, s.tp_group)
            tally.collective("gather", size, s.tp_group)
        else:
            tally.kernel(2 * size)
            tally.collective("all_reduce", size, s.tp_group)
    kernels = (model.embedding_norm, model.embedding_dropout > 0)
    tally.kernel(2 * own, sum(kernels))
    tally.kernel(3 * own if model.embedding_norm else 2 * own, sum(kernels))
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
    tally.kernel(own, tables)  # gradients of the tables
    tally.kernel(size + words)
    if model.tie_word_embeddings and s.pp == 1:
        tally.kernel(3 * words)


def _pairs_once(tally: Tally, s: Sizes) -> None:
    """The mask of dense attention, its bias by distances, made once for all layers."""
    model, micro = s.config.model, s.config.batch.micro_batch_size
    for stack in (s.rows.stack, s.rows.decoder):
        if stack is None or stack.kernel == "varlen":
            continue
        if stack.kernel == "blocks":
            # The bias and the bucket of each distance, or sinusoids and columns.
            tally.small(30 * (model.relative == "buckets" or model.has_distance_scores))
            continue
        pairs = stack.calls[0].pairs * micro
        tally.kernel(3 * pairs, 7)
        if model.relative == "buckets":
            bias = pairs * s.heads * s.element
            tally.kernel(7.7 * pairs, 18)
            tally.kernel(2 * bias + 8 * pairs)
            tally.kernel(bias + 8 * pairs)  # the gradient of the table


def _head(tally: Tally, s: Sizes) -> None:
    model, e, rows = s.config.model, s.element, s.predicted
    micro = s.config.batch.micro_batch_size
    T = s.tokens(s.rows.decoder is not None)
    size = rows * s.width * e
    if s.share > 1:
        tally.collective("gather", T * s.width * e, s.tp_group)
        tally.kernel(0.0)  # this rank's part of the gradient
    tally.kernel(2 * size)
    tally.kernel(T * s.width * e)  # the gradient of all tokens
    tally.kernel(2 * T * s.width * e + size)
    if model.norm == "pre":
        tally.kernel(2 * size)
        tally.kernel(3 * size)
    if model.head_transform or model.embedding_size is not None:
        tally.product(rows, s.width, s.embedding, e)
        tally.product(rows, s.embedding, s.width, e)
        tally.product(s.width, rows, s.embedding, e)
        tally.kernel(3 * size, 7)
    borders = s.rows.borders * micro
    if borders:
        tally.product(borders, 2 * s.width, s.width, e)
        tally.product(borders, s.width, 2 * s.width, e)
        tally.product(2 * s.width, borders, s.width, e)
        tally.kernel(3 * borders * s.width * e, 20)
    if s.rows.sentences:
        tally.kernel(T * s.width * e, 3)
        tally.small(28)
    rows += borders
    parts = loss_parts(s)
    for some in parts:
        _logits(tally, s, some, len(parts) > 1)
    if len(parts) > 1:
        tally.kernel((4 + e) * s.vocabulary * s.embedding)  # their sum to the weight's type
        tally.small(2)
    if s.tp > 1:
        tally.small(_PARALLEL_LOSS)
        tally.collective("all_reduce", 4 * rows, s.tp_group, 3)
        tally.kernel(2 * rows * s.embedding * e)
        tally.collective("all_reduce", rows * s.embedding * e, s.tp_group)
    tally.kernel(size)
    tally.small(_LOSS_FORWARD + _LOSS_BACKWARD + 3)


def loss_parts(s: Sizes) -> list[float]:
    """Rows of logits that are there at a time, see `training.loss_rows`."""
    most, rows = s.config.training.loss_rows, s.predicted
    borders = s.rows.borders * s.config.batch.micro_batch_size
    if not 0 < most < rows + borders:
        return [rows + borders]
    parts = [[most] * int(of // most) + [of % most] for of in (rows, borders)]
    return [some for some in itertools.chain(*parts) if some]


def _logits(tally: Tally, s: Sizes, rows: float, in_parts: bool) -> None:
    """Logits of some rows, their losses, and back; in parts they are computed again."""
    model, e, is_fused = s.config.model, s.element, s.config.training.kernels == "fused"
    logits = rows * s.vocabulary * e
    for _ in range(1 + in_parts):
        tally.product(rows, s.embedding, s.vocabulary, e)
        if model.logit_soft_cap is not None:
            tally.kernel(2 * logits, 3)
    for kernel, passes in (("log_sums", 1), ("write_gradient", 2)):
        tally.kernel(passes * logits, issued=ISSUE[kernel] * rows * s.vocabulary * is_fused)
    if model.head_bias:
        tally.kernel(logits)
    tally.product(s.vocabulary, rows, s.embedding, e, 8 * in_parts)  # adds to what is there
    tally.product(rows, s.vocabulary, s.embedding, e)
    if not is_fused:
        tally.kernel(2 * logits, 6)
    if s.config.training.label_smoothing:
        tally.kernel(logits)
        tally.kernel(2 * logits, 2)
    if model.logit_soft_cap is not None:
        tally.kernel(2 * logits, 3)
    if in_parts:
        tally.kernel(2 * rows * s.embedding * e)  # into the gradient of all rows


class _Pipe:
    """The hidden states that a stage sends and receives in a micro-batch."""

    def __init__(self, stage: Stage, sizes: Sizes):
        self.stage, self.s = stage, sizes

    def exchange(self, tally: Tally) -> None:
        s = self.s
        if s.pp == 1:
            return
        size = s.all_tokens / s.share * s.width * s.element
        neighbours = 2 - self.stage.is_first - self.stage.is_last
        tally.collective("send", size, s.neighbours, 2 * neighbours)
        tally.small(1 + (not self.stage.is_first) + self.stage.is_last)


def add_gradients(tally: Tally, found: list[Bucket], s: Sizes) -> None:
    """Sums of a step's gradients, their exchange, and the update at ZeRO 1 and 2."""
    each, later = Tally(tally.gpu), Tally(tally.gpu)
    at_2 = s.config.parallel.zero_stage == 2
    for bucket in found:
        for waiting in moves(bucket):
            numbers = sum(p.numbers for p in waiting)
            each.kernel(numbers * (8 + s.element))
            small = [p for p in waiting if is_small(p)]
            if small:
                numbers = sum(p.numbers for p in small)
                later.kernel(numbers * (8 + s.element))
                later.kernel(numbers * 12)
            for p in waiting:
                if not is_small(p):
                    later.kernel(p.numbers * (8 + s.element))
        if at_2:
            each.kernel(4 * bucket.numbers)
            each.kernel(12 * bucket.numbers / s.dp)
    passes = s.micro_batches
    tally.add(each, passes if at_2 else 1)
    tally.add(later, 0 if at_2 else passes - 1)
    own = sum(bucket.numbers for bucket in found) / s.dp
    for bucket in found:
        # 4 bytes: gradients are summed over ranks in fp32. ZeRO 2 exchanges them in every micro-batch, ZeRO 1
        # once.
        tally.collective("scatter", 4 * bucket.numbers, s.dp_group, passes if at_2 else 1)
        tally.collective("gather", s.element * bucket.numbers, s.dp_group)
        if bucket.is_summed:
            group = s.tp_group if bucket.parameters[0].is_partial else s.ends
            tally.collective("all_reduce", 4 * bucket.numbers / s.dp, group)
    if not s.config.parallel.offload_optimizer:
        tally.kernel((4 + 2 * s.element) * own, 1, "optimizer")
    tally.small(_STEP + _CLIPPING * (s.config.optimizer.clip_grad_norm > 0), "optimizer")
    tally.kernel(4 * own, 1, "optimizer")
    tally.kernel(8 * own, 1, "optimizer")
    if s.config.optimizer.kind != "adamw":
        add_update(tally, found, s)
    for decays in {bucket.decays for bucket in found} if s.config.optimizer.kind == "adamw" else ():
        # AdamW: 32 bytes of traffic for each parameter, of weight, gradient and two moments in fp32.
        updated = sum(bucket.numbers for bucket in found if bucket.decays == decays) / s.dp
        if not s.config.parallel.offload_optimizer:
            tally.kernel(32 * updated, 1, "optimizer")
            tally.small(_PER_GROUP - 1, "optimizer")
    tally.collective("all_reduce", 8, s.world)
    tally.small(1 + passes)


def _stage_3(tally: Tally, stage: Stage, s: Sizes) -> None:
    """DeepSpeed's own ZeRO 3: weights are gathered before their use, gradients exchanged in every micro-batch.

    Small parameters are gathered one by one after the update, weights with a distant next use in the backward pass too.
    """
    numbers, count, e = stage.numbers, len(stage.parameters), s.element
    large = sum(parameter.numbers > STAYS_WHOLE for parameter in stage.parameters)
    beyond, again = (max(0.0, 1 - live / numbers) for live in (LIVE_PARAMETERS, LIVE_PARAMETERS / 2))
    gathers = -(-min(numbers, LIVE_PARAMETERS) // GATHERED_AHEAD) + _ALONE * large * (
        beyond and beyond + again
    )
    one = Tally(tally.gpu)
    one.kernel(2 * numbers * e / max(1, large), large * (1 + again))
    one.kernel(numbers / count * (4 + 2 * e), count)  # gradients to fp32
    one.kernel(8 * numbers, 2)
    one.kernel(12 * numbers / s.dp / count, count)
    exchanges = -(-numbers // STAGE_3_BUCKET)
    one.collective("scatter", 4 * numbers / exchanges, s.dp_group, exchanges)
    one.collective("gather", e * numbers * (1 + again) / gathers, s.dp_group, gathers)
    tally.add(one, s.micro_batches)
    own = numbers / s.dp
    tally.kernel(8 * own / count, 2 * count, "optimizer")
    tally.kernel((8 + 8 + 32 + 8) * own / 8, 8, "optimizer")
    tally.small(60, "optimizer")
    # DeepSpeed gathers parameters of up to `STAYS_WHOLE` numbers one by one after the update.
    tally.collective("gather", e * numbers / count, s.dp_group, count - large)
    tally.collective("all_reduce", 8, s.world, 2)
