"""Gathers arrays of all data-parallel ranks as tensors, without pickle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_lite.parallel.context import ParallelContext


def gather_arrays(context: ParallelContext, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Gather the float arrays [n, m] of each data-parallel rank, by rank. Ranks of one replica pass equal arrays."""
    if context.world_size == 1:
        return [list(arrays)]
    shapes = np.array([array.shape for array in arrays], np.float64)
    values = np.concatenate([np.zeros(0), *(array.ravel() for array in arrays)])
    gathered = []
    for flat_shapes, flat in zip(
        _gather_vectors(context, shapes.ravel()), _gather_vectors(context, values), strict=True
    ):
        rank_shapes = flat_shapes.reshape(-1, 2).astype(int)
        ends = np.cumsum(rank_shapes.prod(axis=1))
        split = np.split(flat, ends[:-1]) if len(rank_shapes) else []
        gathered.append([array.reshape(shape) for array, shape in zip(split, rank_shapes, strict=True)])
    return gathered


def _gather_vectors(context: ParallelContext, values: np.ndarray) -> list[np.ndarray]:
    """The float64 vectors of the data-parallel ranks, which differ in length."""
    length = torch.tensor([len(values)], device=context.device)
    lengths = [int(each) for each in context.gather(length)]
    # A gather needs equal shapes.
    padded = torch.zeros(max(lengths), dtype=torch.float64, device=context.device)
    padded[: len(values)] = torch.from_numpy(values)
    everything = context.gather(padded)
    first_ranks = range(0, context.world_size, context.tp.size)  # neighbours share a replica
    return [everything[rank][: lengths[rank]].cpu().numpy() for rank in first_ranks]
