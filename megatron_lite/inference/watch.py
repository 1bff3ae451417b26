"""Who attends to whom while an answer is written: the weights of one layer, for people to look at.

Kernels never make these weights. Here they are computed beside them, densely, from the queries and keys that the layer
gives to its cache, so they are meant for short texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

ONE_STACK = "encoder"  # the part of a model without a decoder


class Row(NamedTuple):
    """A query that was shown."""

    token: int
    predicts: bool  # a token of an answer, or its end


class Replay(NamedTuple):
    """An answer's tokens, read once more by the model that has written them."""

    logits: list[torch.Tensor]  # fp32 [n, V] of each blank: of its tokens, and of its end if it ended
    shown: dict[str, tuple[list[Row], list[int]]]  # part of the model -> its queries in order, its keys


@dataclass
class Watch:
    """Keeps the weights of one layer for a text alone. Layers are counted through the encoder, decoder and cross."""

    part: str  # encoder, decoder or cross
    layer: int
    seen: list[torch.Tensor] = field(default_factory=list)  # of each pass: fp32 [H, N, K]

    def of(self, part: str) -> Watch | None:
        return self if self.part == part else None

    def look(self, layer: int, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Args: q: [1, N, H, D]. k: [1, K, H, D]. mask: as for `attention_weights`."""
        if layer == self.layer:
            self.seen.append(attention_weights(q, k, mask)[0])

    def rows(self, keys: int) -> torch.Tensor:
        """All passes: fp32 [H, queries, keys]. A key that came later has no weight."""
        return torch.cat([torch.nn.functional.pad(each, (0, keys - each.shape[2])) for each in self.seen], 1)


def attention_weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax of the scores, fp32 [R, H, N, K].

    Args:
        q: [R, N, H, D]. k: [R, K, H, D].
        mask: bool [R or 1, 1, N or 1, K], which keys; or fp32 [R, H, N, K], added to the scores. None: all keys.
    """
    scores = torch.einsum("rnhd,rkhd->rhnk", q.float(), k.float()) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def stretch(context: Sequence[int], written: Sequence[int]) -> list[Row]:
    """Rows of a text and, after it, of tokens each of which predicts the next."""
    return [*(Row(token, False) for token in context), *(Row(token, True) for token in written)]
