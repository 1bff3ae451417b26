"""LayerNorm and RMSNorm of tokens and of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.kernels.dropout import FeatureDropout
from megatron_lite.transformer.kernels.fused import add_and_normalize, dropout_add, has_kernels
from megatron_lite.transformer.tensor_parallel import TensorParallel


class LayerNorm(nn.Module):
    """LayerNorm between tensor-parallel regions. `normalize` may be another kernel with F.layer_norm's arguments."""

    def __init__(self, hidden_size: int, epsilon: float, parallel: TensorParallel, has_bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias: Any = nn.Parameter(torch.empty(hidden_size)) if has_bias else None
        self.epsilon = epsilon
        self.parallel = parallel
        parallel.mark_replicated(*self.parameters())
        self.normalize: Callable[..., torch.Tensor] = F.layer_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._replicated()
        return self.normalize(x, weight.shape, weight, bias, self.epsilon)

    def _replicated(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = None if self.bias is None else self.parallel.replicated(self.bias)
        return self.parallel.replicated(self.weight), bias

    def after_sum(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        dropout: FeatureDropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + dropout(x + bias), or residual alone, and its norm: [T, D] each. One kernel on a GPU."""
        # Another `normalize` (apex) has no fused sum, so sum and norm run one after another.
        if has_kernels(residual) and self.normalize is F.layer_norm:
            return add_and_normalize(residual, x, bias, dropout, *self._replicated(), self.epsilon)
        total = residual if x is None else dropout_add(x, residual, dropout, bias)
        return total, self(total)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """F.rms_norm over the last dimension: [..., D], [D] -> [..., D]."""
    if x.device.type == "cpu":
        return _RmsNormOnCpu.apply(x, weight, epsilon)
    return F.rms_norm(x, weight.shape, weight, epsilon)


class _RmsNormOnCpu(torch.autograd.Function):
    """One backward pass, where torch has a chain of operators on CPUs, each with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        # Operators with operands of two types are slow on CPUs, so all are converted at first.
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = x.to(wide, copy=True)
        scale = torch.linalg.vector_norm(normed, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return normed.mul_(scale).mul_(weight.to(wide)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed, gradient = x.to(scale.dtype, copy=True).mul_(scale), gradient.to(scale.dtype)
        wide, product = weight.to(scale.dtype), normed * gradient
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        along = (product @ wide).div_(-x.shape[-1]).unsqueeze_(-1)
        of_x = torch.addcmul(normed.mul_(along), gradient, wide).mul_(scale)
        return of_x.to(x.dtype), of_weight, None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight, as LayerNorm between tensor-parallel regions (arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, epsilon: float, parallel: TensorParallel):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.epsilon = epsilon
        self.parallel = parallel
        parallel.mark_replicated(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if has_kernels(x):
            return self.after_sum(x)[1]
        return rms_norm(x, self.parallel.replicated(self.weight), self.epsilon)

    def after_sum(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        dropout: FeatureDropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and its norm, as `LayerNorm.after_sum`."""
        if has_kernels(residual):  # where torch takes up to six kernels
            weight = self.parallel.replicated(self.weight)
            return add_and_normalize(residual, x, bias, dropout, weight, None, self.epsilon, centered=False)
        total = residual if x is None else dropout_add(x, residual, dropout, bias)
        return total, self(total)


Norm = LayerNorm | RMSNorm


def make_norm(config: ModelConfig, width: int, parallel: TensorParallel) -> Norm:
    """The norm that a configuration chooses."""
    if not config.norm_bias:
        return LayerNorm(width, config.layernorm_epsilon, parallel, has_bias=False)
    norm = RMSNorm if config.rms_norm else LayerNorm
    return norm(width, config.layernorm_epsilon, parallel)


def final_layernorm(config: ModelConfig) -> nn.Module:
    """The norm before the heads; none in post-norm models."""
    # Not the model's `parallel`: each rank has all tokens with loss here, so its gradient needs no sum over ranks.
    return make_norm(config, config.hidden_size, TensorParallel()) if config.norm == "pre" else nn.Identity()


class HeadNorms(nn.Module):
    """Queries and keys over their root mean square: each head by itself, with a scale that the heads share (Qwen3), or
    all heads together (OLMoE)."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel):
        super().__init__()
        size, epsilon = config.head_size, config.layernorm_epsilon
        self.is_over_all = config.query_key_norm_over == "all"
        counts = (config.num_attention_heads, config.key_value_heads) if self.is_over_all else (1, 1)
        # Marked as not partial: `scales` sums the gradient of this rank's heads over the ranks.
        self.query_layernorm, self.key_layernorm = (
            RMSNorm(count * size, epsilon, TensorParallel()) for count in counts
        )
        self.parallel, self.epsilon = parallel, epsilon

    def scales(self) -> list[torch.Tensor]:
        """The scales of queries and of keys, [D] each. `copy`: their gradients are sums over the heads of all ranks."""
        return [self.parallel.copy(norm.weight) for norm in (self.query_layernorm, self.key_layernorm)]

    def forward(self, heads: torch.Tensor, key_value_heads: int) -> torch.Tensor:
        """[T, H + 2 K, D] -> the same."""
        queries = heads.shape[1] - 2 * key_value_heads
        *query_key, values = heads.split([queries, key_value_heads, key_value_heads], dim=1)
        normed = [
            rms_norm(x.flatten(1) if self.is_over_all else x, scale, self.epsilon).view_as(x)
            for x, scale in zip(query_key, self.scales(), strict=True)
        ]
        return torch.cat([*normed, values], dim=1)
