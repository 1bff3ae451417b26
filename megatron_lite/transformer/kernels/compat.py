"""Functions of torch that no documentation promises (private_names.py), as the model uses them."""

from __future__ import annotations

import functools

import torch

from data_utils.common.private_names import lookup

# The kernels that F.scaled_dot_product_attention runs on CPU. With these, the backward pass makes masks again, where
# autograd would keep them.
_KERNEL = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
flash_forward_on_cpu = lookup(_KERNEL).default
flash_backward_on_cpu = lookup(f"{_KERNEL}_backward").default

_count_of_modes = lookup("torch._C._len_torch_dispatch_stack")


def is_watched() -> bool:
    """Whether a mode wants to see every operator, as that of the profile's fake devices does."""
    return _count_of_modes() > 0


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of q, k, v

_HALF_INSTRUCTIONS = {
    torch.bfloat16: ("_is_amx_tile_supported", "_is_avx512_bf16_supported"),
    torch.float16: ("_is_amx_fp16_supported",),
}


@functools.cache
def cpu_has_half_matmul(dtype: torch.dtype) -> bool:
    """True if this CPU multiplies matrices of `dtype` with dedicated instructions."""
    names = _HALF_INSTRUCTIONS.get(dtype)
    return names is None or any(lookup(f"torch.cpu.{name}")() for name in names)


def widens(x: torch.Tensor) -> bool:
    """True if operands of the type and device of `x` should be multiplied in fp32."""
    return x.device.type == "cpu" and not cpu_has_half_matmul(x.dtype)
