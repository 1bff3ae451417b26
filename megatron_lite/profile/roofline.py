"""The least that a kernel or collective costs on a GPU: the time of its bytes, of its FLOPs, and of starting it.

Bytes are those of all operands and results, as if nothing stayed in a cache. Attention of variable lengths counts the
pairs of its calls. Collectives move the bytes of a ring, at the speed of its slowest part: a node's links to others, as
many as the ring has ranks there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron_lite.profile.gpus import GPUS_OF_A_NODE, Gpu


@dataclass(frozen=True)
class Members:
    """The ranks of a collective."""

    name: str  # tp, dp, pp or world
    ranks: tuple[int, ...]  # global


def kernel_micros(size: float, flops: float, gpu: Gpu) -> float:
    """Microseconds of a kernel that passes over `size` bytes, or of a product with its FLOPs."""
    return max(gpu.least_us, size / gpu.bandwidth_tbs / 1e6, flops / gpu.matmul_tflops / 1e6)


def attention_micros(forward_flops: float, backward: bool, gpu: Gpu) -> float:
    """Microseconds of a call. Args: forward_flops: two products of its pairs."""
    if backward:
        return max(gpu.least_attention_us[1], 2.5 * forward_flops / gpu.flash_backward_tflops / 1e6)
    return max(gpu.least_attention_us[0], forward_flops / gpu.flash_forward_tflops / 1e6)


def ring_micros(kind: str, size: float, members: Members, gpu: Gpu) -> float:
    """Microseconds of a collective.

    Args:
        kind: all_reduce, gather, scatter (the sums of a reduction), or send (to one rank, or from one to all).
        size: bytes of the largest tensor: what is reduced, or what is there after a gather.
    """
    ranks = members.ranks
    share = {"all_reduce": 2.0, "gather": 1.0, "scatter": 1.0}.get(kind, 0.0) * (len(ranks) - 1) / len(ranks)
    moved = size if kind == "send" else share * size
    of_nodes = Counter(rank // GPUS_OF_A_NODE for rank in ranks)
    return gpu.least_us + moved / gpu.ring_gbs(min(of_nodes.values()), len(of_nodes) > 1) / 1e3
