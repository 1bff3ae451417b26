"""The attention kernel that fits the structure of a batch (batch.py says which token may see which).

A plan is made once per micro-batch and serves all layers. It says in which order it wants the batch's tokens; the model
runs all layers in this order, so no layer moves tokens. The plans:

  CallPlan     CPU: a few kernel calls per document on disjoint queries, most of them without a mask. What needs a mask
               runs in blocks of queries whose small masks are made when they are needed, in the backward pass again,
               so memory grows linearly with the row length.
  VarlenPlan   CUDA: at most two calls of a fused kernel for the whole batch, without a mask (varlen.py): every
               structure but UniLMv2's.
  FlexPlan     CUDA, the rest: FlexAttention with the rule as its mask function (flex.py).
  DensePlan    the reference, only where it is asked for: one masked call, B x S x S booleans.

Tokens that see nothing get zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from megatron_lite.model.batch import (
    BLIND,
    CAUSAL,
    MASKED,
    Call,
    Layout,
    Unit,
    make_units,
    may_see,
    padded_order,
)
from megatron_lite.model.compat import flash_backward_on_cpu, flash_forward_on_cpu
from megatron_lite.model.dropout import AttentionDropout
from megatron_lite.model.tensor_parallel import widens

# CUDA: keys that the calls of VarlenPlan may gather, for each token. GLM takes 2, XLNet 4; UniLMv2 would take 35.
_MOST_KEYS = 6


class AttentionPlan(Protocol):
    """Computes attention for one batch; `layer` is the block's index, for plans that keep state per layer."""

    def attend(self, layer: int, qkv: torch.Tensor, dropout: AttentionDropout | None) -> torch.Tensor:
        """qkv [..., 3, H heads, D head dim] of all tokens -> [..., H, D], scores scaled by D^-1/2."""
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """[B, Sq, H, D] queries over [B, Sk, H, D] keys and values, all of them or those of `mask` [B, 1, Sq, Sk]."""
    dtype = q.dtype
    q, k, v = (_heads_first(x) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).to(dtype)


class DensePlan:
    """One masked call over all tokens. Memory: B x S x S booleans."""

    def __init__(self, layout: Layout):
        self.shape = layout.shape
        self.order = np.arange(layout.shape[0] * layout.shape[1])
        columns = layout.in_place()
        mask = may_see(columns[..., None], columns[..., None, :])
        sees_nothing = ~mask.any(-1)
        # The softmax of no keys would be NaN: such a query sees itself, and its output is zeroed afterwards.
        mask |= sees_nothing[..., None] & np.eye(self.shape[1], dtype=bool)
        self.mask, self.sees_nothing = torch.from_numpy(mask).unsqueeze(1), torch.from_numpy(sees_nothing)

    def arrays(self) -> list[np.ndarray]:
        return []

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> DensePlan:
        self.mask, self.sees_nothing = self.mask.to(device), self.sees_nothing.to(device)
        return self

    def attend(self, layer: int, qkv: torch.Tensor, dropout: AttentionDropout | None) -> torch.Tensor:
        q, k, v = qkv.view(*self.shape, *qkv.shape[1:]).unbind(2)
        if dropout is None:
            out = attend_all(q, k, v, self.mask)
        else:
            keys = dropout.keys.view(self.shape)
            stays = torch.stack([dropout.keep(row, row, q.shape[2]) for row in keys])
            bias = torch.zeros(self.mask.shape, dtype=q.dtype).masked_fill_(~self.mask, float("-inf"))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = _attend_with_dropout(q, k, v, bias, stays, dropout.p).transpose(1, 2)
        return out.masked_fill(self.sees_nothing[:, :, None, None], 0.0).flatten(0, 1)


def _attend_with_dropout(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    stays: torch.Tensor,
    p: float,
) -> torch.Tensor:
    """Attention written out: [..., H, Q, D] queries, keys, values; `stays` bool [..., H, Q, K]."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return torch.where(stays, weights, 0.0) @ v * (1.0 / (1.0 - p))


class CallPlan:
    """The calls of `make_units`, one after another, on CPU. The tokens are in the order of the calls.

    Args: length: T, the tokens of the batch and padding after them.
    """

    def __init__(self, layout: Layout, units: list[Unit], length: int):
        self.layout = layout
        self.order = padded_order(layout, length)
        self.units = units
        self.tokens, self.length = len(layout.rows), length
        self._joins_documents = any(
            layout.document[unit.start] != layout.document[unit.stop - 1] for unit in units
        )
        self._has_groups = bool(layout.grp.any())
        self._columns = torch.from_numpy(layout.columns)

    def arrays(self) -> list[np.ndarray]:
        return []

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> CallPlan:
        return self

    def attend(self, layer: int, qkv: torch.Tensor, dropout: AttentionDropout | None) -> torch.Tensor:
        if dropout is None:
            return _CallsOnCpu.apply(qkv, self)
        out = [self._unit(unit, qkv[unit.start : unit.stop], dropout) for unit in self.units]
        rest = self.length - self.tokens
        return torch.cat([*out, qkv.new_zeros(rest, *qkv.shape[2:])])

    def _unit(self, unit: Unit, qkv: torch.Tensor, dropout: AttentionDropout) -> torch.Tensor:
        """qkv [unit, 3, H, D] -> [unit, H, D], under autograd."""
        q, k, v = (_heads_first(x) for x in qkv.unbind(1))
        keys = dropout.keys[unit.start : unit.stop]
        out = []
        for call in unit.calls:
            queries = q[:, call.start : call.stop]
            if call.kind == BLIND:
                out.append(torch.zeros_like(queries))
                continue
            stays = dropout.keep(keys[call.start : call.stop], _part(keys, call, 0), len(q))
            bias = self.bias(unit, call, q.dtype, causal=True)
            out.append(
                _attend_with_dropout(queries, _part(k, call, 1), _part(v, call, 1), bias, stays, dropout.p)
            )
        return torch.cat(out, dim=1).transpose(0, 1).to(qkv.dtype)

    def bias(
        self, unit: Unit, call: Call, dtype: torch.dtype, *, causal: bool = False
    ) -> torch.Tensor | None:
        """What a masked call adds to its scores: [queries, keys], 0 or -infinity; None for other calls.

        Args: causal: also for causal calls.
        """
        if call.kind != MASKED and not (causal and call.kind == CAUSAL):
            return None
        columns = self._columns[:, unit.start : unit.stop]
        seen = may_see(
            columns[:, call.start : call.stop, None],
            _part(columns, call, 1)[:, None],
            has_groups=self._has_groups,
            joins_documents=self._joins_documents,
        )
        return torch.full(seen.shape, float("-inf"), dtype=dtype).masked_fill_(seen, 0.0)


def _part(x: torch.Tensor, call: Call, dim: int) -> torch.Tensor:
    """The keys of a call out of those of its unit, which lie along `dim`."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in call.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _CallsOnCpu(torch.autograd.Function):
    """All calls of a plan as one autograd node.

    It saves q, k, v in the kernel's layout, the output, and one number per query and head. The backward pass makes the
    masks again and adds the gradients of keys in place.
    """

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, plan: CallPlan) -> torch.Tensor:
        heads = [_heads_first(x).unsqueeze(0) for x in qkv.unbind(1)]
        out = torch.empty(plan.length, *qkv.shape[2:], dtype=qkv.dtype)
        out[plan.tokens :] = 0.0
        sums = []  # log of the sum of exponentials, of each call
        for unit, call in _calls(plan):
            rows = slice(unit.start + call.start, unit.start + call.stop)
            if call.kind == BLIND:
                out[rows] = 0.0
                continue
            keys, values = (_part(x[:, :, unit.start : unit.stop], call, 2) for x in heads[1:])
            bias = plan.bias(unit, call, keys.dtype)
            queries = heads[0][:, :, rows]
            part, log_sum = flash_forward_on_cpu(
                queries, keys, values, 0.0, call.kind == CAUSAL, attn_mask=bias
            )
            out[rows] = part[0].transpose(0, 1)
            sums.append(log_sum)
        ctx.plan = plan
        ctx.save_for_backward(out, *heads, *sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        plan: CallPlan = ctx.plan
        out, *heads = ctx.saved_tensors
        heads, sums = heads[:3], heads[3:]
        # fp32: a key's gradient is a sum over calls.
        wide = torch.promote_types(out.dtype, torch.float32)
        total = torch.empty(plan.length, 3, *out.shape[1:], dtype=wide)
        total[plan.tokens :] = 0.0
        totals = total.unbind(1)
        for unit in reversed(plan.units):
            is_first = True
            for call in reversed(unit.calls):
                rows = slice(unit.start + call.start, unit.start + call.stop)
                if is_first:
                    _clear(totals[1:], unit, call)
                if call.kind == BLIND:
                    totals[0][rows] = 0.0
                else:
                    keys, values = (_part(x[:, :, unit.start : unit.stop], call, 2) for x in heads[1:])
                    bias = plan.bias(unit, call, keys.dtype)
                    given, out_rows = (
                        x[rows].to(keys.dtype).transpose(0, 1).unsqueeze(0) for x in (grad, out)
                    )
                    inputs = (given, heads[0][:, :, rows], keys, values, out_rows, sums.pop(), 0.0)
                    parts = flash_backward_on_cpu(*inputs, call.kind == CAUSAL, attn_mask=bias)
                    totals[0][rows] = parts[0][0].transpose(0, 1)
                    for total_of, part in zip(totals[1:], parts[1:], strict=True):
                        _add(total_of, part[0].transpose(0, 1), unit, call, is_first)
                is_first = False
        return total.to(grad.dtype), None


def _calls(plan: CallPlan) -> Iterator[tuple[Unit, Call]]:
    return ((unit, call) for unit in plan.units for call in unit.calls)


def _clear(totals: tuple[torch.Tensor, ...], unit: Unit, first: Call) -> None:
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
        from megatron_lite.model.varlen import VarlenPlan

        return VarlenPlan(layout, units, length)
    from megatron_lite.model.flex import FlexPlan  # here: its import takes seconds

    return FlexPlan(layout, length, compiled=device.type != "cpu")


def _suits_varlen(units: list[Unit], tokens: int) -> bool:
    calls = [call for unit in units for call in unit.calls]
    keys = sum(stop - start for call in calls for start, stop in call.keys)
    return all(call.kind != MASKED for call in calls) and keys <= _MOST_KEYS * tokens
