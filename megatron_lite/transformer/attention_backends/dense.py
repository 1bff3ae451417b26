"""The reference of attention: one launch for all tokens of a batch, under a mask of all pairs.

On CUDA it also serves models with relative positions, since its kernel takes a bias and returns the bias's gradient.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_lite.transformer.attention_backends.cpu_kernels import attend_all, attend_written_out
from megatron_lite.transformer.attention_backends.interface import Packed, ScoreBias, query_and_key_dropout
from megatron_lite.transformer.attention_backends.layout import Layout, may_see
from megatron_lite.transformer.kernels.dropout import AttentionDropout


class DensePlan:
    """One masked launch over all tokens. Memory: B x S x S booleans.

    Args:
        is_cross: the decoder's tokens see the encoder's. Queries and keys are all tokens of the batch.
        window: of a local layer; 0 = none.
    """

    def __init__(self, layout: Layout, *, is_cross: bool = False, window: int = 0):
        self.shape = layout.shape
        # Tokens and padding stay where they are: the mask has all pairs of a row.
        self.order = np.arange(layout.shape[0] * layout.shape[1])
        self.columns = np.minimum(layout.in_batch_order(), np.iinfo(np.int32).max).astype(np.int32)
        self.row_length = layout.shape[1]
        self.is_cross, self.window = is_cross, window

    def arrays(self) -> list[np.ndarray]:
        return [self.columns]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> DensePlan:
        # The device makes the mask from the columns: bool [B, S queries, S keys].
        (columns,) = arrays
        seen = may_see(columns[..., None], columns[..., None, :], window=self.window)
        if self.is_cross:
            time = columns[1]
            is_target = (time > 0) & (time < np.iinfo(np.int32).max)
            seen &= is_target[..., None] & ~is_target[:, None]
        self._sees_nothing = ~seen.any(-1)
        # The softmax of no keys would be NaN: such a query sees itself, and its output is zeroed afterwards.
        itself = torch.eye(self.row_length, dtype=torch.bool, device=seen.device)
        self.mask = (seen | (self._sees_nothing[..., None] & itself)).unsqueeze(1)
        self._tokens = torch.arange(len(self.order), device=device).view(self.shape)
        return self

    def query_key_pairs(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries and keys of the one launch: int64 [B, S]."""
        return [(self._tokens, self._tokens)]

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        q, k, v = (x.unflatten(0, self.shape) for packed in inputs for x in packed.unbind(1))
        mask = self.mask
        if bias is not None:
            added = bias(0, *self.query_key_pairs(q.device)[0]).to(q.dtype)
            # A float mask carries both: torch takes either a mask or a bias.
            mask = added.masked_fill(~self.mask, float("-inf"))
        if dropout is None:
            out = attend_all(q, k, v, mask)
        elif q.device.type != "cpu":
            dropout.seed_kernel(q.device)
            out = attend_all(q, k, v, mask, dropout.p)
        else:
            query_dropout, key_dropout = (x.view(self.shape) for x in query_and_key_dropout(dropout, inputs))
            # Row by row of the batch: `keep` draws for pairs of a row's queries and keys.
            rows = zip(query_dropout, key_dropout, strict=True)
            keep = torch.stack([dropout.keep(queries, keys, q.shape[2]) for queries, keys in rows])
            if bias is None:
                mask = torch.zeros(self.mask.shape, dtype=q.dtype).masked_fill_(~self.mask, float("-inf"))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = attend_written_out(q, k, v, mask, keep, dropout.p).transpose(1, 2)
        return out.masked_fill(self._sees_nothing[:, :, None, None], 0.0).flatten(0, 1)
