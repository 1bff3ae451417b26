"""The interface between an engine and the model that it trains."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from megatron_lite.parallel.context import ParallelContext
    from megatron_lite.transformer.micro_batch import MicroBatch

ENCODER, DECODER = "encoder.", "decoder."  # prefixes of the parameters in a model of two stacks
_LARGEST_EXPONENT = 700.0  # exp(710) is infinite


def loss_measures(loss: float) -> dict[str, float]:
    """The perplexity. Args: loss: mean over predicted tokens, nats."""
    return {"perplexity": math.exp(min(loss, _LARGEST_EXPONENT))}


class TrainedModel(nn.Module):
    """A model that an engine trains. The engine prepares its samples and sums its losses over ranks."""

    num_losses: int
    # Called before a module is computed: ranks may still be gathering its weights.
    before_use: Callable[[nn.Module], None]

    @abstractmethod
    def forward(self, batch: MicroBatch, *, predict: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss sum (fp32 scalar, nats), and without gradient fp32 [losses, 2]: sum and weight of each loss.

        Args: predict: return the predictions of a task instead, if the model learns tasks.
        """

    def set_step(self, step: int, steps: int) -> None:
        """Called before each step. Args: step: its number, from 1. steps: of the whole run."""

    @property
    def annealed(self) -> dict[str, float]:
        """Annealed weights of the last step's loss, by name, for the log."""
        return {}

    def begin_evaluation(self) -> None:
        """Called before the forward passes of an evaluation."""

    def end_evaluation(self) -> None:
        """Called after them, also if one failed."""

    def measures(self, context: ParallelContext, loss: float) -> dict[str, float]:
        """Measures of the last evaluation besides its losses. Called on every rank. Args: loss: the mean, nats."""
        return loss_measures(loss)
