"""Metrics of a latent space from the posteriors of sentences: mutual information and active units.

Source: OPTIMUS, arXiv:2004.04092, section 4.1. Shapes: N sentences, P components of the latent vector.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from data_utils.common.errors import DataError
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.gather import gather_arrays
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.trained_model import loss_measures

ACTIVE = 0.01  # variance of mu over the sentences above which a component is active
BLOCK = 1024  # sentences of each side in a block of the mutual information


def require_several(count: int) -> None:
    """Raise DataError for fewer than two sentences, between which nothing can be compared."""
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


class LatentMetrics:
    """Metrics of an evaluation over the sentences of all ranks; `Optimus.observe` adds each forward pass."""

    def __init__(self) -> None:
        self._passes: list[np.ndarray] = []  # mu, logvar, z side by side: fp64 [N, 3 P]
        self._tokens = 0.0

    def add(self, batch: MicroBatch, mu: torch.Tensor, logvar: torch.Tensor, z: torch.Tensor) -> None:
        """Args: mu, logvar, z: fp32 [N, P] of the sentences of a batch."""
        real = batch.extra_inputs.weight > 0
        self._passes.append(torch.cat([mu, logvar, z], 1)[real].double().cpu().numpy())
        self._tokens += float(batch.weights.sum())

    def summary(self, context: ParallelContext, loss: float) -> dict[str, float]:
        """Called by every rank. Args: loss: -ELBO, mean over the sentences."""
        tokens = context.sum_on_hosts([self._tokens])[0]
        gathered = gather_arrays(context, self._passes)
        rows = torch.from_numpy(np.concatenate([array for of_rank in gathered for array in of_rank]))
        mu, logvar, z = rows.chunk(3, dim=1)
        if len(rows) < 2 or not rows.isfinite().all():  # nothing to compare
            return {}
        return {
            **loss_measures(loss * len(rows) / tokens),
            "mutual_information": mutual_information(mu, logvar, z),
            "active_units": float(active_units(mu).sum()),
        }
