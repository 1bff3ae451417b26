"""A pre-norm block as one autograd function: the host's cheapest way through it on a GPU.

block.py says what a block computes. There each product, kernel and attention call is an autograd function of its own,
whose two calls cost the host more than the launch; here they are plain calls. And a block's sums over tokens, for
biases and norms, are finished by one kernel instead of four. Gradients of parameters go straight to the optimizer.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.model.attention.varlen import VarlenPlan
from megatron_lite.model.kernels.dropout import AttentionDropout, FeatureDropout
from megatron_lite.model.kernels.fused import (
    NO_DROPOUT,
    Biased,
    activate_backward_kernel,
    activate_kernel,
    add_norm_backward_kernel,
    add_norm_kernel,
    finish_sums_kernel,
)
from megatron_lite.model.layers.tensor_parallel import LayerNorm


class _Norm(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter
    epsilon: float


class _Product(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter
    take: Callable[[torch.Tensor, torch.Tensor], None]  # of the weight, see `take_products`


class Parts(NamedTuple):
    """Parameters of one block, looked up once: module attribute access costs the host 100 us per pass."""

    first: _Norm
    qkv: _Product
    dense: _Product
    second: _Norm
    expand: _Product
    shrink: _Product
    head_size: int
    activation: str
    take: Callable[[nn.Parameter, torch.Tensor], None]
    run: Callable[..., Any] | None = None  # instead of `_FusedBlock.apply`: with CUDA graphs (graphs.py)

    @staticmethod
    def of(block: Any, take: Callable[[nn.Parameter, torch.Tensor], None]) -> Parts | None:
        """The parameters of a block; None if its norms have no kernel.

        Args: block: a plain one of block.py. take: takes in a parameter's gradient.
        """
        norms = []
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            if not isinstance(norm, LayerNorm) or norm.normalize is not F.layer_norm:
                return None
            norms.append(_Norm(norm.weight, norm.bias, norm.epsilon))
        attention, mlp = block.attention, block.mlp
        return Parts(
            norms[0], _product(attention.query_key_value), _product(attention.dense),
            norms[1], _product(mlp.dense_h_to_4h), _product(mlp.dense_4h_to_h),
            attention.head_size, mlp.activation, take,
        )  # fmt: skip

    def suits(self, plan: Any) -> bool:
        return isinstance(plan, VarlenPlan)

    def block(
        self,
        hidden: torch.Tensor,
        x: Biased | None,
        dropout: FeatureDropout | None,
        attended_dropout: FeatureDropout | None,
        attention_dropout: AttentionDropout | None,
        plan: Any,
    ) -> tuple[torch.Tensor, Biased]:
        """Forward pass on hidden + dropout(x): the hidden state after attention, and the MLP's output to add."""
        p = plan.prepare(self.head_size, hidden.device, attention_dropout)
        added, added_bias = x or (None, None)
        dropouts = dropout or NO_DROPOUT, attended_dropout or NO_DROPOUT
        # Parameters are no arguments of their own: autograd would call the hooks of those that have been taken.
        run = self.run or _FusedBlock.apply
        total, out = run(hidden, added, (added_bias, self), dropouts, p, plan)
        return total, Biased(out, self.shrink.bias)


def _product(layer: Any) -> _Product:
    return _Product(layer.weight, layer.bias, layer.weight.take_product)


class _FusedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, x, parameters, dropouts, attention_p, plan):  # type: ignore[no-untyped-def]
        x_bias, parts = parameters
        first, qkv_layer, dense, second, expand, shrink, head_size, activation, *_ = parts
        before, after = dropouts
        tokens = hidden.shape[0]
        summed, normed, stats = add_norm_kernel(x, x_bias, *before, hidden, *first, True)
        if x is None:
            summed = hidden
        qkv = F.linear(normed, qkv_layer.weight, qkv_layer.bias).view(tokens, 3, -1, head_size)
        attended, kept = plan.forward([qkv], attention_p)
        flat = attended.view(tokens, -1)
        projected = F.linear(flat, dense.weight)
        total, normed_again, stats_again = add_norm_kernel(
            projected, dense.bias, *after, summed, *second, True
        )
        expanded = F.linear(normed_again, expand.weight)
        inner = activate_kernel(expanded, expand.bias, activation, False, *NO_DROPOUT)
        out = F.linear(inner, shrink.weight)
        ctx.save_for_backward(total)  # a result: as an attribute it would keep itself
        ctx.of_attention = summed, normed, stats, attended, flat, kept
        ctx.of_mlp = normed_again, stats_again, expanded, inner
        ctx.parameters, ctx.has_x = parameters, x is not None
        ctx.dropouts, ctx.attention_p, ctx.plan = dropouts, attention_p, plan
        return total, out

    @staticmethod
    def backward(ctx: Any, d_total, d_out):  # type: ignore[no-untyped-def]
        x_bias, parts = ctx.parameters
        d_sum, d_projected, sums = _mlp_backward(ctx, parts, d_total.contiguous(), d_out.contiguous())
        d_hidden, d_x, more_sums = _attention_backward(ctx, parts, d_sum, d_projected, x_bias is not None)
        parameters = [
            parts.expand.bias,
            *parts.second[:2],
            parts.dense.bias,
            parts.qkv.bias,
            *parts.first[:2],
        ]
        if x_bias is not None:
            parameters.append(x_bias)
        finished = finish_sums_kernel([*sums, *more_sums], parts.expand.bias)
        gradients = finished.split([parameter.shape[0] for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parts.take(parameter, gradient)
        return d_hidden, d_x if ctx.has_x else None, None, None, None, None


def _mlp_backward(ctx: Any, parts: Parts, d_total: torch.Tensor, d_out: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of the sum after attention and of attention's part of it; sums of biases and of the norm."""
    normed, stats, expanded, inner = ctx.of_mlp
    ctx.of_mlp = None
    (total,) = ctx.saved_tensors
    d_inner = torch.mm(d_out, parts.shrink.weight)
    parts.shrink.take(d_out, inner)
    d_expanded, bias_sums = activate_backward_kernel(
        expanded, parts.expand.bias, d_inner, parts.activation, False, *NO_DROPOUT
    )
    del d_inner, inner, expanded
    d_normed = torch.mm(d_expanded, parts.expand.weight)
    parts.expand.take(d_expanded, normed)
    _, after = ctx.dropouts
    d_sum, d_projected, sums = add_norm_backward_kernel(
        d_total, d_normed, total, parts.second.weight, stats, True, True, *after, True
    )
    return d_sum, d_sum if after is NO_DROPOUT else d_projected, [bias_sums, sums]


def _attention_backward(
    ctx: Any, parts: Parts, d_sum: torch.Tensor, d_projected: torch.Tensor, has_x_bias: bool
) -> tuple[Any, ...]:
    """Gradients of the hidden state and of x; sums of the bias of Q, K and V, of the norm and of x's bias."""
    summed, normed, stats, attended, flat, kept = ctx.of_attention
    ctx.of_attention = None
    d_attended = torch.mm(d_projected, parts.dense.weight).view_as(attended)
    parts.dense.take(d_projected, flat)
    (d_qkv,), qkv_sums = ctx.plan.gradients(d_attended, attended, kept, ctx.attention_p)
    d_qkv = d_qkv.view(flat.shape[0], -1)
    if qkv_sums is None:
        qkv_sums = d_qkv.sum(0, dtype=torch.float32, keepdim=True)
    d_normed = torch.mm(d_qkv, parts.qkv.weight)
    parts.qkv.take(d_qkv, normed)
    before, _ = ctx.dropouts
    d_hidden, d_x, sums = add_norm_backward_kernel(
        d_sum, d_normed, summed, parts.first.weight, stats, True, True, *before, has_x_bias
    )
    return d_hidden, d_hidden if before is NO_DROPOUT else d_x, [qkv_sums, sums]
