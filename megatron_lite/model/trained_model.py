"""The interface between an engine and the model that it trains."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from megatron_lite.model.micro_batch import MicroBatch
    from megatron_lite.parallel.context import ParallelContext

ENCODER, DECODER = "encoder.", "decoder."  # prefixes of the parameters in a model of two stacks
_LARGEST_EXPONENT = 700.0  # exp of it is still finite


def usual_measures(loss: float) -> dict[str, float]:
    """Args: loss: mean over predicted tokens, nats."""
    return {"perplexity": math.exp(min(loss, _LARGEST_EXPONENT))}


class TrainedModel(nn.Module):
    """A model that an engine trains. Samples, losses and sums over ranks are the engine's."""

    num_losses: int
    # Called before a part of the model is computed: its weights may still be on their way from other ranks.
    before_use: Callable[[nn.Module], None]

    @abstractmethod
    def forward(self, batch: MicroBatch, *, answers: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss sum (fp32 scalar, nats), and without gradient fp32 [losses, 2]: sum and weight of each loss.

        Args: answers: what a task's parts are answered with instead, where the model learns tasks.
        """

    def set_step(self, step: int, steps: int) -> None:
        """Called before each step. Args: step: its number, from 1. steps: those of the whole run."""

    @property
    def annealed(self) -> dict[str, float]:
        """Weights that the loss of the last step had, by name, for the records."""
        return {}

    def begin_evaluation(self) -> None:
        """Called before the passes of an evaluation."""

    def end_evaluation(self) -> None:
        """Called after them, in any case."""

    def measures(self, context: ParallelContext, loss: float) -> dict[str, float]:
        """Measures of the last evaluation beside its losses. Every rank calls this. Args: loss: the mean, nats."""
        return usual_measures(loss)
