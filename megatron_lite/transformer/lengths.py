"""Lengths to which micro-batches are padded."""

from __future__ import annotations

import torch

from megatron_lite.transformer.attention_backends.layout import LENGTHS
from megatron_lite.transformer.kernels.compat import cpu_has_half_matmul


def builds_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether each new shape of a matrix product makes the library build and keep a kernel.

    oneDNN does so in half precision on CPUs: products of ever new shapes took 10 times as long, and memory grew.

    Args: dtype: of the products.
    """
    return device.type == "cpu" and dtype.itemsize < 4 and cpu_has_half_matmul(dtype)


def few_lengths(slots: int, device: torch.device, dtype: torch.dtype) -> int:
    """The multiple to which tokens are padded, so that batches of a shape have about LENGTHS lengths; 1 = any length.

    On a GPU few lengths let the allocator reuse memory, and multiples of 64 align products. CPU: `builds_kernels`.

    Args: slots: tokens of a batch, padding included. dtype: of the products.
    """
    is_few = device.type == "cuda" or builds_kernels(device, dtype)
    return -(-slots // (LENGTHS * 64)) * 64 if is_few else 1
