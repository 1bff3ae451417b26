"""torch.cuda as it looks on a machine with one GPU per process: device 0 exists, streams and events do nothing.

What makes the host wait is reported. The choice of attention kernels is that of a CUDA build for bf16, which a CPU
build cannot make: flash attention without a mask, the memory-efficient kernel with one.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.step_trace.record import Recorder
from megatron_lite.estimate.gpus import Gpu
from megatron_lite.transformer import cuda_graphs as graphs


class _Stub:
    """A stream or an event."""

    recorder: Recorder  # set by `patch`
    device = torch.device("cuda", 0)
    device_index = device_type = stream_id = cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> _Stub:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def synchronize(self) -> None:
        self.recorder.wait(f"{type(self).__name__.lower()}.synchronize()")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = wait_event = wait_stream = _nothing


class Stream(_Stub):
    pass


class Event(_Stub):
    pass


class _Generator:
    """The generator of a device, whose seed is a number of the host."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def manual_seed(self, seed: int) -> None:
        if self._recorder.watch is not None:
            self._recorder.watch("manual_seed", (seed,))


class _Within(contextlib.nullcontext[None]):
    """The context of a stream or a device: a class, for which libraries ask."""


def patch(recorder: Recorder, gpu: Gpu) -> None:
    """Replace the functions of torch.cuda that ask for a device, in this process."""
    _Stub.recorder = recorder
    stream = Stream()
    major, minor = gpu.capability
    properties = SimpleNamespace(
        major=major, minor=minor, total_memory=int(gpu.memory_gib * 2**30), name=f"NVIDIA {gpu.name.upper()}",
        multi_processor_count=132, warp_size=32, max_threads_per_multi_processor=2048, uuid="", gcnArchName="",
        regs_per_multiprocessor=65536, max_threads_per_block=1024, L2_cache_size=50 << 20, is_integrated=False,
        is_multi_gpu_board=False, shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
    )  # fmt: skip
    values: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "_is_compiled": True,
        "_lazy_init": None, "init": None, "set_device": None, "empty_cache": None, "memory_stats": {},
        "reset_peak_memory_stats": None, "is_bf16_supported": True, "get_device_capability": gpu.capability,
        "get_device_name": properties.name, "get_device_properties": properties, "current_stream": stream,
        "default_stream": stream, "memory_reserved": 0, "max_memory_reserved": 0, "is_current_stream_capturing": False,
        "manual_seed": None, "manual_seed_all": None, "_lazy_call": None, "set_stream": None,
        "mem_get_info": (properties.total_memory, properties.total_memory), "get_arch_list": ["sm_90"],
        "set_rng_state": None, "graph_pool_handle": None,
    }  # fmt: skip
    cuda: Any = torch.cuda
    for name, value in values.items():
        setattr(cuda, name, _answer(value))
    cuda.memory_allocated = cuda.max_memory_allocated = lambda *_: recorder.memory.now
    cuda.synchronize = lambda *_: recorder.wait("torch.cuda.synchronize()")
    cuda.stream, cuda.device = _Within, _Within
    cuda.Stream, cuda.Event = Stream, Event
    cuda.default_generators = (_Generator(recorder),)
    cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _answer(0)
    torch.Tensor.record_stream = _answer(None)  # type: ignore[method-assign, assignment]
    # The fake mode believes in the GPU as well: it must not touch it, and torch.tensor must copy through the modes.
    fake_tensor.init_gpu_context = _answer(None)
    torch._C._set_only_lift_cpu_tensors(True)
    graphs.capture, graphs.address = recorder.capture, recorder.address
    _patch_pinned_memory(recorder)
    _patch_kernels()


def _answer(value: Any) -> Any:
    return lambda *_, **__: value


def _patch_pinned_memory(recorder: Recorder) -> None:
    """Page-locked memory is ordinary memory that the recorder knows."""

    def pin_memory(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        pinned = self if is_pinned(self) else self.clone()
        recorder.pinned.add(pinned.untyped_storage())
        return pinned

    def is_pinned(self: torch.Tensor, *_: Any, **__: Any) -> bool:
        return not isinstance(self, FakeTensor) and self.untyped_storage() in recorder.pinned

    torch.Tensor.pin_memory, torch.Tensor.is_pinned = pin_memory, is_pinned  # type: ignore[method-assign, assignment]


def _patch_kernels() -> None:
    on_host = F.scaled_dot_product_attention

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if not isinstance(q, FakeTensor):
            return on_host(q, k, v, attn_mask, dropout_p, is_causal, **options)
        if attn_mask is None:
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
        if attn_mask.dtype == torch.bool:
            zero, never = (torch.full((), x, dtype=q.dtype, device=q.device) for x in (0.0, float("-inf")))
            attn_mask = torch.where(attn_mask, zero, never)
        bias = attn_mask.expand(*q.shape[:3], k.shape[2])
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p)[0]

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
