"""The attention kernel that fits the structure of a batch (layout.py says which token may see which).

A plan is made once per micro-batch and serves all layers. It says in which order it wants the batch's tokens; the model
runs all layers in this order, so no layer moves tokens. The plans:

  CallPlan     CPU: a few kernel calls per document on disjoint queries, most of them without a mask. What needs a mask
               runs in blocks of queries whose small masks are made when they are needed, in the backward pass again,
               so memory grows linearly with the row length. Short documents of similar length share one masked call.
  VarlenPlan   CUDA: at most two calls of a fused kernel for the whole batch, without a mask (varlen.py): every
               structure but UniLMv2's.
  BlockPlan    CUDA, UniLMv2's structure, and a bias by distance: kernels that evaluate the rule (blocks.py, tables.py).
  DensePlan    the reference: one masked call, B x S x S booleans (dense.py).
  LayeredPlan  two of these, for models with local layers (window.py).

All but BlockPlan serve cross-attention too (cross_attention.py). A bias of the scores (position_bias.py) goes to
CallPlan, which then writes attention out, and to DensePlan. Tokens that see nothing get zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron_lite.model.attention_backends.blocks import block_plan
from megatron_lite.model.attention_backends.calls import (
    Attend,
    HostPlan,
    Packed,
    ScoreBias,
    add_part,
    attend_written_out,
    heads_first,
    kernel_of,
    operands,
    part_of,
    rows_of,
    spans_of,
    token_keys,
)
from megatron_lite.model.attention_backends.dense import DensePlan
from megatron_lite.model.attention_backends.layout import (
    BLIND,
    CAUSAL,
    FULL,
    MASKED,
    Call,
    Layout,
    Unit,
    make_units,
    may_see,
    padded_order,
)
from megatron_lite.model.attention_backends.varlen import varlen_plan
from megatron_lite.model.kernels.compat import flash_backward_on_cpu, flash_forward_on_cpu
from megatron_lite.model.kernels.dropout import AttentionDropout

# CUDA: keys that the calls of VarlenPlan may gather, for each token. GLM takes 2, XLNet 5 to 6; UniLMv2 would take 35.
_MOST_KEYS = 8
# CPU: units whose lengths differ by less than SIMILAR_ROWS are computed in groups of at most SHORT_PRODUCTS products of
# query and key (tokens^2 x heads x head size). Measured at 1 to 4 million: 1.1 to 2.8 times as fast as one call per
# unit; at 8 to 16 million 0.8 to 0.9 times as fast, since masked pairs cost more than calls.
SHORT_PRODUCTS, SIMILAR_ROWS = 1 << 22, 32


class CallPlan:
    """The calls of units, one after another, on CPU; short units are computed in groups.

    Args:
        layout: of the queries, in the order of the units.
        order: as for HostPlan.
        keys: number of rows of keys, where they are other ones than those of queries.
        window: of local layers; 0 = none.
    """

    def __init__(
        self, layout: Layout, units: list[Unit], order: np.ndarray, keys: int | None = None, window: int = 0
    ):
        self.order, self.units, self._window = order, units, window
        self.row_length = layout.shape[1]
        self._joins_documents = any(
            layout.document[unit.start] != layout.document[unit.stop - 1] for unit in units
        )
        self._has_groups = bool(layout.grp.any())
        self._columns = torch.from_numpy(layout.columns)
        lengths = [len(order)] if keys is None else [len(order), keys]
        # Shapes of the gradients' sums: q, k and v packed as [T, 3, H, D]; in cross-attention q [Tq, 1, H, D], and k
        # with v [Tk, 2, H, D].
        self._lengths = list(zip(lengths, [3] if keys is None else [1, 2], strict=True))
        # Tokens of no unit are padding. Every other token is written by exactly one unit, so only these need zeros.
        self._gaps = [_gaps([spans_of(unit)[i] for unit in units], n) for i, n in enumerate(lengths)]
        self._parts: list[UnitGroup | LongUnit] | None = None
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def arrays(self) -> list[np.ndarray]:
        return []

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> CallPlan:
        return self

    def pairs(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries and keys of each call that has any, one unit after another: int64 [Q] and [K]."""
        if self._pairs is None:
            self._pairs = []
            for unit in self.units:
                tokens = torch.arange(unit.start, unit.stop)
                for call in unit.calls:
                    if call.kind != BLIND:
                        self._pairs.append((tokens[call.start : call.stop], part_of(tokens, call, 0)))
        return self._pairs

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        # The fast path keeps no scores. torch has no CPU flash kernel with dropout, and none that returns a bias's
        # gradient: the rest of this method writes attention out under autograd.
        if dropout is None and bias is None:
            return Attend.apply(self, 0.0, *inputs)
        added: Iterator[torch.Tensor | None] = itertools.repeat(None)
        if bias is not None:
            # In the order of `pairs`, which leaves out blind calls; `_written_out` takes the next one for each call it
            # computes.
            added = (bias(number, *pair) for number, pair in enumerate(self.pairs(inputs[0].device)))
        out = {
            start: inputs[0].new_zeros(stop - start, *inputs[0].shape[2:]) for start, stop in self._gaps[0]
        }
        for unit in self.units:
            out[unit.start] = self._written_out(unit, inputs, dropout, added)
        return torch.cat([out[start] for start in sorted(out)])

    def _written_out(
        self,
        unit: Unit,
        inputs: Packed,
        dropout: AttentionDropout | None,
        biases: Iterator[torch.Tensor | None],
    ) -> torch.Tensor:
        """The output of a unit, [unit, H, D], under autograd. Args: biases: of the calls, [H, Q, K]."""
        q, k, v = (heads_first(x) for x in rows_of(unit, inputs))
        out = []
        for call in unit.calls:
            queries = q[:, call.start : call.stop]
            if call.kind == BLIND:
                out.append(torch.zeros_like(queries))
                continue
            stays = None
            if dropout is not None:
                of_queries, of_keys = token_keys(dropout, inputs)
                drawn = of_queries[unit.start + call.start : unit.start + call.stop]
                stays = dropout.keep(drawn, part_of(of_keys[slice(*spans_of(unit)[-1])], call, 0), len(q))
            seen, added = self.bias(unit, call, q.dtype, causal=True), next(biases)
            if added is not None:
                seen = added.to(q.dtype) if seen is None else added + seen
            p = 0.0 if dropout is None else dropout.p
            out.append(attend_written_out(queries, part_of(k, call, 1), part_of(v, call, 1), seen, stays, p))
        return torch.cat(out, dim=1).transpose(0, 1).to(inputs[0].dtype)

    def bias(
        self, unit: Unit, call: Call, dtype: torch.dtype, *, causal: bool = False
    ) -> torch.Tensor | None:
        """The mask of a call as a score bias: [queries, keys], 0 or -infinity; None for calls without a mask.

        Args: causal: also for causal calls.
        """
        if call.kind != MASKED and not (causal and call.kind == CAUSAL):
            return None
        columns = self._columns[:, unit.start : unit.stop]
        return _as_bias(
            self._may_see(columns[:, call.start : call.stop, None], part_of(columns, call, 1)[:, None]), dtype
        )

    def _may_see(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        flags = {"has_groups": self._has_groups, "joins_documents": self._joins_documents}
        return may_see(query, key, **flags, window=self._window)

    def group_seen(self, group: UnitGroup) -> torch.Tensor:
        """Which keys the queries of a group see: bool [units, tokens, tokens]."""
        columns, is_real = self._columns[:, group.queries.place], group.queries.is_real
        return (
            self._may_see(columns[..., None], columns[..., None, :]) & is_real[..., None] & is_real[:, None]
        )

    def parts(self, width: int) -> list[UnitGroup | LongUnit]:
        """Groups of short units, and the other units. Args: width: heads x head size, the same at each call."""
        # Made at the first layer and kept for all: grouping and masks depend on the batch only.
        if self._parts is None:
            groups: dict[tuple[int, ...], list[Unit]] = {}
            long_units = []
            for unit in self.units:
                lengths = tuple(stop - start for start, stop in spans_of(unit))
                if lengths[0] * lengths[-1] * width <= SHORT_PRODUCTS:
                    # Bins of SIMILAR_ROWS tokens: filling up to the longest of a bin wastes less than that in each
                    # unit.
                    groups.setdefault(tuple(-(-n // SIMILAR_ROWS) for n in lengths), []).append(unit)
                else:
                    long_units.append(LongUnit(unit))
            self._parts = [*map(UnitGroup, groups.values()), *long_units]
        return self._parts

    def forward(self, inputs: Packed, p: float) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """See `Attend`. Kept are q, k, v in the kernels' layout, and one number per query and head."""
        out = inputs[0].new_empty(len(inputs[0]), *inputs[0].shape[2:])
        for start, stop in self._gaps[0]:
            out[start:stop] = 0.0
        return out, [part.forward(self, inputs, out) for part in self.parts(out[0].numel())]

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, kept: list[list[torch.Tensor]], p: float
    ) -> list[torch.Tensor]:
        # fp32: a key's gradient is a sum over calls.
        wide = torch.promote_types(out.dtype, torch.float32)
        # Uninitialised: units write their own tokens, and zeros everywhere would be one more pass over q, k and v.
        totals = [torch.empty(*shape, *out.shape[1:], dtype=wide) for shape in self._lengths]
        for total, gaps in zip(totals, self._gaps, strict=True):
            for start, stop in gaps:
                total[start:stop] = 0.0
        for part, tensors in zip(self.parts(out[0].numel()), kept, strict=True):
            part.backward(self, grad, out, tensors, totals)
        return [total.to(grad.dtype) for total in totals]


def _gaps(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The stretches of [0, length) outside of spans."""
    edges = [0, *itertools.chain(*sorted(spans)), length]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _as_bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(seen.shape, float("-inf"), dtype=dtype).masked_fill_(seen, 0.0)


class PaddedRows:
    """Stretches of similar length, each filled up to the longest, so that one call serves them all.

    Args: starts, lengths: int64 [stretches], in the order of the plan.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray):
        columns = np.arange(lengths.max())
        is_real = columns < lengths[:, None]
        # [stretches, tokens]; what is filled in takes the first token of the stretch.
        self.place = torch.from_numpy(starts[:, None] + np.where(is_real, columns, 0))
        self.is_real, self.is_even = torch.from_numpy(is_real), bool(is_real.all())
        self.inside = torch.from_numpy(np.flatnonzero(is_real))  # int64 [real tokens], of stretches x tokens
        self.rows = self.place.flatten()[self.inside]  # the same in the order of the plan

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """[T, n, H, D] -> [n, stretches, H, tokens, D], a copy in fp32 or wider: see `heads_first`."""
        x = x.flatten(1).index_select(0, self.place.flatten()).view(*self.place.shape, *x.shape[1:])
        # fp32: torch's bf16 kernel takes up to six times as long in the backward pass of short sequences (calls.py).
        x = x.permute(2, 0, 3, 1, 4)
        return x.to(torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format)

    def put(self, parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Write n tensors [stretches, H, tokens, D] to their tokens of [T, n, H, D]."""
        x = torch.stack([part.transpose(1, 2) for part in parts], dim=2).flatten(0, 1).flatten(1)
        # Copied, not added: each token belongs to one unit, and filled-in tokens are left out by `inside`.
        into.flatten(1).index_copy_(0, self.rows, x.index_select(0, self.inside).to(into.dtype))


def _kind(unit: Unit) -> int:
    """FULL or CAUSAL for one such call of all queries on all keys, else MASKED."""
    (first, *more), (start, stop) = unit.calls, spans_of(unit)[-1]
    return MASKED if more or first.keys != ((0, stop - start),) else first.kind


class UnitGroup:
    """Units of similar length in one call instead of several for each. What is filled in sees nothing.

    Calls on a hundred tokens cost more to prepare than to compute.
    """

    def __init__(self, units: Sequence[Unit]):
        spans = [np.array(part).T for part in zip(*(spans_of(unit) for unit in units), strict=True)]
        self.rows = [PaddedRows(start, stop - start) for start, stop in spans]
        self.queries, self.keys = self.rows[0], self.rows[-1]
        kinds = {_kind(unit) for unit in units}
        is_one = len(kinds) == 1 and (self.keys.is_even or CAUSAL not in kinds)
        self.kind = kinds.pop() if is_one else MASKED
        self._mask: tuple[torch.Tensor | None, torch.Tensor] | None = None

    def mask(self, plan: CallPlan, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The mask as a score bias, [units, 1, queries, keys] or None, and which queries see any key.

        Made once for all layers: a few numbers for each token, since units are short.
        """
        if self._mask is None:
            bias, sees = None, self.queries.is_real
            if self.kind == FULL and not self.keys.is_even:
                bias = _as_bias(self.keys.is_real, dtype)[:, None, None].expand(-1, 1, sees.shape[1], -1)
            elif self.kind == MASKED:
                seen = plan.group_seen(self)
                sees = seen.any(-1)
                # The softmax of no keys would be NaN: such a query sees all, its output and its gradient are zeroed.
                bias = _as_bias(seen | ~sees[..., None], dtype).unsqueeze(1)
            self._mask = bias, sees
        return self._mask

    def forward(self, plan: CallPlan, inputs: Packed, out: torch.Tensor) -> list[torch.Tensor]:
        heads = [rows.heads_first(x) for rows, x in zip(self.rows, inputs, strict=True)]
        q, k, v = itertools.chain(*heads)
        bias, sees = self.mask(plan, q.dtype)
        part, state = flash_forward_on_cpu(q, k, v, 0.0, self.kind == CAUSAL, attn_mask=bias)
        if self.kind == MASKED:
            part = part.masked_fill(~sees[:, None, :, None], 0.0)
        self.queries.put([part], out[:, None])
        return [*heads, state]

    def backward(
        self,
        plan: CallPlan,
        grad: torch.Tensor,
        out: torch.Tensor,
        kept: list[torch.Tensor],
        totals: list[torch.Tensor],
    ) -> None:
        """Write the gradients of q, k and v to their rows of the totals."""
        *heads, state = kept
        q, k, v = itertools.chain(*heads)
        bias, sees = self.mask(plan, q.dtype)
        given, outs = (self.queries.heads_first(x[:, None])[0] for x in (grad, out))
        # A filled-in query repeats a real token: without this, that token's gradient would reach the keys twice.
        given.masked_fill_(~sees[:, None, :, None], 0.0)
        is_causal = self.kind == CAUSAL
        grads = iter(flash_backward_on_cpu(given, q, k, v, outs, state, 0.0, is_causal, attn_mask=bias))
        for rows, total in zip(self.rows, totals, strict=True):
            rows.put(list(itertools.islice(grads, total.shape[1])), total)


class LongUnit:
    """A unit whose calls are computed one after another. Their masks are made again in the backward pass."""

    def __init__(self, unit: Unit):
        self.unit = unit

    def forward(self, plan: CallPlan, inputs: Packed, out: torch.Tensor) -> list[torch.Tensor]:
        heads = [heads_first(x).unsqueeze(0) for x in rows_of(self.unit, inputs)]
        out, states = out[self.unit.start : self.unit.stop], []
        for call in self.unit.calls:
            if call.kind == BLIND:
                out[call.start : call.stop] = 0.0
                continue
            q, k, v = operands(heads, call)
            bias = plan.bias(self.unit, call, q.dtype)
            part, state = kernel_of(q, k, call).forward(q, k, v, call.kind == CAUSAL, bias)
            out[call.start : call.stop] = part[0].transpose(0, 1)
            states.append(state)
        return [*heads, *states]

    def backward(
        self,
        plan: CallPlan,
        grad: torch.Tensor,
        out: torch.Tensor,
        kept: list[torch.Tensor],
        totals: list[torch.Tensor],
    ) -> None:
        """Write the gradients of q, k and v to their rows of the totals."""
        heads, states, unit = kept[:3], kept[3:], self.unit
        grad, out = (x[unit.start : unit.stop] for x in (grad, out))
        of_queries, *of_keys = rows_of(unit, totals)
        is_first = True
        # The last call has most keys: their gradients are written, and those of the others added.
        for call in reversed(unit.calls):
            queries = slice(call.start, call.stop)
            # The first call processed writes with `=`; keys that it does not cover must be zero before others are
            # added.
            if is_first and call.keys != ((0, len(of_keys[0])),):
                for total in of_keys:
                    total.zero_()
            if call.kind == BLIND:
                of_queries[queries] = 0.0
            else:
                q, k, v = operands(heads, call)
                bias = plan.bias(unit, call, q.dtype)
                given, outs = (x[queries].to(q.dtype).transpose(0, 1).unsqueeze(0) for x in (grad, out))
                parts = kernel_of(q, k, call).backward(
                    given, q, k, v, outs, states.pop(), call.kind == CAUSAL, bias
                )
                of_queries[queries] = parts[0][0].transpose(0, 1)
                for total, part in zip(of_keys, parts[1:], strict=True):
                    add_part(total, part[0].transpose(0, 1), call, is_first)
            is_first = False


def plan_attention(layout: Layout, device: torch.device, kernel: str = "auto", multiple: int = 1) -> HostPlan:
    """Choose the kernel for a batch, and lay out its tokens.

    Args:
        kernel: "auto", or one of "calls", "varlen", "blocks", "tables" (blocks, with a TableBias), "query tables" (a
            QueryBias) and "dense".
        multiple: of the number of tokens, padding included.
    """
    assert kernel in ("auto", "calls", "varlen", "blocks", "tables", "query tables", "dense"), kernel
    if kernel == "dense":
        return DensePlan(layout)
    on_cpu = kernel == "calls" or (kernel == "auto" and device.type == "cpu")
    # torch's CPU kernel is causal for as many keys as queries only; the CUDA kernel aligns both at their ends.
    units = make_units(layout, square_causal_only=on_cpu)
    # At least one token: a rank whose batch is empty still takes part in every collective.
    length = max(1, -(-len(layout.rows) // multiple)) * multiple
    if on_cpu:
        return CallPlan(layout, units, padded_order(layout, length))
    if kernel == "varlen" or (kernel == "auto" and _suits_varlen(units, len(layout.rows))):
        return varlen_plan(layout, units, length)
    # What is left needs a mask or a bias: kernels that evaluate the rule.
    return block_plan(layout, length, kernel=kernel)


def _suits_varlen(units: list[Unit], tokens: int) -> bool:
    calls = [call for unit in units for call in unit.calls]
    # Gathered keys are copies of K and V. With many copies for each token the masked kernel is cheaper in memory and
    # time.
    keys = sum(stop - start for call in calls for start, stop in call.keys)
    return all(call.kind != MASKED for call in calls) and keys <= _MOST_KEYS * tokens
