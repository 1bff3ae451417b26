"""fused_layer_norm_affine: statistics in fp32, which the backward pass reads again."""

import torch

calls = 0


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps):
        assert x.numel() > 0  # CUDA's "invalid configuration argument"
        assert tuple(shape) == x.shape[-1:] == weight.shape == bias.shape and x.dtype == weight.dtype
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        inverse = (wide.var(-1, correction=0, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse)
        return ((wide - mean) * inverse * weight.float() + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, mean, inverse = ctx.saved_tensors
        normed, gradient = (x.float() - mean) * inverse, gradient.float()
        scaled = gradient * weight.float()
        grad_x = scaled - scaled.mean(-1, keepdim=True) - normed * (scaled * normed).mean(-1, keepdim=True)
        rows = tuple(range(x.dim() - 1))
        grad_weight, grad_bias = (gradient * normed).sum(rows), gradient.sum(rows)
        return (
            (grad_x * inverse).to(x.dtype),
            grad_weight.to(weight.dtype),
            grad_bias.to(weight.dtype),
            None,
            None,
        )


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    global calls
    calls += 1
    return _LayerNorm.apply(input, weight, bias, normalized_shape, eps)
