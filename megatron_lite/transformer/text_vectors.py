"""The vectors of texts: a mean of hidden states over chosen tokens of each text.

A batch chooses the tokens: all of a text, its first or its last one (`positions` and `texts`). So texts that are packed
in one sequence have the vectors that they have alone, and padding is never read.

Shapes: T tokens, P chosen tokens, V texts, D hidden size; N records of the global batch, k texts of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from megatron_lite.transformer.kernels import fused
from megatron_lite.transformer.kernels.dropout import Dropout


@dataclass(frozen=True)
class GlobalRecords:
    """The records of the global batch of a step, on the host, equal on all ranks; see `pair_losses.Records`."""

    texts: np.ndarray  # int64 [N, k]: equal numbers are equal texts
    is_text: np.ndarray  # bool [N, k]
    is_counted: np.ndarray  # bool [N]
    scores: np.ndarray | None = None  # fp32 [N]


@dataclass(frozen=True)
class TextInputs:
    """The texts of a micro-batch whose vectors are computed: k texts for each of its sequences."""

    positions: torch.Tensor  # int32 [P]: the chosen tokens, indices into [T]
    texts: torch.Tensor  # int32 [P]: the text of each
    counts: torch.Tensor  # fp32 [V]: chosen tokens of each text, at least 1
    numbers: np.ndarray  # int64 [V / k]: the record of each sequence in the global batch; -1 for padding
    records: GlobalRecords
    loss_number: int  # among all losses

    def pool(
        self, hidden: torch.Tensor, final_layernorm: nn.Module, dropout: Dropout | None, probability: float
    ) -> torch.Tensor:
        """The last block's [T, D] -> vectors, fp32 [V, D]. Args: dropout: of all T tokens, with this probability."""
        x = final_layernorm(hidden.index_select(0, self.positions))
        final_dropout = None if dropout is None else dropout.features(probability, -1, "final")
        if final_dropout is not None:
            x = fused.dropout_add(x, None, final_dropout.for_tokens(self.positions))
        # In fp32: a mean of bf16 numbers would round as often as there are tokens.
        sums = torch.zeros(len(self.counts), x.shape[1], device=x.device).index_add(0, self.texts, x.float())
        return sums / self.counts[:, None]
