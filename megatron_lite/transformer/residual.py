"""The hidden state between blocks: a tensor, or a sum that the next norm makes.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_lite.transformer.kernels.dropout import FeatureDropout
from megatron_lite.transformer.kernels.fused import dropout_add
from megatron_lite.transformer.norms import Norm
from megatron_lite.transformer.tensor_parallel import DeferredBias


class Residual(NamedTuple):
    """The sum hidden + dropout(x), [T, D], not added yet: where kernels run, one of them adds it and norms it.

    So the residual is read once less in each direction.

    A tuple, so that DeepSpeed finds the tensors in it.
    """

    hidden: torch.Tensor
    x: DeferredBias | None = None
    dropout: FeatureDropout | None = None

    def norm(self, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and its norm, [T, D] each."""
        x, bias = self.x or (None, None)
        return norm.after_sum(self.hidden, x, bias, self.dropout)


Hidden = torch.Tensor | Residual  # between blocks: on a CPU always a tensor


def materialize(x: Hidden) -> torch.Tensor:
    """The hidden state as a tensor [T, D]."""
    if isinstance(x, torch.Tensor):
        return x
    return x.hidden if x.x is None else dropout_add(x.x.x, x.hidden, x.dropout, x.x.bias)
