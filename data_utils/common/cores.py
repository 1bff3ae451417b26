"""How many processes or threads of a command can run at the same time."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The cores that this process may use: fewer than the machine has in a container, or under SLURM."""
    return len(os.sched_getaffinity(0))
