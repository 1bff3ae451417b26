"""Which blocks each pipeline stage has."""

from __future__ import annotations

import functools
import itertools

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config


def stage_shares(config: Config) -> list[tuple[int, bool, bool]]:
    """Blocks of each stage, and whether it begins with the embedding and ends with the head.

    The block of further tokens is on the last.
    """
    return list(_shares(config.model, config.loss_share, config.parallel.pipeline_parallel_size))


@functools.lru_cache(maxsize=256)
def _shares(model: ModelConfig, loss_share: float, size: int) -> tuple[tuple[int, bool, bool], ...]:
    layers = model.total_layers
    if size == 1:
        return ((layers + model.mtp_layers, True, True),)
    from megatron_lite.engine.pipeline import stage_bounds  # imports DeepSpeed
    from megatron_lite.transformer.flops import layer_costs

    bounds = stage_bounds(layer_costs(model, loss_share), size)
    # Layers: words, positions, the blocks, final norm, words again.
    last = layers + 4
    return tuple(
        (
            max(0, min(end, 2 + layers) - max(first, 2)) + (end == last) * model.mtp_layers,
            first == 0,
            end == last,
        )
        for first, end in itertools.pairwise(bounds)
    )
