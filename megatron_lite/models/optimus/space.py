"""Measures of a latent space from the posteriors of sentences: mutual information and active units.

Source: OPTIMUS, arXiv:2004.04092, section 4.1. Shapes: N sentences, P components of the latent vector.
"""

from __future__ import annotations

import math

import torch

from data_utils.common.errors import DataError

ACTIVE = 0.01  # variance of mu over the sentences above which a component is active
BLOCK = 1024  # sentences of each side in a block of the mutual information


def require_several(count: int) -> None:
    """Raise DataError for fewer than two sentences: measures between sentences need two."""
    if count < 2:
        raise DataError(
            f"there are {count} sentences; mutual information and active units need at least 2: give more lines."
        )


def mutual_information(mu: torch.Tensor, logvar: torch.Tensor, z: torch.Tensor, block: int = BLOCK) -> float:
    """Mutual information of sentence and latent vector, in nats: the mean of log q(z | x) - log q(z).

    q(z) is the mean of q(z | x) over the N sentences. The first term is in closed form, as in the released code, so
    noise may lift an estimate above its limit ln N.

    Args: z: one sample of each sentence's posterior, fp64 [N, P] as mu and logvar.
    """
    count, size = mu.shape
    require_several(count)
    constant = -0.5 * size * math.log(2 * math.pi)
    own = constant - 0.5 * (1.0 + logvar).sum(1)
    precision = torch.exp(-logvar)
    # log q(z_i | x_j) = constant - 1/2 (z_i^2 . precision_j - 2 z_i . (mu precision)_j + offset_j), by a product
    weights = torch.cat([precision, -2.0 * mu * precision], 1)
    offset = (mu.square() * precision + logvar).sum(1)
    queries = torch.cat([z.square(), z], 1)
    aggregate = mu.new_full((count,), -math.inf)
    for i in range(0, count, block):
        here = slice(i, i + block)
        for j in range(0, count, block):
            there = slice(j, j + block)
            terms = constant - 0.5 * (queries[here] @ weights[there].T + offset[there])
            aggregate[here] = torch.logaddexp(aggregate[here], torch.logsumexp(terms, 1))
    return float((own - (aggregate - math.log(count))).mean())


def active_units(mu: torch.Tensor) -> torch.Tensor:
    """Mask of the components whose means differ between sentences, bool [P]. Args: mu: [N, P]."""
    require_several(len(mu))
    return mu.var(0) > ACTIVE
