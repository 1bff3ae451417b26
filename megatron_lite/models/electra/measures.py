"""Measures of an evaluation: what the discriminator finds, and how often the generator is right."""

from __future__ import annotations

import torch

from megatron_lite.parallel.context import ParallelContext


class Found:
    """Counts over the tokens of all passes: right, all, found, replaced, chosen."""

    def __init__(self) -> None:
        self._counts: list[torch.Tensor] = []

    def add(
        self, scores: torch.Tensor, label: torch.Tensor, is_real: torch.Tensor, is_chosen: torch.Tensor
    ) -> None:
        """Args: scores, label: fp32 [T]; is_real: bool [T]; is_chosen: bool [K]."""
        is_new, is_called_new = label > 0, scores > 0
        parts = ((is_new == is_called_new) & is_real, is_real, is_new & is_called_new, is_new, is_chosen)
        self._counts.append(torch.stack([part.sum() for part in parts]))

    def summary(self, context: ParallelContext) -> dict[str, float]:
        """Called by every rank: shares of tokens over all ranks."""
        own = torch.stack(self._counts).sum(0).double().tolist()
        right, tokens, found, replaced, chosen = context.sum_of_hosts(own)
        return {
            "replaced_accuracy": right / max(tokens, 1.0),
            "replaced_recall": found / max(replaced, 1.0),
            "generator_accuracy": 1.0 - replaced / max(chosen, 1.0),
        }
