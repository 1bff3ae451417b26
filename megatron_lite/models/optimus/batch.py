"""Batches of sentences for OPTIMUS: what the model reads besides the tokens.

A document of a sequence is a sentence: the encoder's tokens have `ord` 0, the decoder's more. Neither stack sees the
other's tokens; only the latent vector passes between them.

Shapes: N sentences, P latent size, K predicted positions; Te, Td tokens of encoder and decoder.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from data_utils.common.batch_fields import DOC
from data_utils.loader.loader import SampleLoader
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.model import ModelConfig
from megatron_lite.model.batch import Batch
from megatron_lite.model.model_input import few_count
from megatron_lite.models.optimus.latent import normals


@dataclass(frozen=True)
class Sentences:
    """The sentences of a micro-batch on the device. Those that pad to a fixed count have weight 0."""

    cls_positions: torch.Tensor  # int32 [N]: CLS of each sentence in [Te]
    memory_slots: torch.Tensor  # int32 [real N], or [0] without memory: its memory slot in [Td]
    token_sentence: torch.Tensor  # int32 [Td]: the sentence of each decoder token
    loss_sentence: torch.Tensor  # int32 [K]: the sentence of each predicted position
    noise: torch.Tensor  # fp32 [N, P]
    weight: torch.Tensor  # fp32 [N]


class LatentBatch(Batch):
    """Args:
    fields, samples: as for Batch.
    seed: of the noise, which is a pure function of it, the sample and the sentence's number in its sequence.
    latent_size: P.
    has_memory: the first of the decoder's tokens is the slot.
    """

    def __init__(
        self, fields: np.ndarray, samples: np.ndarray, seed: int, latent_size: int, has_memory: bool
    ):
        super().__init__(fields, samples)
        self._seed, self.latent_size, self.has_memory = seed, latent_size, has_memory

    @cached_property
    def sentence_index(self) -> tuple[np.ndarray, np.ndarray]:
        """The sequence of each sentence and its number there, both int64 [N], in the order of the layout."""
        # A document's number in the layout is row * width + its number in the row.
        width = self.fields[:, DOC].max(initial=0) + 1
        return np.divmod(np.unique(self.layout.document), width)

    @property
    def noise(self) -> np.ndarray:
        """Draws of the standard normal distribution for the sentences, fp32 [N, P]."""
        rows, numbers = self.sentence_index
        most = int(numbers.max(initial=-1)) + 1
        # Named by (seed, sample, sentence), so that a resumed run and any number of ranks draw the same.
        drawn = normals(self._seed, "sentence", self.samples.tolist(), 0, most, self.latent_size)
        return drawn.numpy()[rows, numbers].astype(np.float32)

    @property
    def loss_weight(self) -> float:
        """Number of sentences: the loss is the mean over them."""
        return float(len(self.sentence_index[0]))

    def loss_weights(self, num_losses: int) -> np.ndarray:
        weights = np.zeros(num_losses)
        weights[LOSS_NAMES.index("reconstruction")] = self.loss_weight
        return weights

    @property
    def visible_keys(self) -> int:
        """(query, key) pairs that attention computes, in both stacks."""
        encoder, decoder = self.layout.encoder_and_decoder
        return int(encoder.visible_keys.count.sum() + decoder.visible_keys.count.sum())

    @property
    def target_keys(self) -> int:
        return int(self.layout.encoder_and_decoder[1].visible_keys.count.sum())

    def host_parts(
        self, order: np.ndarray, first: int, predicted: np.ndarray, few_counts: bool, config: ModelConfig
    ) -> HostSentences:
        return HostSentences(self, order, first, predicted, few_counts)

    def padded(self, rows: int) -> LatentBatch:
        fields = super().padded(rows).fields
        samples = np.pad(self.samples, (0, rows - len(self.samples)))
        return LatentBatch(fields, samples, self._seed, self.latent_size, self.has_memory)


class HostSentences:
    """The sentences of a batch in the order of its attention plans.

    Args:
        order: int64 [Te + Td], the plans': index of each token into the flattened batch, -1 for padding.
        first: Te.
        loss_rows: int64 [K] in [Td], -1 for padding.
        few_counts: pad the sentences to one of few counts, see `few_count`; there is always at least one.
    """

    ARRAYS = 6

    def __init__(
        self, batch: LatentBatch, order: np.ndarray, first: int, loss_rows: np.ndarray, few_counts: bool
    ):
        layout = batch.layout
        rank = np.full(batch.fields[:, DOC].size, -1)  # index in the batch -> index in the order
        rank[order[order >= 0]] = np.flatnonzero(order >= 0)
        known, number = np.unique(layout.document, return_inverse=True)
        sentence = np.zeros(batch.fields[:, DOC].size, np.int64)
        sentence[layout.batch_index] = number
        token_sentence = np.where(order < 0, 0, sentence[order])[first:]
        real = len(known)
        # Few counts, so that kernels and memory of one shape serve many batches.
        count = max(1, few_count(real) if few_counts else real)

        def firsts(chosen: np.ndarray) -> np.ndarray:
            """The first chosen token of each sentence, as an index into the order."""
            rows = np.flatnonzero(chosen)
            _, at = np.unique(layout.document[rows], return_index=True)
            return rank[layout.batch_index[rows[at]]]

        noise = np.zeros((count, batch.latent_size), np.float32)
        noise[:real] = batch.noise
        self._integers = (
            np.pad(firsts(~layout.is_target), (0, count - real)),
            firsts(layout.is_target)[: real if batch.has_memory else 0] - first,
            token_sentence,
            np.where(loss_rows < 0, 0, token_sentence[loss_rows]),
        )
        self._numbers = (noise, np.r_[np.ones(real), np.zeros(count - real)])

    def arrays(self) -> list[np.ndarray]:
        """int32; floats as their bits, so that one buffer goes to the device."""
        return [
            *(array.astype(np.int32) for array in self._integers),
            *(array.astype(np.float32).view(np.int32) for array in self._numbers),
        ]

    def loss_rows(self) -> None:
        """None: the predicted positions are the batch's own."""

    def on_device(self, arrays: list[torch.Tensor]) -> Sentences:
        """Args: arrays: as `arrays` gave them."""
        cls_positions, memory_slots, token_sentence, loss_sentence, noise, weight = arrays
        floats = noise.view(torch.float32), weight.view(torch.float32)
        return Sentences(cls_positions, memory_slots, token_sentence, loss_sentence, *floats)


class LatentSamples:
    """The samples of a loader as LatentBatches. Args: seed: of the latent noise."""

    def __init__(self, loader: SampleLoader, latent_size: int, has_memory: bool, seed: int):
        self._loader = loader
        self._make = functools.partial(LatentBatch, seed=seed, latent_size=latent_size, has_memory=has_memory)

    def batch(self, indices: np.ndarray) -> LatentBatch:
        """Samples int64 [B]."""
        return self._make(self._loader.batch(indices), indices)

    def prefetch(self, indices: np.ndarray) -> None:
        self._loader.prefetch(indices)

    def fingerprint(self) -> list[dict[str, object]]:
        return self._loader.fingerprint()
