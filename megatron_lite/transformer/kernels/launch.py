"""Launches of Triton kernels. Once a kernel is compiled, they pass Triton's inspection of each argument by.

Triton looks at every argument of every launch to find the kernel that it has compiled for such arguments: 20 us of the
host and more. Here the kernel is found by what can differ between launches of ours, which are called with tensors, then
numbers that no code is specialised for, then constants: the types of the tensors, the constants, and the tensors that
do not begin at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

_ALIGNMENT = 16  # bytes: Triton compiles other code for pointers that are no multiples of it


def _is_observed() -> bool:
    """Whether a profiler wants to be told of launches, which only Triton's own way does."""
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def require(*shapes: tuple[Sequence[int], *tuple[torch.Tensor | None, ...]]) -> None:
    """Before a launch, whose addresses follow from sizes. Raises: ValueError for a tensor of another shape.

    Args: shapes: each a shape, and the tensors that must have it.
    """
    for shape, *tensors in shapes:
        for tensor in tensors:
            if tensor is not None and tensor.shape != shape:
                raise ValueError(
                    f"a kernel takes {tuple(shape)} numbers there, and got {tuple(tensor.shape)}."
                )


class Kernel:
    """A compiled function for tensors, numbers and constants, in this order.

    Args: function: in Triton's language, not compiled. numbers: its arguments for which it is not specialised.
    """

    def __init__(self, function: Any, numbers: Sequence[str]):
        self._function = triton.jit(function, do_not_specialize=list(numbers))
        self._is_interpreted = not isinstance(self._function, triton.runtime.JITFunction)
        self._compiled: dict[Any, tuple[Any, Any, Any]] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[float],
        constants: tuple[Any, ...],
        num_warps: int = 4,
    ) -> None:
        """Launch. Args: grid: of programs. numbers: int32 or fp32. num_warps: a function of the constants.

        Raises: ValueError for a tensor with gaps between its rows, which the kernels' addresses leave out.
        """
        if not all(tensor is None or tensor.is_contiguous() for tensor in tensors):
            raise ValueError(f"{self._function} needs contiguous tensors; call .contiguous() before it.")
        if self._is_interpreted:
            self._function[grid](*tensors, *numbers, *constants)
            return
        # ---- our own lookup of the compiled kernel: types, constants and alignment are all that can differ ----
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        key: list[Any] = [device, constants]
        pointers: list[int | None] = []
        all_bits = 0
        for tensor in tensors:
            if tensor is None:
                key.append(None)
                pointers.append(None)
            else:
                key.append(tensor.dtype)
                pointer = tensor.data_ptr()
                pointers.append(pointer)
                all_bits |= pointer
        # One test for all pointers; only where some is unaligned does the key name which.
        if all_bits % _ALIGNMENT:
            key += [pointer is not None and pointer % _ALIGNMENT == 0 for pointer in pointers]
        found = self._compiled.get(tuple(key))
        # Triton's own way compiles, and is the only one that calls a profiler's hooks.
        if found is None or _is_observed():
            compiled = self._function[grid](*tensors, *numbers, *constants, num_warps=num_warps)
            self._compiled[tuple(key)] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = found
        observers = None, None, None
        stream = driver.get_current_stream(device)
        run(*grid, 1, stream, function, metadata, *observers, *pointers, *numbers, *constants)


def kernel(*numbers: str) -> Callable[[Any], Kernel]:
    """A function in Triton's language as a `Kernel`."""
    return lambda function: Kernel(function, numbers)
