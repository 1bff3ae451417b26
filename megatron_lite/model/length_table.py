"""The lengths to which micro-batches are padded on GPUs: they end with waves of tiles."""

from __future__ import annotations

import functools

import numpy as np

from megatron_lite.config.model import ModelConfig
from megatron_lite.model.attention_backends.layout import LENGTHS

TILES = ((128, 256), (256, 128), (128, 128))  # of a product's result on a GPU
_REST = 1.5  # work of a step that grows with each token, in that of products in full waves: 1.8 at 335M, 1.1 at 2B


def length_table(
    places: int, model: ModelConfig, processors: int, ranks: int = 1, has_graphs: bool = False
) -> np.ndarray:
    """The lengths, rising, int64, to which the tokens of a stack of blocks are padded on a GPU with these processors.

    From one to the next the work grows by about a hundredth of that of `places` tokens. With CUDA graphs, which are
    captured for each length, it grows by three. Where a wave of tiles costs as much, a length ends at the last full.

    Args: places: tokens of a batch, padding included. ranks: of tensor parallelism, which share products and tokens.
    """
    queries, inner = model.num_attention_heads * model.head_size, model.inner_size
    both = queries + 2 * model.key_value_heads * model.head_size, inner * (1 + (model.ffn == "gated"))
    widths = model.hidden_size, *(width // ranks for width in (queries, inner, *both))
    return _table(places, widths, processors, int(np.lcm(64, ranks)), LENGTHS * (1 if has_graphs else 3))


@functools.lru_cache(64)
def _table(places: int, widths: tuple[int, ...], processors: int, step: int, count: int) -> np.ndarray:
    """Args: widths: of the hidden state, and of the others in products with it. step: divides each length."""
    # Multiples of `step`: products are aligned, and tensor-parallel ranks share tokens evenly.
    lengths = np.arange(step, places + step, step)
    hidden, work = widths[0], np.zeros(len(lengths))
    for one, other in [pair for width in widths[1:] for pair in ((hidden, width), (width, hidden))]:
        # Tiles of the result in waves over all processors; the last wave costs as much as a full one.
        waves = [
            -(-(-(-lengths // high) * -(-other // wide)) // processors) * high * wide for high, wide in TILES
        ]
        work += one * (processors * np.min(waves, axis=0) + _REST * lengths * other)
    # From the longest down: each next one is the longest whose work is smaller by a fixed share of the whole.
    chosen = [len(lengths) - 1]
    while (below := np.searchsorted(work, work[chosen[-1]] - work[-1] / count, side="right")) > 0:
        chosen.append(below - 1)
    return lengths[chosen[::-1]]
