"""Masks and inputs for tests of attention, and attention written out."""

from __future__ import annotations

import numpy as np
import torch

from data_utils.objectives.planes import DOC, GRP, ORD
from megatron_lite.model.batch import allowed
from support.recipes import collate, make, windows

CPU = torch.device("cpu")


def arrays_of(batch):
    return tuple(np.ascontiguousarray(batch[:, plane]) for plane in (DOC, ORD, GRP))


def recipe_arrays(recipe, sequence_length, rows, seed):
    """doc, ord, grp of random packed and padded rows."""
    made = make(recipe.name, sequence_length, **recipe.config)
    return arrays_of(collate(made, windows(rows, sequence_length, seed)))


def random_arrays(seed):
    """Arrays that no objective makes: documents in several stretches, any order, any groups, rows that see nothing."""
    rng = np.random.default_rng(seed)
    shape = (2, int(rng.integers(1, 40)))
    planes = rng.integers(-1, 3, shape), rng.integers(-5, 6, shape), rng.integers(0, 3, shape) * (seed % 2)
    return tuple(plane.astype(np.int32) for plane in planes)


def mask_of(arrays):
    return torch.from_numpy(allowed(*arrays))


def reference_attention(arrays, q, k, v):
    """Softmax over the allowed keys, written out; rows that see nothing give 0."""
    mask = mask_of(arrays)[:, None]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def draw(shape, dtype=torch.float64, count=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for _ in range(count)]
