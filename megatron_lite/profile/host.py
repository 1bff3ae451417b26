"""What starting an operation costs the host: measured on this CPU, for this torch, in this process.

A chain of what blocks are made of, products and the kernels between them, runs forward and backward on tensors so small
that arithmetic costs nothing. The CPU time of an operation is that of Python, autograd, torch and Triton, which is the
same on a machine with a GPU; a CUDA kernel costs its launch beside, which is assumed. Without the package triton
torch's own operators take the place of the kernels, and cost about half as much.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.model import fused
from megatron_lite.model.dropout import FeatureDropout
from megatron_lite.model.fused import Biased, add, gelu
from megatron_lite.model.tensor_parallel import LayerNorm, TensorParallel, linear
from megatron_lite.profile import without_gpu
from megatron_lite.profile.request import CUDA_LAUNCH_US

_ROUNDS, _LAYERS, _SIZE, _TOKENS = 15, 8, 16, 2


class _Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (
            func.is_view or func.overloadpacket.__name__ in ("detach", "empty_like", "_unsafe_view")
        )
        return func(*args, **(kwargs or {}))


def launch_us() -> float:
    """Microseconds of the host per launching operation, forward and backward together; best of several rounds.

    To be called in a process of its own: kernels are compiled from then on, and not run.
    """
    if without_gpu.is_available():
        without_gpu.compile_only()
        fused.DEVICES = ("cuda", "cpu")
    weights = [[torch.randn(_SIZE, _SIZE, requires_grad=True) for _ in range(3)] for _ in range(_LAYERS)]
    bias = torch.zeros(_SIZE, requires_grad=True)
    norm = LayerNorm(_SIZE, 1e-5, TensorParallel())
    dropout = FeatureDropout(torch.zeros(_TOKENS, dtype=torch.int32), 0, 0.1)
    inputs = [bias, *norm.parameters(), *(weight for layer in weights for weight in layer)]

    def step() -> None:
        hidden = torch.ones(_TOKENS, _SIZE)
        for attended, expand, shrink in weights:
            hidden, normed = norm.after_sum(hidden)
            hidden, normed = norm.after_sum(hidden, Biased(linear(normed, attended), bias), dropout)
            inner = gelu(Biased(linear(normed, expand), bias), "tanh")
            hidden = add(hidden, Biased(linear(inner, shrink), bias), dropout)
        torch.autograd.grad(hidden.sum(), inputs)

    with _Operations() as operations:
        step()
    step()
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.process_time()
        step()
        best = min(best, time.process_time() - start)
    return best / operations.count * 1e6 + CUDA_LAUNCH_US
