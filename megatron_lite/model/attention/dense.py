"""The reference of attention: one call for all tokens of a batch, under a mask of all pairs.

On CUDA it also serves models with relative positions, since its kernel takes a bias and returns the bias's gradient.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from megatron_lite.model.attention.cpu_kernels import attend_all, attend_written_out
from megatron_lite.model.attention.layout import Layout, may_see
from megatron_lite.model.kernels.dropout import AttentionDropout


class ScoreBias(Protocol):
    """A layer's bias of attention scores, added after scaling."""

    def __call__(self, call: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[..., H, Q, K] for the tokens of the plan's call of this number."""
        ...


class DenseMask:
    """Attention under a mask of all pairs, which keys a query sees: bool [B, S, S]."""

    def __init__(self, seen: torch.Tensor):
        self.sees_nothing = ~seen.any(-1)
        # The softmax of no keys would be NaN: such a query sees itself, and its output is zeroed afterwards.
        itself = torch.eye(seen.shape[1], dtype=torch.bool, device=seen.device)
        self.mask = (seen | (self.sees_nothing[..., None] & itself)).unsqueeze(1)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout: AttentionDropout | None,
        query_keys: torch.Tensor,
        key_keys: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B S, H, D] three times -> [B S, H, D].

        Args: query_keys, key_keys: of the tokens, for dropout. bias: added to the scores, [B, H, S, S].
        """
        rows = len(self.mask)
        q, k, v = (x.view(rows, -1, *x.shape[1:]) for x in (q, k, v))
        seen = self.mask if bias is None else bias.masked_fill(~self.mask, float("-inf"))
        if dropout is None:
            out = attend_all(q, k, v, seen)
        elif q.device.type != "cpu":
            dropout.seed_kernel(q.device)
            out = attend_all(q, k, v, seen, dropout.p)
        else:
            of_queries, of_keys = query_keys.view(rows, -1), key_keys.view(rows, -1)
            stays = torch.stack(
                [dropout.keep(*row, q.shape[2]) for row in zip(of_queries, of_keys, strict=True)]
            )
            if bias is None:
                seen = torch.zeros(self.mask.shape, dtype=q.dtype).masked_fill_(~self.mask, float("-inf"))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = attend_written_out(q, k, v, seen, stays, dropout.p).transpose(1, 2)
        return out.masked_fill(self.sees_nothing[:, :, None, None], 0.0).flatten(0, 1)


def columns_in_place(layout: Layout) -> np.ndarray:
    """The columns that `may_see` compares, in batch order: int32 [4, B, S]. The device makes the mask from them."""
    return np.minimum(layout.in_place(), np.iinfo(np.int32).max).astype(np.int32)


def seen_pairs(columns: torch.Tensor) -> torch.Tensor:
    """int32 [4, B, S] -> bool [B, S queries, S keys]."""
    return may_see(columns[..., None], columns[..., None, :])


class DensePlan:
    """One masked call over all tokens. Memory: B x S x S booleans."""

    _masked: DenseMask
    _places: torch.Tensor  # int64 [B, S]

    def __init__(self, layout: Layout):
        self.shape = layout.shape
        self.order = np.arange(layout.shape[0] * layout.shape[1])
        self.columns = columns_in_place(layout)
        self.row_length = layout.shape[1]

    def arrays(self) -> list[np.ndarray]:
        return [self.columns]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> DensePlan:
        (columns,) = arrays
        self._masked = DenseMask(seen_pairs(columns))
        self._places = torch.arange(len(self.order), device=device).view(self.shape)
        return self

    def pairs(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries and keys of the one call: int64 [B, S]."""
        return [(self._places, self._places)]

    def attend(
        self,
        layer: int,
        qkv: torch.Tensor,
        dropout: AttentionDropout | None,
        bias: ScoreBias | None = None,
    ) -> torch.Tensor:
        keys = qkv[:0] if dropout is None else dropout.keys
        q, k, v = qkv.unbind(1)
        added = None if bias is None else bias(0, *self.pairs(qkv.device)[0]).to(q.dtype)
        return self._masked.attend(q, k, v, dropout, keys, keys, added)
