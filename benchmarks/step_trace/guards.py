"""Fake `cuda` tensors under autograd, without a GPU: torch's table of devices gets an entry for cuda that does nothing.

Two places of torch ask for the device behind a fake tensor. Both are C++ objects without a Python interface:

1. c10's table of device guards. The entry for cuda becomes a copy of that of `meta`, whose functions do nothing, but
   which says that it is of type cuda and has one device, cuda:0, with one stream. Then autograd starts its thread for
   cuda:0 as on a GPU.
2. The CUDA hooks. `isBuilt` becomes true, so that cuda is the accelerator, and `hasPrimaryContext` false, so that no
   thread looks for a context on a device.

Both change the process for good, so it must be a process of its own, without visible GPUs, and end with `leave`.
The same changes serve a CPU build of torch and a CUDA build.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
import platform
import sys
from typing import Any, NoReturn

import torch

from data_utils.common.errors import ConfigError

_CUDA, _META = 1, 14  # c10::DeviceType
_DEVICE_TYPES = 22  # entries of the table
_REGISTRY, _HOOKS = "_ZN3c104impl26device_guard_impl_registryE", "_ZN2at6detail12getCUDAHooksEv"
KNOWN_TORCH = ("2.13",)  # whose vtables are those below

# x86-64. Device{cuda, 0} and Stream{cuda, 0, id 0} are returned in rax and rdx, as 1 and 0.
_RETURN_ONE = b"\xb8\x01\x00\x00\x00\x31\xd2\xc3"  # mov eax, 1; xor edx, edx; ret
_RETURN_ZERO = b"\x31\xc0\x31\xd2\xc3"  # xor eax, eax; xor edx, edx; ret

# Slots of DeviceGuardImplInterface: 0 type, exchangeDevice, getDevice, setDevice, uncheckedSetDevice, 5 getStream,
# getDefaultStream, getStreamFromGlobalPool, getNewStream, exchangeStream, 10 getStreamNativeHandle, destroyEvent,
# record, block, queryEvent, 15 deviceCount, getDeviceCapability, queryStream, synchronizeStream, isStreamCapturing,
# 20 synchronizeEvent, synchronizeDevice, recordDataPtrOnStream.
_GUARD_ONES = (0, 1, 2, 5, 6, 7, 8, 9, 14, 15, 17)
_GUARD_ZEROS = (3, 4, 11, 12, 13, 18, 19, 20, 21, 22)
_GUARD_SLOTS = 30
# Slots of AcceleratorHooksInterface: two destructors, 2 isBuilt, isAvailable, 4 hasPrimaryContext.
_IS_BUILT, _HAS_PRIMARY_CONTEXT, _HOOK_SLOTS = 2, 4, 160
_kept: list[Any] = []  # libraries use these until the process ends


def require_known() -> None:
    """Raise ConfigError where the vtables above need not be those of this torch."""
    version = torch.__version__
    if not version.startswith(tuple(f"{known}." for known in KNOWN_TORCH)):
        raise ConfigError(
            f"fake devices do not know torch {version}, only {', '.join(KNOWN_TORCH)}; use that version of torch for "
            "the profile."
        )
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ConfigError(
            f"fake devices need Linux on x86_64, and this is {sys.platform} on {platform.machine()}; make the profile "
            "on another machine."
        )


def install() -> None:
    """Let fake cuda tensors run in this process; once, before the first backward pass.

    Raises: ConfigError if this torch or this machine is unknown to it.
    """
    require_known()
    if _kept:
        return
    one, zero = _functions()
    guards, hooks = _tables()
    if not guards[_META]:
        raise ConfigError(
            f"torch {torch.__version__} has no guard of meta devices; use one of {KNOWN_TORCH}."
        )
    meta = ctypes.cast(guards[_META], ctypes.POINTER(ctypes.c_void_p))
    slots = dict.fromkeys(_GUARD_ONES, one) | dict.fromkeys(_GUARD_ZEROS, zero)
    assert meta[0] is not None and hooks[0] is not None
    guard = (ctypes.c_void_p * 1)(_patched(meta[0], slots, _GUARD_SLOTS))
    guards[_CUDA] = ctypes.addressof(guard)
    hooks[0] = _patched(hooks[0], {_IS_BUILT: one, _HAS_PRIMARY_CONTEXT: zero}, _HOOK_SLOTS)
    _kept.extend((guard, guards))
    for kept in _kept:  # beyond the end of Python's own objects
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _functions() -> tuple[int, int]:
    """Addresses of machine code that returns 1, and 0."""
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError as error:
        raise ConfigError(
            f"this system refuses executable memory to a process ({error.strerror}), which fake devices need; make "
            "the profile on another machine."
        ) from None
    code.write(_RETURN_ONE.ljust(16, b"\xcc") + _RETURN_ZERO)
    one = ctypes.addressof(ctypes.c_char.from_buffer(code))
    _kept.append(code)
    return one, one + 16


def _tables() -> tuple[Any, Any]:
    """torch's table of device guards, and the object of its CUDA hooks."""
    folder = pathlib.Path(torch.__file__).parent / "lib"
    try:
        guards = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(ctypes.CDLL(str(folder / "libc10.so")), _REGISTRY)
        get_hooks = getattr(ctypes.CDLL(str(folder / "libtorch_cpu.so")), _HOOKS)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"fake devices do not know this build of torch {torch.__version__} ({error}); use an official "
            "build."
        ) from None
    get_hooks.restype = ctypes.c_void_p
    return guards, ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))


def _patched(vtable: int, changes: dict[int, int], slots: int) -> int:
    """Address of a copy of a vtable with other functions in some slots."""
    old = ctypes.cast(vtable - 16, ctypes.POINTER(ctypes.c_void_p))  # offset to top, type info, slots
    new = (ctypes.c_void_p * slots)(*[old[i] for i in range(slots)])
    for slot, address in changes.items():
        new[2 + slot] = address
    _kept.append(new)
    return ctypes.addressof(new) + 16


def leave(status: int = 0) -> NoReturn:
    """End the process at once: autograd's thread for cuda:0 does not survive the interpreter's end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
