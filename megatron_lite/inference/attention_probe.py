"""Attention weights of one layer during generation, to be displayed.

Fused kernels do not return these weights. They are computed again, densely, from the queries and keys that the layer
gives to its cache, so this is for short texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

SINGLE_STACK = "encoder"  # name of the stack of a model without a decoder


class QueryToken(NamedTuple):
    """A query whose attention is displayed."""

    token: int
    predicts: bool  # whether it predicts a token of the completion, or its end


class Replay(NamedTuple):
    """A second forward pass over a completion, by the model that generated it."""

    logits: list[torch.Tensor]  # fp32 [n, V] of each blank: of its tokens, and of its end if it ended
    shown: dict[str, tuple[list[QueryToken], list[int]]]  # stack -> its queries in order, its keys


@dataclass
class AttentionProbe:
    """Keeps the weights of one layer for a single text. Layers are numbered through encoder, decoder and cross."""

    part: str  # encoder, decoder or cross
    layer: int
    seen: list[torch.Tensor] = field(default_factory=list)  # of each pass: fp32 [H, N, K]

    def of(self, part: str) -> AttentionProbe | None:
        return self if self.part == part else None

    def look(self, layer: int, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Args: q: [1, N, H, D]. k: [1, K, H, D]. mask: as for `attention_weights`."""
        if layer == self.layer:
            self.seen.append(attention_weights(q, k, mask)[0])

    def rows(self, keys: int) -> torch.Tensor:
        """All passes: fp32 [H, queries, keys]. Keys that were not there yet have weight 0."""
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


def query_tokens(context: Sequence[int], written: Sequence[int]) -> list[QueryToken]:
    """A text's tokens and, after it, tokens each of which predicts the next."""
    return [*(QueryToken(token, False) for token in context), *(QueryToken(token, True) for token in written)]
