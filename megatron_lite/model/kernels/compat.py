"""Functions of torch outside its documented interface that the model uses."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch

from data_utils.base.errors import ConfigError


def _undocumented(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise ConfigError(
            f"torch {torch.__version__} has no {name}, which this program needs; install the version of torch that "
            "requirements.txt names."
        ) from None


# The kernels that F.scaled_dot_product_attention runs on CPU. With these, the backward pass makes masks again, where
# autograd would keep them.
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
flash_forward_on_cpu = _undocumented(torch.ops.aten, _KERNEL).default
flash_backward_on_cpu = _undocumented(torch.ops.aten, f"{_KERNEL}_backward").default

_count_of_modes = _undocumented(torch._C, "_len_torch_dispatch_stack")


def is_watched() -> bool:
    """Whether a mode wants to see every operator, as that of the profile's fake devices does."""
    return _count_of_modes() > 0


_HALF_INSTRUCTIONS = {
    torch.bfloat16: ("_is_amx_tile_supported", "_is_avx512_bf16_supported"),
    torch.float16: ("_is_amx_fp16_supported",),
}


@functools.cache
def cpu_has_half_matmul(dtype: torch.dtype) -> bool:
    """True if this CPU multiplies matrices of `dtype` with dedicated instructions."""
    names = _HALF_INSTRUCTIONS.get(dtype)
    return names is None or any(_undocumented(torch.cpu, name)() for name in names)


def widens(x: torch.Tensor) -> bool:
    """True if operands of the type and device of `x` should be multiplied in fp32."""
    return x.device.type == "cpu" and not cpu_has_half_matmul(x.dtype)


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of q, k, v


class VarlenKernel(Protocol):
    """A fused attention kernel of CUDA on sequences of different lengths: q [Q, H, D], k and v [K, H, D].

    `call` is a `varlen.VarlenCall`. `forward` returns the output [Q, H, D] and what `backward` needs of it besides.
    """

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any, dropout: float) -> Any: ...

    @staticmethod
    def backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        state: Any, call: Any, dropout: float,
    ) -> Gradients:  # fmt: skip
        ...


class _Flash(VarlenKernel):
    """FlashAttention 2, for bf16 and fp16. Its causal mask is aligned at the bottom right."""

    @staticmethod
    def forward(q, k, v, call, dropout):  # type: ignore[no-untyped-def]
        out, *state = torch.ops.aten._flash_attention_forward(
            q, k, v, call.query_ends, call.key_ends, call.longest_queries, call.longest_keys,
            dropout, call.causal, False,
        )  # fmt: skip
        return out, state[:3]  # log of the sum of exponentials, state of the generator

    @staticmethod
    def backward(grad, q, k, v, out, state, call, dropout):  # type: ignore[no-untyped-def]
        log_sums, *generator = state
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, log_sums, call.query_ends, call.key_ends, call.longest_queries, call.longest_keys,
            dropout, call.causal, *generator,
        )  # fmt: skip


class _Efficient(VarlenKernel):
    """The memory-efficient kernel, for fp32."""

    FROM_BOTTOM_RIGHT = 2  # its number for a causal mask

    @classmethod
    def forward(cls, q, k, v, call, dropout):  # type: ignore[no-untyped-def, override]
        out, *state, _, _ = torch.ops.aten._efficient_attention_forward(
            q[None], k[None], v[None], None, call.query_ends, call.key_ends, call.longest_queries, call.longest_keys,
            dropout, cls.FROM_BOTTOM_RIGHT if call.causal else 0, True,
        )  # fmt: skip
        return out[0], state  # log of the sum of exponentials, seed and offset of the generator

    @classmethod
    def backward(cls, grad, q, k, v, out, state, call, dropout):  # type: ignore[no-untyped-def, override]
        log_sums, *generator = state
        *grads, _ = torch.ops.aten._efficient_attention_backward(
            grad[None], q[None], k[None], v[None], None, out[None], call.query_ends, call.key_ends,
            call.longest_queries, call.longest_keys, log_sums, dropout, *generator,
            cls.FROM_BOTTOM_RIGHT if call.causal else 0, False,
        )  # fmt: skip
        return tuple(x[0] for x in grads)


def varlen_kernel(dtype: torch.dtype) -> type[VarlenKernel]:
    """The kernel for operands of a type."""
    return _Efficient if dtype == torch.float32 else _Flash
