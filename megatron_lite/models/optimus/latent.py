"""The latent vector of a sentence: KL divergence from the prior, free bits, the divergence's weight, and draws.

The posterior of a sentence is a normal distribution with independent components, mean mu and variance exp(logvar); the
prior is N(0, I). Source: OPTIMUS, arXiv:2004.04092, section 3; the weight's cycles: Fu et al., arXiv:1903.10145.
"""

# N sentences, P components of the latent vector

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from data_utils.common.seeds import derive_seed

_PER_BLOCK = 4  # words of NumPy's Philox


def gaussian_kl(mu: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
    """Divergence of each component from the prior, in nats. Args: [N, P]. Returns: fp32 [N, P], at least 0."""
    mu, logvar = mu.float(), logvar.float()
    # expm1: exp(logvar) - 1 would lose all digits of a component that is nearly the prior's.
    return 0.5 * (mu.square() + (torch.expm1(logvar) - logvar))


def with_free_bits(kl: torch.Tensor, free_bits: float) -> torch.Tensor:
    """The divergences above `free_bits` nats, and 0 for the others, which are not lowered further. [N, P] -> [N, P].

    It is the released code's form. The paper's max(free_bits, kl) is another number with the same gradient: 0 up to
    `free_bits`, that of kl above. A product, so that a component that is not finite is not hidden.
    """
    return kl * (kl > free_bits)


def draw(mu: torch.Tensor, logvar: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """z = mu + exp(logvar / 2) * noise. Args: [N, P]; noise: of N(0, I). Returns: fp32 [N, P]."""
    return mu.float() + torch.exp(0.5 * logvar.float()) * noise.float()


def beta(step: int, steps: int, *, peak: float, cycles: int, zero_share: float, rise_share: float) -> float:
    """Weight of the divergence in step `step`, from 0, of `steps` steps.

    `cycles` cycles of steps / cycles steps, which need not be a whole number. In each it is 0 for `zero_share` of it,
    rises linearly from 0 to `peak` over `rise_share`, and stays there. From `steps` on it is `peak`.
    """
    if step >= steps:
        return peak
    phase = (
        step * cycles % steps
    ) / steps  # of the cycle, in [0, 1): by integers, so that no cycle begins late
    if phase < zero_share:
        return 0.0
    if phase - zero_share >= rise_share:
        return peak
    return peak * (phase - zero_share) / rise_share


def normals(seed: int, purpose: str, rows: Sequence[int], first: int, count: int, size: int) -> torch.Tensor:
    """Vectors `first` to `first + count` of each row's stream: fp64 [rows, count, size], of N(0, I).

    Each begins a block of Philox, so that it is the same in chunks of any size. Only raw words are taken, whose order
    NumPy keeps in all versions.
    """
    blocks = -(-size // _PER_BLOCK)
    key, words = (
        derive_seed(seed, "latent", purpose),
        np.empty((len(rows), count, blocks * _PER_BLOCK), np.uint64),
    )
    for place, row in enumerate(rows):
        # The counter names vector and row, so that chunks and batches change no draw, and k = 5 uses the first
        # 5 of k = 100.
        philox = np.random.Philox(key=key, counter=[first * blocks, row, 0, 0])
        words[place] = philox.random_raw(words[place].shape)
    # The middles of 2**53 equal parts of (0, 1): never 0 or 1.
    uniform = ((words[:, :, :size] >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    return torch.special.ndtri(torch.from_numpy(uniform))
