"""Fused operations between matrix products. On a GPU each is one Triton kernel per direction (triton_kernels.py), and
one more that finishes the sums over tokens. On CPU, and with `training.kernels=torch`, they are torch's operators.

A product's bias is added by the function that takes its output, where the addition and the sum of its gradient cost no
extra pass through memory. Kernels compute dropout's masks again in the backward pass instead of storing them.

Blocks compiled by torch took 12 and 33 launches a layer and 13.1 ms a step of a 335M model, these kernels 12 and 20 and
10.6 ms: with torch every sum over tokens was another pass and two kernels. These need no compilation for each length of
a batch, and serve ZeRO 3 and tensor parallelism too.

Shapes: T tokens, D width, P programs of a kernel, each of which sums over some of the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from megatron_lite.transformer.kernels.compat import is_watched
from megatron_lite.transformer.kernels.dropout import FeatureDropout, drop
from megatron_lite.transformer.kernels.sums import empty_sums

DEVICES: tuple[str, ...] = ("cuda", "meta")  # where kernels run; on "meta" they have shapes alone
_is_wanted = True  # False: torch's operators everywhere
_ACTIVATION_PROGRAMS = 64  # most that sum over tokens, for each block of columns


def has_kernels(x: torch.Tensor) -> bool:
    """Whether the tensor is where kernels run."""
    return _is_wanted and x.device.type in DEVICES


def kernels_are_wanted() -> bool:
    """Whether `training.kernels` is "fused"."""
    return _is_wanted


def choose_kernels(kernels: str) -> None:
    """Apply `training.kernels`, once per process: "fused" are those of this file, "torch" torch's operators."""
    global _is_wanted
    _is_wanted = kernels == "fused"


def operator(
    allocate: Callable[..., Any], overwrites: tuple[str, ...] = (), module: str = "triton_kernels"
) -> Callable[..., Any]:
    """The kernel of the same name as an operator of torch.

    Args:
        allocate: makes the results, empty, from the operator's arguments; annotated as torch's operators are.
        overwrites: arguments that the kernel writes.
        module: of this package, which has the kernel.
    """
    name = f"megatron_lite::{allocate.__name__}"

    @functools.cache
    def kernel() -> Callable[..., None]:
        return getattr(import_module(f"megatron_lite.transformer.kernels.{module}"), allocate.__name__)

    def run(*arguments: Any) -> Any:
        results = allocate(*arguments)
        written = results if isinstance(results, tuple) else () if results is None else (results,)
        kernel()(*arguments, *written)
        return results

    torch.library.define(name, torch.library.infer_schema(allocate, mutates_args=overwrites))
    torch.library.impl(name, "default", run)
    torch.library.register_fake(name, allocate)
    registered = getattr(torch.ops.megatron_lite, allocate.__name__)

    def launch(*arguments: Any) -> Any:
        # Through torch's dispatcher, which costs the host as much as the launch, only if a mode watches operators.
        return (registered if is_watched() else run)(*arguments)

    return launch


# The operators: each function allocates the results that the kernel writes. p: probability of dropout.


def add_norm(
    x: torch.Tensor | None, x_bias: torch.Tensor | None, keys: torch.Tensor | None, salt: int, p: float,
    hidden: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float,
    centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """total = hidden + dropout(x + x_bias), its norm, and each token's 1 / deviation and mean, fp32 [2, T].

    Args: centered: LayerNorm; else RMSNorm, which has no mean: [1, T].
    """
    like = hidden if x is None else x
    assert like is not None
    total = like.new_empty(0) if x is None else torch.empty_like(like)
    if weight is None:
        return total, like.new_empty(0), like.new_empty(0)
    return total, torch.empty_like(like), like.new_empty(1 + centered, like.shape[0], dtype=torch.float32)


def add_norm_backward(
    d_total: torch.Tensor | None, d_normed: torch.Tensor | None, total: torch.Tensor | None,
    weight: torch.Tensor | None, stats: torch.Tensor | None, has_bias: bool, centered: bool,
    keys: torch.Tensor | None, salt: int, p: float, has_x_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradient of hidden, if there is a norm; of x, if it is another tensor (with dropout); and partial sums
    [P, n D] of the gradients of weight, bias and x_bias, side by side, for the n that there are.
    """
    like = d_total if d_normed is None else d_normed
    assert like is not None
    d_hidden = like.new_empty(0) if d_normed is None else torch.empty_like(like)
    d_x = torch.empty_like(like) if p else like.new_empty(0)
    return d_hidden, d_x, empty_sums(like, like.shape[1], (d_normed is not None) + has_bias + has_x_bias)


def activate(
    x: torch.Tensor, bias: torch.Tensor | None, activation: str, gated: bool,
    keys: torch.Tensor | None, salt: int, p: float,
) -> torch.Tensor:  # fmt: skip
    """dropout(activation(x + bias)), [T, D].

    Args: gated: x is [T, 2 D]; the activation of its first half multiplies the second.
    """
    return x.new_empty(x.shape[0], x.shape[1] // (1 + gated))


def activate_backward(
    x: torch.Tensor, bias: torch.Tensor | None, grad: torch.Tensor, activation: str, gated: bool,
    keys: torch.Tensor | None, salt: int, p: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradient of x, and partial sums of the bias's, fp32 [P, D or 2 D]."""
    tokens, width = x.shape
    return torch.empty_like(x), x.new_empty(min(_ACTIVATION_PROGRAMS, tokens), width, dtype=torch.float32)


def finish_sums(sums: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The sums of all programs, of up to four kernels [P, D] each, one after another [D + ..] in the type of `like`."""
    return like.new_empty(sum(partial.shape[1] for partial in sums))


def join_pair(
    dq_0: torch.Tensor, dk_0: torch.Tensor, dv_0: torch.Tensor,
    dq_1: torch.Tensor, dk_1: torch.Tensor, dv_1: torch.Tensor,
    first_key: int, gathered_index: torch.Tensor, second_start: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradient of Q, K and V [T, 3, H, D'] from the gradients of a pair of launches, and its partial sums
    [P, 3 H D'].

    Args:
        first_key: of the first launch.
        gathered_index: of the second launch, see VarlenLaunch.
        second_start: int32 [1], the first query of the second launch, where shapes are fixed (`with_fixed_shapes`).
    """
    joined = dq_0.new_empty(gathered_index.shape[0], 3, *dq_0.shape[1:])
    return joined, empty_sums(joined, dq_0.shape[1] * dq_0.shape[2], 3)


add_norm_kernel, add_norm_backward_kernel = operator(add_norm), operator(add_norm_backward)
activate_kernel, activate_backward_kernel = operator(activate), operator(activate_backward)
finish_sums_kernel = operator(finish_sums)
join_pair_kernel = operator(join_pair)


NO_DROPOUT = None, 0, 0.0


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, x, x_bias, weight, bias, epsilon, centered, dropout):  # type: ignore[no-untyped-def]
        keys, *ctx.dropout = dropout or NO_DROPOUT
        total, normed, stats = add_norm_kernel(
            x, x_bias, keys, *ctx.dropout, hidden, weight, bias, epsilon, centered
        )
        if x is None:
            total = hidden
        ctx.save_for_backward(None if weight is None else total, weight, stats, keys, x_bias)
        ctx.has_bias, ctx.centered = bias is not None, centered
        ctx.has_hidden, ctx.has_x = hidden is not None, x is not None
        # A result that nobody uses has the gradient None instead of zeros, which the kernel would have to read.
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, d_total, d_normed):  # type: ignore[no-untyped-def]
        total, weight, stats, keys, x_bias = ctx.saved_tensors
        p = ctx.dropout[1]
        d_total = None if d_total is None else d_total.contiguous()
        # Without norm, bias and dropout both gradients are the incoming one, and nothing is launched.
        d_hidden = d_x = d_total
        d_weight = d_bias = d_x_bias = None
        has_sums = weight is not None, ctx.has_bias, x_bias is not None
        if p or any(has_sums):
            d_normed = None if weight is None else d_normed.contiguous()
            d_sum, d_dropped, sums = add_norm_backward_kernel(
                d_total, d_normed, total, weight, stats, ctx.has_bias, ctx.centered, keys, *ctx.dropout,
                x_bias is not None,
            )  # fmt: skip
            d_hidden = d_total if weight is None else d_sum
            d_x = d_dropped if p else d_hidden
            if any(has_sums):
                like = x_bias if weight is None else weight
                finished = iter(finish_sums_kernel([sums], like).view(sum(has_sums), -1))
                d_weight, d_bias, d_x_bias = (next(finished) if has_sum else None for has_sum in has_sums)
        d_hidden, d_x = d_hidden if ctx.has_hidden else None, d_x if ctx.has_x else None
        return d_hidden, d_x, d_x_bias, d_weight, d_bias, None, None, None


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, bias, kind, gated, dropout):  # type: ignore[no-untyped-def]
        keys, *ctx.dropout = dropout or NO_DROPOUT
        ctx.save_for_backward(x, bias, keys)
        ctx.activation = kind, gated
        return activate_kernel(x, bias, *ctx.activation, keys, *ctx.dropout)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[no-untyped-def]
        x, bias, keys = ctx.saved_tensors
        d_x, sums = activate_backward_kernel(x, bias, grad.contiguous(), *ctx.activation, keys, *ctx.dropout)
        return d_x, None if bias is None else finish_sums_kernel([sums], bias), None, None, None


def dropout_add(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    dropout: FeatureDropout | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + dropout(x + bias), [T, D]. Without `residual` the second term alone."""
    if has_kernels(x):
        return _AddNorm.apply(residual, x, bias, None, None, 0.0, False, dropout)[0]
    return drop(x if bias is None else x + bias, residual, dropout)


def add_and_normalize(
    residual: torch.Tensor,
    x: torch.Tensor | None,
    x_bias: torch.Tensor | None,
    dropout: FeatureDropout | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    centered: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + dropout(x + x_bias), or residual alone, and its LayerNorm or, not centered, RMSNorm: [T, D] each.

    On a GPU.
    """
    return _AddNorm.apply(residual, x, x_bias, weight, bias, epsilon, centered, dropout)


def activated(
    x: torch.Tensor,
    activation: str,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    dropout: FeatureDropout | None = None,
) -> torch.Tensor:
    """dropout(activation(x + bias)), [T, D].

    Args: gated: x is [T, 2 D]; the activation of the first half multiplies the second (arXiv:2002.05202).
    """
    if has_kernels(x):
        return _Activate.apply(x.contiguous(), bias, activation, gated, dropout)
    x = x if bias is None else x + bias
    return activated_by_torch(x, activation, gated=gated, dropout=dropout)


def activated_by_torch(
    x: torch.Tensor, activation: str, *, gated: bool, dropout: FeatureDropout | None
) -> torch.Tensor:
    """`activated` by torch's operators."""
    x, *up = x.chunk(2, dim=-1) if gated else (x,)
    if gated and x.device.type == "cpu":
        # Two copies, and yet three fifths of the time in bf16 (equal in fp32): CPU kernels are slow on halves of rows.
        x, *up = x.contiguous(), up[0].contiguous()
    if activation == "relu":
        value = F.relu(x)
    elif activation == "silu":
        value = F.silu(x)
    else:
        value = F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    value = value * up[0] if gated else value
    return value if dropout is None else drop(value, None, dropout)
