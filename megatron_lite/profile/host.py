"""What starting an operation costs the host: measured on this CPU, for this torch, in this process.

A chain of the project's own layers runs forward and backward on tensors so small that arithmetic costs nothing. The
CPU time of an operation is that of Python, autograd and dispatch, which is the same on a machine with a GPU; a CUDA
kernel costs its launch beside, which is assumed.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.profile.request import CUDA_LAUNCH_US

_ROUNDS, _LAYERS, _SIZE = 15, 8, 16


class _Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (
            func.is_view or func.overloadpacket.__name__ in ("detach", "empty_like", "_unsafe_view")
        )
        return func(*args, **(kwargs or {}))


def launch_us() -> float:
    """Microseconds of the host per launching operation, forward and backward together; best of several rounds."""
    weights = [torch.randn(_SIZE, _SIZE, requires_grad=True) for _ in range(_LAYERS)]
    bias = torch.zeros(_SIZE, requires_grad=True)

    def step() -> None:
        x = torch.ones(2, _SIZE)
        for weight in weights:
            x = x + F.gelu(F.linear(F.layer_norm(x, (_SIZE,), bias, bias), weight, bias))
        torch.autograd.grad(x.sum(), [bias, *weights])

    with _Operations() as operations:
        step()
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.process_time()
        step()
        best = min(best, time.process_time() - start)
    return best / operations.count * 1e6 + CUDA_LAUNCH_US
