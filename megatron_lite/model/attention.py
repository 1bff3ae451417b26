"""The attention kernel that fits the structure of a batch (batch.py says which token may see which).

A plan is made once per batch and serves all layers. The plans:

  CallPlan   a few kernel calls per document on disjoint queries, most of them without a mask. On CPU it serves every
             structure: what needs a mask runs in blocks of queries whose small masks are made when they are needed, in
             the backward pass again, so memory grows linearly with the row length. On CUDA it serves structures that
             need no mask (all recipes but UniLMv2's and joined short documents).
  FlexPlan   the rest on CUDA: FlexAttention with the rule as its mask function (flex.py).
  DensePlan  the reference: one masked call, B x S x S booleans. Also CUDA with dropout, which FlexAttention lacks.

Tokens that see nothing, above all padding, get zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from megatron_lite.model.batch import BLIND, CAUSAL, MASKED, Call, Layout, Unit, make_units, may_see
from megatron_lite.model.compat import flash_backward_on_cpu, flash_forward_on_cpu
from megatron_lite.model.tensor_parallel import widens

# CUDA: mean number of tokens per call from which CallPlan is taken. Not measured yet.
_LEAST_ROWS_PER_CALL = 64


class AttentionPlan(Protocol):
    """Computes attention for one batch; `layer` is the block's index, for plans that keep state per layer."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        """q, k, v [B, S, H heads, D head dim] -> [B, S, H, D], scaled by D^-1/2."""
        ...


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[..., S, H, D] -> [..., H, S, D]; on CPU a copy, in fp32 where half-precision matmuls are slow."""
    x = x.transpose(-3, -2)
    if x.device.type != "cpu":
        return x
    # torch's CPU kernel is up to 1.3 times faster when the rows of a head lie side by side.
    if widens(x):
        return x.to(torch.float32, memory_format=torch.contiguous_format)
    return x.contiguous()


def attend_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """[B, Sq, H, D] queries over [B, Sk, H, D] keys and values, all of them or those of `mask` [B, 1, Sq, Sk]."""
    dtype = q.dtype
    q, k, v = (_heads_first(x) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return out.transpose(1, 2).to(dtype)


class DensePlan:
    """One masked call over all tokens. Memory: B x S x S booleans."""

    def __init__(self, layout: Layout, device: torch.device):
        columns = torch.from_numpy(layout.in_place()).to(device)
        mask = may_see(columns[..., None], columns[..., None, :])
        self.sees_nothing = ~mask.any(-1)
        # The softmax of no keys would be NaN: such a query sees itself, and its output is zeroed afterwards.
        self.mask = (mask | torch.diag_embed(self.sees_nothing)).unsqueeze(1)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        out = attend_all(q, k, v, dropout, self.mask)
        return out.masked_fill(self.sees_nothing[:, :, None, None], 0.0)


class CallPlan:
    """The calls of `make_units`, one after another.

    Args: rows: indices into the flattened [B, S] that put the tokens in the order of the calls; None if they are in
        this order and there is no padding.
    """

    def __init__(self, layout: Layout, units: list[Unit], rows: torch.Tensor | None, device: torch.device):
        self.layout = layout
        self.units = units
        self.rows = rows
        self.device = device
        self._joins_documents = any(
            layout.document[unit.start] != layout.document[unit.stop - 1] for unit in units
        )
        self._has_groups = bool(layout.grp.any())
        self._columns = torch.from_numpy(layout.columns).to(device)

    def laid_out(self) -> CallPlan:
        """The plan for a batch [1, T] that holds the tokens `layout.rows` of this one, in that order."""
        return CallPlan(self.layout, self.units, None, self.device)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        if q.device.type == "cpu" and not dropout:
            return _CallsOnCpu.apply(q, k, v, self)
        if not self.units:
            return torch.zeros_like(q)
        lengths = [unit.stop - unit.start for unit in self.units]
        # split, not slices: the backward pass of split is one concatenation, that of a slice a zero-filled full tensor.
        parts = (_heads_first(self._take(x)).unsqueeze(0).split(lengths, dim=2) for x in (q, k, v))
        out: list[torch.Tensor] = []
        for unit, *heads in zip(self.units, *parts, strict=True):
            out += self._unit(unit, heads, dropout)
        return self._put(torch.cat(out, dim=2)[0].transpose(0, 1).to(q.dtype), q)

    def _take(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H, D] -> [T, H, D] in the order of the calls."""
        x = x.flatten(0, 1)
        return x if self.rows is None else x.index_select(0, self.rows)

    def _put(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of `_take`; tokens that are not in the plan get 0."""
        if self.rows is None:
            return x.reshape(like.shape)
        whole = x.new_zeros(like.shape[0] * like.shape[1], *like.shape[2:])
        return whole.index_copy(0, self.rows, x).view(like.shape)

    def _unit(self, unit: Unit, heads: list[torch.Tensor], dropout: float) -> Iterator[torch.Tensor]:
        """q, k, v [1, H, unit, D] -> the outputs of the unit's calls, under autograd."""
        q, k, v = heads
        attend = functools.partial(F.scaled_dot_product_attention, dropout_p=dropout)
        for call, rows in zip(
            unit.calls, q.split([c.stop - c.start for c in unit.calls], dim=2), strict=True
        ):
            if call.kind == BLIND:
                yield torch.zeros_like(rows)
                continue
            keys, values = _part(k, call), _part(v, call)
            if call.kind == CAUSAL:
                yield attend(rows, keys, values, causal_lower_right(rows.shape[2], keys.shape[2]))
            else:
                yield attend(rows, keys, values, self.bias(unit, call, rows.dtype))

    def bias(self, unit: Unit, call: Call, dtype: torch.dtype) -> torch.Tensor | None:
        """What a masked call adds to its scores: [queries, keys], 0 or -infinity; None for other calls."""
        if call.kind != MASKED:
            return None
        columns = self._columns[:, unit.start : unit.stop]
        parts = [columns[:, start:stop] for start, stop in call.keys]
        seen = may_see(
            columns[:, call.start : call.stop, None],
            parts[0] if len(parts) == 1 else torch.cat(parts, dim=1),
            has_groups=self._has_groups,
            joins_documents=self._joins_documents,
        )
        whole = torch.full(seen.shape, float("-inf"), dtype=dtype, device=self.device)
        return whole.masked_fill_(seen, 0.0)


def _part(x: torch.Tensor, call: Call) -> torch.Tensor:
    """The keys (or values) of a call out of those of its unit, [1, H, keys, D]."""
    parts = [x[:, :, start:stop] for start, stop in call.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


class _CallsOnCpu(torch.autograd.Function):
    """All calls of a plan as one autograd node.

    It saves q, k, v in the kernel's layout, the output, and one number per query and head. The backward pass makes the
    masks again and adds the gradients of keys in place.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: CallPlan) -> torch.Tensor:
        heads = [_heads_first(plan._take(x)).unsqueeze(0) for x in (q, k, v)]
        out = torch.empty(len(plan.layout.rows), *q.shape[2:], dtype=q.dtype)
        sums = []  # log of the sum of exponentials, of each call
        for unit, call in ((u, c) for u in plan.units for c in u.calls):
            rows = slice(unit.start + call.start, unit.start + call.stop)
            if call.kind == BLIND:
                out[rows] = 0.0
                continue
            keys, values = (_part(x[:, :, unit.start : unit.stop], call) for x in heads[1:])
            bias = plan.bias(unit, call, keys.dtype)
            queries = heads[0][:, :, rows]
            part, log_sum = flash_forward_on_cpu(
                queries, keys, values, 0.0, call.kind == CAUSAL, attn_mask=bias
            )
            out[rows] = part[0].transpose(0, 1)
            sums.append(log_sum)
        ctx.plan = plan
        ctx.save_for_backward(out, *heads, *sums)
        return plan._put(out, q)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        plan: CallPlan = ctx.plan
        out, *heads = ctx.saved_tensors
        heads, sums = heads[:3], heads[3:]
        tokens = plan._take(grad)
        # fp32: a key's gradient is a sum over calls.
        totals = [torch.empty_like(out, dtype=torch.promote_types(out.dtype, torch.float32)) for _ in heads]
        for unit in reversed(plan.units):
            is_first = True
            for call in reversed(unit.calls):
                rows = slice(unit.start + call.start, unit.start + call.stop)
                if is_first:
                    _clear(totals[1:], unit, call)
                if call.kind == BLIND:
                    totals[0][rows] = 0.0
                else:
                    keys, values = (_part(x[:, :, unit.start : unit.stop], call) for x in heads[1:])
                    bias = plan.bias(unit, call, keys.dtype)
                    given, out_rows = (
                        x[rows].to(keys.dtype).transpose(0, 1).unsqueeze(0) for x in (tokens, out)
                    )
                    inputs = (given, heads[0][:, :, rows], keys, values, out_rows, sums.pop(), 0.0)
                    parts = flash_backward_on_cpu(*inputs, call.kind == CAUSAL, attn_mask=bias)
                    totals[0][rows] = parts[0][0].transpose(0, 1)
                    for total, part in zip(totals[1:], parts[1:], strict=True):
                        _add(total, part[0].transpose(0, 1), unit, call, is_first)
                is_first = False
        return *(plan._put(total.to(grad.dtype), grad) for total in totals), None


def _clear(totals: list[torch.Tensor], unit: Unit, first: Call) -> None:
    """Zero the gradients of the unit's keys, unless its first call has all of them."""
    if first.keys != ((0, unit.stop - unit.start),):
        for total in totals:
            total[unit.start : unit.stop] = 0.0


def _add(total: torch.Tensor, part: torch.Tensor, unit: Unit, call: Call, is_first: bool) -> None:
    """Add the gradients of a call's keys, [keys, H, D]; the first call of a unit writes them."""
    at = 0
    for start, stop in call.keys:
        place = total[unit.start + start : unit.start + stop]
        if is_first:
            place.copy_(part[at : at + stop - start])
        else:
            place.add_(part[at : at + stop - start])
        at += stop - start


def plan_attention(layout: Layout, device: torch.device, kernel: str = "auto") -> AttentionPlan:
    """Choose the kernel for a batch.

    Args: kernel: "auto", or one of "calls", "flex" and "dense".
    """
    assert kernel in ("auto", "calls", "flex", "dense"), kernel
    if kernel == "dense":
        return DensePlan(layout, device)
    tokens = layout.shape[0] * layout.shape[1]  # padding included
    units = make_units(layout, square_causal_only=device.type == "cpu")
    if kernel == "calls" or (
        kernel == "auto" and (device.type == "cpu" or _suits_cuda(units, len(layout.rows)))
    ):
        in_order = len(layout.rows) == tokens and (np.diff(layout.rows) == 1).all()
        return CallPlan(layout, units, None if in_order else torch.from_numpy(layout.rows).to(device), device)
    from megatron_lite.model.flex import FlexPlan  # here: its import takes seconds

    dense = functools.cache(lambda: DensePlan(layout, device))
    return FlexPlan(layout, device, dense, compiled=device.type != "cpu")


def _suits_cuda(units: list[Unit], tokens: int) -> bool:
    calls = [call for unit in units for call in unit.calls]
    return all(call.kind != MASKED for call in calls) and tokens >= _LEAST_ROWS_PER_CALL * len(calls)
