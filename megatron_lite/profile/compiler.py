"""torch.compile for a GPU on a machine without one: kernels are generated for it, counted, and not run.

Inductor asks for the device's properties, generates Triton kernels, and would load and run them. Here the properties
are those of the profile's GPU, and a kernel is a stand-in that reports itself: one launch, which reads and writes each
of its tensors once. Products and attention stay torch operators, which the recorder counts as ever.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_lite.profile.gpus import Gpu
from megatron_lite.profile.record import Recorder

COMPUTE_CAPABILITY = 90  # of the kernels: Hopper


def is_available() -> bool:
    """Whether blocks can be compiled. Triton comes with CUDA builds of torch, else it is a package of its own."""
    return importlib.util.find_spec("triton") is not None


def install(recorder: Recorder, gpu: Gpu) -> None:
    """Let torch.compile generate and report kernels in this process."""
    import torch._C._dynamo.guards as guards
    import torch._inductor.async_compile as async_compile
    import torch._inductor.config as inductor_config
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from triton.backends.compiler import GPUTarget

    patched: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", COMPUTE_CAPABILITY, 32),
        get_current_device=lambda: 0,
        is_active=lambda: True,
    )
    triton.runtime.driver.set_active(patched)
    torch.version.cuda = torch.version.cuda or "12.8"
    untyped: Any = torch
    untyped._C._cuda_getCurrentRawStream = lambda _: 0
    # Two functions: Dynamo tells them apart.
    untyped.cuda._exchange_device, untyped.cuda._maybe_exchange_device = lambda _: 0, lambda _: 0
    for name, value in list(vars(CudaInterface).items()):  # Dynamo's own names of what it asks of torch.cuda
        if isinstance(value, staticmethod) and hasattr(torch.cuda, name):
            setattr(CudaInterface, name, staticmethod(getattr(torch.cuda, name)))
    inductor_config.compile_threads = 1
    inductor_config.joint_graph_constant_folding = False
    # Patterns, which would be traced on tensors of a real device.
    joint_graph.lazy_init = post_grad.lazy_init = lambda *_: None
    untyped_guards: Any = guards
    untyped_compile: Any = async_compile.AsyncCompile
    untyped_guards._reinterpret_tensor = _view
    untyped_guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda"
    )
    untyped_compile.triton = lambda _self, name, source, device_str="cuda": SimpleNamespace(
        run=_stand_in(name, source, recorder)
    )


def _view(x: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)


def _stand_in(name: str, source: str, recorder: Recorder) -> Callable[..., None]:
    """What runs in place of a kernel."""
    signature = re.search(rf"def {name}\(([^)]*)\)", source)
    assert signature is not None, source
    names = [part.split(":")[0].strip() for part in signature[1].split(",")]

    def run(*args: Any, **kwargs: Any) -> None:
        passes = (
            (2 if argument.startswith("in_out") else 1) * tensor.numel() * tensor.element_size()
            for argument, tensor in zip(names, args, strict=False)
            if isinstance(tensor, torch.Tensor)
        )
        recorder.kernel(name, sum(passes))

    return run
