"""Imports of large packages that a library would use for what is not needed here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def not_imported(module: str) -> Iterator[None]:
    """Within the context a module is found only if it was imported before, else it counts as not installed."""
    is_new = module not in sys.modules
    if is_new:
        sys.modules[module] = None  # type: ignore[assignment]  # what Python's import system documents for this
    try:
        yield
    finally:
        if is_new:
            del sys.modules[module]
