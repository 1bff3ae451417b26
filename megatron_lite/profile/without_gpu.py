"""Triton for a GPU on a machine without one: a launch compiles its kernel and does not run it."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

COMPUTE_CAPABILITY = 90  # of the kernels: Hopper


def is_available() -> bool:
    """Whether there is a Triton. It comes with CUDA builds of torch, else it is a package of its own."""
    return importlib.util.find_spec("triton") is not None


def compile_only(found: list[tuple[str, Any]] | None = None) -> None:
    """For the rest of this process. Args: found: gets the name of each launched kernel, and the kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    driver: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", COMPUTE_CAPABILITY, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        is_active=lambda: True,
    )
    triton.runtime.driver.set_active(driver)
    run = JITFunction.run

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        if found is not None:
            found.append((self.__name__, kernel))

    JITFunction.run = compiled
