"""Lengths to which micro-batches are padded."""

from __future__ import annotations

import torch

from megatron_lite.model.attention_backends.layout import LENGTHS
from megatron_lite.model.kernels.compat import cpu_has_half_matmul


def builds_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether each new shape of a product costs a kernel that is built and kept.

    So it is in half precision on CPU, where oneDNN does it. Products of ever new shapes took 10 times as long, and
    memory grew with each.

    Args: dtype: of the products.
    """
    return device.type == "cpu" and dtype.itemsize < 4 and cpu_has_half_matmul(dtype)


def few_lengths(places: int, device: torch.device, dtype: torch.dtype) -> int:
    """The multiple to which tokens are padded, so that batches of a shape have about LENGTHS lengths; 1 = any length.

    On a GPU memory is used again, and rows of all products begin at 128 bytes. On CPU see `builds_kernels`.

    Args: places: tokens of a batch, padding included. dtype: of the products.
    """
    is_few = device.type == "cuda" or builds_kernels(device, dtype)
    return -(-places // (LENGTHS * 64)) * 64 if is_few else 1
