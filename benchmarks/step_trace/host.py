"""Host time per kernel launch, measured on this CPU with the installed torch, in this process.

A few blocks of the model run forward and backward, with an optimizer's bucket that receives their gradients, on tensors
so small that arithmetic costs nothing. The CPU time divided by the number of launched kernels is the cost of one:
Python, autograd, torch and Triton, which are the same on a machine with a GPU. The launch of a CUDA kernel itself is
added as a constant. Attention kernels are replaced by functions that only allocate the results.

Without the package triton, torch's operators replace the kernels, and the fused block is off.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.step_trace import without_gpu
from benchmarks.step_trace.request import CUDA_LAUNCH_US
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.attention_backends import varlen
from megatron_lite.model.attention_backends.layout import make_layout
from megatron_lite.model.attention_backends.plan import plan_attention
from megatron_lite.model.block import Block
from megatron_lite.model.forward_context import ForwardContext
from megatron_lite.model.fused_block import Hidden, materialize
from megatron_lite.model.kernels import fused
from megatron_lite.model.kernels.dropout import AttentionDropout, Dropout, salts
from megatron_lite.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    accumulate_in_backward,
)
from megatron_lite.optim.buckets import Bucket, ParamGroup
from megatron_lite.parallel.collectives import SINGLE

_ROUNDS, _LAYERS = 25, 8
_CONFIG = ModelConfig(num_layers=_LAYERS, hidden_size=16, num_attention_heads=2, vocab_size=1, max_position=1)
_CPU = torch.device("cpu")


class _Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_nothing = func.overloadpacket.__name__ in (
            "detach",
            "empty",
            "empty_like",
            "new_empty",
            "_unsafe_view",
        )
        self.count += not (func.is_view or is_nothing)
        return func(*args, **(kwargs or {}))


class _Attention:
    """The results of an attention kernel, empty."""

    @staticmethod
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any, dropout: float) -> Any:
        return q.new_empty(q.shape), [q.new_empty(2) for _ in range(3)]

    @staticmethod
    def backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _context(parallel: TensorParallel) -> ForwardContext:
    """GLM's two attention calls, with dropout."""
    document, order = np.zeros((2, 16), np.int32), np.arange(-7, 9, dtype=np.int32).clip(0)[None].repeat(2, 0)
    plan = plan_attention(make_layout(document, order, document), _CPU, "varlen")
    on_device = plan.on_device([torch.from_numpy(array) for array in plan.arrays()], _CPU)
    keys = torch.zeros(len(plan.order), dtype=torch.int32)
    return ForwardContext.of(
        (len(keys),), on_device, Dropout(keys, torch.from_numpy(salts(_LAYERS)), 0), parallel
    )


def _take_gradients(blocks: nn.ModuleList) -> Bucket:
    """Take gradients into a bucket, as ShardedOptimizer does."""
    bucket = Bucket(list(reversed(list(blocks.parameters()))), ParamGroup(0.0, True), SINGLE, offload=False)

    def take(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        parameter.grad = gradient
        bucket.add_gradient(parameter)

    for part in blocks.modules():
        if isinstance(part, (ColumnParallelLinear, RowParallelLinear)):
            accumulate_in_backward(part.weight, functools.partial(bucket.accumulate_weight_grad, part.weight))
    for block in blocks:
        assert isinstance(block, Block)
        block.accumulate_gradients(take)
    for parameter in bucket.offsets:
        parameter.register_post_accumulate_grad_hook(
            lambda p: None if p.grad is None else bucket.add_gradient(p)
        )
    return bucket


def layer_cost() -> tuple[float, float]:
    """Milliseconds of the host per block, forward and backward, best of several rounds; operations of a block.

    To be called in a process of its own: kernels are compiled from then on, and not run.
    """
    if without_gpu.is_available():
        without_gpu.compile_only()
        fused.DEVICES = ("cuda", "cpu")
    varlen.varlen_kernel = lambda dtype: _Attention  # type: ignore[assignment, return-value]
    AttentionDropout.seed_kernel = lambda self, device: None  # type: ignore[method-assign]
    parallel = TensorParallel(SINGLE)
    blocks = nn.ModuleList([Block(_CONFIG, parallel, "none") for _ in range(_LAYERS)])
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter.fill_(0.1)
    bucket, context = _take_gradients(blocks), _context(parallel)
    hidden = torch.ones(context.shape[0], _CONFIG.hidden_size, requires_grad=True)

    def step() -> None:
        bucket.begin_accumulation(1)
        x: Hidden = hidden
        for layer, block in enumerate(blocks):
            x = block(x, context, layer)
        out = materialize(x)
        out.backward(out)

    with _Operations() as operations:
        step()
    for _ in range(2):
        step()
    best = float("inf")
    for _ in range(_ROUNDS):
        start = time.process_time()
        step()
        best = min(best, time.process_time() - start)
    calls = 4  # of attention's kernels, which are not run
    return best / _LAYERS * 1e3, operations.count / _LAYERS + calls


def launch_us() -> float:
    """Microseconds of the host per launching operation. To be called as `layer_cost`."""
    milliseconds, operations = layer_cost()
    return milliseconds * 1e3 / operations + CUDA_LAUNCH_US
