"""The least time of a kernel or collective on a GPU, from its bytes, instructions and tiles, and its start.

Bytes count all operands and results, as if nothing stayed in a cache. A matrix product is computed in tiles, as many
at a time as there are processors; attention in tiles of queries and keys, which cost the same where they hold few
pairs. A collective moves the bytes of a ring at the speed of its slowest link: that of a node to others, once per
rank there.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_lite.estimate.gpus import GPUS_PER_NODE, Gpu
from megatron_lite.model.length_table import TILES

_SPLITS = (1, 2, 4, 8)  # split-K: ranges of the inner dimension, whose results are summed in fp32
# FlashAttention-2's tiles (queries, keys) up to a head size: forward, with dropout, backward.
_FLASH = {64: ((128, 128), (128, 64), (128, 128)), 128: ((128, 64), (128, 32), (64, 128))}
_FLASH_WIDE = (64, 64), (64, 64), (64, 64)
# FlashAttention 3's on Hopper, by head size: forward, under a causal mask or in a window, backward and there. Those of
# FlashAttention 4 on Blackwell are two blocks of 128 queries forward, and 128 x 128 backward.
_FA3 = {
    64: ((192, 192), (192, 128), (128, 128), (128, 128)),
    96: ((192, 144), (192, 144), (64, 128), (64, 128)),
    128: ((128, 176), (128, 128), (80, 128), (64, 128)),
}
_FA3_WIDE = (128, 112), (128, 112), (64, 96), (64, 96)
_FA4 = (256, 128), (256, 128), (128, 128), (128, 128)
# Counted, not derived: instructions of a compiled kernel (SASS of sm_90) per number of its largest tensor; tests
# recount them.
ISSUE = {
    "add_norm": 38.2, "add_norm_backward": 37.7, "add_rms_norm": 30.1, "add_rms_norm_backward": 32.2,
    "activate_gelu_tanh": 25.3, "activate_backward_gelu_tanh": 34.2,
    "activate_gelu_tanh_gated": 13.3, "activate_backward_gelu_tanh_gated": 18.9,
    "activate_gelu_erf": 38.3, "activate_backward_gelu_erf": 50.2,
    "activate_gelu_erf_gated": 19.8, "activate_backward_gelu_erf_gated": 26.9,
    "activate_relu": 7.3, "activate_backward_relu": 10.2,
    "activate_relu_gated": 4.3, "activate_backward_relu_gated": 7.1,
    "activate_silu": 19.3, "activate_backward_silu": 25.2,
    "activate_silu_gated": 10.3, "activate_backward_silu_gated": 13.9,
    "activate_relu_dropped": 21.3, "activate_backward_relu_dropped": 23.0,
    "expand_heads": 11.4, "expand_heads_normed": 17.6, "gather_heads": 14.8, "gather_heads_normed": 31.1,
    "join_pair": 7.8, "log_sums": 25.2, "write_gradient": 20.3,
}  # fmt: skip
FINISH_ROWS = 128  # partial sums that `finish_sums` (model/kernels/sums.py) adds in one iteration
# Counted in the SASS (sm_90) of triton_attention.py, per pair and head, forward and backward: masks and softmax;
# dropout; a type of bias. The gradient of a bias by distance takes 10 for each bucket of a tile, eight on average in
# documents of 512 tokens. That of two tables, whose tiles are smaller, takes 16 in each kernel for each further
# iteration, 1.2 on average there. A table of queries alone has no further iterations, and keys write none.
_RULE_ISSUE = ((25.0, 13.0), (53.0, 28.0))
_BIAS_ISSUE = {
    "rule": (0.0, 0.0),
    "biased": (5.0, 97.0),
    "tables": (34.0, 221.0),
    "query tables": (27.0, 102.0),
}
RULE_TYPES = tuple(_BIAS_ISSUE)
SORT_KERNELS = 10  # kernels that sort the ids for the gradient of an embedding; from memory, not measured


def activation_issue(kernel: str, activation: str, gated: bool, p: float) -> float:
    """Instructions of `activate` or `activate_backward` per number of its largest tensor. Args: p: dropout."""
    dropped = ISSUE[f"{kernel}_relu_dropped"] - ISSUE[f"{kernel}_relu"] if p else 0.0
    return ISSUE[f"{kernel}_{activation}{gated * '_gated'}"] + dropped / (1 + gated)


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a collective."""

    name: str  # tp, dp, pp or world
    ranks: tuple[int, ...]  # global

    @cached_property
    def fewest_in_a_node(self) -> int:
        """Ranks in the node that has the fewest of them."""
        return min(Counter(rank // GPUS_PER_NODE for rank in self.ranks).values())


def kernel_micros(size: float, gpu: Gpu, instructions: float = 0.0, rounds: float = 0.0) -> float:
    """Microseconds of a kernel that passes over `size` bytes.

    Args:
        instructions: of all threads; memory traffic and instruction issue partly overlap.
        rounds: iterations of each program, where there are too few programs to hide memory latency.
    """
    memory, issue = size / gpu.bandwidth_tbs / 1e6, instructions / gpu.issue_rate
    # The least is a kernel's start, which bounds small ones.
    return max(gpu.least_us, max(memory, issue) + gpu.unhidden * min(memory, issue), rounds * gpu.round_us)


def product_micros(rows: float, inner: float, columns: float, size: float, gpu: Gpu, count: int = 1) -> float:
    """Microseconds of `count` products [rows, inner] x [inner, columns] of `size` bytes, in the best of the tiles."""
    least = math.inf
    for high, wide in TILES:
        tiles = math.ceil(rows / high) * math.ceil(columns / wide) * count
        for split in _SPLITS:
            # A partly filled wave takes as long as a full one, which FLOPs alone do not show.
            waves = math.ceil(tiles * split / gpu.processors)
            flops = waves * gpu.processors * 2.0 * high * wide * inner / split
            # Partial results in fp32, written and read.
            added = 8.0 * split * rows * columns * count if split > 1 else 0.0
            least = min(least, flops / gpu.matmul_tflops / 1e6 + added / gpu.bandwidth_tbs / 1e6)
    return max(gpu.least_us, size / gpu.bandwidth_tbs / 1e6, least)


def flash_tile(
    head_size: int, has_dropout: bool, backward: bool, implementation: str = "fa2", is_partial: bool = False
) -> tuple[int, int]:
    """Queries and keys of a tile. Args: is_partial: under a causal mask, or in a window."""
    if implementation in ("fa3", "fa4"):
        of_size = next((tiles for size, tiles in _FA3.items() if head_size <= size), _FA3_WIDE)
        return (of_size if implementation == "fa3" else _FA4)[2 * backward + is_partial]
    tiles = next((tiles for size, tiles in _FLASH.items() if head_size <= size), _FLASH_WIDE)
    return tiles[2] if backward else tiles[1] if has_dropout else tiles[0]


def tile_pairs(
    queries: np.ndarray, keys: np.ndarray, causal: bool, tile: tuple[int, int], window: int = 0
) -> float:
    """Pairs that tiles compute.

    Args: queries, keys: lengths of each range of queries and of its keys. causal, window: see varlen.py.
    """
    high, wide = tile
    tiles = np.ceil(queries / high)
    if not causal and not window:
        return float((tiles * np.ceil(keys / wide)).sum() * high * wide)
    total = 0.0
    for tile_row in range(int(tiles.max(initial=0))):
        stop = np.minimum((tile_row + 1) * high, queries) + keys - queries + (0 if causal else window)
        first = (tile_row * high + keys - queries - window if window else 0 * keys).clip(0)
        seen = np.ceil(np.minimum(stop, keys).clip(0) / wide) - np.floor(first / wide)
        total += np.where(tile_row < tiles, seen, 0).clip(0).sum()
    return float(total * high * wide)


@dataclass(frozen=True)
class Work:
    """The work of one attention launch: what its tiles compute, forward or backward."""

    pairs: float
    starts: float  # queries of the tiles forward, keys backward: each has a cost before its first pair
    type: str  # full, causal, dense (at a share of FlashAttention's rate), or one of RULE_TYPES
    implementation: str = "fa2"  # of full and causal work, as in `training.attention`

    @staticmethod
    def flash(
        queries: np.ndarray,
        keys: np.ndarray,
        causal: bool,
        head_size: int,
        p: float,
        backward: bool,
        window: int = 0,
        implementation: str = "fa2",
    ) -> Work:
        """The work of FlashAttention. Args: queries, keys: as for `tile_pairs`. p: dropout."""
        tile = flash_tile(head_size, p > 0, backward, implementation, causal or window > 0)
        along, step = (keys, tile[1]) if backward else (queries, tile[0])
        pairs = tile_pairs(queries, keys, causal, tile, window)
        starts = float(np.ceil(along / step).sum() * step)
        return Work(pairs, starts, "causal" if causal else "full", implementation)

    def times(self, factor: float) -> Work:
        return replace(self, pairs=factor * self.pairs, starts=factor * self.starts)

    def plus(self, other: Work) -> Work:
        return replace(self, pairs=self.pairs + other.pairs, starts=self.starts + other.starts)


def attention_micros(
    work: Work,
    heads: int,
    head_size: int,
    p: float,
    backward: bool,
    gpu: Gpu,
    queries: float,
    moved: float = 0.0,
) -> float:
    """Microseconds of a launch. Args: p: dropout. queries: tokens of the output. moved: bytes of score tables."""
    if work.type in RULE_TYPES:
        return _rule_micros(work, heads, head_size, p, backward, gpu, moved)
    rates = gpu.attention_tflops(work.implementation, head_size)
    share = {"full": 1.0, "causal": gpu.flash_causal, "dense": gpu.dense_share}[work.type]
    # Two products forward; five backward, since scores are computed again.
    flops = (10.0 if backward else 4.0) * heads * head_size * (work.pairs + gpu.flash_start * work.starts)
    dropped = gpu.flash_dropout * heads * work.pairs / gpu.issue_rate if p else 0.0
    micros = flops / rates[backward] / share / 1e6 + dropped
    if backward:
        # Two small kernels: sums of output times gradient, clearing the gradients of queries in fp32 (8 bytes per
        # number), and those rounded to training precision (6).
        return micros + 2 * kernel_micros(7.0 * queries * heads * head_size, gpu)
    return max(gpu.least_us, micros)


def _rule_micros(
    work: Work, heads: int, head_size: int, p: float, backward: bool, gpu: Gpu, moved: float
) -> float:
    """Microseconds of triton_attention.py's kernels, which evaluate the mask rule: one forward, two backward."""
    rates = gpu.flash_64 if head_size <= 64 else gpu.flash_128
    # Two kernels backward, for queries and for keys, which both recompute the scores and their gradient: seven
    # products.
    products = (14.0 if backward else 4.0) * heads * head_size * work.pairs / rates[0] / gpu.rule_share / 1e6
    instructions, dropped = _RULE_ISSUE[backward]
    instructions += dropped * (p > 0) + _BIAS_ISSUE[work.type][backward]
    issue, memory = instructions * heads * work.pairs / gpu.issue_rate, moved / gpu.bandwidth_tbs / 1e6
    longest, total = max(products, issue, memory), products + issue + memory
    return max(gpu.least_us, longest + gpu.unhidden * (total - longest))


def ring_micros(kind: str, size: float, group: RankGroup, gpu: Gpu) -> float:
    """Microseconds of a collective.

    Args:
        kind: all_reduce, gather, scatter (reduce-scatter), or send (to one rank, or a broadcast).
        size: bytes of the largest tensor: the input of a reduction, the result of a gather.
    """
    ranks = group.ranks
    share = {"all_reduce": 2.0, "gather": 1.0, "scatter": 1.0}.get(kind, 0.0) * (len(ranks) - 1) / len(ranks)
    moved = size if kind == "send" else share * size
    has_others = ranks[0] // GPUS_PER_NODE != ranks[-1] // GPUS_PER_NODE
    least = gpu.network_us if has_others else gpu.link_us
    return least + moved / gpu.ring_gbs(group.fewest_in_a_node, has_others) / 1e3
