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
from megatron_lite.models.optimus.latent import normals
from megatron_lite.transformer.batch import Batch, ExtraInputs
from megatron_lite.transformer.loss_positions import few_count


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
        # A document's number in the layout is sequence * width + its number in the sequence.
        width = self.fields[:, DOC].max(initial=0) + 1
        return np.divmod(np.unique(self.layout.document), width)

    @property
    def noise(self) -> np.ndarray:
        """Draws of the standard normal distribution for the sentences, fp32 [N, P]."""
        sequences, numbers = self.sentence_index
        most = int(numbers.max(initial=-1)) + 1
        # Named by (seed, sample, sentence), so that a resumed run and any number of ranks draw the same.
        drawn = normals(self._seed, "sentence", self.samples.tolist(), 0, most, self.latent_size)
        return drawn.numpy()[sequences, numbers].astype(np.float32)

    @property
    def loss_divisor(self) -> float:
        """Number of sentences: the loss is the mean over them."""
        return float(len(self.sentence_index[0]))

    def loss_divisors(self, num_losses: int) -> np.ndarray:
        divisors = np.zeros(num_losses)
        divisors[LOSS_NAMES.index("reconstruction")] = self.loss_divisor
        return divisors

    @property
    def visible_keys(self) -> int:
        """(query, key) pairs that attention computes, in both stacks."""
        encoder, decoder = self.layout.encoder_and_decoder
        return int(encoder.visible_keys.count.sum() + decoder.visible_keys.count.sum())

    @property
    def decoder_keys(self) -> int:
        return int(self.layout.encoder_and_decoder[1].visible_keys.count.sum())

    def extra_inputs(
        self,
        order: np.ndarray,
        decoder_start: int,
        predicted: np.ndarray,
        few_counts: bool,
        config: ModelConfig,
    ) -> ExtraInputs:
        """`Sentences`; there is always at least one."""
        layout = self.layout
        # Index in the flattened batch -> index in the plans' order, in which the model has its tokens.
        index_in_order = np.full(self.fields[:, DOC].size, -1)
        index_in_order[order[order >= 0]] = np.flatnonzero(order >= 0)
        documents, sentence_of_token = np.unique(layout.document, return_inverse=True)
        sentences = np.zeros(self.fields[:, DOC].size, np.int64)
        sentences[layout.batch_index] = sentence_of_token
        token_sentence = np.where(order < 0, 0, sentences[order])[decoder_start:]
        real = len(documents)
        # Few counts, so that kernels and memory of one shape serve many batches.
        count = max(1, few_count(real) if few_counts else real)

        def first_tokens(chosen: np.ndarray) -> np.ndarray:
            """The first chosen token of each sentence, as an index into the order."""
            tokens = np.flatnonzero(chosen)
            _, first = np.unique(layout.document[tokens], return_index=True)
            return index_in_order[layout.batch_index[tokens[first]]]

        memory_slots = first_tokens(layout.is_target)[: real if self.has_memory else 0] - decoder_start
        noise = np.zeros((count, self.latent_size), np.float32)
        noise[:real] = self.noise
        return ExtraInputs(
            arrays={
                "cls_positions": np.pad(first_tokens(~layout.is_target), (0, count - real)),
                "memory_slots": memory_slots,
                "token_sentence": token_sentence,
                "loss_sentence": np.where(predicted < 0, 0, token_sentence[predicted]),
                "noise": noise,
                "weight": np.r_[np.ones(real), np.zeros(count - real)],
            },
            make=lambda tensors: Sentences(**tensors),
        )

    def padded(self, sequences: int) -> LatentBatch:
        fields = super().padded(sequences).fields
        samples = np.pad(self.samples, (0, sequences - len(self.samples)))
        return LatentBatch(fields, samples, self._seed, self.latent_size, self.has_memory)


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
