"""numba's `njit`, for all compiled functions here: without the extensions that other packages register with numba.

numba imports those of every installed package before the first function is compiled or loaded: awkward, which gigatoken
brings, takes half a second of each process. No function here has values of such types.
"""

from __future__ import annotations

from numba import njit
from numba.core import entrypoints

__all__ = ["njit"]

# No documentation promises this name. Without it a start is slower, and nothing else.
entrypoints._already_initialized = True
