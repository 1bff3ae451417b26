"""The latent vector of a sentence: its posterior's divergence from the prior, free bits, and draws. All in fp32.

The posterior of a sentence is a normal distribution with independent components, mean mu and variance exp(logvar); the
prior is N(0, I). Source: OPTIMUS, arXiv:2004.04092, section 3.
"""

# N sentences, P components of the latent vector

from __future__ import annotations

import torch


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
