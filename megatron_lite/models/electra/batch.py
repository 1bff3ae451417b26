"""Batches of ELECTRA: besides the tokens, the sample and position of each masked token, which seed its draw.

Shapes: T tokens, K masked positions, which the generator predicts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from data_utils.common.losses import MASKED, REPLACED
from data_utils.loader.loader import SampleLoader
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.batch import Batch, ExtraInputs


@dataclass(frozen=True)
class MaskedPositions:
    """The masked tokens' samples and positions, on the device."""

    seed: int
    samples: torch.Tensor  # int32 [K, 2]: low and high word of the sample's number
    positions: torch.Tensor  # int32 [K]: in the sequence of its sample


class ElectraBatch(Batch):
    """Args: fields, samples: as for Batch. seed: of the draws."""

    def __init__(self, fields: np.ndarray, samples: np.ndarray, seed: int):
        super().__init__(fields, samples)
        self._seed = seed

    @property
    def loss_divisor(self) -> float:
        """1: both losses are means, whose sum is not divided."""
        return 1.0

    def loss_divisors(self, num_losses: int) -> np.ndarray:
        divisors = np.zeros(num_losses)
        # The divisors of the two means: masked positions, and all tokens but padding.
        divisors[[MASKED.number, REPLACED.number]] = self.loss_tokens, self.tokens
        return divisors

    def extra_inputs(
        self,
        order: np.ndarray,
        decoder_start: int,
        predicted: np.ndarray,
        few_counts: bool,
        config: ModelConfig,
    ) -> ExtraInputs:
        """`MaskedPositions`, and the discriminator's loss weights: 1 for each token but padding."""
        chosen = order[predicted]  # for padding any position
        # Draws are named by sample and position in its sequence, so that any order of tokens and any batch draws the
        # same.
        sequence, position = np.divmod(np.where(chosen < 0, 0, chosen), self.fields.shape[2])
        # Two words of 32 bits, since all inputs of a step are one int32 buffer.
        samples = np.ascontiguousarray(self.samples[sequence], "<i8").view("<i4").reshape(-1, 2)
        return ExtraInputs(
            arrays={"samples": samples, "positions": position},
            make=lambda tensors: MaskedPositions(self._seed, **tensors),
            weights=(order >= 0).astype(np.float32),
            weight_objectives=np.full(len(order), REPLACED.number),
        )

    def padded(self, sequences: int) -> ElectraBatch:
        samples = np.pad(self.samples, (0, sequences - len(self.samples)))
        return ElectraBatch(super().padded(sequences).fields, samples, self._seed)


class ElectraSamples:
    """The samples of a loader as ElectraBatches. Args: seed: of the draws."""

    def __init__(self, loader: SampleLoader, seed: int):
        self._loader, self.prefetch, self.fingerprint = loader, loader.prefetch, loader.fingerprint
        self._make = functools.partial(ElectraBatch, seed=seed)

    def batch(self, indices: np.ndarray) -> ElectraBatch:
        """Samples int64 [B]."""
        return self._make(self._loader.batch(indices), indices)
