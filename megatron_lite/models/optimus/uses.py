"""Uses of a latent space: interpolation, analogies and samples, decoded to texts."""

# P components of the latent vector

from __future__ import annotations

import torch

from data_utils.common.progress import progress_bar
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.models.optimus.interface import LatentModel
from megatron_lite.models.optimus.noise import normals


def between(mu: torch.Tensor, points: int) -> torch.Tensor:
    """Evenly spaced points from one sentence to another, both included, [points, P]. Args: mu: [2, P]."""
    share = torch.linspace(0.0, 1.0, points, dtype=mu.dtype)[:, None]
    # Not start + share * difference: at 1 that need not be the end to the last bit.
    return (1.0 - share) * mu[0] + share * mu[1]


def analogy(mu: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The latent vector C + scale * (B - A), [1, P]. Args: mu: [3, P], those of A, B and C."""
    a, b, c = mu
    return (c + scale * (b - a))[None]


def prior(count: int, size: int, seed: int) -> torch.Tensor:
    """Draws of N(0, I), [count, size]: the first ones are the same for any count."""
    return normals(seed, "prior", range(count), 0, 1, size)[:, 0]


def texts(model: LatentModel, z: torch.Tensor, config: GenerationConfig, batch: int) -> list[str]:
    """A text for each latent vector, `batch` of them at a time. Args: z: [N, P]."""
    starts = progress_bar(range(0, len(z), batch), desc="writing", disable=None if len(z) > batch else True)
    return [text for start in starts for text in model.decode(z[start : start + batch], config, start)]
