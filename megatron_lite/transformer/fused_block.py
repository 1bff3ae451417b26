"""A plain pre-norm block as one function of autograd, where Triton's kernels run and an optimizer takes its gradients.

block.py says what a block computes; tests prove that this is the same. There each product, kernel and attention is its
own autograd function, whose two calls cost the host more than the launch; here they are plain calls. And a block's sums
over tokens, for biases, norms and norms of heads, are finished by one kernel instead of four. Gradients of parameters
go straight to the optimizer.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

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
    finish_sums_kernel,
)
from megatron_lite.transformer.kernels.qkv_heads import (
    HeadTransform,
    expand_heads_kernel,
    rotate_heads_kernel,
)
from megatron_lite.transformer.mlp import MLP
from megatron_lite.transformer.norms import LayerNorm, RMSNorm
from megatron_lite.transformer.residual import Residual
from megatron_lite.transformer.rope import head_transform
from megatron_lite.transformer.tensor_parallel import DeferredBias

if TYPE_CHECKING:
    from megatron_lite.transformer.block import Block


_MOST_SUMS = 4  # that one kernel finishes


class _Norm(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter | None
    epsilon: float
    centered: bool


class _Product(NamedTuple):
    weight: nn.Parameter
    bias: nn.Parameter | None
    # Takes the operands of the weight's gradient, see `accumulate_in_backward`.
    accumulate: Callable[[torch.Tensor, torch.Tensor], None]


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
    activation: str
    is_gated: bool
    accumulate: Callable[[nn.Parameter, torch.Tensor], None]  # the gradient of a bias or a norm
    run: Callable[..., Any] | None = None  # instead of `FusedBlock.apply`: with CUDA graphs (cuda_graphs.py)

    @staticmethod
    def of(block: Block, accumulate: Callable[[nn.Parameter, torch.Tensor], None]) -> FusedParameters | None:
        """The parameters of a block; None if its norms have no kernel, or its sums need more than one.

        Args: block: one that `may_fuse`. accumulate: adds a parameter's gradient to what the optimizer reads.
        """
        norms = list[_Norm]()
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            if isinstance(norm, RMSNorm):
                norms.append(_Norm(norm.weight, None, norm.epsilon, False))
            elif isinstance(norm, LayerNorm) and norm.normalize is F.layer_norm:
                norms.append(_Norm(norm.weight, norm.bias, norm.epsilon, True))
            else:
                return None
        attention, mlp = block.attention, block.mlp
        assert isinstance(mlp, MLP), "a plain block"
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
            activation=mlp.activation,
            is_gated=mlp.is_gated,
            accumulate=accumulate,
        )
        # Two norms always have sums over tokens; with more than `_MOST_SUMS` one kernel could not finish them.
        others = parameters.mlp_inner.bias, parameters.qkv.bias, parameters.transform.query_scale
        return parameters if 2 + sum(other is not None for other in others) <= _MOST_SUMS else None

    def forward(
        self, block: Block, residual: Residual, context: ForwardContext, layer: int, plan: VarlenPlan
    ) -> Residual:
        """`Block.forward` as one function of autograd. Args: plan: of this layer."""
        attention_dropout = block.attention.dropout_of(context, layer)
        rotary = block.attention.rotary_of(context, layer)
        x, x_bias = residual.x or (None, None)
        transform = self.transform
        if rotary is not None:
            transform = transform._replace(cos=rotary.cos, sin=rotary.sin)
        constants = BlockConstants(
            block=self,
            x_bias=x_bias,
            x_dropout=residual.dropout or NO_DROPOUT,
            attended_dropout=context.features(block.dropout, layer, "attended") or NO_DROPOUT,
            # Before the function: it seeds the device's generator on the host, which a CUDA graph would not repeat.
            attention_p=plan.prepare(self.head_size, residual.hidden.device, attention_dropout),
            transform=transform,
            plan=plan,
        )
        total, out = (self.run or FusedBlock.apply)(residual.hidden, x, constants)
        output = DeferredBias(out, self.mlp_output.bias)
        return Residual(total, output, context.features(block.dropout, layer, "expanded"))


def _product(layer: Any) -> _Product:
    return _Product(layer.weight, layer.bias, layer.weight.accumulate_weight_grad)


def fusible_plan(plan: Any, layer: int) -> VarlenPlan | None:
    """The plan of a layer, if it is one with which a block can be one function of autograd."""
    layer_plan = plan.layer_plan(layer) if isinstance(plan, LayeredPlan) else plan
    return layer_plan if isinstance(layer_plan, VarlenPlan) else None


class BlockConstants(NamedTuple):
    """What `FusedBlock` reads besides the two tensors that have gradients.

    Parameters are among them: as inputs of the function autograd would call their hooks, for gradients that
    `FusedParameters.accumulate` has had already.
    """

    block: FusedParameters
    x_bias: torch.Tensor | None  # that x lacks: of the block before
    x_dropout: FeatureDropout | tuple[None, int, float]  # or NO_DROPOUT
    attended_dropout: FeatureDropout | tuple[None, int, float]
    attention_p: float  # probability of dropout
    transform: HeadTransform  # with the batch's angles
    plan: VarlenPlan


class _AttentionTensors(NamedTuple):
    """Of attention's forward pass, for its backward pass."""

    summed: torch.Tensor  # [T, D]: hidden and x
    normed: torch.Tensor  # [T, D]
    stats: torch.Tensor  # of the norm, see `add_norm`
    transform: HeadTransform | None  # of heads to operands; None = they are the same
    heads: torch.Tensor | None  # what was transformed, where norms read it again
    attention: VarlenAttention
    attended: torch.Tensor  # [T, H, D']
    kernel_state: Any  # see `VarlenAttention.forward`


class _MlpTensors(NamedTuple):
    """Of the MLP's forward pass, for its backward pass."""

    normed: torch.Tensor  # [T, D]
    stats: torch.Tensor
    expanded: torch.Tensor  # [T, FFN]: the first product, without its bias
    inner: torch.Tensor  # what the second product reads


class _PartialSums(NamedTuple):
    """Sums over tokens that a kernel has left to be finished."""

    sums: torch.Tensor  # fp32 [P, ..]
    parameters: tuple[Any, ...]  # whose gradients they are, side by side; None = there is none


class FusedBlock(torch.autograd.Function):
    """(hidden, x) of a Residual, x without its bias -> (total, x) of the next."""

    @staticmethod
    def forward(ctx: Any, hidden, x, constants: BlockConstants):  # type: ignore[no-untyped-def]
        block, tokens = constants.block, hidden.shape[0]
        summed, normed, stats = add_norm_kernel(
            x, constants.x_bias, *constants.x_dropout, hidden, *block.attention_norm
        )
        if x is None:
            summed = hidden
        product = F.linear(normed, block.qkv.weight, block.qkv.bias)
        transform, qkv, heads = _attention_operands(
            product.view(tokens, -1, block.head_size), constants.transform
        )
        attention = VarlenAttention(constants.plan, constants.attention_p)
        attended, kernel_state = attention.forward([qkv])
        # Without the bias: the next kernel adds it while it reads the product.
        projected = F.linear(attended.view(tokens, -1), block.attention_output.weight)
        total, mlp_normed, mlp_stats = add_norm_kernel(
            projected, block.attention_output.bias, *constants.attended_dropout, summed, *block.mlp_norm
        )
        expanded = F.linear(mlp_normed, block.mlp_inner.weight)
        inner = activate_kernel(expanded, block.mlp_inner.bias, block.activation, block.is_gated, *NO_DROPOUT)
        out = F.linear(inner, block.mlp_output.weight)
        ctx.save_for_backward(total)  # a result: as an attribute it would keep itself
        # Attributes and not saved tensors: none of them leaves the function, and the backward pass drops each as soon
        # as it has used it.
        ctx.attention_tensors = _AttentionTensors(
            summed, normed, stats, transform, heads, attention, attended, kernel_state
        )
        ctx.mlp_tensors = _MlpTensors(mlp_normed, mlp_stats, expanded, inner)
        ctx.constants, ctx.has_x = constants, x is not None
        return total, out

    @staticmethod
    def backward(ctx: Any, d_total, d_out):  # type: ignore[no-untyped-def]
        block: FusedParameters = ctx.constants.block
        d_summed, d_projected, sums = _mlp_backward(ctx, d_total.contiguous(), d_out.contiguous())
        d_hidden, d_x, attention_sums = _attention_backward(ctx, d_summed, d_projected)
        sums += attention_sums
        parameters = [parameter for each in sums for parameter in each.parameters if parameter is not None]
        # One kernel for all sums of the block; each was left as partial sums of programs.
        finished = finish_sums_kernel([each.sums for each in sums], block.mlp_norm.weight)
        gradients = finished.split([parameter.shape[0] for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            block.accumulate(parameter, gradient)
        return d_hidden, d_x if ctx.has_x else None, None


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
    ctx: Any, d_total: torch.Tensor, d_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[_PartialSums]]:
    """The gradients of `summed` and `projected` of the forward pass, and the sums of biases and of the norm."""
    block: FusedParameters = ctx.constants.block
    normed, stats, expanded, inner = ctx.mlp_tensors
    ctx.mlp_tensors = None
    (total,) = ctx.saved_tensors
    inner_bias, norm, output_bias = block.mlp_inner.bias, block.mlp_norm, block.attention_output.bias
    d_inner = torch.mm(d_out, block.mlp_output.weight)
    # Weights' gradients go to the optimizer at once, so that their operands can be freed.
    block.mlp_output.accumulate(d_out, inner)
    d_expanded, bias_sums = activate_backward_kernel(
        expanded, inner_bias, d_inner, block.activation, block.is_gated, *NO_DROPOUT
    )
    del d_inner, inner, expanded
    d_normed = torch.mm(d_expanded, block.mlp_inner.weight)
    block.mlp_inner.accumulate(d_expanded, normed)
    d_summed, d_projected, norm_sums = _norm_backward(
        d_total, d_normed, total, norm, stats, ctx.constants.attended_dropout, output_bias
    )
    sums = [] if inner_bias is None else [_PartialSums(bias_sums, (inner_bias,))]
    return d_summed, d_projected, [*sums, norm_sums]


def _attention_backward(
    ctx: Any, d_summed: torch.Tensor, d_projected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[_PartialSums]]:
    """The gradients of `hidden` and of x, and the sums of the bias of Q, K and V, of norms and of x's bias."""
    block: FusedParameters = ctx.constants.block
    forward: _AttentionTensors = ctx.attention_tensors
    ctx.attention_tensors = None
    attended, tokens = forward.attended, len(d_projected)
    d_attended = torch.mm(d_projected, block.attention_output.weight).view_as(attended)
    block.attention_output.accumulate(d_projected, attended.view(tokens, -1))
    d_qkv, qkv_sums, scale_sums = forward.attention.head_grads(
        d_attended, attended, forward.kernel_state, forward.transform, forward.heads
    )
    d_qkv = d_qkv.view(tokens, -1)
    sums = []
    if block.qkv.bias is not None:
        if qkv_sums is None:
            qkv_sums = d_qkv.sum(0, dtype=torch.float32, keepdim=True)
        sums.append(_PartialSums(qkv_sums, (block.qkv.bias,)))
    if forward.heads is not None:
        assert scale_sums is not None
        sums.append(_PartialSums(scale_sums, (block.transform.query_scale, block.transform.key_scale)))
    d_normed = torch.mm(d_qkv, block.qkv.weight)
    block.qkv.accumulate(d_qkv, forward.normed)
    d_hidden, d_x, norm_sums = _norm_backward(
        d_summed, d_normed, forward.summed, block.attention_norm, forward.stats, ctx.constants.x_dropout,
        ctx.constants.x_bias,
    )  # fmt: skip
    return d_hidden, d_x, [*sums, norm_sums]


def _norm_backward(
    d_total: torch.Tensor,
    d_normed: torch.Tensor,
    total: torch.Tensor,
    norm: _Norm,
    stats: torch.Tensor,
    dropout: FeatureDropout | tuple[None, int, float],
    x_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, _PartialSums]:
    """The gradients of the two terms of a sum, residual and branch, from those of the sum and of its norm."""
    d_residual, d_branch, sums = add_norm_backward_kernel(
        d_total, d_normed, total, norm.weight, stats, norm.bias is not None, norm.centered, *dropout,
        x_bias is not None,
    )  # fmt: skip
    # Without dropout the branch's gradient equals the residual's, and the kernel writes it once.
    d_branch = d_residual if dropout is NO_DROPOUT else d_branch
    return d_residual, d_branch, _PartialSums(sums, (norm.weight, norm.bias, x_bias))
