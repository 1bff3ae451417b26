"""Progress bars: on a terminal alone, and also on one that does not say how large it is."""

from __future__ import annotations

import os
import sys
from typing import Any

from tqdm import tqdm

# For a terminal that says 0 (`docker run -t`, `script`): tqdm shows nothing there.
_COLUMNS, _LINES = 80, 24


def progress_bar(*arguments: Any, **options: Any) -> tqdm:
    """A `tqdm` on stderr. Args and options: as its own; `disable=True` shows none."""
    try:
        columns, lines = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # no terminal, or no stream of the system
        columns = lines = -1
    if columns == 0 or lines == 0:
        options |= {"ncols": columns or _COLUMNS, "nrows": lines or _LINES, "dynamic_ncols": False}
    return tqdm(*arguments, **{"disable": None, **options})
