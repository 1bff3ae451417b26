"""FlexAttention on fake devices: an operator with the shapes, bytes and pairs of the compiled kernel, no arithmetic.

Compiling the real one needs a compiler for the device. Its pairs are those of the blocks that it does not skip.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from megatron_lite.model.attention import flex

_SHAPES = "Tensor query, Tensor key, Tensor value"


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pairs: int) -> Any:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.pairs = inputs[3]


def install() -> None:
    """Let every FlexPlan of this process call the operator."""
    custom = torch.library.custom_op
    forward = custom(
        "profile::flex_attention",
        _forward,
        mutates_args=(),
        schema=f"({_SHAPES}, int pairs) -> (Tensor, Tensor)",
    )
    backward = custom(
        "profile::flex_attention_backward",
        _backward,
        mutates_args=(),
        schema=f"(Tensor grad, {_SHAPES}, Tensor out, Tensor lse, int pairs) -> (Tensor, Tensor, Tensor)",
    )
    forward.register_fake(_forward)
    backward.register_fake(_backward)

    def differentiate(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor) -> Any:
        return *backward(grad, *ctx.saved_tensors, ctx.pairs), None

    forward.register_autograd(differentiate, setup_context=_save)

    def attention(
        *heads: torch.Tensor, block_mask: Any, score_mod: Any = None, return_aux: Any = None
    ) -> Any:
        out, lse = forward(*heads, _pairs(block_mask))
        return out if return_aux is None else (out, SimpleNamespace(lse=lse))

    flex._kernel = lambda compiled: attention  # type: ignore[assignment]


def _pairs(mask: Any) -> int:
    counts = [getattr(x, "host_values", None) for x in (mask.kv_num_blocks, mask.full_kv_num_blocks)]
    with unset_fake_temporarily():
        blocks = sum(int(x.sum()) for x in counts if x is not None)
    return blocks * flex.BLOCK**2
