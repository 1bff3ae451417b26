"""Which tokens of a micro-batch count for the losses of its routers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RoutedTokens:
    """Which tokens of a micro-batch count for its router's losses.

    Args:
        members: fp32 [B, T], 1 for the tokens of each sequence; padding is in none.
        share: of each sequence in the step's mean: 1 over their number, on all ranks.
        factor: the same times the scale of the losses in fp16.
    """

    members: torch.Tensor
    share: float
    factor: float

    @staticmethod
    def of(sequence: torch.Tensor, sequences: int, share: float, loss_scale: float) -> RoutedTokens:
        """Args: sequence: int [T], of each token; -1 for padding."""
        numbers = torch.arange(sequences, device=sequence.device)
        return RoutedTokens((sequence == numbers[:, None]).float(), share, share * loss_scale)

    def means(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [T, n] -> its mean over the tokens of each sequence, [B, n]; 0 for a sequence of padding."""
        return self.members @ x / self.members.sum(1, keepdim=True).clamp(min=1.0)

    def split(self, lengths: Sequence[int]) -> list[RoutedTokens]:
        """Of the tokens of an encoder and of a decoder."""
        return [RoutedTokens(part, self.share, self.factor) for part in self.members.split(list(lengths), 1)]
