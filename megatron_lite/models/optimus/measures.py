"""Measures of the latent space in an evaluation, over the sentences of all ranks."""

from __future__ import annotations

import numpy as np
import torch

from megatron_lite.model.model_input import ModelInput
from megatron_lite.model.trained_model import usual_measures
from megatron_lite.models.optimus.space import active_units, mutual_information
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.gather import gather_arrays


class LatentMeasures:
    """Fed by `Optimus.observe`, pass by pass."""

    def __init__(self) -> None:
        self._passes: list[np.ndarray] = []  # mu, logvar, z side by side: fp64 [N, 3 P]
        self._tokens = 0.0

    def add(self, batch: ModelInput, mu: torch.Tensor, logvar: torch.Tensor, z: torch.Tensor) -> None:
        """Args: mu, logvar, z: fp32 [N, P] of the sentences of a batch."""
        real = batch.parts.weight > 0
        self._passes.append(torch.cat([mu, logvar, z], 1)[real].double().cpu().numpy())
        self._tokens += float(batch.weights.sum())

    def summary(self, context: ParallelContext, loss: float) -> dict[str, float]:
        """Called by every rank. Args: loss: -ELBO, mean over the sentences."""
        tokens = context.sum_of_hosts([self._tokens])[0]
        gathered = gather_arrays(context, self._passes)
        rows = torch.from_numpy(np.concatenate([array for of_rank in gathered for array in of_rank]))
        mu, logvar, z = rows.chunk(3, dim=1)
        if len(rows) < 2 or not rows.isfinite().all():  # nothing to compare
            return {}
        return {
            **usual_measures(loss * len(rows) / tokens),
            "mutual_information": mutual_information(mu, logvar, z),
            "active_units": float(active_units(mu).sum()),
        }
