"""numba's `njit`, for all compiled functions here, without what numba imports for others.

That took a second of each process: the extensions of numba that installed packages bring (awkward, by gigatoken), for
types that no function here has; and scipy.linalg, for sums of products in np.convolve, which has others.
"""

from __future__ import annotations

from numba import njit
from numba.core import entrypoints, ir

from data_utils.common.imports import not_imported

with not_imported("scipy.linalg"):
    import numba.np.arraymath  # noqa: F401  the compiler imports it before the first function

__all__ = ["njit"]

# No documentation promises this name. Where it does nothing, a start is slower.
entrypoints._already_initialized = True

# numba copies a function that it inlines block by block, and with each block the table of all variables, which it only
# reads. One table for all saves a quarter of the time to compile an objective.
ir.Scope.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
