"""Operators of the cross entropy on a GPU, see fused.py. Its kernels are in triton_cross_entropy.py.

Shapes: K predictions, V columns of a rank's vocabulary. `first` is the global id of its first column, `valid` its
columns that are no padding.
"""

from __future__ import annotations

import torch

from megatron_lite.transformer.kernels.fused import operator


def log_sums(
    logits: torch.Tensor, targets: torch.Tensor, first: int, valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp of logits [K, V], and the target's logit, 0 if another rank has it: both fp32 [K]."""
    sums, target_logits = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    return sums, target_logits


def write_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    sums: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    valid: int,
) -> None:
    """Overwrites logits [K, V] by the gradient of sum(grad * cross entropy). Args: sums: fp32 [K], from `log_sums`."""


log_sums_kernel = operator(log_sums, module="triton_cross_entropy")
write_gradient_kernel = operator(write_gradient, ("logits",), "triton_cross_entropy")
