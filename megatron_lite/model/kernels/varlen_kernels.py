"""Fused attention kernels of CUDA on sequences of different lengths, outside torch's documented interface."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from data_utils.common.errors import ConfigError
from megatron_lite.model.kernels.compat import Gradients


class VarlenKernel(Protocol):
    """A fused attention kernel of CUDA on sequences of different lengths: q [Q, H, D], k and v [K, H, D].

    `launch` is a `varlen.VarlenLaunch`. `forward` returns the output [Q, H, D], and the state that `backward` needs.
    """

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: Any, dropout: float) -> Any: ...

    @staticmethod
    def backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        state: Any, launch: Any, dropout: float,
    ) -> Gradients:  # fmt: skip
        ...


class _Flash(VarlenKernel):
    """FlashAttention 2, for bf16 and fp16. Its causal mask is aligned at the bottom right."""

    @staticmethod
    def forward(q, k, v, launch, dropout):  # type: ignore[no-untyped-def]
        out, *state = torch.ops.aten._flash_attention_forward(
            q, k, v, launch.query_ends, launch.key_ends, launch.longest_queries, launch.longest_keys,
            dropout, launch.causal, False, **_window_sides(launch),
        )  # fmt: skip
        return out, state[:3]  # log of the sum of exponentials, state of the generator

    @staticmethod
    def backward(grad, q, k, v, out, state, launch, dropout):  # type: ignore[no-untyped-def]
        log_sums, *generator = state
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, log_sums, launch.query_ends, launch.key_ends,
            launch.longest_queries, launch.longest_keys, dropout, launch.causal, *generator, **_window_sides(launch),
        )  # fmt: skip


def _window_sides(launch: Any) -> dict[str, int]:
    """The keys on both sides of each query in a local layer."""
    left, right = launch.window, 0 if launch.causal else launch.window
    return {"window_size_left": left, "window_size_right": right} if launch.window else {}


class _Efficient(VarlenKernel):
    """The memory-efficient kernel, for fp32."""

    FROM_BOTTOM_RIGHT = 2  # its number for a causal mask

    @classmethod
    def forward(cls, q, k, v, launch, dropout):  # type: ignore[no-untyped-def, override]
        if launch.window:
            raise ConfigError(
                f"model.attention_window is {launch.window} in fp32, for which CUDA's kernel has none; set "
                "training.precision to bf16 or fp16."
            )
        out, *state, _, _ = torch.ops.aten._efficient_attention_forward(
            q[None], k[None], v[None], None, launch.query_ends, launch.key_ends,
            launch.longest_queries, launch.longest_keys, dropout, cls.FROM_BOTTOM_RIGHT if launch.causal else 0, True,
        )  # fmt: skip
        return out[0], state  # log of the sum of exponentials, seed and offset of the generator

    @classmethod
    def backward(cls, grad, q, k, v, out, state, launch, dropout):  # type: ignore[no-untyped-def, override]
        log_sums, *generator = state
        *grads, _ = torch.ops.aten._efficient_attention_backward(
            grad[None], q[None], k[None], v[None], None, out[None], launch.query_ends, launch.key_ends,
            launch.longest_queries, launch.longest_keys, log_sums, dropout, *generator,
            cls.FROM_BOTTOM_RIGHT if launch.causal else 0, False,
        )  # fmt: skip
        return tuple(x[0] for x in grads)


def varlen_kernel(dtype: torch.dtype) -> type[VarlenKernel]:
    """The kernel for operands of a type."""
    return _Efficient if dtype == torch.float32 else _Flash
