"""Operators between the joined product of queries, keys and values and their scores, on a GPU, see fused.py.

One launch in each direction takes the norms of heads, rotary positions, keys and values that several queries share, a
factor of the queries, and in the backward pass the gradients as attention's kernels leave them. On CPU model/rope.py
computes the same with torch's operators.

Shapes: T tokens, H heads of queries, K of keys and of values, D head size, W features of a head that are turned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_lite.model.kernels.fused import finish_sums_kernel, operator

_PROGRAMS = 256  # most that sum gradients of scales over tokens, for queries and keys each


class HeadForm(NamedTuple):
    """How heads become operands of attention. Its first four are of all tokens or all heads; None = nothing is done."""

    cos: torch.Tensor | None  # fp32 [T, 1, W / 2]
    sin: torch.Tensor | None
    query_scale: torch.Tensor | None  # [D], of the norm of each head
    key_scale: torch.Tensor | None
    epsilon: float  # of the norms
    key_heads: int  # K
    factor: float  # of the queries

    def turns_only(self, queries: int) -> bool:
        """Whether `turn_heads_kernel` is all that is needed. Args: queries: their number of heads."""
        others = self.query_scale is None and self.factor == 1.0 and self.key_heads == queries
        return others and self.cos is not None


def plain_form(heads: int) -> HeadForm:
    """The form of heads that change nothing: `gather_heads_kernel` then puts gradients together as they are."""
    return HeadForm(None, None, None, None, 0.0, heads, 1.0)


def spread_heads(
    heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, query_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None, epsilon: float, key_heads: int, factor: float,
) -> torch.Tensor:  # fmt: skip
    """[T, H + 2 K, D] -> [T, 3, H, D]: queries and keys are normed and turned, keys and values repeated for groups."""
    tokens, count, size = heads.shape
    return heads.new_empty(tokens, 3, count - 2 * key_heads, size)


def turn_heads(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> None:
    """Turns queries and keys of [T, 3, H, D] where they are. Args: back: the other way."""


def gather_heads(
    d_q: torch.Tensor, d_k: torch.Tensor | None, d_v: torch.Tensor | None, first_key: int,
    heads: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None,
    query_scale: torch.Tensor | None, key_scale: torch.Tensor | None, epsilon: float, key_heads: int, factor: float,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradient [T, H + 2 K, D] of what `spread_heads` took, and sums of that of the scales, fp32 [P, 2 D].

    Args:
        d_q, d_k, d_v: [T, 3, H, D] and None, or gradients of the first queries and of a slice of keys and values.
        first_key: where that slice begins. heads: what was normed, None without norms.
    """
    count, size = d_q.shape[-2:]
    programs = 0 if query_scale is None else min(_PROGRAMS, tokens)
    sums = d_q.new_empty(programs, 2 * size, dtype=torch.float32)
    return d_q.new_empty(tokens, count + 2 * key_heads, size), sums


spread_heads_kernel = operator(spread_heads, module="triton_heads")
turn_heads_kernel = operator(turn_heads, ("heads",), "triton_heads")
gather_heads_kernel = operator(gather_heads, module="triton_heads")


def of_heads(
    grad: torch.Tensor, heads: torch.Tensor | None, form: HeadForm
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`gather_heads` of a gradient [T, 3, H, D] that nobody else reads."""
    if form.turns_only(grad.shape[2]):
        turn_heads_kernel(grad, form.cos, form.sin, True)
        return grad, None
    return gather_heads_kernel(grad, None, None, 0, heads, *form, len(grad))


class Spread(torch.autograd.Function):
    """Heads [T, H + 2 K, D], the scales of norms, and the rest of a HeadForm -> [T, 3, H, D]."""

    @staticmethod
    def forward(ctx: Any, heads, query_scale, key_scale, form):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(None if query_scale is None else heads, query_scale)
        ctx.form, ctx.tokens = form, heads.shape[0]
        return spread_heads_kernel(heads, *form)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[no-untyped-def]
        heads, query_scale = ctx.saved_tensors
        d_heads, sums = gather_heads_kernel(grad.contiguous(), None, None, 0, heads, *ctx.form, ctx.tokens)
        if query_scale is None:
            return d_heads, None, None, None
        return d_heads, *finish_sums_kernel([sums], query_scale).chunk(2), None
