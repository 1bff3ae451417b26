"""Counts of kernels and collectives, with the time that the roofline gives each."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from megatron_lite.config.model import ModelConfig
from megatron_lite.estimate.gpus import Gpu
from megatron_lite.estimate.roofline import (
    FINISH_ROWS,
    RankGroup,
    Work,
    attention_micros,
    kernel_micros,
    product_micros,
    ring_micros,
)


@dataclass
class Tally:
    """Sums over the kernels of one rank. Times are in microseconds."""

    gpu: Gpu
    launches: float = 0.0
    public_calls: float = 0.0  # launches by torch's public function, whose call costs the host more
    micros: Counter[str] = field(default_factory=Counter)  # type of kernel -> time
    collectives: Counter[str] = field(default_factory=Counter)  # group -> number of collectives
    bytes: Counter[str] = field(default_factory=Counter)  # group -> bytes of the largest tensor of each
    ring_micros: Counter[str] = field(default_factory=Counter)  # group -> time, if nothing overlaps

    def kernel(
        self,
        size: float,
        count: float = 1,
        kind: str = "elementwise",
        issued: float = 0.0,
        rounds: float = 0.0,
    ) -> None:
        """`count` kernels that each pass over `size` bytes. Args: issued, rounds: as for `kernel_micros`."""
        self.launches += count
        self.micros[kind] += count * kernel_micros(size, self.gpu, issued, rounds)  # type: ignore[assignment]

    def small(self, count: float, kind: str = "elementwise") -> None:
        """Kernels of the least duration: over single numbers, or one number per token."""
        self.kernel(0.0, count, kind)

    def finish(self, sums: float, programs: float) -> None:
        """The second pass of a sum over tokens.

        Args: sums: bytes of all partial sums. programs: how many wrote them.
        """
        self.kernel(sums, rounds=math.ceil(programs / FINISH_ROWS))

    def product(self, rows: float, inner: float, columns: float, element: int, result: int = 0) -> None:
        """[rows, inner] x [inner, columns].

        Args: element: bytes of an operand's number. result: of the result's, 0 = the same.
        """
        size = (rows * inner + inner * columns) * element + rows * columns * (result or element)
        self.launches += 1
        self.micros["matmul"] += product_micros(rows, inner, columns, size, self.gpu)  # type: ignore[assignment]

    def attention(
        self, work: Work, queries: float, heads: int, model: ModelConfig, backward: bool, moved: float = 0.0
    ) -> None:
        """One launch of attention's kernel.

        Args: queries: tokens of its output. heads: on this rank. moved: bytes of score tables.
        """
        self.launches += 1
        p = model.attention_dropout
        # As in varlen_kernels.py: dropout, backward passes and the memory-efficient kernel have operators alone.
        is_flash = work.type in ("full", "causal") and work.implementation != "torch"
        self.public_calls += is_flash and not p and not backward
        micros = attention_micros(work, heads, model.head_size, p, backward, self.gpu, queries, moved)
        self.micros["attention"] += micros  # type: ignore[assignment]

    def collective(self, kind: str, size: float, group: RankGroup, count: float = 1) -> None:
        """Args: kind: as for `ring_micros`. size: bytes of the largest tensor."""
        if len(group.ranks) == 1:
            return
        self.collectives[group.name] += count  # type: ignore[assignment]
        self.bytes[group.name] += count * size  # type: ignore[assignment]
        self.ring_micros[group.name] += count * ring_micros(kind, size, group, self.gpu)  # type: ignore[assignment]

    def add(self, other: Tally, times: float = 1.0) -> None:
        self.launches += times * other.launches
        self.public_calls += times * other.public_calls
        for name in ("micros", "collectives", "bytes", "ring_micros"):
            sums = getattr(self, name)
            for key, value in getattr(other, name).items():
                sums[key] += times * value
