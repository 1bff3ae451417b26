"""Counts of one phase of a traced step, which can be added, scaled to more layers, and written as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

# input: copies of a micro-batch to the device. sums: from the end of a backward pass to the next micro-batch. The last
# micro-batch is separate, because gradients may be summed over ranks in it alone. step: the optimizer.
PHASES = ("input", "forward", "backward", "sums", "last_backward", "last_sums", "step")


@dataclass
class Counts:
    """Numbers of one phase over all micro-batches of the traced step. Keys of places are `file:line`."""

    launches: float = 0  # operations that start at least one kernel
    sums: float = 0  # of them, those by which the optimizer takes gradients during a backward pass
    attention: Counter[str] = field(default_factory=Counter)  # of them, forward calls of an attention kernel
    waits: Counter[str] = field(default_factory=Counter)  # the host waits for the device: place -> times
    pinned: Counter[str] = field(default_factory=Counter)  # asynchronous copies to the device
    pageable: Counter[str] = field(default_factory=Counter)  # other copies to the device
    unaligned: Counter[str] = field(default_factory=Counter)  # matmuls whose rows do not begin at 16 bytes
    collectives: Counter[str] = field(default_factory=Counter)  # group -> calls
    collective_bytes: Counter[str] = field(default_factory=Counter)  # group -> bytes of the largest tensor
    peak: float = 0  # bytes

    def tree(self) -> dict[str, Any]:
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Counter) else value


def extended(first: Any, second: Any, steps: float) -> Any:
    """`first` + `steps` x (`second` - `first`) for every number of two trees; a missing number is 0."""
    return _combined(first, second, lambda less, more: less + steps * (more - less))


def difference(more: Any, less: Any) -> Any:
    """`more` - `less` for every number of two trees; a missing number is 0."""
    return _combined(more, less, lambda a, b: a - b)


def scaled(tree: Any, factor: float) -> Any:
    """Every number of a tree times `factor`."""
    return _combined(tree, tree, lambda number, _: number * factor)


def _combined(first: Any, second: Any, combine: Callable[[float, float], float]) -> Any:
    if not isinstance(first, dict):
        return combine(first, second)
    return {
        key: _combined(first.get(key, 0), second.get(key, 0), combine) for key in first.keys() | second.keys()
    }
