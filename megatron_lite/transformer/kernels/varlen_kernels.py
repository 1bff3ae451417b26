"""Fused attention kernels of CUDA on sequences of different lengths: FlashAttention, and the memory-efficient kernel.

Without dropout the forward pass of FlashAttention is torch's public function. Its operators without documentation
(private_names.py) remain for dropout, which the public function has not, and for backward passes: it has one only as a
node of autograd, whose call costs the host more than the launch, and which fills a tensor in each forward pass.

FlashAttention 3 and 4 are packages that torch's switch puts in place of these operators, see `use_attention`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from data_utils.common.errors import ConfigError
from data_utils.common.private_names import lookup
from data_utils.common.setting_files import one_line
from megatron_lite.config.attention import IMPLEMENTATIONS, LaunchType
from megatron_lite.transformer.kernels.compat import Gradients

_flash_forward = lookup("torch.ops.aten._flash_attention_forward")
_flash_backward = lookup("torch.ops.aten._flash_attention_backward")
_efficient_forward = lookup("torch.ops.aten._efficient_attention_forward")
_efficient_backward = lookup("torch.ops.aten._efficient_attention_backward")

_implementation = "fa2"  # of this process, see `use_attention`


def attention_in_use() -> str:
    """The implementation that kernels in half precision run: a name of `IMPLEMENTATIONS`."""
    return _implementation


def use_attention(name: str, activate: bool = True) -> None:
    """Run an implementation from now on, in this process.

    Args: activate: False where no kernel runs, on fake devices: the package may be missing.
    Raises: ConfigError if its package does not work here.
    """
    global _implementation
    package = IMPLEMENTATIONS[name].package
    if activate and package is not None:
        try:
            activate_flash_attention_impl(name.upper())
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            raise _unusable(name, error) from error
    elif current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    if activate and name != "torch":
        _public_forward()  # not in the first step: see there
    _implementation = name


def try_attention(device: torch.device, dtype: torch.dtype, types: Sequence[LaunchType]) -> None:
    """Launch the implementation in use once for each type, without and with a causal mask, in both directions.

    A kernel may be missing in this build of torch, a package be built for another GPU, or called by torch in a way that
    it has left; each for some head sizes alone. Raises: ConfigError if a launch fails.
    """
    name, kernel = _implementation, varlen_kernel(dtype)
    for launched, causal in itertools.product(types, (False, True)):
        # More keys than queries, as in GLM and in cross-attention; local layers have as many.
        queries, keys = 16, 16 if launched.window else 24
        q = torch.ones(queries, 1, launched.head_size, device=device, dtype=dtype)
        k = torch.ones(keys, 1, launched.head_size, device=device, dtype=dtype)
        cu_seqlens = [
            torch.tensor([0, length], device=device, dtype=torch.int32) for length in (queries, keys)
        ]
        launch = SimpleNamespace(
            cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1], max_seqlen_q=queries, max_seqlen_k=keys,
            causal=causal, window=launched.window,
        )  # fmt: skip
        try:
            out, state = kernel.forward(q, k, k, launch, launched.dropout)
            kernel.backward(q, q, k, k, out, state, launch, launched.dropout)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:  # whatever torch or the package raises
            raise _unusable(name, error, f"heads of {launched.head_size}: ") from error


def _unusable(name: str, error: Exception, what: str = "") -> ConfigError:
    """Args: what: was launched, in words."""
    package = IMPLEMENTATIONS[name].package
    source, remedy = "which", "install a torch that is built for this GPU"
    if package is not None:
        source, remedy = f"whose package {package.name}", f"{package.install}, built for this torch and CUDA"
    return ConfigError(
        f"training.attention chooses {name}, {source} does not work here ({what}{one_line(error)}); {remedy}, or set "
        f"training.attention to {'torch' if name == 'fa2' else 'fa2'}."
    )


@functools.cache
def _public_forward() -> Callable[..., Any]:
    """torch's function, which writes the output into its first argument and returns it and the log of the sums."""
    # Its module imports torch's compiler, which takes more than a second: a CPU never calls it.
    from torch.nn.attention.varlen import AuxRequest, varlen_attn_out

    return functools.partial(varlen_attn_out, return_aux=AuxRequest(lse=True))


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
    """FlashAttention 2, 3 or 4, for bf16 and fp16. Its causal mask is aligned at the bottom right."""

    @staticmethod
    def forward(q, k, v, launch, dropout):  # type: ignore[no-untyped-def]
        cu_seqlens = launch.cu_seqlens_q, launch.cu_seqlens_k, launch.max_seqlen_q, launch.max_seqlen_k
        left, right = _window_sides(launch)
        if dropout:
            out, *state = _flash_forward(
                q,
                k,
                v,
                *cu_seqlens,
                dropout,
                launch.causal,
                False,
                window_size_left=left,
                window_size_right=right,
            )
            return out, state[:3]  # log of the sum of exponentials, state of the generator
        # Into a tensor of ours: fa3 and fa4 fill two tensors more where they make the output themselves.
        out = q.new_empty(q.shape)
        _, log_sums = _public_forward()(out, q, k, v, *cu_seqlens, window_size=(left, right))
        return out, [log_sums]

    @staticmethod
    def backward(grad, q, k, v, out, state, launch, dropout):  # type: ignore[no-untyped-def]
        log_sums, *generator = state
        # Without dropout no kernel reads the generator's state.
        generator = generator or [q.new_empty(2, dtype=torch.uint64), q.new_empty(0)]
        left, right = _window_sides(launch)
        return _flash_backward(
            grad, q, k, v, out, log_sums, launch.cu_seqlens_q, launch.cu_seqlens_k, launch.max_seqlen_q,
            launch.max_seqlen_k, dropout, launch.causal, *generator, window_size_left=left, window_size_right=right,
        )  # fmt: skip


def _window_sides(launch: Any) -> tuple[int, int]:
    """The keys on both sides of each query; -1 = all of them."""
    left = launch.window or -1
    return left, 0 if launch.causal else left


class _Efficient(VarlenKernel):
    """The memory-efficient kernel, for fp32 and for GPUs without FlashAttention."""

    FROM_BOTTOM_RIGHT = 2  # its number for a causal mask

    @classmethod
    def forward(cls, q, k, v, launch, dropout):  # type: ignore[no-untyped-def, override]
        if launch.window:
            raise ConfigError(
                f"model.attention_window is {launch.window}, which CUDA's memory-efficient kernel lacks; it runs in "
                "fp32 and on GPUs before Ampere: set training.precision to bf16 or fp16, and use a later GPU."
            )
        out, *state, _, _ = _efficient_forward(
            q[None], k[None], v[None], None, launch.cu_seqlens_q, launch.cu_seqlens_k,
            launch.max_seqlen_q, launch.max_seqlen_k, dropout, cls.FROM_BOTTOM_RIGHT if launch.causal else 0, True,
        )  # fmt: skip
        return out[0], state  # log of the sum of exponentials, seed and offset of the generator

    @classmethod
    def backward(cls, grad, q, k, v, out, state, launch, dropout):  # type: ignore[no-untyped-def, override]
        log_sums, *generator = state
        *grads, _ = _efficient_backward(
            grad[None], q[None], k[None], v[None], None, out[None], launch.cu_seqlens_q, launch.cu_seqlens_k,
            launch.max_seqlen_q, launch.max_seqlen_k, log_sums, dropout, *generator,
            cls.FROM_BOTTOM_RIGHT if launch.causal else 0, False,
        )  # fmt: skip
        return tuple(x[0] for x in grads)


def varlen_kernel(dtype: torch.dtype) -> type[VarlenKernel]:
    """The kernel for operands of a type."""
    return _Efficient if dtype == torch.float32 or _implementation == "torch" else _Flash
