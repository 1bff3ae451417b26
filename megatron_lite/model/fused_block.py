"""A pre-norm block as one autograd function: the host's cheapest way through it on a GPU.

block.py says what a block computes. There each product, kernel and attention call is an autograd function of its own,
whose two calls cost the host more than the launch; here they are plain calls. And a block's sums over tokens, for
biases and norms, are finished by one kernel instead of four. Gradients of parameters go straight to the optimizer.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megatron_lite.model.dropout import FeatureDropout
from megatron_lite.model.fused import (
    NO_DROPOUT,
    Biased,
    add_norm_backward_kernel,
    add_norm_kernel,
    finish_sums_kernel,
    gelu_backward_kernel,
    gelu_kernel,
)
from megatron_lite.model.varlen import VarlenPlan, backward_calls, forward_calls

if TYPE_CHECKING:
    from megatron_lite.model.block import Block


def fused_block(
    block: Block,
    hidden: torch.Tensor,
    x: Biased | None,
    dropout: FeatureDropout | None,
    attended_dropout: FeatureDropout | None,
    attention_p: float,
    plan: VarlenPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the block makes of hidden + dropout(x): the hidden state after attention, and what the MLP adds to it.

    Args: attention_p: probability of dropout of attention weights, whose kernel is seeded.
    """
    added, added_bias = x or (None, None)
    dropouts = dropout or NO_DROPOUT, attended_dropout or NO_DROPOUT
    return _FusedBlock.apply(hidden, added, added_bias, block, dropouts, attention_p, plan)


class _FusedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, x, x_bias, block, dropouts, attention_p, plan):  # type: ignore[no-untyped-def]
        first, second = block.input_layernorm, block.post_attention_layernorm
        qkv_layer, dense = block.attention.query_key_value, block.attention.dense
        expand, shrink = block.mlp.dense_h_to_4h, block.mlp.dense_4h_to_h
        before, after = dropouts
        summed, normed, stats = add_norm_kernel(
            x, x_bias, *before, hidden, first.weight, first.bias, first.epsilon
        )
        if x is None:
            summed = hidden
        qkv = F.linear(normed, qkv_layer.weight, qkv_layer.bias)
        attended, keys, states = forward_calls(
            plan, qkv.view(hidden.shape[0], 3, -1, block.attention.head_size), attention_p
        )
        attended = attended.view(hidden.shape[0], -1)
        projected = F.linear(attended, dense.weight)
        total, normed_again, stats_again = add_norm_kernel(
            projected, dense.bias, *after, summed, second.weight, second.bias, second.epsilon
        )
        expanded = F.linear(normed_again, expand.weight)
        inner = gelu_kernel(expanded, expand.bias, block.mlp.activation == "gelu_tanh")
        out = F.linear(inner, shrink.weight)
        ctx.save_for_backward(total)  # a result: kept otherwise, it would keep itself
        ctx.of_attention = summed, normed, stats, qkv, attended, keys, states
        ctx.of_mlp = normed_again, stats_again, expanded, inner
        ctx.block, ctx.x_bias, ctx.has_x = block, x_bias, x is not None
        ctx.dropouts, ctx.attention_p, ctx.plan = dropouts, attention_p, plan
        return total, out

    @staticmethod
    def backward(ctx: Any, d_total, d_out):  # type: ignore[no-untyped-def]
        block = ctx.block
        dense, expand = block.attention.dense, block.mlp.dense_h_to_4h
        first, second = block.input_layernorm, block.post_attention_layernorm
        grad, projected_grad, sums = _mlp_backward(ctx, d_total.contiguous(), d_out.contiguous())
        d_hidden, d_x, more_sums = _attention_backward(ctx, grad, projected_grad)
        biases = [expand.bias, second.weight, second.bias, dense.bias, block.attention.query_key_value.bias]
        biases += [first.weight, first.bias, *([] if ctx.x_bias is None else [ctx.x_bias])]
        finished = finish_sums_kernel([*sums, *more_sums], expand.bias)
        for parameter, gradient in zip(biases, finished.split([p.shape[0] for p in biases]), strict=True):
            block.take(parameter, gradient)
        return d_hidden, d_x, None, None, None, None, None


def _mlp_backward(ctx: Any, d_total: torch.Tensor, d_out: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of the sum after attention and of attention's part of it; sums of GELU's bias, norm and bias."""
    block = ctx.block
    second, expand, shrink = block.post_attention_layernorm, block.mlp.dense_h_to_4h, block.mlp.dense_4h_to_h
    normed, stats, expanded, inner = ctx.of_mlp
    ctx.of_mlp = None
    (total,) = ctx.saved_tensors
    d_inner = torch.mm(d_out, shrink.weight)
    shrink.weight.take_product(d_out, inner)
    d_expanded, gelu_sums = gelu_backward_kernel(
        expanded, expand.bias, d_inner, block.mlp.activation == "gelu_tanh"
    )
    del d_inner, inner, expanded
    d_normed = torch.mm(d_expanded, expand.weight)
    expand.weight.take_product(d_expanded, normed)
    _, after = ctx.dropouts
    d_sum, d_projected, sums = add_norm_backward_kernel(
        d_total, d_normed, total, second.weight, stats, *after, True
    )
    return d_sum, d_projected if after is not NO_DROPOUT else d_sum, [gelu_sums, sums]


def _attention_backward(ctx: Any, d_sum: torch.Tensor, d_projected: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of the hidden state and of x; sums of the bias of Q, K and V, of the norm and of x's bias."""
    block = ctx.block
    first, qkv_layer, dense = block.input_layernorm, block.attention.query_key_value, block.attention.dense
    summed, normed, stats, qkv, attended, keys, states = ctx.of_attention
    ctx.of_attention = None
    d_attended = torch.mm(d_projected, dense.weight)
    dense.weight.take_product(d_projected, attended)
    tokens, size = attended.shape[0], block.attention.head_size
    whole, d_whole = attended.view(tokens, -1, size), d_attended.view(tokens, -1, size)
    d_qkv, qkv_sums = backward_calls(
        ctx.plan, qkv.view(tokens, 3, -1, size), whole, keys, states, d_whole, ctx.attention_p
    )
    d_qkv = d_qkv.view(tokens, -1)
    if qkv_sums is None:
        qkv_sums = d_qkv.sum(0, dtype=torch.float32, keepdim=True)
    d_normed = torch.mm(d_qkv, qkv_layer.weight)
    qkv_layer.weight.take_product(d_qkv, normed)
    before, _ = ctx.dropouts
    d_hidden, d_x, sums = add_norm_backward_kernel(
        d_sum, d_normed, summed, first.weight, stats, *before, ctx.x_bias is not None
    )
    of_x = None
    if ctx.has_x:
        of_x = d_x if before is not NO_DROPOUT else d_hidden
    return d_hidden, of_x, [qkv_sums, sums]
