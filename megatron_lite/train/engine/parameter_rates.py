"""How single parameters are trained: the factor of their learning rate, and from which step on."""

from __future__ import annotations

import sys
from dataclasses import dataclass

NEVER = sys.maxsize


@dataclass(frozen=True)
class Rate:
    """Learning rate factor and first trained step of a parameter."""

    lr_factor: float = 1.0
    first_step: int = 1  # before it the parameter is frozen; NEVER: it stays as it is

    def is_trained(self, step: int) -> bool:
        return step >= self.first_step


USUAL = Rate()
