"""Triton for a GPU on a machine without one: kernels are compiled, and launched up to the call of CUDA's driver."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

COMPUTE_CAPABILITY = 90  # of the kernels: Hopper
_SHARED_MEMORY = 227 << 10  # bytes that a program may have there


def is_available() -> bool:
    """Whether there is a Triton. It comes with CUDA builds of torch, else it is a package of its own."""
    return importlib.util.find_spec("triton") is not None


def compile_only(
    found: list[tuple[str, Any]] | None = None, launch: Callable[..., None] = lambda *arguments: None
) -> None:
    """For the rest of this process.

    Args:
        found: gets the name of each kernel that Triton compiles or looks up, and the kernel.
        launch: stands in for the function in C that launches a kernel, with its arguments.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.jit import JITFunction

    handles = itertools.count(1)
    nvidia.PyKernelArg = lambda nested_tuple, type: type
    nvidia.ARG_CONSTEXPR, nvidia.ARG_KERNEL = "constant", "argument"
    utils = SimpleNamespace(
        load_binary=lambda *_: (next(handles), next(handles), 0, 0, 1024),
        unload_module=lambda module: None,
        build_signature_metadata=lambda signature: signature,
        get_device_properties=lambda device: {"max_shared_mem": _SHARED_MEMORY},
        launch=launch,
    )
    driver: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", COMPUTE_CAPABILITY, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        is_active=lambda: True,
        launcher_cls=nvidia.CudaLauncher,
        utils=utils,
    )
    triton.runtime.driver.set_active(driver)
    if found is None:
        return
    run = JITFunction.run

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        kernel = run(self, *arguments, **options)
        found.append((self.__name__, kernel))
        return kernel

    JITFunction.run = noted
