"""The block where Triton's kernels run. block.py says what a block computes; tests prove that this is the same.

A sum and its norm are one kernel: it adds a product's bias, drops out, adds the residual and norms (`after_sum`). So a
product leaves its bias (`DeferredBias`) and a pre-norm block its last sum (`Residual`) to the next norm, which may be
that of the next block. The block of block.py takes more passes through memory. Launches of a layer there instead
of here, forward and backward, counted on fake devices: 17 + 22 for 13 + 18 with tensor parallelism, 13 + 22 for 11 + 15
(GLM) and 11 + 18 for 9 + 14 (Llama) in one function of autograd, 10 + 21 for 8 + 19 (BERT).

A plain pre-norm block is one autograd function, `_FusedBlock`, where an optimizer of ours accumulates its gradients. In
other blocks each product, kernel and attention is its own autograd function, whose two calls cost the host more than
the launch; in this one they are plain calls. And a block's sums over tokens, for biases, norms and norms of heads, are
finished by one kernel instead of four. Gradients of parameters go straight to the optimizer.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from megatron_lite.transformer.activation_checkpoint import recomputed
from megatron_lite.transformer.attention import Attention
from megatron_lite.transformer.attention_backends.varlen import VarlenAttention, VarlenPlan
from megatron_lite.transformer.attention_backends.window import LayeredPlan
from megatron_lite.transformer.forward_context import ForwardContext
from megatron_lite.transformer.kernels.dropout import FeatureDropout
from megatron_lite.transformer.kernels.fused import (
    NO_DROPOUT,
    activate_backward_kernel,
    activate_kernel,
    add_norm_backward_kernel,
    add_norm_kernel,
    dropout_add,
    finish_sums_kernel,
)
from megatron_lite.transformer.kernels.qkv_heads import (
    HeadTransform,
    expand_heads_kernel,
    rotate_heads_kernel,
)
from megatron_lite.transformer.mlp import MLP
from megatron_lite.transformer.norms import LayerNorm, Norm, RMSNorm
from megatron_lite.transformer.rope import head_transform
from megatron_lite.transformer.tensor_parallel import DeferredBias, TensorParallel


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


def materialize(x: Hidden) -> torch.Tensor:
    """The hidden state as a tensor [T, D]."""
    if isinstance(x, torch.Tensor):
        return x
    return x.hidden if x.x is None else dropout_add(x.x.x, x.hidden, x.dropout, x.x.bias)


class Block(Protocol):
    """What this file reads of the Block of block.py, which imports this file."""

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
        return recomputed(True, _tensor_forward, block, materialize(x), context, layer)
    residual = x if isinstance(x, Residual) else Residual(x)
    is_trained = residual.hidden.requires_grad and torch.is_grad_enabled() and context.condition is None
    if block.fused is not None and is_trained and (plan := fusible_plan(context.plan, layer)):
        return block.fused.forward(block, residual, context, layer, plan)
    if block.parallel.sums_at_once:  # at ZeRO 3 this block's bias is gone when the next block runs
        return _tensor_forward(block, residual.hidden, context, layer)
    return _forward(block, residual, context, layer)


def _tensor_forward(block: Block, x: torch.Tensor, context: ForwardContext, layer: int) -> torch.Tensor:
    return materialize(_forward(block, Residual(x), context, layer))


def _forward(block: Block, residual: Residual, context: ForwardContext, layer: int) -> Hidden:
    total, normed = attention_sublayer(block, residual, context, layer, block.post_attention_layernorm)
    return mlp_sublayer(block, total, normed, context, layer)


def attention_sublayer(
    block: Block, residual: Residual, context: ForwardContext, layer: int, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum after attention and its norm, [T, D] each."""
    # Post-norm, and a first block without a norm: attention reads the sum itself.
    if isinstance(block.input_layernorm, nn.Identity):
        hidden = normed = materialize(residual)
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
# Partial sums over tokens [P, ..], and the parameters whose gradients they are, side by side; None = there is none.
_PartialSums = list[tuple[torch.Tensor, list[Any]]]


class _Norm(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter | None
    epsilon: float
    centered: bool


class _Product(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter | None
    accumulate: Callable[
        [torch.Tensor, torch.Tensor], None
    ]  # the weight's gradient, see `accumulate_in_backward`


class FusedParameters(NamedTuple):
    """Parameters of one block, looked up once: module attribute access costs the host 100 us per pass."""

    attention_norm: _Norm
    qkv: _Product
    attention_output: _Product
    mlp_norm: _Norm
    mlp_inner: _Product
    mlp_output: _Product
    transform: HeadTransform  # without angles
    head_size: int
    activation: tuple[str, bool]  # and whether it is gated
    accumulate: Callable[[nn.Parameter, torch.Tensor], None]  # the gradient of a bias or a norm
    run: Callable[..., Any] | None = None  # instead of `_FusedBlock.apply`: with CUDA graphs (cuda_graphs.py)

    @staticmethod
    def of(block: Block, accumulate: Callable[[nn.Parameter, torch.Tensor], None]) -> FusedParameters | None:
        """The parameters of a block; None if its norms have no kernel, or its sums need more than one.

        Args: block: one that `may_fuse`. accumulate: adds a parameter's gradient to what the optimizer reads.
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
        parameters = FusedParameters(
            attention_norm=norms[0],
            qkv=_product(attention.query_key_value),
            attention_output=_product(attention.dense),
            mlp_norm=norms[1],
            mlp_inner=_product(mlp.dense_h_to_4h),
            mlp_output=_product(mlp.dense_4h_to_h),
            transform=head_transform(
                None, attention.head_norms, attention.key_value_heads, attention.query_factor
            ),
            head_size=attention.head_size,
            activation=(mlp.activation, mlp.is_gated),
            accumulate=accumulate,
        )
        # Two norms always have sums over tokens; with more than `_MOST_SUMS` one kernel could not finish them.
        others = parameters.mlp_inner.bias, parameters.qkv.bias, parameters.transform.query_scale
        return parameters if 2 + sum(other is not None for other in others) <= _MOST_SUMS else None

    def forward(
        self, block: Block, residual: Residual, context: ForwardContext, layer: int, plan: VarlenPlan
    ) -> Residual:
        """`_forward` of a block as one function of autograd. Args: plan: of this layer."""
        attention_dropout = block.attention.dropout_of(context, layer)
        rotary = block.attention.rotary_of(context, layer)
        # Before the function: it seeds the device's generator on the host, which a CUDA graph would not repeat.
        p = plan.prepare(self.head_size, residual.hidden.device, attention_dropout)
        x, x_bias = residual.x or (None, None)
        attended_dropout = context.features(block.dropout, layer, "attended")
        dropouts = residual.dropout or NO_DROPOUT, attended_dropout or NO_DROPOUT
        transform = self.transform
        if rotary is not None:
            transform = transform._replace(cos=rotary.cos, sin=rotary.sin)
        # Parameters are not inputs of the function: autograd would call their hooks, for gradients that
        # `accumulate` has had already.
        run = self.run or _FusedBlock.apply
        total, out = run(residual.hidden, x, (x_bias, self), dropouts, p, transform, plan)
        output = DeferredBias(out, self.mlp_output.bias)
        return Residual(total, output, context.features(block.dropout, layer, "expanded"))


def _product(layer: Any) -> _Product:
    return _Product(layer.weight, layer.bias, layer.weight.accumulate_weight_grad)


def fusible_plan(plan: Any, layer: int) -> VarlenPlan | None:
    """The plan of a layer, if it is one with which a block can be one function of autograd."""
    layer_plan = plan.layer_plan(layer) if isinstance(plan, LayeredPlan) else plan
    return layer_plan if isinstance(layer_plan, VarlenPlan) else None


class _FusedBlock(torch.autograd.Function):
    """(hidden, x) of a Residual -> (total, x) of the next. The other arguments are not tensors that have gradients."""

    @staticmethod
    def forward(ctx: Any, hidden, x, parameters, dropouts, attention_p, transform, plan):  # type: ignore[no-untyped-def]
        x_bias, block = parameters
        residual_dropout, attended_dropout = dropouts
        tokens = hidden.shape[0]
        summed, normed, stats = add_norm_kernel(x, x_bias, *residual_dropout, hidden, *block.attention_norm)
        if x is None:
            summed = hidden
        product = F.linear(normed, block.qkv.weight, block.qkv.bias)
        ctx.transform, qkv, heads = _attention_operands(product.view(tokens, -1, block.head_size), transform)
        attention = VarlenAttention(plan, attention_p)
        attended, saved = attention.forward([qkv])
        attended_flat = attended.view(tokens, -1)
        # Without the bias: the next kernel adds it while it reads the product.
        projected = F.linear(attended_flat, block.attention_output.weight)
        total, mlp_normed, mlp_stats = add_norm_kernel(
            projected, block.attention_output.bias, *attended_dropout, summed, *block.mlp_norm
        )
        expanded = F.linear(mlp_normed, block.mlp_inner.weight)
        inner = activate_kernel(expanded, block.mlp_inner.bias, *block.activation, *NO_DROPOUT)
        out = F.linear(inner, block.mlp_output.weight)
        ctx.save_for_backward(total)  # a result: as an attribute it would keep itself
        # Attributes and not saved tensors: none of them leaves the function, and the backward pass drops each as soon
        # as it has used it.
        ctx.attention_tensors = summed, normed, stats, heads, attended, attended_flat, saved
        ctx.mlp_tensors = mlp_normed, mlp_stats, expanded, inner
        ctx.parameters, ctx.has_x = parameters, x is not None
        ctx.dropouts, ctx.attention = dropouts, attention
        return total, out

    @staticmethod
    def backward(ctx: Any, d_total, d_out):  # type: ignore[no-untyped-def]
        x_bias, block = ctx.parameters
        d_sum, d_projected, sums = _mlp_backward(ctx, block, d_total.contiguous(), d_out.contiguous())
        d_hidden, d_x, attention_sums = _attention_backward(ctx, block, d_sum, d_projected, x_bias)
        sums += attention_sums
        parameters = [parameter for _, several in sums for parameter in several if parameter is not None]
        # One kernel for all sums of the block; each was left as partial sums of programs.
        finished = finish_sums_kernel([partial for partial, _ in sums], block.mlp_norm.weight)
        gradients = finished.split([parameter.shape[0] for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            block.accumulate(parameter, gradient)
        return d_hidden, d_x if ctx.has_x else None, None, None, None, None, None


def _attention_operands(
    heads: torch.Tensor, transform: HeadTransform
) -> tuple[HeadTransform | None, torch.Tensor, torch.Tensor | None]:
    """The transform if it changes anything, q, k, v [T, 3, H, D'], and the heads where the backward pass needs them."""
    query_heads = heads.shape[1] - 2 * transform.key_heads
    packed = heads.view(len(heads), 3, -1, heads.shape[2]) if transform.key_heads == query_heads else heads
    if transform.is_rotation_only(query_heads):
        rotate_heads_kernel(
            packed, transform.cos, transform.sin, False
        )  # in place: nothing else reads the product
        return transform, packed, None
    is_identity = transform.cos is None and transform.query_scale is None and transform.factor == 1.0
    if is_identity and packed is not heads:
        return None, packed, None
    operands = expand_heads_kernel(heads, *transform)
    return transform, operands, None if transform.query_scale is None else heads


def _mlp_backward(
    ctx: Any, block: FusedParameters, d_total: torch.Tensor, d_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, _PartialSums]:
    """The gradients of `summed` and `projected` of the forward pass, and the sums of biases and of the norm."""
    normed, stats, expanded, inner = ctx.mlp_tensors
    ctx.mlp_tensors = None
    (total,) = ctx.saved_tensors
    inner_bias, norm, output_bias = block.mlp_inner.bias, block.mlp_norm, block.attention_output.bias
    d_inner = torch.mm(d_out, block.mlp_output.weight)
    # Weights' gradients go to the optimizer at once, so that their operands can be freed.
    block.mlp_output.accumulate(d_out, inner)
    d_expanded, bias_sums = activate_backward_kernel(
        expanded, inner_bias, d_inner, *block.activation, *NO_DROPOUT
    )
    del d_inner, inner, expanded
    d_normed = torch.mm(d_expanded, block.mlp_inner.weight)
    block.mlp_inner.accumulate(d_expanded, normed)
    _, attended_dropout = ctx.dropouts
    d_sum, d_projected, norm_sums = add_norm_backward_kernel(
        d_total, d_normed, total, norm.weight, stats, norm.bias is not None, norm.centered, *attended_dropout,
        output_bias is not None,
    )  # fmt: skip
    sums: _PartialSums = [] if inner_bias is None else [(bias_sums, [inner_bias])]
    sums.append((norm_sums, [norm.weight, norm.bias, output_bias]))
    # Without dropout the branch's gradient equals the sum's, and the kernel writes it once.
    return d_sum, d_sum if attended_dropout is NO_DROPOUT else d_projected, sums


def _attention_backward(
    ctx: Any,
    block: FusedParameters,
    d_sum: torch.Tensor,
    d_projected: torch.Tensor,
    x_bias: nn.Parameter | None,
) -> tuple[torch.Tensor, torch.Tensor, _PartialSums]:
    """The gradients of `hidden` and of x, and the sums of the bias of Q, K and V, of norms and of x's bias."""
    summed, normed, stats, heads, attended, attended_flat, saved = ctx.attention_tensors
    ctx.attention_tensors = None
    qkv_bias, norm = block.qkv.bias, block.attention_norm
    d_attended = torch.mm(d_projected, block.attention_output.weight).view_as(attended)
    block.attention_output.accumulate(d_projected, attended_flat)
    d_qkv, qkv_sums, scale_sums = ctx.attention.head_grads(d_attended, attended, saved, ctx.transform, heads)
    d_qkv = d_qkv.view(attended_flat.shape[0], -1)
    sums: _PartialSums = []
    if qkv_bias is not None:
        if qkv_sums is None:
            qkv_sums = d_qkv.sum(0, dtype=torch.float32, keepdim=True)
        sums.append((qkv_sums, [qkv_bias]))
    if heads is not None:
        sums.append((scale_sums, [block.transform.query_scale, block.transform.key_scale]))
    d_normed = torch.mm(d_qkv, block.qkv.weight)
    block.qkv.accumulate(d_qkv, normed)
    residual_dropout, _ = ctx.dropouts
    d_hidden, d_x, norm_sums = add_norm_backward_kernel(
        d_sum, d_normed, summed, norm.weight, stats, norm.bias is not None, norm.centered, *residual_dropout,
        x_bias is not None,
    )  # fmt: skip
    sums.append((norm_sums, [norm.weight, norm.bias, x_bias]))
    return d_hidden, d_hidden if residual_dropout is NO_DROPOUT else d_x, sums
