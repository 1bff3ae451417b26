"""The lengths to which micro-batches are padded on GPUs: they fill whole waves of tiles.

Without torch, which estimates do not load.
"""

from __future__ import annotations

import functools

import numpy as np

from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends.layout import LENGTHS

TILES = ((128, 256), (256, 128), (128, 128))  # rows and columns of a matrix product's result on a GPU
# Work of a step besides products, per token, relative to products in full waves: 1.8 at 335M, 1.1 at 2B.
_REST = 1.5


def length_table(
    slots: int, model: ModelConfig, processors: int, ranks: int = 1, has_graphs: bool = False
) -> np.ndarray:
    """The lengths, ascending, int64, to which the tokens of a stack of blocks are padded on a GPU.

    From one length to the next the work grows by about 1 % of the work of `slots` tokens; with CUDA graphs, which are
    captured for each length, by 3 %. A partly filled wave of tiles costs as much as a full one, so lengths end with
    full waves.

    Args:
        slots: tokens of a batch, padding included.
        processors: of the GPU.
        ranks: tensor-parallel ranks, which share products and tokens.
    """
    queries, inner = model.num_attention_heads * model.head_size, model.inner_size
    both = queries + 2 * model.key_value_heads * model.head_size, inner * (1 + (model.ffn == "gated"))
    widths = model.hidden_size, *(width // ranks for width in (queries, inner, *both))
    return _table(slots, widths, processors, int(np.lcm(64, ranks)), LENGTHS * (1 if has_graphs else 3))


@functools.lru_cache(64)
def _table(slots: int, widths: tuple[int, ...], processors: int, step: int, count: int) -> np.ndarray:
    """As `length_table`.

    Args:
        widths: of the hidden state, then of the other side of each product with it.
        step: divides each length.
        count: number of lengths if the work grew evenly.
    """
    # Multiples of `step`: products are aligned, and tensor-parallel ranks share tokens evenly.
    lengths = np.arange(step, slots + step, step)
    hidden, work = widths[0], np.zeros(len(lengths))
    for inner, outer in [pair for width in widths[1:] for pair in ((hidden, width), (width, hidden))]:
        # Tiles of the result in waves over all processors; the last wave costs as much as a full one.
        waves = [
            -(-(-(-lengths // high) * -(-outer // wide)) // processors) * high * wide for high, wide in TILES
        ]
        work += inner * (processors * np.min(waves, axis=0) + _REST * lengths * outer)
    # From the longest down: the next one is the longest whose work is smaller by 1 / count of the whole.
    chosen = [len(lengths) - 1]
    while (below := np.searchsorted(work, work[chosen[-1]] - work[-1] / count, side="right")) > 0:
        chosen.append(below - 1)
    return lengths[chosen[::-1]]
