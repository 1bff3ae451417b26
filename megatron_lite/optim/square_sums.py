"""Sums of squares of flat tensors, from which gradient norms and trust ratios follow, exact at any size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Elements whose squares torch's kernel for CPUs adds up at once. It widens a whole tensor before it adds, so that a
# larger one would leave the cache.
_PIECE = 1 << 16


def square_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of each tensor, fp64 [tensors], one at least; added in fp64, without a wait for the device.

    In fp32 torch's kernel for CPUs adds one square after another: the norm of 28 M numbers is off by 1e-3.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64)).square()
    pieces = [tensor.reshape(-1).split(_PIECE) for tensor in tensors]
    norms = torch._foreach_norm([piece for of_tensor in pieces for piece in of_tensor], 2, torch.float64)
    numbers = [number for number, of_tensor in enumerate(pieces) for _ in of_tensor]
    sums = torch.zeros(len(tensors), dtype=torch.float64)
    return sums.index_add_(0, torch.tensor(numbers), torch.stack(norms).square())
