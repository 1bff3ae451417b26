"""The reference of attention: one call for all tokens of a batch, under a mask of all pairs.

On CUDA it also serves models with relative positions, since its kernel takes a bias and returns the bias's gradient.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_lite.model.attention_backends.calls import (
    Packed,
    ScoreBias,
    attend_all,
    attend_written_out,
    token_keys,
)
from megatron_lite.model.attention_backends.layout import Layout, may_see
from megatron_lite.model.kernels.dropout import AttentionDropout


class DensePlan:
    """One masked call over all tokens. Memory: B x S x S booleans.

    Args:
        is_cross: the decoder's tokens see the encoder's. Both have a place for each token of the batch.
        window: of a local layer; 0 = none.
    """

    def __init__(self, layout: Layout, *, is_cross: bool = False, window: int = 0):
        self.shape = layout.shape
        # Tokens stay where they are, places of padding included: the mask has all pairs of a row.
        self.order = np.arange(layout.shape[0] * layout.shape[1])
        self.columns = np.minimum(layout.in_place(), np.iinfo(np.int32).max).astype(np.int32)
        self.row_length = layout.shape[1]
        self.is_cross, self.window = is_cross, window

    def arrays(self) -> list[np.ndarray]:
        return [self.columns]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> DensePlan:
        (columns,) = arrays  # the device makes the mask of them
        # bool [B, S queries, S keys]
        seen = may_see(columns[..., None], columns[..., None, :], window=self.window)
        if self.is_cross:
            time = columns[1]
            is_target = (time > 0) & (time < np.iinfo(np.int32).max)
            seen &= is_target[..., None] & ~is_target[:, None]
        self._sees_nothing = ~seen.any(-1)
        # The softmax of no keys would be NaN: such a query sees itself, and its output is zeroed afterwards.
        itself = torch.eye(self.row_length, dtype=torch.bool, device=seen.device)
        self.mask = (seen | (self._sees_nothing[..., None] & itself)).unsqueeze(1)
        self._places = torch.arange(len(self.order), device=device).view(self.shape)
        return self

    def pairs(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries and keys of the one call: int64 [B, S]."""
        return [(self._places, self._places)]

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        q, k, v = (x.unflatten(0, self.shape) for packed in inputs for x in packed.unbind(1))
        seen = self.mask
        if bias is not None:
            added = bias(0, *self.pairs(q.device)[0]).to(q.dtype)
            # A float mask carries both: torch takes either a mask or a bias.
            seen = added.masked_fill(~self.mask, float("-inf"))
        if dropout is None:
            out = attend_all(q, k, v, seen)
        elif q.device.type != "cpu":
            dropout.seed_kernel(q.device)
            out = attend_all(q, k, v, seen, dropout.p)
        else:
            of_queries, of_keys = (x.view(self.shape) for x in token_keys(dropout, inputs))
            # Row by row: `keep` draws for pairs of a row's queries and keys.
            rows = zip(of_queries, of_keys, strict=True)
            stays = torch.stack([dropout.keep(queries, keys, q.shape[2]) for queries, keys in rows])
            if bias is None:
                seen = torch.zeros(self.mask.shape, dtype=q.dtype).masked_fill_(~self.mask, float("-inf"))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = attend_written_out(q, k, v, seen, stays, dropout.p).transpose(1, 2)
        return out.masked_fill(self._sees_nothing[:, :, None, None], 0.0).flatten(0, 1)
