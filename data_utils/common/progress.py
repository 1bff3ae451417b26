"""Progress bars: on a terminal alone, and also on one that does not say how large it is."""

from __future__ import annotations

import os
import sys
from typing import Any

from tqdm import tqdm

_COLUMNS, _ROWS = (
    80,
    24,
)  # for a terminal that says 0 (`docker run -t`, `script`): tqdm shows nothing there


def progress_bar(*arguments: Any, **options: Any) -> tqdm:
    """A `tqdm` on stderr. Args and options: as its own; `disable=True` shows none."""
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # no terminal, or no stream of the system
        columns = rows = -1
    if columns == 0 or rows == 0:
        options |= {"ncols": columns or _COLUMNS, "nrows": rows or _ROWS, "dynamic_ncols": False}
    return tqdm(*arguments, **{"disable": None, **options})
