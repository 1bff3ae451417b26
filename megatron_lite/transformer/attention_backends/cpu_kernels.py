"""Three ways to compute attention on CPU, and attention written out in torch's operators.

  flash        torch's fused kernel in the type of its operands
  flash fp32   the same on operands that are cast to fp32
  plain        matrix products and a softmax, whose weights are saved for the backward pass

The choice depends on nothing but the type of the operands and the number of queries and keys, so all ranks make the
same one. Operands are bf16 or fp16 only where the CPU multiplies them natively (AMX); elsewhere they have been cast to
fp32, for which the fused kernel is the fastest, or a draw. `benchmarks/attention.py` measures all three. With dropout,
or with a bias of the scores, attention is written out.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from megatron_lite.transformer.kernels.compat import (
    Gradients,
    flash_backward_on_cpu,
    flash_forward_on_cpu,
    widens,
)

# Half precision: pairs of query and key, for each head, up to which flash fp32 and plain are faster than flash.
# Measured with AMX, ms forward and backward of [batch, heads, tokens, head size] for flash, flash fp32 and plain:
#     [32, 4, 136, 32]    111   19   23     the backward pass of the fused kernel is slow on short sequences
#     [1, 16, 568, 64]     84   50   51
#     [4, 16, 512, 64]    196  161  146     products are large enough for AMX
#     [1, 16, 2048, 64]   457  742  615     the fused kernel keeps the weights in its cache
_SMALL, _LARGE = 1 << 18, 1 << 20


class CpuKernel(Protocol):
    """Softmax over keys. q [B, H, Q, D], k and v [B, H, K, D]; bias [B or 1, 1, Q, K] or [Q, K] is added to the scores.

    With `causal` there are as many queries as keys and no bias.
    """

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [B, H, Q, D], and what the backward pass needs in addition, the state."""
        ...

    @staticmethod
    def backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        state: torch.Tensor, causal: bool, bias: torch.Tensor | None,
    ) -> Gradients:  # fmt: skip
        ...


class Flash(CpuKernel):
    """Its state is the log of the sum of exponentials of each query and head."""

    @staticmethod
    def forward(q, k, v, causal, bias):  # type: ignore[no-untyped-def]
        return flash_forward_on_cpu(q, k, v, 0.0, causal, attn_mask=bias)

    @staticmethod
    def backward(grad, q, k, v, out, state, causal, bias):  # type: ignore[no-untyped-def]
        return flash_backward_on_cpu(grad, q, k, v, out, state, 0.0, causal, attn_mask=bias)


class FlashInFp32(CpuKernel):
    @staticmethod
    def forward(q, k, v, causal, bias):  # type: ignore[no-untyped-def]
        wide_q, wide_k, wide_v = (_wide(x) for x in (q, k, v))
        out, state = Flash.forward(wide_q, wide_k, wide_v, causal, None if bias is None else _wide(bias))
        return out.to(q.dtype), state

    @staticmethod
    def backward(grad, q, k, v, out, state, causal, bias):  # type: ignore[no-untyped-def]
        grad, q, k, v, out = (_wide(x) for x in (grad, q, k, v, out))
        # The gradients stay in fp32: the caller sums them over query ranges.
        return Flash.backward(grad, q, k, v, out, state, causal, None if bias is None else _wide(bias))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Plain(CpuKernel):
    """Saves the attention weights for the backward pass; for a bounded number of queries and keys only."""

    @staticmethod
    def forward(q, k, v, causal, bias):  # type: ignore[no-untyped-def]
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        if causal:
            bias = scores.new_full(scores.shape[-2:], float("-inf")).triu_(1)
        # In place: nothing else needs the scores, and they are the largest tensor here.
        weights = (scores if bias is None else scores.add_(bias)).softmax(-1)
        return weights @ v, weights

    @staticmethod
    def backward(grad, q, k, v, out, state, causal, bias):  # type: ignore[no-untyped-def]
        weights = state
        grad_weights = grad @ v.transpose(-2, -1)
        # torch's own backward pass of a softmax, one kernel; written out it would be three passes over the weights.
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_scores = grad_scores.mul_(q.shape[-1] ** -0.5)
        return grad_scores @ k, grad_scores.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ grad


CPU_KERNELS: dict[str, type[CpuKernel]] = {"flash": Flash, "flash fp32": FlashInFp32, "plain": Plain}


def choose_cpu_kernel(dtype: torch.dtype, queries: int, keys: int, *, is_full: bool) -> str:
    """The name of the fastest kernel.

    Args: dtype: of the operands. queries, keys: their numbers. is_full: every query sees every key.
    """
    pairs = queries * keys
    if torch.promote_types(dtype, torch.float32) == dtype or pairs >= _LARGE:
        return "flash"
    # Under a mask plain computes hidden pairs too, and its weights of many blocks of queries would need much memory.
    return "plain" if is_full and pairs >= _SMALL else "flash fp32"


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """[..., S, H, D] -> [..., H, S, D]; on CPU a copy, in fp32 where half-precision matmuls are slow."""
    x = x.transpose(-3, -2)
    if x.device.type != "cpu":
        return x
    # torch's CPU kernel is up to 1.3 times faster when the tokens of a head are neighbours in memory.
    if widens(x):
        return x.to(torch.float32, memory_format=torch.contiguous_format)
    return x.contiguous()


def attend_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, p: float = 0.0
) -> torch.Tensor:
    """[B, Sq, H, D] queries over [B, Sk, H, D] keys and values, by torch's own choice of kernel.

    Args:
        mask: bool [B, 1, Sq, Sk], which keys; or what is added to the scores, [B, H, Sq, Sk]. None: all keys.
        p: of dropout, drawn by the kernel.
    """
    dtype = q.dtype
    q, k, v = (heads_first(x) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
    return out.transpose(1, 2).to(dtype)


def attend_written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    keep: torch.Tensor | None,
    p: float,
) -> torch.Tensor:
    """[..., H, Q, D] queries, keys, values; `bias` [..., H, Q, K].

    Args: keep: bool [..., H, Q, K], the weights that dropout with probability p keeps; None = all.
    """
    dtype = q.dtype
    if (
        q.device.type == "cpu"
        and choose_cpu_kernel(dtype, q.shape[-2], k.shape[-2], is_full=bias is None) == "flash fp32"
    ):
        # As without dropout. In half precision oneDNN would also build a kernel for each new shape.
        q, k, v = q.float(), k.float(), v.float()
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    weights = (scores if bias is None else scores + bias).softmax(-1)
    # The factor on the output [Q, D] instead of on the weights [Q, K].
    out = weights @ v if keep is None else torch.where(keep, weights, 0.0) @ v * (1.0 / (1.0 - p))
    return out.to(dtype)
