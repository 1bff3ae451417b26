"""Batches of ELECTRA: beside the tokens, where in its sample each chosen token stands, from which draws follow.

Shapes: T tokens, K rows with loss, those of the generator.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from data_utils.common.losses import MASKED, REPLACED
from data_utils.loader.loader import SampleLoader
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.batch import Batch


@dataclass(frozen=True)
class Places:
    """Where the chosen tokens stand, on the device."""

    seed: int
    samples: torch.Tensor  # int32 [K, 2]: low and high word of each one's sample
    places: torch.Tensor  # int32 [K]: in the row of its sample


class ElectraBatch(Batch):
    """Args: planes, samples: as for Batch. seed: of the draws."""

    def __init__(self, planes: np.ndarray, samples: np.ndarray, seed: int):
        super().__init__(planes, samples)
        self._seed = seed

    @property
    def loss_weight(self) -> float:
        """Both losses are means; nothing divides their sum."""
        return 1.0

    def loss_weights(self, num_losses: int) -> np.ndarray:
        weights = np.zeros(num_losses)
        weights[[MASKED.number, REPLACED.number]] = self.loss_rows, self.tokens
        return weights

    def more_weights(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """1 for each token but padding, the discriminator's."""
        return (order >= 0).astype(np.float32), np.full(len(order), REPLACED.number)

    def host_parts(
        self, order: np.ndarray, first: int, predicted: np.ndarray, few_counts: bool, config: ModelConfig
    ) -> HostPlaces:
        chosen = order[predicted]  # of rows that only fill up any one
        row, place = np.divmod(np.where(chosen < 0, 0, chosen), self.planes.shape[2])
        return HostPlaces(self._seed, self.samples[row], place)

    def padded(self, rows: int) -> ElectraBatch:
        samples = np.pad(self.samples, (0, rows - len(self.samples)))
        return ElectraBatch(super().padded(rows).planes, samples, self._seed)


class HostPlaces:
    """`Places` on the host. Args: samples, places: int64 [K]."""

    ARRAYS = 2

    def __init__(self, seed: int, samples: np.ndarray, places: np.ndarray):
        self._seed, self._samples, self._places = seed, samples, places

    def arrays(self) -> list[np.ndarray]:
        words = np.ascontiguousarray(self._samples, "<i8").view("<i4").reshape(-1, 2)
        return [words, self._places.astype(np.int32)]

    def loss_rows(self) -> None:
        """The rows with loss are those of the batch."""

    def on_device(self, arrays: list[torch.Tensor]) -> Places:
        return Places(self._seed, *arrays)


class ElectraSamples:
    """The samples of a loader as ElectraBatches. Args: seed: of the draws."""

    def __init__(self, loader: SampleLoader, seed: int):
        self._loader, self.prefetch, self.fingerprint = loader, loader.prefetch, loader.fingerprint
        self._make = functools.partial(ElectraBatch, seed=seed)

    def batch(self, indices: np.ndarray) -> ElectraBatch:
        """Samples int64 [B]."""
        return self._make(self._loader.batch(indices), indices)
