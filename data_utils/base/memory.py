"""What becomes of freed memory: kept, so that a training step does not fault its tensors in anew, or given back.

glibc returns large freed blocks to the kernel at once, which hands them back page by page, zeroed. On CPU
that costs 5 to 10 % of a step. Kept, the process holds its peak memory for good; from fragmentation it
settled up to a quarter above the peak without it, within the first ten steps.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """For the whole process, from now on. Does nothing where the C library has no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)  # large blocks come from the heap as well
        mallopt(_M_TRIM_THRESHOLD, -1)  # and the heap never shrinks


def return_freed_memory() -> None:
    """Give what is free now back to the kernel. Does nothing where the C library has no malloc_trim."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
