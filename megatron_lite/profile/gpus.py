"""Rates of GPUs, from which the roofline of a step is computed: data sheets, and the share of them that kernels reach.

`peak`, `memory` and `links` are from the vendors' data sheets. The reached rates of A100 and H100 follow published
measurements of cuBLAS, FlashAttention 2 and copies; none was measured by this project. The other GPUs are assumed to
reach the same share of their peak as the H100.
"""

from __future__ import annotations

from dataclasses import dataclass

from data_utils.base.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One device. Rates are in TFLOP/s of bf16, TB/s and GB/s; times in microseconds."""

    name: str
    peak_tflops: float  # dense bf16, of the data sheet: what MFU is a part of
    matmul_tflops: float  # reached by large matmuls
    bandwidth_tbs: float  # of memory, reached by elementwise kernels
    flash_forward_tflops: float  # reached by attention of heads of 64 and a few hundred tokens
    flash_backward_tflops: float
    memory_gib: float  # of the device; a process has 1 to 3 less
    link_gbs: float  # to GPUs of the same node, per direction
    network_gbs: float  # to other nodes, per GPU and direction
    reached: str  # where the reached rates come from
    least_us: float = 3.0  # of any kernel
    least_attention_us: tuple[float, float] = (8.0, 20.0)  # of a call, forward and backward

    def ring_gbs(self, members_of_a_node: int, has_other_nodes: bool) -> float:
        """GB/s of a ring of ranks. Each GPU has its own link to the network, so the ranks of a node share several."""
        if not has_other_nodes:
            return self.link_gbs
        return min(self.link_gbs, members_of_a_node * self.network_gbs)

    def describe(self) -> str:
        """The constants in a line, as every output states them."""
        return (
            f"{self.name}: peak {self.peak_tflops:g} TFLOP/s, {self.memory_gib:g} GiB; reached ({self.reached}): "
            f"matmul {self.matmul_tflops:g} TFLOP/s, memory {self.bandwidth_tbs:g} TB/s, flash "
            f"{self.flash_forward_tflops:g}/{self.flash_backward_tflops:g} TFLOP/s forward/backward; a kernel "
            f"at least {self.least_us:g} us, an attention call {self.least_attention_us[0]:g}/"
            f"{self.least_attention_us[1]:g} us; links {self.link_gbs:g} GB/s in a node, {self.network_gbs:g} per GPU "
            "between"
        )


_PUBLISHED, _ASSUMED = "published by others", "assumed as on the H100"
GPUS_OF_A_NODE = 8
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 989, 650, 2.8, 300, 230, 79, 360, 40, _PUBLISHED),
        Gpu("h200", 989, 650, 4.0, 300, 230, 140, 360, 40, _ASSUMED),
        Gpu("gh200", 989, 650, 3.3, 300, 230, 95, 360, 40, _ASSUMED),
        Gpu("b200", 2250, 1480, 6.7, 680, 520, 178, 720, 40, _ASSUMED),
        Gpu("a100", 312, 250, 1.7, 170, 130, 79, 240, 20, _PUBLISHED),
        Gpu("a100-40", 312, 250, 1.3, 170, 130, 39.5, 240, 20, _PUBLISHED),
    )
}


def gpu_named(name: str) -> Gpu:
    """Raises ConfigError for one that is not in the table."""
    if name not in GPUS:
        raise ConfigError(f"--gpu is {name!r}; it must be one of {', '.join(GPUS)}.")
    return GPUS[name]
