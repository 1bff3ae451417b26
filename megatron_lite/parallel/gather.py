"""Gathers arrays of all data-parallel ranks as tensors, without pickle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_lite.parallel.context import ParallelContext


def gather_arrays(context: ParallelContext, mine: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Gather the float arrays [n, m] of each data-parallel rank, by rank. Ranks of one replica pass equal arrays."""
    if context.world_size == 1:
        return [list(mine)]
    shapes = np.array([array.shape for array in mine], np.float64).reshape(-1, 2)
    values = np.concatenate([np.zeros(0), *(array.ravel() for array in mine)])
    gathered = zip(_of_replicas(context, shapes.ravel()), _of_replicas(context, values), strict=True)
    return [_split(of_rank.reshape(-1, 2).astype(int), numbers) for of_rank, numbers in gathered]


def _split(shapes: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(shapes.prod(axis=1))
    parts = np.split(values, ends[:-1]) if len(shapes) else []
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _of_replicas(context: ParallelContext, values: np.ndarray) -> list[np.ndarray]:
    """The float64 vectors of the data-parallel ranks, which differ in length."""
    length = torch.tensor([len(values)], device=context.device)
    lengths = [int(x) for x in context.gather(length)]
    padded = torch.zeros(max(lengths), dtype=torch.float64, device=context.device)
    padded[: len(values)] = torch.from_numpy(values)
    everything = context.gather(padded)
    first = range(0, context.world_size, context.tp.size)  # neighbours share a replica
    return [everything[rank][: lengths[rank]].cpu().numpy() for rank in first]
