"""Functions of torch outside its documented interface that the model uses."""

from __future__ import annotations

import functools
from typing import Any

import torch

from data_utils.common.errors import ConfigError


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


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of q, k, v

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
