"""The kernels of a block, forward and backward, with the bytes that each reads and writes.

The list follows block.py and fused_block.py, kernel by kernel; tests compare it with traces of the blocks. Names: s
sizes, e bytes of a number, T tokens within tensor-parallel layers, t tokens of this rank outside them. Fractional
factors are means over several small kernels, fitted to those traces, not derived.
"""

from __future__ import annotations

from megatron_lite.estimate.average_sequence import AttentionLaunch
from megatron_lite.estimate.query_key_costs import RMS_BACKWARD, RMS_FORWARD, QueryKeyCosts, rms
from megatron_lite.estimate.roofline import ISSUE, Work, activation_issue
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.estimate.tally import Tally
from megatron_lite.model.flops import update_shapes
from megatron_lite.model.kernels.sums import sum_programs

_ACTIVATION_PROGRAMS = 64  # that sum over tokens, fused.py; 4 bytes a sum


class BlockCosts:
    """One block of a stack. Args: is_decoder: with cross-attention. length: of a micro-batch; 0 = the mean."""

    def __init__(self, sizes: Sizes, is_decoder: bool = False, length: float = 0.0):
        self.s, self.is_decoder = sizes, is_decoder
        self.model = sizes.config.model
        self.T = length or sizes.tokens(is_decoder)
        self.heads = QueryKeyCosts(sizes, self.T)
        self.t = self.T / sizes.share
        self.e = sizes.element
        self.has_kernels = sizes.config.training.kernels == "fused"
        self.dropout = self.model.output_dropout > 0
        self._sums = 0.0  # bytes of partial sums over tokens, which a fused block finishes in one kernel
        # The norm's kernel, and the bytes that it saves per token: deviation, and for LayerNorm the mean.
        self._add_norm, self._stats = ("add_rms_norm", 4) if self.model.rms_norm else ("add_norm", 8)

    # Forward

    def forward(self, tally: Tally, again: bool = False) -> None:
        """Args: again: recomputation in the backward pass, which stops at the last tensor that is saved."""
        model, s = self.model, self.s
        recompute = s.config.training.recompute == "full"
        # Recomputation stops at the last tensor that the backward pass needs, which is then the FFN's
        # activation.
        ends_early = again and model.norm == "pre" and not self.dropout and not model.has_bias("mlp")
        if model.norm == "pre":
            self._norm(tally, not (recompute or self.is_decoder))
        self._attention_layer(tally)
        self._norm(tally, True)
        if self.is_decoder:
            self._cross_layer(tally)
            self._norm(tally, True)
        self._mlp(tally, ends_early)
        if ends_early:
            return
        if model.norm != "pre":
            self._norm(tally, True)
        # Otherwise the next block's norm makes the sum, so that the residual is read once less.
        elif recompute or self.is_decoder or self._is_joined:
            self._add(tally)
        self._extras(tally, 1.0)

    @property
    def _is_joined(self) -> bool:
        """Whether a block ends with the residual sum: at ZeRO 3."""
        return self.s.config.parallel.zero_stage == 3

    def _norm(self, tally: Tally, has_x: bool) -> None:
        """hidden + dropout(x), and its norm."""
        size = self.t * self.s.width * self.e
        if not self.has_kernels:
            if has_x:
                self._add(tally)
            self._plain_norm(tally, self.t)
        else:
            size = (4 if has_x else 2) * size + self.t * (self._stats + 4 * (self.dropout and has_x))
            tally.kernel(size, issued=self._issued(self._add_norm))

    def _plain_norm(self, tally: Tally, tokens: float) -> None:
        numbers = tokens * self.s.width
        if not self.model.rms_norm or self.has_kernels:
            tally.kernel(2 * numbers * self.e)
            return
        rms(tally, numbers * self.e, RMS_FORWARD)

    def _add(self, tally: Tally) -> None:
        size = self.t * self.s.width * self.e
        if self.has_kernels:
            tally.kernel(3 * size + 4 * self.t * self.dropout, issued=self._issued("add_norm"))
        else:
            tally.kernel(2 * size, 2)  # the bias, and the sum
            if self.dropout:
                tally.kernel(2 * size, 9)  # a hash of each number

    def _enter(self, tally: Tally, tokens: float) -> None:
        """Before a product whose columns are split."""
        if self.s.share > 1:
            tally.collective("gather", tokens * self.s.width * self.e, self.s.tp_group)

    def _leave(self, tally: Tally, tokens: float) -> None:
        """After a product whose rows are split."""
        if self.s.tp == 1:
            return
        size = tokens * self.s.width * self.e
        if self.s.share > 1:
            tally.collective("scatter", size, self.s.tp_group)
        else:
            tally.kernel(2 * size)
            tally.collective("all_reduce", size, self.s.tp_group)

    def _attention_layer(self, tally: Tally) -> None:
        s = self.s
        self._enter(tally, self.T)
        tally.product(self.T, s.width, s.qkv, self.e)
        self._attend(tally)
        tally.product(self.T, s.attended, s.width, self.e)
        self._leave(tally, self.T)

    def attention_launches(self) -> list[AttentionLaunch]:
        """The attention launches of a micro-batch; padding is documents of 64 tokens."""
        stack, micro = self.s.stack(self.is_decoder), self.s.config.batch.micro_batch_size
        launches = [launch.times(micro) for launch in stack.attention]
        if stack.kernel == "varlen" and launches:
            padding = max(0.0, self.T - sum(launch.queries for launch in launches))
            launches[0] = launches[0].plus(self.s.sequence.padding.times(padding / 64))
        return launches

    def _launch(self, tally: Tally, launch: AttentionLaunch, backward: bool) -> None:
        work = launch.backward if backward else launch.forward
        moved = moved_bytes(self, work, backward)
        tally.attention(work, launch.queries, self.s.heads, self.model, backward, moved)

    def _issued(self, kernel: str, numbers: float = 0.0) -> float:
        """Instructions of a kernel over these numbers, or over the hidden state."""
        return ISSUE[kernel] * (numbers or self.t * self.s.width)

    def _attend(self, tally: Tally) -> None:
        """Attention without the QKV and output products: what selective recomputation repeats."""
        s, kernel = self.s, self.s.stack(self.is_decoder).kernel
        whole = self.T * s.attended * self.e
        self.heads.spread(tally)
        launches = self.attention_launches()
        for launch in launches:
            if launch.gathered:
                # Keys and values are read and written once.
                tally.kernel(4 * launch.gathered * s.attended * self.e)
            if kernel == "dense":
                relative_terms(self, tally, launch.pairs)
                self._masked(tally, launch.pairs)
            else:
                table_kernels(self, tally, launch.forward.type)
            self._launch(tally, launch, backward=False)
        if kernel == "dense":
            tally.kernel(2 * whole)  # zeros for tokens that see nothing
        elif kernel != "blocks" and len(launches) > 1:
            tally.kernel(2 * whole)

    def _masked(self, tally: Tally, pairs: float) -> None:
        """The scores' bias of all pairs, masked."""
        tally.kernel(2 * pairs)
        if self.model.relative == "none":
            tally.kernel((1 + self.e) * pairs)
        else:
            tally.kernel(2 * pairs * self.s.heads * self.e)

    def _unmasked(self, tally: Tally, pairs: float) -> None:
        """The gradient of the bias, which the layers add up."""
        size = pairs * self.s.heads * self.e
        tally.kernel(2 * size, self.model.relative != "none")
        tally.kernel(3 * size, self.model.relative == "buckets")

    def _cross_layer(self, tally: Tally) -> None:
        s, encoded = self.s, self.s.tokens()
        self._enter(tally, self.T)
        self._enter(tally, encoded)
        tally.product(self.T, s.width, s.attended, self.e)
        tally.product(encoded, s.width, 2 * s.attended, self.e)
        whole, is_dense = self.T * s.attended * self.e, s.stack(True).kernel == "dense"
        if self.model.unscaled_scores:
            tally.kernel(2 * whole)
        if is_dense:
            tally.small(2)
            tally.kernel((1 + self.e) * self._cross_launch().pairs)
        self._launch(tally, self._cross_launch(), backward=False)
        if is_dense:
            tally.kernel(2 * whole)
        tally.product(self.T, s.attended, s.width, self.e)
        self._leave(tally, self.T)

    def _cross_launch(self) -> AttentionLaunch:
        assert self.s.sequence.cross is not None
        return self.s.sequence.cross.times(self.s.config.batch.micro_batch_size)

    def _mlp(self, tally: Tally, ends_early: bool) -> None:
        s = self.s
        self._enter(tally, self.T)
        tally.product(self.T, s.width, s.expanded, self.e)
        self._activation(tally)
        tally.product(self.T, s.inner, s.width, self.e)
        if not ends_early:
            self._leave(tally, self.T)

    def _activation(self, tally: Tally) -> None:
        self._activate(tally, "activate", 1)
        if not self.has_kernels:
            size, model = self.T * self.s.inner * self.e, self.model
            tally.kernel(2 * size, model.has_bias("mlp") + (model.activation_dropout > 0))
            tally.kernel(3 * size, model.ffn == "gated")

    def _activate(self, tally: Tally, kernel: str, passes: int, sum_bytes: float = 0.0) -> None:
        """The activation's kernel, over `passes` tensors of the expanded width and one of the inner width."""
        model, s = self.model, self.s
        gated = self.has_kernels and model.ffn == "gated"
        wide = self.T * s.inner * (1 + gated)
        issue = activation_issue(kernel, model.activation, gated, model.activation_dropout) * self.has_kernels
        tally.kernel((passes * wide + self.T * s.inner) * self.e + sum_bytes, issued=wide * issue)

    def _extras(self, tally: Tally, times: float) -> None:
        """Sandwich norms, DeepNorm's residual factor, adapters; the backward pass has twice as many kernels."""
        size, model = self.t * self.s.width * self.e, self.model
        if model.sandwich_norm:
            self._plain_norm(tally, 2 * times * self.t)
        if model.norm == "deepnorm":
            tally.kernel(2 * size, 2 * times)
        if model.adapter_size:
            tally.kernel(3 * size, 8 * times)
        self._updates(tally, is_backward=times > 1.0)

    def _updates(self, tally: Tally, is_backward: bool) -> None:
        """Products with the factors of LoRA's updates, and the sums with the layers' own products."""
        prefix = f"layers.{self.model.num_layers if self.is_decoder else 0}."
        for rows, columns in update_shapes(self.model, prefix):
            rank, is_last_factor = min(rows, columns), rows > columns
            width = max(rows, columns) / self.s.tp
            tally.product(self.T, rank, width, self.e)
            if is_backward:
                tally.product(rank, self.T, width, self.e)
            # Forward the sum of both products, backward of both gradients of the input; and the scale.
            if is_backward != is_last_factor:
                tally.kernel(3 * self.T * width * self.e)
            else:
                tally.kernel(2 * self.T * rank * self.e)

    # Backward

    def backward(self, tally: Tally) -> None:
        """With what is recomputed before it."""
        recompute = self.s.config.training.recompute
        if recompute == "full":
            self.forward(tally, again=True)
        elif recompute == "selective":
            self._attend(tally)
        pre = self.model.norm == "pre"
        if not pre or recompute == "full" or self.is_decoder or self._is_joined:
            (self._add_backward if pre else self._norm_backward)(tally)
        self._mlp_backward(tally)
        self._norm_backward(tally)
        if self.is_decoder:
            self._cross_backward(tally)
            self._norm_backward(tally)
        self._attention_backward(tally)
        if pre:
            self._norm_backward(tally, has_x=not (recompute == "full" or self.is_decoder))
        else:  # two gradients meet at the residual sum before each norm
            tally.kernel(3 * self.t * self.s.width * self.e, 2)
        if self.s.is_fused:
            tally.finish(self._sums, self._programs(tally))
        self._extras(tally, 2.0)

    def _programs(self, tally: Tally) -> float:
        """Programs that sum over the tokens' hidden states."""
        return min(self.t, sum_programs(self.s.width, tally.gpu.processors))

    def _finish(self, tally: Tally, sums: float, programs: float) -> None:
        """The second pass of sums over tokens; a fused block has one for all of them. Args: sums: bytes."""
        self._sums += sums
        if not self.s.is_fused:
            tally.finish(sums, programs)

    def _norm_backward(self, tally: Tally, has_x: bool = True) -> None:
        s = self.s
        sum_count = (1 if self.model.rms_norm else 2) + (has_x and self.model.has_bias("attention"))
        programs = self._programs(tally)
        size, sums = self.t * s.width * self.e, programs * s.width * 4 * sum_count
        if self.model.rms_norm and not self.has_kernels:
            rms(tally, self.t * s.width * self.e, RMS_BACKWARD)
            if has_x and self.dropout:
                tally.kernel(2 * size)
        elif not self.has_kernels:
            tally.kernel(4 * size, 2)
            if has_x and self.dropout:
                tally.kernel(2 * size, 9)
        else:
            size = (4 + (has_x and self.dropout)) * size + sums + self._stats * self.t
            tally.kernel(size, issued=self._issued(f"{self._add_norm}_backward"), rounds=self.t / programs)
            self._finish(tally, sums, programs)

    def _add_backward(self, tally: Tally) -> None:
        if self.dropout or self.model.has_bias("mlp"):
            programs = self._programs(tally)
            sums = programs * self.s.width * 4
            size = 2 * self.t * self.s.width * self.e + sums
            tally.kernel(size, issued=self._issued("add_norm_backward"), rounds=self.t / programs)
            if self.model.has_bias("mlp"):
                tally.finish(sums, programs)

    def products_backward(
        self, tally: Tally, rows: float, inner: int, columns: int, is_column: bool, has_bias: bool
    ) -> None:
        """Gradients of the input and the weight of a product [rows, inner] x [inner, columns]."""
        s = self.s
        size = rows * s.width * self.e
        # The gathered side is the input of a column-parallel layer and the output's gradient of a row-parallel one.
        if s.share > 1:
            tally.collective("gather", size, s.tp_group)
        tally.product(rows, columns, inner, self.e)
        if is_column and s.tp > 1:
            tally.collective("scatter" if s.share > 1 else "all_reduce", size, s.tp_group)
        if self.model.lora is not None:  # weights and biases are frozen
            return
        tally.product(columns, rows, inner, self.e, self._sum_bytes)
        if has_bias:
            tally.kernel(rows * columns * self.e)

    @property
    def _sum_bytes(self) -> int:
        """Bytes written per number of a weight's gradient."""
        # 8: the product adds to a sum in fp32, which it reads and writes. ZeRO 3 and shared layers add later.
        return self.e if self._is_joined or self.model.share_layers != "none" else 8

    def _mlp_backward(self, tally: Tally) -> None:
        s, size = self.s, self.T * self.s.inner * self.e
        self.products_backward(tally, self.T, s.inner, s.width, False, False)
        if self.has_kernels or self.model.ffn != "gated":
            sums = _ACTIVATION_PROGRAMS * s.expanded * 4
            self._activate(tally, "activate_backward", 2, sums)
            if self.model.has_bias("mlp"):
                self._finish(tally, sums, _ACTIVATION_PROGRAMS)
        else:
            tally.kernel(3 * size, 2)  # of the product
            tally.kernel(2.2 * size, 7)  # of the activation, and its halves put together
            tally.kernel(4 * size)
        tally.kernel(2 * size, self.model.activation_dropout > 0 and not self.has_kernels)
        self.products_backward(tally, self.T, s.width, s.expanded, True, False)

    def _attention_backward(self, tally: Tally) -> None:
        s, kernel = self.s, self.s.stack(self.is_decoder).kernel
        self.products_backward(tally, self.T, s.attended, s.width, False, False)
        launches = self.attention_launches()
        for launch in launches:
            self._launch(tally, launch, backward=True)
        whole = self.T * s.attended * self.e
        if kernel == "dense":
            tally.kernel(2 * whole)
            self._unmasked(tally, launches[0].pairs)
            relative_terms(self, tally, launches[0].pairs, backward=True)
            tally.kernel(6 * whole)
        elif kernel == "blocks":
            tally.launches += 1  # two kernels: gradients of queries, and of keys and values
            table_kernels(self, tally, launches[0].backward.type, backward=True)
            tally.small(3 * (self.model.relative == "buckets"))  # sums of the bias's gradient
        elif len(launches) > 1:
            # GLM's two launches: one kernel joins their gradients of queries, keys and values.
            read = sum(launch.queries + 2 * launch.keys for launch in launches)
            programs = min(self.T, sum_programs(s.attended, tally.gpu.processors))
            sums = programs * 3 * s.attended * 4
            issued = self._issued("join_pair", 3 * self.T * s.attended)
            tally.kernel(
                (read + 3 * self.T) * s.attended * self.e + sums, issued=issued, rounds=self.T / programs
            )
            self._sums += sums
        elif not s.is_fused:
            self.heads.join(tally)
        is_one = kernel == "varlen" and len(launches) == 1
        self.heads.gather(tally, is_one and s.is_fused)
        is_summed = s.is_fused and len(launches) > 1 and not self.heads.changes
        self.products_backward(
            tally, self.T, s.width, s.qkv, True, self.model.has_bias("qkv") and not is_summed
        )

    def _cross_backward(self, tally: Tally) -> None:
        s, encoded = self.s, self.s.tokens()
        self.products_backward(tally, self.T, s.attended, s.width, False, False)
        whole = self.T * s.attended * self.e
        if self.model.unscaled_scores:
            tally.kernel(2 * whole)
        if s.stack(True).kernel == "dense":
            tally.kernel(2 * whole)
        self._launch(tally, self._cross_launch(), backward=True)
        tally.kernel(4 * encoded * s.attended * self.e)
        for rows, columns in ((encoded, 2 * s.attended), (self.T, s.attended)):
            self.products_backward(tally, rows, s.width, columns, True, self.model.has_bias("qkv"))
        tally.kernel(3 * encoded * s.width * self.e)  # sums of the encoder's gradients


# Scores whose relative positions depend on queries


def relative_terms(costs: BlockCosts, tally: Tally, pairs: float, backward: bool = False) -> None:
    """Learned terms of the scores of one layer under dense attention; none without terms that depend on queries."""
    if costs.model.relative == "disentangled":
        _bucket_terms(costs, tally, pairs, backward)
    elif costs.model.has_query_terms:
        _distance_terms(costs, tally, pairs, backward)


def _distance_terms(costs: BlockCosts, tally: Tally, pairs: float, backward: bool) -> None:
    """Terms by distance and segment."""
    s, e, numbers = costs.s, costs.e, pairs * costs.s.heads
    whole, scores = costs.T * s.attended * e, table_bytes(costs)
    tally.product(s.distances, s.width, s.attended, e)
    tally.kernel(2 * whole, 4)
    tally.kernel(6 * whole)
    tally.kernel(scores + whole, 2 if backward else 1, "matmul")
    tally.small(2)
    if backward:
        tally.kernel(6.5 * numbers, 2)
        tally.kernel((8 + 2 * e) * numbers)
        tally.kernel(2 * e * numbers)
        tally.kernel(2 * scores)
        tally.small(8)
    else:
        tally.kernel((8 + 2 * e) * numbers, 2)
        tally.kernel(3 * e * numbers)
        tally.kernel(2 * e * numbers)
        tally.kernel(8 * pairs, 4)
        tally.small(9)


def table_bytes(costs: BlockCosts) -> float:
    """A layer's products of queries, or of keys, with the vectors of buckets or of distances."""
    rows = costs.s.distances if costs.model.has_distance_scores else costs.model.position_rows
    return costs.T * costs.s.heads * rows * costs.e


def moved_bytes(costs: BlockCosts, work: Work, backward: bool) -> float:
    """Bytes of tables and of their gradients that a launch of attention reads and writes."""
    if work.type == "tables":
        return (6 if backward else 2) * table_bytes(costs)
    if work.type == "query tables":  # one number per pair
        return (3 if backward else 1) * work.pairs * costs.s.heads * costs.e
    return 0.0


def table_kernels(costs: BlockCosts, tally: Tally, work_type: str, backward: bool = False) -> None:
    """Kernels that make the tables of scores which attention's tiles read. Args: work_type: `Work.type`."""
    if work_type == "tables":
        _two_tables(costs, tally, backward)
    elif work_type == "query tables":
        _query_table(costs, tally, backward)


def _query_table(costs: BlockCosts, tally: Tally, backward: bool) -> None:
    """A table of all distances twice: for the same segment, and for another."""
    s, e = costs.s, costs.e
    whole, scores = costs.T * s.attended * e, 2 * table_bytes(costs)
    tally.product(s.distances, s.width, s.attended, e)
    tally.kernel(6 * whole)
    tally.kernel(2 * whole)  # queries with the numbers of segments
    tally.kernel(scores + whole, 1, "matmul")
    if backward:
        tally.kernel(scores)  # zeros
        tally.kernel(scores + whole, 2, "matmul")
        tally.kernel(whole, 5)
        tally.kernel(3 * whole, 2)
        tally.small(4)
    else:
        tally.kernel(2 * whole, 3)
        tally.kernel(whole)
        tally.small(2)


def _two_tables(costs: BlockCosts, tally: Tally, backward: bool) -> None:
    """A table of queries, and one of keys."""
    s, e, model = costs.s, costs.e, costs.model
    rows, whole, scores = model.position_rows, costs.T * s.attended * e, table_bytes(costs)
    width = 2 * s.attended if model.position_projections else s.qkv
    tally.kernel(scores + whole, 2, "matmul")
    if backward:
        tally.kernel(scores, 2)  # zeros
        tally.kernel(scores + whole, 4, "matmul")
        tally.kernel(3 * whole, 2)
        costs.products_backward(tally, rows, s.width, width, True, model.has_bias("qkv"))
        tally.small(5 + costs.dropout)
        if not model.position_projections:  # gradients of weights that tokens use too
            tally.kernel(3 * width * s.width * e)
            tally.small(1 + model.has_bias("qkv"))
    else:
        tally.product(rows, s.width, width, e)
        tally.small(2 + 15 * costs.dropout)  # a hash of each row's number


def _bucket_terms(costs: BlockCosts, tally: Tally, pairs: float, backward: bool) -> None:
    """Terms by queries and keys of buckets."""
    s, e, model = costs.s, costs.e, costs.model
    numbers, rows = pairs * s.heads, model.position_rows
    whole, scores = costs.T * s.attended * e, table_bytes(costs)
    width = 2 * s.attended if model.position_projections else s.qkv
    if backward:
        costs.products_backward(tally, rows, s.width, width, False, False)
        tally.kernel((8 + 2 * e) * numbers, 2)
        tally.kernel(scores, 2)
        tally.kernel(scores + whole, 4, "matmul")
        tally.kernel(3 * whole, 4)
    else:
        tally.product(rows, s.width, width, e)
        tally.kernel(2 * whole, 2)
        tally.kernel(scores + whole, 2, "matmul")
        tally.kernel((8 + 2 * e) * numbers, 2)
        tally.kernel(3 * e * numbers)
    tally.small(4)
