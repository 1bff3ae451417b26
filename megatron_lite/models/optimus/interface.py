"""The interface of a latent-variable model for evaluation: posteriors and likelihoods of sentences, and decoding."""

# N sentences, k samples of each, P components of the latent vector, H features

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_lite.config.generation import GenerationConfig


@dataclass(frozen=True)
class Sentence:
    """A text as both stacks read it: ids without special tokens, each of its own stack's vocabulary."""

    text: str
    encoder_tokens: Sequence[int]
    decoder_tokens: Sequence[int]

    @property
    def predicted_tokens(self) -> int:
        """Number of predicted tokens: the text's and the end. BOS is never predicted."""
        return len(self.decoder_tokens) + 1


class LatentModel(Protocol):
    """Results may be on any device; arguments come on CPU."""

    latent_size: int

    def read(self, texts: Sequence[str]) -> list[Sentence]:
        """Raises: DataError that names a text's number (from 1), where it is empty or longer than the positions."""
        ...

    def encode(self, sentences: Sequence[Sentence]) -> tuple[torch.Tensor, torch.Tensor]:
        """mu and logvar of each sentence's posterior, at least fp32, [N, P] each."""
        ...

    def features(self, sentences: Sequence[Sentence]) -> torch.Tensor:
        """The encoder's features [N, H] from which the posteriors are computed."""
        ...

    def log_likelihood(self, sentences: Sequence[Sentence], z: torch.Tensor) -> torch.Tensor:
        """log p(x | z) in nats, summed over a sentence's predicted tokens: at least fp32, [N, k].

        Args: z: fp64 [N, k, P].
        """
        ...

    def decode(self, z: torch.Tensor, config: GenerationConfig, first: int = 0) -> list[str]:
        """A text for each latent vector, by the search of `config`, at most as long as the positions allow.

        Args:
            z: [N, P].
            first: number of the first text; sampled draws depend on (config.seed, number of the text) only.
        """
        ...

    def untrained(self) -> LatentModel:
        """The model with random initial weights, as a baseline."""
        ...
