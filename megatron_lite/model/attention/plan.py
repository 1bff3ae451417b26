"""The attention kernel that fits the structure of a batch (layout.py says which token may see which).

A plan is made once per micro-batch and serves all layers. It says in which order it wants the batch's tokens; the model
runs all layers in this order, so no layer moves tokens. The plans:

  CallPlan     CPU: a few kernel calls per document on disjoint queries, most of them without a mask. What needs a mask
               runs in blocks of queries whose small masks are made when they are needed, in the backward pass again,
               so memory grows linearly with the row length. Short documents of similar length share one masked call.
  VarlenPlan   CUDA: at most two calls of a fused kernel for the whole batch, without a mask (varlen.py): every
               structure but UniLMv2's.
  FlexPlan     CUDA, UniLMv2's structure: FlexAttention with the rule as its mask function (flex.py).
  DensePlan    the reference: one masked call, B x S x S booleans (dense.py). On CUDA it serves models with relative
               positions.

A bias of the scores (relative.py) goes to CallPlan, which then writes attention out, and to DensePlan.

Tokens that see nothing get zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from megatron_lite.model.attention.cpu_kernels import (
    KERNELS,
    Flash,
    Kernel,
    attend_written_out,
    choose,
    heads_first,
)
from megatron_lite.model.attention.dense import DensePlan, ScoreBias
from megatron_lite.model.attention.layout import (
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
from megatron_lite.model.kernels.dropout import AttentionDropout

# CUDA: keys that the calls of VarlenPlan may gather, for each token. GLM takes 2, XLNet 5 to 6; UniLMv2 would take 35.
_MOST_KEYS = 8
# CPU: units whose lengths differ by less than SIMILAR_ROWS are computed in groups of at most SHORT_PRODUCTS products of
# query and key (tokens^2 x heads x head size). Measured at 1 to 4 million: 1.1 to 2.8 times as fast as one call per
# unit; at 8 to 16 million 0.8 to 0.9 times as fast, since masked pairs cost more than calls.
SHORT_PRODUCTS, SIMILAR_ROWS = 1 << 22, 32


class AttentionPlan(Protocol):
    """Computes attention for one batch; `layer` is the block's index, for plans that keep state per layer."""

    def attend(self, layer: int, qkv: torch.Tensor, dropout: AttentionDropout | None) -> torch.Tensor:
        """qkv [..., 3, H heads, D head dim] of all tokens -> [..., H, D], scores scaled by D^-1/2."""
        ...


class BiasedPlan(AttentionPlan, Protocol):
    """A plan that adds a bias to the scores."""

    row_length: int  # S of the batch

    def pairs(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The calls: queries [..., Q] and keys [..., K] of each, int64, in the order of the plan."""
        ...

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        dropout: AttentionDropout | None,
        bias: ScoreBias | None = None,
    ) -> torch.Tensor:
        """Attention as `AttentionPlan.attend`, with a score bias for each call."""
        ...


class HostPlan(Protocol):
    """A plan on the host: NumPy arrays, made ahead of the step."""

    order: (
        np.ndarray
    )  # int64 [T], indices into the flattened batch; -1 = padding, of which the batch may have less

    def arrays(self) -> list[np.ndarray]:
        """int32 arrays that the plan needs on the device."""
        ...

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> AttentionPlan:
        """The plan, from its arrays on the device."""
        ...


class CallPlan:
    """The calls of `make_units`, one after another, on CPU; short units are computed in groups. The tokens are in the
    order of the units.

    Args: length: T, the tokens of the batch and padding after them.
    """

    def __init__(self, layout: Layout, units: list[Unit], length: int):
        self.layout = layout
        self.order = padded_order(layout, length)
        self.units = units
        self.tokens, self.length = len(layout.rows), length
        self.row_length = layout.shape[1]
        self._joins_documents = any(
            layout.document[unit.start] != layout.document[unit.stop - 1] for unit in units
        )
        self._has_groups = bool(layout.grp.any())
        self._columns = torch.from_numpy(layout.columns)
        self._parts: tuple[list[UnitGroup], list[Unit]] | None = None
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
                        self._pairs.append((tokens[call.start : call.stop], _part(tokens, call, 0)))
        return self._pairs

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        dropout: AttentionDropout | None,
        bias: ScoreBias | None = None,
    ) -> torch.Tensor:
        if dropout is None and bias is None:
            return _CallsOnCpu.apply(qkv, self)
        added: Iterator[torch.Tensor | None] = itertools.repeat(None)
        if bias is not None:
            added = (bias(number, *pair) for number, pair in enumerate(self.pairs(qkv.device)))
        out = [self._unit(unit, qkv[unit.start : unit.stop], dropout, added) for unit in self.units]
        rest = self.length - self.tokens
        return torch.cat([*out, qkv.new_zeros(rest, *qkv.shape[2:])])

    def _unit(
        self,
        unit: Unit,
        qkv: torch.Tensor,
        dropout: AttentionDropout | None,
        biases: Iterator[torch.Tensor | None],
    ) -> torch.Tensor:
        """qkv [unit, 3, H, D] -> [unit, H, D], under autograd. Args: biases: of the calls, [H, Q, K]."""
        q, k, v = (heads_first(x) for x in qkv.unbind(1))
        out = []
        for call in unit.calls:
            queries = q[:, call.start : call.stop]
            if call.kind == BLIND:
                out.append(torch.zeros_like(queries))
                continue
            stays = None
            if dropout is not None:
                keys = dropout.keys[unit.start : unit.stop]
                stays = dropout.keep(keys[call.start : call.stop], _part(keys, call, 0), len(q))
            seen, added = self.bias(unit, call, q.dtype, causal=True), next(biases)
            if added is not None:
                seen = added.to(q.dtype) if seen is None else added + seen
            p = 0.0 if dropout is None else dropout.p
            out.append(attend_written_out(queries, _part(k, call, 1), _part(v, call, 1), seen, stays, p))
        return torch.cat(out, dim=1).transpose(0, 1).to(qkv.dtype)

    def bias(
        self, unit: Unit, call: Call, dtype: torch.dtype, *, causal: bool = False
    ) -> torch.Tensor | None:
        """The mask of a call as a score bias: [queries, keys], 0 or -infinity; None for calls without a mask.

        Args: causal: also for causal calls.
        """
        if call.kind != MASKED and not (causal and call.kind == CAUSAL):
            return None
        columns = self._columns[:, unit.start : unit.stop]
        seen = self._may_see(columns[:, call.start : call.stop, None], _part(columns, call, 1)[:, None])
        return torch.full(seen.shape, float("-inf"), dtype=dtype).masked_fill_(seen, 0.0)

    def parts(self, width: int) -> tuple[list[UnitGroup], list[Unit]]:
        """Groups of short units, and the other units. Args: width: heads x head size, the same at each call."""
        if self._parts is None:
            groups: dict[int, list[Unit]] = {}
            long_units = []
            for unit in self.units:
                length = unit.stop - unit.start
                if length**2 * width <= SHORT_PRODUCTS:
                    groups.setdefault(-(-length // SIMILAR_ROWS), []).append(unit)
                else:
                    long_units.append(unit)
            self._parts = [UnitGroup(members) for members in groups.values()], long_units
        return self._parts

    def _may_see(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return may_see(query, key, has_groups=self._has_groups, joins_documents=self._joins_documents)

    def group_seen(self, group: UnitGroup) -> torch.Tensor:
        """Which keys the queries of a group see: bool [units, tokens, tokens]."""
        columns = self._columns[:, group.place]
        is_pair = group.is_real[..., None] & group.is_real[:, None]
        return self._may_see(columns[..., None], columns[..., None, :]) & is_pair


def _part(x: torch.Tensor, call: Call, dim: int) -> torch.Tensor:
    """The keys of a call out of those of its unit, which lie along `dim`."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in call.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class PaddedRows:
    """Stretches of similar length, each filled up to the longest, so that one call serves them all.

    Args: starts, lengths: int64 [stretches], in the order of the plan.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray):
        columns = np.arange(lengths.max())
        is_real = columns < lengths[:, None]
        # [stretches, tokens]; what is filled in takes the first token of the stretch.
        self.place = torch.from_numpy(starts[:, None] + np.where(is_real, columns, 0))
        self.is_real = torch.from_numpy(is_real)
        self.inside = torch.from_numpy(np.flatnonzero(is_real))  # int64 [real tokens], of stretches x tokens
        self.rows = self.place.flatten()[self.inside]  # the same in the order of the plan

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """[T, n, H, D] -> [n, stretches, H, tokens, D], a copy in fp32 or wider: see cpu_kernels.py."""
        x = x.flatten(1).index_select(0, self.place.flatten()).view(*self.place.shape, *x.shape[1:])
        x = x.permute(2, 0, 3, 1, 4)
        return x.to(torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format)

    def put(self, parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Write n tensors [stretches, H, tokens, D] to their tokens of [T, n, H, D]."""
        x = torch.stack([part.transpose(1, 2) for part in parts], dim=2).flatten(0, 1).flatten(1)
        into.flatten(1).index_copy_(0, self.rows, x.index_select(0, self.inside).to(into.dtype))


class UnitGroup(PaddedRows):
    """Units of similar length in one call instead of several for each. What is filled in sees nothing.

    Calls on a hundred tokens cost more to prepare than to compute.
    """

    def __init__(self, units: Sequence[Unit]):
        starts, stops = np.array([(unit.start, unit.stop) for unit in units]).T
        super().__init__(starts, stops - starts)
        self.units = units
        (first, *more), alike = units[0].calls, {unit.calls for unit in units}
        is_one_call = len(alike) == 1 and not more
        self.is_causal = is_one_call and first.kind == CAUSAL
        self.needs_mask = not (is_one_call and first.kind in (FULL, CAUSAL))
        self._mask: tuple[torch.Tensor | None, torch.Tensor] | None = None

    def mask(self, plan: CallPlan, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The mask as a score bias, [units, 1, tokens, tokens] or None, and which queries see any key.

        Made once for all layers: a few numbers for each token, since units are short.
        """
        if self._mask is None:
            if not self.needs_mask:
                self._mask = None, self.is_real
            else:
                seen = plan.group_seen(self)
                sees = seen.any(-1)
                bias = torch.full(seen.shape, float("-inf"), dtype=dtype).masked_fill_(seen, 0.0)
                # The softmax of no keys would be NaN: such a query sees all, its output and its gradient are zeroed.
                bias[~sees] = 0.0
                self._mask = bias.unsqueeze(1), sees
        return self._mask


class _CallsOnCpu(torch.autograd.Function):
    """All calls of a plan as one autograd node.

    It saves q, k, v in the kernels' layout, the output, and one number per query and head. The backward pass makes the
    masks of long units again and adds the gradients of keys in place.
    """

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, plan: CallPlan) -> torch.Tensor:
        out = torch.empty(plan.length, *qkv.shape[2:], dtype=qkv.dtype)
        out[plan.tokens :] = 0.0
        saved: list[torch.Tensor] = [out]
        groups, long_units = plan.parts(qkv[0, 0].numel())
        for group in groups:
            heads = group.heads_first(qkv)
            bias, sees = group.mask(plan, heads[0].dtype)
            q, k, v = heads
            part, state = Flash.forward(q, k, v, group.is_causal, bias)
            if bias is not None:
                part = part.masked_fill(~sees[:, None, :, None], 0.0)
            group.put([part], out[:, None])
            saved += [heads, state]
        for unit in long_units:
            own = [heads_first(x).unsqueeze(0) for x in qkv[unit.start : unit.stop].unbind(1)]
            saved += own
            for call in unit.calls:
                rows = slice(unit.start + call.start, unit.start + call.stop)
                if call.kind == BLIND:
                    out[rows] = 0.0
                    continue
                q, k, v = _operands(own, call)
                bias = plan.bias(unit, call, q.dtype)
                part, state = _kernel(q, k, call).forward(q, k, v, call.kind == CAUSAL, bias)
                out[rows] = part[0].transpose(0, 1)
                saved.append(state)
        ctx.plan = plan
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        plan: CallPlan = ctx.plan
        out, *rest = ctx.saved_tensors
        saved = iter(rest)
        # fp32: a key's gradient is a sum over calls.
        wide = torch.promote_types(out.dtype, torch.float32)
        total = torch.empty(plan.length, 3, *out.shape[1:], dtype=wide)
        total[plan.tokens :] = 0.0
        groups, long_units = plan.parts(out[0].numel())
        for group in groups:
            heads, state = next(saved), next(saved)
            bias, sees = group.mask(plan, heads.dtype)
            given, outs = (group.heads_first(x[:, None])[0] for x in (grad, out))
            given.masked_fill_(~sees[:, None, :, None], 0.0)
            q, k, v = heads
            group.put(Flash.backward(given, q, k, v, outs, state, group.is_causal, bias), total)
        for unit in long_units:
            own = [next(saved) for _ in range(3)]
            states = [next(saved) for call in unit.calls if call.kind != BLIND]
            _unit_backward(plan, unit, grad, out, own, states, total[unit.start : unit.stop].unbind(1))
        return total.to(grad.dtype), None


def _operands(heads: Sequence[torch.Tensor], call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a call out of those of its unit, [1, H, unit, D]."""
    q, k, v = heads
    return q[:, :, call.start : call.stop], _part(k, call, 2), _part(v, call, 2)


def _kernel(q: torch.Tensor, k: torch.Tensor, call: Call) -> type[Kernel]:
    return KERNELS[choose(q.dtype, q.shape[2], k.shape[2], is_full=call.kind == FULL)]


def _unit_backward(
    plan: CallPlan,
    unit: Unit,
    grad: torch.Tensor,
    out: torch.Tensor,
    heads: Sequence[torch.Tensor],
    states: list[torch.Tensor],
    totals: tuple[torch.Tensor, ...],
) -> None:
    """Write the gradients of a unit's q, k and v to `totals`, [unit, H, D] each."""
    is_first = True
    for call in reversed(
        unit.calls
    ):  # the last one has most keys: they are written, and those of others added
        queries = slice(call.start, call.stop)
        if is_first and call.keys != ((0, unit.stop - unit.start),):
            for total in totals[1:]:
                total.zero_()
        if call.kind == BLIND:
            totals[0][queries] = 0.0
        else:
            q, k, v = _operands(heads, call)
            bias = plan.bias(unit, call, q.dtype)
            rows = slice(unit.start + call.start, unit.start + call.stop)
            given, out_rows = (x[rows].to(q.dtype).transpose(0, 1).unsqueeze(0) for x in (grad, out))
            parts = _kernel(q, k, call).backward(
                given, q, k, v, out_rows, states.pop(), call.kind == CAUSAL, bias
            )
            totals[0][queries] = parts[0][0].transpose(0, 1)
            for total, part in zip(totals[1:], parts[1:], strict=True):
                _add(total, part[0].transpose(0, 1), call, is_first)
        is_first = False


def _add(total: torch.Tensor, part: torch.Tensor, call: Call, is_first: bool) -> None:
    """Add the gradients of a call's keys, [keys, H, D], to those of its unit; the first call writes them."""
    at = 0
    for start, stop in call.keys:
        place = total[start:stop]
        if is_first:
            place.copy_(part[at : at + stop - start])
        else:
            place.add_(part[at : at + stop - start])
        at += stop - start


def plan_attention(layout: Layout, device: torch.device, kernel: str = "auto", multiple: int = 1) -> HostPlan:
    """Choose the kernel for a batch, and lay out its tokens.

    Args:
        kernel: "auto", or one of "calls", "varlen", "flex" and "dense".
        multiple: of the number of tokens, padding included.
    """
    assert kernel in ("auto", "calls", "varlen", "flex", "dense"), kernel
    if kernel == "dense":
        return DensePlan(layout)
    on_cpu = kernel == "calls" or (kernel == "auto" and device.type == "cpu")
    units = make_units(layout, square_causal_only=on_cpu)
    length = max(1, -(-len(layout.rows) // multiple)) * multiple
    if on_cpu:
        return CallPlan(layout, units, length)
    if kernel == "varlen" or (kernel == "auto" and _suits_varlen(units, len(layout.rows))):
        from megatron_lite.model.attention.varlen import VarlenPlan

        return VarlenPlan(layout, units, length)
    from megatron_lite.model.attention.flex import FlexPlan  # here: its import takes seconds

    return FlexPlan(layout, length, compiled=device.type != "cpu")


def _suits_varlen(units: list[Unit], tokens: int) -> bool:
    calls = [call for unit in units for call in unit.calls]
    keys = sum(stop - start for call in calls for start, stop in call.keys)
    return all(call.kind != MASKED for call in calls) and keys <= _MOST_KEYS * tokens
