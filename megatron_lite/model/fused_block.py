"""The block where Triton's kernels run. block.py says what a block computes; tests prove that this is the same.

A sum and its norm are one kernel: it adds a product's bias, drops out, adds the residual and norms (`after_sum`). So a
product leaves its bias (`DeferredBias`) and a pre-norm block its last sum (`Residual`) to the next norm, which may be
that of the next block. The form of block.py takes more passes through memory. Launches of a layer there instead of
here, forward and backward, counted on fake devices: 17 + 22 for 13 + 18 with tensor parallelism, 13 + 22 for 11 + 15
(GLM) and 11 + 18 for 9 + 14 (Llama) in one function of autograd, 10 + 21 for 8 + 19 (BERT).

A plain pre-norm block is one autograd function, `_FusedBlock`, where an optimizer of ours takes its gradients. In other
blocks each product, kernel and attention call is an autograd function of its own, whose two calls cost the host more
than the launch; in this one they are plain calls. And a block's sums over tokens, for biases, norms and norms of heads,
are finished by one kernel instead of four. Gradients of parameters go straight to the optimizer.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.model.activation_checkpoint import recomputed
from megatron_lite.model.attention import Attention
from megatron_lite.model.attention_backends.varlen import VarlenPlan
from megatron_lite.model.attention_backends.window import LayeredPlan
from megatron_lite.model.forward_context import ForwardContext
from megatron_lite.model.kernels.dropout import FeatureDropout
from megatron_lite.model.kernels.fused import (
    NO_DROPOUT,
    activate_backward_kernel,
    activate_kernel,
    add_norm_backward_kernel,
    add_norm_kernel,
    dropout_add,
    finish_sums_kernel,
)
from megatron_lite.model.kernels.qkv_heads import HeadForm, spread_heads_kernel, turn_heads_kernel
from megatron_lite.model.mlp import MLP
from megatron_lite.model.norms import LayerNorm, Norm, RMSNorm
from megatron_lite.model.rope import head_form
from megatron_lite.model.tensor_parallel import DeferredBias, TensorParallel


class Residual(NamedTuple):
    """The hidden state between two blocks as a sum that the next norm's kernel makes: hidden + dropout(x), [T, D].

    So the residual is read once less in each direction. Pipeline stages, recomputed blocks and ZeRO 3 make the sum at
    their end.

    A tuple, so that DeepSpeed finds the tensors in it.
    """

    hidden: torch.Tensor
    x: DeferredBias | None = None
    dropout: FeatureDropout | None = None

    def norm(self, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and its norm, [T, D] each."""
        x, bias = self.x or (None, None)
        return norm.after_sum(self.hidden, x, bias, self.dropout)


Hidden = torch.Tensor | Residual  # between blocks: on a CPU always a tensor


def settled(x: Hidden) -> torch.Tensor:
    """The hidden state as a tensor [T, D]."""
    if isinstance(x, torch.Tensor):
        return x
    return x.hidden if x.x is None else dropout_add(x.x.x, x.hidden, x.dropout, x.x.bias)


class Block(Protocol):
    """What this file reads of a block of block.py, which imports it."""

    attention: Attention
    mlp: MLP
    input_layernorm: Norm | nn.Identity
    post_attention_layernorm: Norm
    output_layernorm: Norm | nn.Identity
    has_branch_layers: bool
    dropout: float
    parallel: TensorParallel
    recompute: bool
    fused: FusedParameters | None

    def after_attention(self, x: torch.Tensor) -> torch.Tensor: ...

    def after_mlp(self, x: torch.Tensor) -> torch.Tensor: ...

    def scaled(self, x: torch.Tensor) -> torch.Tensor: ...


def forward(block: Block, x: Hidden, context: ForwardContext, layer: int) -> Hidden:
    """`Block.forward` by kernels."""
    if block.recompute and torch.is_grad_enabled():
        return recomputed(True, _tensor_forward, block, settled(x), context, layer)
    # ---- one function of autograd, or a function for each product, kernel and call of attention ----
    residual = x if isinstance(x, Residual) else Residual(x)
    is_trained = residual.hidden.requires_grad and torch.is_grad_enabled() and context.condition is None
    if block.fused is not None and is_trained and (plan := block.fused.plan_of(context.plan, layer)):
        return block.fused.forward(block, residual, context, layer, plan)
    if block.parallel.sums_at_once:  # at ZeRO 3 this block's bias is gone when the next block runs
        return _tensor_forward(block, residual.hidden, context, layer)
    return _forward(block, residual, context, layer)


def _tensor_forward(block: Block, x: torch.Tensor, context: ForwardContext, layer: int) -> torch.Tensor:
    return settled(_forward(block, Residual(x), context, layer))


def _forward(block: Block, residual: Residual, context: ForwardContext, layer: int) -> Hidden:
    total, normed = attention_sublayer(block, residual, context, layer, block.post_attention_layernorm)
    return mlp_sublayer(block, total, normed, context, layer)


def attention_sublayer(
    block: Block, residual: Residual, context: ForwardContext, layer: int, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum after attention and its norm, [T, D] each."""
    # Post-norm, and a first block without a norm: attention reads the sum itself.
    if isinstance(block.input_layernorm, nn.Identity):
        hidden = normed = settled(residual)
    else:
        hidden, normed = residual.norm(block.input_layernorm)
    x: DeferredBias = block.attention(normed, context, layer, skip_bias_add=True)
    if block.has_branch_layers:
        x = DeferredBias(block.after_attention(x.added()))
    dropout = context.features(block.dropout, layer, "attended")
    return Residual(block.scaled(hidden), x, dropout).norm(norm)


def mlp_sublayer(
    block: Block, total: torch.Tensor, normed: torch.Tensor, context: ForwardContext, layer: int
) -> Hidden:
    """The hidden state after the MLP. Args: total, normed: a sum and its norm, which the MLP reads."""
    x: DeferredBias = block.mlp(normed, context, layer, skip_bias_add=True)
    if block.has_branch_layers:
        x = DeferredBias(block.after_mlp(x.added()))
    dropout = context.features(block.dropout, layer, "expanded")
    if isinstance(block.output_layernorm, nn.Identity):
        # Pre-norm: the sum is left to the next block's first norm.
        return Residual(total, x, dropout)
    return Residual(block.scaled(normed), x, dropout).norm(block.output_layernorm)[1]


_MOST_SUMS = 4  # that one kernel finishes
# Sums over tokens, and the parameters whose gradients they are, one after another; None = there is none.
_Taken = list[tuple[torch.Tensor, list[Any]]]


class _Norm(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter | None
    epsilon: float
    centered: bool


class _Product(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter | None
    take: Callable[[torch.Tensor, torch.Tensor], None]  # of the weight, see `accumulate_in_backward`


class FusedParameters(NamedTuple):
    """Parameters of one block, looked up once: module attribute access costs the host 100 us per pass."""

    first: _Norm
    qkv: _Product
    dense: _Product
    second: _Norm
    expand: _Product
    shrink: _Product
    heads: HeadForm  # without angles
    head_size: int
    activation: tuple[str, bool]  # and whether it is gated
    take: Callable[[nn.Parameter, torch.Tensor], None]
    run: Callable[..., Any] | None = None  # instead of `_FusedBlock.apply`: with CUDA graphs (graphs.py)

    @staticmethod
    def of(block: Block, take: Callable[[nn.Parameter, torch.Tensor], None]) -> FusedParameters | None:
        """The parameters of a block; None if its norms have no kernel, or its sums need more than one.

        Args: block: one that `may_fuse`. take: takes in a parameter's gradient.
        """
        norms = []
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            if isinstance(norm, RMSNorm):
                norms.append(_Norm(norm.weight, None, norm.epsilon, False))
            elif isinstance(norm, LayerNorm) and norm.normalize is F.layer_norm:
                norms.append(_Norm(norm.weight, norm.bias, norm.epsilon, True))
            else:
                return None
        attention, mlp = block.attention, block.mlp
        heads = head_form(None, attention.head_norms, attention.key_value_heads, attention.query_factor)
        parts = FusedParameters(
            norms[0], _product(attention.query_key_value), _product(attention.dense),
            norms[1], _product(mlp.dense_h_to_4h), _product(mlp.dense_4h_to_h),
            heads, attention.head_size, (mlp.activation, mlp.is_gated), take,
        )  # fmt: skip
        # Two norms always have sums over tokens; with more than `_MOST_SUMS` one kernel could not finish them.
        others = parts.expand.bias, parts.qkv.bias, heads.query_scale
        return parts if 2 + sum(other is not None for other in others) <= _MOST_SUMS else None

    @staticmethod
    def plan_of(plan: Any, layer: int) -> VarlenPlan | None:
        """The plan of a layer, if it is one that this function follows."""
        chosen = plan.of(layer) if isinstance(plan, LayeredPlan) else plan
        return chosen if isinstance(chosen, VarlenPlan) else None

    def forward(
        self, block: Block, residual: Residual, context: ForwardContext, layer: int, plan: VarlenPlan
    ) -> Residual:
        """`_forward` of a block as one function of autograd. Args: plan: of this layer."""
        attention_dropout, rotary = (
            block.attention.dropout_of(context, layer),
            block.attention.rotary_of(context, layer),
        )
        # Before the function: it seeds the device's generator on the host, which a CUDA graph would not repeat.
        p = plan.prepare(self.head_size, residual.hidden.device, attention_dropout)
        added, added_bias = residual.x or (None, None)
        attended_dropout = context.features(block.dropout, layer, "attended")
        dropouts = residual.dropout or NO_DROPOUT, attended_dropout or NO_DROPOUT
        form = self.heads if rotary is None else self.heads._replace(cos=rotary.cos, sin=rotary.sin)
        # Parameters are no arguments of their own: autograd would call the hooks of those that have been taken.
        run = self.run or _FusedBlock.apply
        total, out = run(residual.hidden, added, (added_bias, self), dropouts, p, form, plan)
        x = DeferredBias(out, self.shrink.bias)
        return Residual(total, x, context.features(block.dropout, layer, "expanded"))


def _product(layer: Any) -> _Product:
    return _Product(layer.weight, layer.bias, layer.weight.accumulate_weight_grad)


class _FusedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, x, parameters, dropouts, attention_p, form, plan):  # type: ignore[no-untyped-def]
        x_bias, parts = parameters
        first, qkv_layer, dense, second, expand, shrink, _, head_size, activation, *_ = parts
        before, after = dropouts
        tokens = hidden.shape[0]
        summed, normed, stats = add_norm_kernel(x, x_bias, *before, hidden, *first)
        if x is None:
            summed = hidden
        product = F.linear(normed, qkv_layer.weight, qkv_layer.bias)
        ctx.form, qkv, heads = _operands(product.view(tokens, -1, head_size), form)
        attended, kept = plan.forward([qkv], attention_p)
        flat = attended.view(tokens, -1)
        # Without the bias: the next kernel adds it while it reads the product.
        projected = F.linear(flat, dense.weight)
        total, normed_again, stats_again = add_norm_kernel(projected, dense.bias, *after, summed, *second)
        expanded = F.linear(normed_again, expand.weight)
        inner = activate_kernel(expanded, expand.bias, *activation, *NO_DROPOUT)
        out = F.linear(inner, shrink.weight)
        ctx.save_for_backward(total)  # a result: as an attribute it would keep itself
        # Attributes and not saved tensors: none of them leaves the function, and the backward pass drops each as soon
        # as it has used it.
        ctx.of_attention = summed, normed, stats, heads, attended, flat, kept
        ctx.of_mlp = normed_again, stats_again, expanded, inner
        ctx.parameters, ctx.has_x = parameters, x is not None
        ctx.dropouts, ctx.attention_p, ctx.plan = dropouts, attention_p, plan
        return total, out

    @staticmethod
    def backward(ctx: Any, d_total, d_out):  # type: ignore[no-untyped-def]
        x_bias, parts = ctx.parameters
        d_sum, d_projected, taken = _mlp_backward(ctx, parts, d_total.contiguous(), d_out.contiguous())
        d_hidden, d_x, more = _attention_backward(ctx, parts, d_sum, d_projected, x_bias)
        taken += more
        parameters = [parameter for _, some in taken for parameter in some if parameter is not None]
        # One kernel for all sums of the block; each was left as partial sums of programs.
        finished = finish_sums_kernel([sums for sums, _ in taken], parts.second.weight)
        gradients = finished.split([parameter.shape[0] for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parts.take(parameter, gradient)
        return d_hidden, d_x if ctx.has_x else None, None, None, None, None, None


def _operands(
    heads: torch.Tensor, form: HeadForm
) -> tuple[HeadForm | None, torch.Tensor, torch.Tensor | None]:
    """The form if it changes anything, operands [T, 3, H, D'], and the heads where the backward pass needs them."""
    queries = heads.shape[1] - 2 * form.key_heads
    packed = heads.view(len(heads), 3, -1, heads.shape[2]) if form.key_heads == queries else heads
    if form.turns_only(queries):
        turn_heads_kernel(packed, form.cos, form.sin, False)  # nobody else reads the product
        return form, packed, None
    if form.cos is None and form.query_scale is None and form.factor == 1.0 and packed is not heads:
        return None, packed, None
    return form, spread_heads_kernel(heads, *form), None if form.query_scale is None else heads


def _mlp_backward(
    ctx: Any, parts: FusedParameters, d_total: torch.Tensor, d_out: torch.Tensor
) -> tuple[Any, ...]:
    """Gradients of the sum after attention and of attention's part of it; sums of biases and of the norm."""
    normed, stats, expanded, inner = ctx.of_mlp
    ctx.of_mlp = None
    (total,) = ctx.saved_tensors
    bias, norm, dense_bias = parts.expand.bias, parts.second, parts.dense.bias
    d_inner = torch.mm(d_out, parts.shrink.weight)
    # Weights' gradients go to the optimizer at once, so that their operands can be freed.
    parts.shrink.take(d_out, inner)
    d_expanded, bias_sums = activate_backward_kernel(expanded, bias, d_inner, *parts.activation, *NO_DROPOUT)
    del d_inner, inner, expanded
    d_normed = torch.mm(d_expanded, parts.expand.weight)
    parts.expand.take(d_expanded, normed)
    _, after = ctx.dropouts
    d_sum, d_projected, sums = add_norm_backward_kernel(
        d_total, d_normed, total, norm.weight, stats, norm.bias is not None, norm.centered, *after,
        dense_bias is not None,
    )  # fmt: skip
    taken: _Taken = [] if bias is None else [(bias_sums, [bias])]
    taken.append((sums, [norm.weight, norm.bias, dense_bias]))
    # Without dropout the branch's gradient is that of the sum, and the kernel writes it once.
    return d_sum, d_sum if after is NO_DROPOUT else d_projected, taken


def _attention_backward(
    ctx: Any,
    parts: FusedParameters,
    d_sum: torch.Tensor,
    d_projected: torch.Tensor,
    x_bias: nn.Parameter | None,
) -> tuple[Any, ...]:
    """Gradients of the hidden state and of x; sums of the bias of Q, K and V, of norms and of x's bias."""
    summed, normed, stats, heads, attended, flat, kept = ctx.of_attention
    ctx.of_attention = None
    bias, norm, form = parts.qkv.bias, parts.first, ctx.form
    d_attended = torch.mm(d_projected, parts.dense.weight).view_as(attended)
    parts.dense.take(d_projected, flat)
    (d_qkv,), qkv_sums, scale_sums = ctx.plan.gradients(
        d_attended, attended, kept, ctx.attention_p, form, heads
    )
    d_qkv = d_qkv.view(flat.shape[0], -1)
    taken: _Taken = []
    if bias is not None:
        if qkv_sums is None:
            qkv_sums = d_qkv.sum(0, dtype=torch.float32, keepdim=True)
        taken.append((qkv_sums, [bias]))
    if heads is not None:
        taken.append((scale_sums, [parts.heads.query_scale, parts.heads.key_scale]))
    d_normed = torch.mm(d_qkv, parts.qkv.weight)
    parts.qkv.take(d_qkv, normed)
    before, _ = ctx.dropouts
    d_hidden, d_x, sums = add_norm_backward_kernel(
        d_sum, d_normed, summed, norm.weight, stats, norm.bias is not None, norm.centered, *before,
        x_bias is not None,
    )  # fmt: skip
    taken.append((sums, [norm.weight, norm.bias, x_bias]))
    return d_hidden, d_hidden if before is NO_DROPOUT else d_x, taken
