"""The kernels of a block, forward and backward, with the bytes that each reads and writes.

The list follows block.py and fused_block.py, kernel by kernel; tests compare it with traces of the blocks themselves.
`e` is the bytes of a number, `t` the tokens of this rank outside tensor-parallel layers, T those within.
"""

from __future__ import annotations

from megatron_lite.estimate.head_costs import RMS_BACKWARD, RMS_FORWARD, HeadCosts, rms
from megatron_lite.estimate.relative_costs import moved_bytes, relative_terms, tables
from megatron_lite.estimate.roofline import ISSUE, activation_issue
from megatron_lite.estimate.rows import Call
from megatron_lite.estimate.sizes import Sizes
from megatron_lite.estimate.tally import Tally
from megatron_lite.model.kernels.sums import sum_programs

_ACTIVATION_PROGRAMS = 64  # that sum over tokens, fused.py; 4 bytes a sum


class BlockCosts:
    """One block of a stack. Args: is_decoder: with cross-attention. length: of a micro-batch; 0 = the mean."""

    def __init__(self, sizes: Sizes, is_decoder: bool = False, length: float = 0.0):
        self.s, self.is_decoder = sizes, is_decoder
        self.model = sizes.config.model
        self.T = length or sizes.tokens(is_decoder)
        self.heads = HeadCosts(sizes, self.T)
        self.t = self.T / sizes.share
        self.e = sizes.element
        self.has_kernels = sizes.config.training.kernels == "fused"
        self.dropout = self.model.output_dropout > 0
        # The norm's kernel, and its bytes of a token's deviation and mean.
        self._sums = 0.0  # bytes of sums over tokens that a fused block ends at once
        self._add_norm, self._stats = ("add_rms_norm", 4) if self.model.rms_norm else ("add_norm", 8)

    # The parts of a forward pass

    def forward(self, tally: Tally, again: bool = False) -> None:
        """Args: again: in the backward pass, where it ends with the last tensor that is saved."""
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
        # Elsewhere the next block's norm makes the sum, so that the residual is read once less.
        elif recompute or self.is_decoder or self._is_joined:
            self._add(tally)
        self._others(tally, 1.0)

    @property
    def _is_joined(self) -> bool:
        """Whether a block ends with the sum: at ZeRO 3."""
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

    def calls(self) -> list[Call]:
        """The calls of a micro-batch; padding is 64 tokens that see each other."""
        stack, micro = self.s.stack(self.is_decoder), self.s.config.batch.micro_batch_size
        found = [call.times(micro) for call in stack.calls]
        if stack.kernel == "varlen" and found:
            padding = max(0.0, self.T - sum(call.queries for call in found))
            found[0] = found[0].plus(self.s.rows.padding.times(padding / 64))
        return found

    def _call(self, tally: Tally, call: Call, backward: bool) -> None:
        work = call.backward if backward else call.forward
        moved = moved_bytes(self, work, backward)
        tally.attention(work, call.queries, self.s.heads, self.model, backward, moved)

    def _issued(self, kernel: str, numbers: float = 0.0) -> float:
        """Instructions of a kernel over these numbers, or over the hidden state."""
        return ISSUE[kernel] * (numbers or self.t * self.s.width)

    def _attend(self, tally: Tally) -> None:
        """Attention without its products: the part that selective recomputation repeats."""
        s, kernel = self.s, self.s.stack(self.is_decoder).kernel
        whole = self.T * s.attended * self.e
        self.heads.spread(tally)
        calls = self.calls()
        for call in calls:
            if call.gathered:
                # Keys and values are read and written once.
                tally.kernel(4 * call.gathered * s.attended * self.e)
            if kernel == "dense":
                relative_terms(self, tally, call.pairs)
                self._masked(tally, call.pairs)
            else:
                tables(self, tally, call.forward.kind)
            self._call(tally, call, backward=False)
        if kernel == "dense":
            tally.kernel(2 * whole)  # zeros for what sees nothing
        elif kernel != "blocks" and len(calls) > 1:
            tally.kernel(2 * whole)

    def _masked(self, tally: Tally, pairs: float) -> None:
        """The bias of all pairs under the mask."""
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
            tally.kernel((1 + self.e) * self._cross_call().pairs)
        self._call(tally, self._cross_call(), backward=False)
        if is_dense:
            tally.kernel(2 * whole)
        tally.product(self.T, s.attended, s.width, self.e)
        self._leave(tally, self.T)

    def _cross_call(self) -> Call:
        assert self.s.rows.cross is not None
        return self.s.rows.cross.times(self.s.config.batch.micro_batch_size)

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

    def _activate(self, tally: Tally, kernel: str, passes: int, more: float = 0.0) -> None:
        """The activation's kernel, over `passes` tensors of the expanded width and one of the inner width."""
        model, s = self.model, self.s
        gated = self.has_kernels and model.ffn == "gated"
        wide = self.T * s.inner * (1 + gated)
        issue = activation_issue(kernel, model.activation, gated, model.activation_dropout) * self.has_kernels
        tally.kernel((passes * wide + self.T * s.inner) * self.e + more, issued=wide * issue)

    def _others(self, tally: Tally, times: float) -> None:
        """Norms of a sandwich, the residual's factor, adapters; in the backward pass twice as many kernels."""
        size, model = self.t * self.s.width * self.e, self.model
        if model.sandwich_norm:
            self._plain_norm(tally, 2 * times * self.t)
        if model.norm == "deepnorm":
            tally.kernel(2 * size, 2 * times)
        if model.adapter_size:
            tally.kernel(3 * size, 8 * times)

    # The backward pass

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
        else:  # two paths lead to the sums that norms begin with
            tally.kernel(3 * self.t * self.s.width * self.e, 2)
        if self.s.is_fused:
            tally.finish(self._sums, self._programs(tally))
        self._others(tally, 2.0)

    def _programs(self, tally: Tally) -> float:
        """Programs that sum over the tokens' hidden states."""
        return min(self.t, sum_programs(self.s.width, tally.gpu.processors))

    def _finish(self, tally: Tally, sums: float, programs: float) -> None:
        """The end of a kernel's sums over tokens, where the block has none for all. Args: sums: their bytes."""
        self._sums += sums
        if not self.s.is_fused:
            tally.finish(sums, programs)

    def _norm_backward(self, tally: Tally, has_x: bool = True) -> None:
        s = self.s
        parts = (1 if self.model.rms_norm else 2) + (has_x and self.model.has_bias("attention"))
        programs = self._programs(tally)
        size, sums = self.t * s.width * self.e, programs * s.width * 4 * parts
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
        if (
            s.share > 1
        ):  # the gathered side: the input of a column-parallel layer, the gradient of the other kind
            tally.collective("gather", size, s.tp_group)
        tally.product(rows, columns, inner, self.e)
        if is_column and s.tp > 1:
            tally.collective("scatter" if s.share > 1 else "all_reduce", size, s.tp_group)
        tally.product(columns, rows, inner, self.e, self._sum_bytes)
        if has_bias:
            tally.kernel(rows * columns * self.e)

    @property
    def _sum_bytes(self) -> int:
        """Bytes of a number of a weight's gradient: it goes to a sum in fp32 that is read and written."""
        # Elsewhere the product adds to the fp32 sum itself.
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
        calls = self.calls()
        for call in calls:
            self._call(tally, call, backward=True)
        whole = self.T * s.attended * self.e
        if kernel == "dense":
            tally.kernel(2 * whole)
            self._unmasked(tally, calls[0].pairs)
            relative_terms(self, tally, calls[0].pairs, backward=True)
            tally.kernel(6 * whole)
        elif kernel == "blocks":
            tally.launches += 1  # of queries, of keys
            tables(self, tally, calls[0].backward.kind, backward=True)
            tally.small(3 * (self.model.relative == "buckets"))  # the bias's sums
        elif len(calls) > 1:
            # GLM's two calls: one kernel joins their gradients of queries, keys and values.
            read = sum(call.queries + 2 * call.keys for call in calls)
            programs = min(self.T, sum_programs(s.attended, tally.gpu.processors))
            sums = programs * 3 * s.attended * 4
            issued = self._issued("join_pair", 3 * self.T * s.attended)
            tally.kernel(
                (read + 3 * self.T) * s.attended * self.e + sums, issued=issued, rounds=self.T / programs
            )
            self._sums += sums
        elif not s.is_fused:
            self.heads.join(tally)
        is_one = kernel == "varlen" and len(calls) == 1
        self.heads.gather(tally, is_one and s.is_fused)
        is_summed = s.is_fused and len(calls) > 1 and not self.heads.changes
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
        self._call(tally, self._cross_call(), backward=True)
        tally.kernel(4 * encoded * s.attended * self.e)
        for rows, columns in ((encoded, 2 * s.attended), (self.T, s.attended)):
            self.products_backward(tally, rows, s.width, columns, True, self.model.has_bias("qkv"))
        tally.kernel(3 * encoded * s.width * self.e)  # sums of the encoder's gradients
