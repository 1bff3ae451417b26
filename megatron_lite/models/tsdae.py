"""TSDAE's model: a Transformer with encoder and decoder, whose decoder sees the vector of a text alone.

The objective hides all of an encoder's tokens but one from the decoder (data_utils/objectives/tsdae.py). A batch says
which one, and of which tokens the vector is the mean; `only_vectors` in encoder_decoder.py puts it there. The model has
the parameters of T5 or BART, so checkpoints, exports and tasks are theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from data_utils.common.batch_fields import DOC, ORD, PADDING_DOC
from data_utils.loader.loader import SampleLoader
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.transformer.batch import ExtraInputs
from megatron_lite.transformer.build import ModelSpec, Samples
from megatron_lite.transformer.pooling import PlacedVectors, TextBatch, places_in


class DenoisingBatch(TextBatch):
    """A batch whose encoder's documents have vectors, which the decoder reads."""

    def extra_inputs(
        self,
        order: np.ndarray,
        decoder_start: int,
        predicted: np.ndarray,
        few_counts: bool,
        config: ModelConfig,
    ) -> ExtraInputs:
        """`PlacedVectors`."""
        pooled = super().extra_inputs(order, decoder_start, predicted, few_counts, config)
        is_seen = (self.fields[:, DOC] != PADDING_DOC) & (self.fields[:, ORD] == 0)
        slots = places_in(order, is_seen.size)[np.flatnonzero(is_seen)]
        return ExtraInputs(
            arrays={**pooled.arrays, "slots": slots}, make=lambda tensors: PlacedVectors(**tensors)
        )

    @property
    def has_part(self) -> np.ndarray:
        """The encoder's tokens alone."""
        return super().has_part & (self.fields[:, ORD].ravel() <= 0)

    def padded(self, sequences: int) -> DenoisingBatch:
        samples = np.pad(self.samples, (0, sequences - len(self.samples)))
        return DenoisingBatch(super().padded(sequences).fields, samples, pooling=self.pooling)


class DenoisingSamples:
    """The samples of a loader as DenoisingBatches."""

    def __init__(self, loader: SampleLoader, pooling: str):
        self._loader, self._pooling = loader, pooling
        self.prefetch, self.fingerprint = loader.prefetch, loader.fingerprint

    def batch(self, indices: np.ndarray) -> DenoisingBatch:
        """Samples int64 [B]."""
        return DenoisingBatch(self._loader.batch(indices), indices, pooling=self._pooling)


class DenoisingSpec(ModelSpec):
    """T5 or BART, fed with DenoisingBatches; a task replaces them."""

    def samples(self, config: Config, loader: Any, purpose: str) -> Samples:
        if config.task is not None:
            return super().samples(config, loader, purpose)
        return DenoisingSamples(loader, config.embedding.pooling_of(False))


MODEL_SPEC = DenoisingSpec()
