"""Operators between the joined product of queries, keys and values and their scores, on a GPU, see fused.py.

One launch in each direction does all of this: norms of heads, rotary positions, repeating the keys and values that
several queries share, scaling the queries, and in the backward pass reading the gradients as attention's kernels leave
them. On CPU transformer/rope.py computes the same with torch's operators.

Shapes: T tokens, H heads of queries, K of keys and of values, D head size, W features of a head that are rotated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_lite.transformer.kernels.fused import finish_sums_kernel, operator

_PROGRAMS = 256  # most that sum gradients of scales over tokens, for queries and keys each


class HeadTransform(NamedTuple):
    """How heads become operands of attention. None = that step is left out."""

    cos: torch.Tensor | None  # fp32 [T, 1, W / 2]
    sin: torch.Tensor | None
    query_scale: torch.Tensor | None  # [D], of the norm of each head
    key_scale: torch.Tensor | None
    epsilon: float  # of the norms
    key_heads: int  # K
    factor: float  # of the queries

    def is_rotation_only(self, query_heads: int) -> bool:
        """Whether `rotate_heads_kernel` is all that is needed. Args: query_heads: H."""
        others = self.query_scale is None and self.factor == 1.0 and self.key_heads == query_heads
        return others and self.cos is not None


def identity_transform(heads: int) -> HeadTransform:
    """Changes nothing: `gather_heads_kernel` then only packs the gradients of q, k and v into one tensor."""
    return HeadTransform(None, None, None, None, 0.0, heads, 1.0)


def expand_heads(
    heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, query_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None, epsilon: float, key_heads: int, factor: float,
) -> torch.Tensor:  # fmt: skip
    """[T, H + 2 K, D] -> [T, 3, H, D]: queries and keys normed and rotated, keys and values repeated for groups."""
    tokens, count, size = heads.shape
    return heads.new_empty(tokens, 3, count - 2 * key_heads, size)


def rotate_heads(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> None:
    """Rotates queries and keys of [T, 3, H, D] in place. Args: back: by the negative angles."""


def gather_heads(
    d_q: torch.Tensor, d_k: torch.Tensor | None, d_v: torch.Tensor | None, first_key: int,
    heads: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None,
    query_scale: torch.Tensor | None, key_scale: torch.Tensor | None, epsilon: float, key_heads: int, factor: float,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradient [T, H + 2 K, D] of the input of `expand_heads`, and partial sums for the scales, fp32 [P, 2 D].

    Args:
        d_q, d_k, d_v: one gradient [T, 3, H, D], None and None; or gradients of the first queries and of a range of
            keys and values, [.., H, D]; the others are zero.
        first_key: the first token of that range. heads: what was normed, None without norms.
    """
    count, size = d_q.shape[-2:]
    programs = 0 if query_scale is None else min(_PROGRAMS, tokens)
    sums = d_q.new_empty(programs, 2 * size, dtype=torch.float32)
    return d_q.new_empty(tokens, count + 2 * key_heads, size), sums


expand_heads_kernel = operator(expand_heads, module="triton_qkv_heads")
rotate_heads_kernel = operator(rotate_heads, ("heads",), "triton_qkv_heads")
gather_heads_kernel = operator(gather_heads, module="triton_qkv_heads")


def gather_head_grads(
    grad: torch.Tensor, heads: torch.Tensor | None, transform: HeadTransform
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`gather_heads` of one gradient [T, 3, H, D], which is overwritten: nothing else reads it."""
    if transform.is_rotation_only(grad.shape[2]):
        rotate_heads_kernel(grad, transform.cos, transform.sin, True)
        return grad, None
    return gather_heads_kernel(grad, None, None, 0, heads, *transform, len(grad))


class ExpandHeads(torch.autograd.Function):
    """Heads [T, H + 2 K, D], the scales of norms, and the transform, which has them too -> [T, 3, H, D]."""

    @staticmethod
    def forward(ctx: Any, heads, query_scale, key_scale, transform):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(None if query_scale is None else heads, query_scale)
        ctx.transform, ctx.tokens = transform, heads.shape[0]
        return expand_heads_kernel(heads, *transform)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[no-untyped-def]
        heads, query_scale = ctx.saved_tensors
        d_heads, sums = gather_heads_kernel(
            grad.contiguous(), None, None, 0, heads, *ctx.transform, ctx.tokens
        )
        if query_scale is None:
            return d_heads, None, None, None
        return d_heads, *finish_sums_kernel([sums], query_scale).chunk(2), None
