"""Worker processes: what they do when the command that started them is gone."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import connection


def exit_with_parent() -> None:
    """End with the parent: a killed parent cannot end its workers, which would wait without end. For a thread."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    # Without cleaning up: the main thread may be in native code.
    os._exit(1)
