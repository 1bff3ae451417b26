"""y = x W^T + b in the way that suits the device.

CPUs without bf16/fp16 matrix instructions (before Sapphire Rapids: no AMX, no AVX512-BF16) run torch's half-precision
matmul 4 to 5 times slower than fp32. There, half-precision operands are widened to fp32, multiplied with fp32
accumulation and rounded once on the way out, which is what the native instructions do as well.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


@functools.cache
def cpu_has_half_matmul(dtype: torch.dtype) -> bool:
    """True if this CPU multiplies matrices of `dtype` with dedicated instructions."""
    if dtype == torch.bfloat16:
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    if dtype == torch.float16:
        return torch.cpu._is_amx_fp16_supported()
    return True


def widens(x: torch.Tensor) -> bool:
    """True if matmuls on `x` should run in fp32 on widened operands."""
    return x.device.type == "cpu" and not cpu_has_half_matmul(x.dtype)


class _WidenedLinear(torch.autograd.Function):
    """Saves the half-precision operands (not their fp32 copies) for the backward pass."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad = grad.float()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight.float()).to(x.dtype)
        flat = grad.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            grad_weight = (flat.T @ x.flatten(0, -2).float()).to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [..., in] -> [..., out]` with `weight [out, in]`; rounds once to x's dtype."""
    if widens(x):
        return _WidenedLinear.apply(x, weight, bias)
    return F.linear(x, weight, bias)
