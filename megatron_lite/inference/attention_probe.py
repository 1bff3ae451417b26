"""Attention weights of one layer during generation, to be displayed.

Fused kernels do not return these weights. They are computed again from the queries and keys that the layer gives to its
cache, with a matrix of all pairs, so this is for short texts.
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
    tokens: dict[str, tuple[list[QueryToken], list[int]]]  # stack -> its queries in order, its keys


@dataclass
class AttentionProbe:
    """Keeps the weights of one layer for a single text. Layers are numbered through encoder, decoder and cross."""

    stack: str  # encoder, decoder or cross
    layer: int
    weights: list[torch.Tensor] = field(default_factory=list)  # of each pass: fp32 [H, N, K]

    def for_stack(self, stack: str) -> AttentionProbe | None:
        """This probe if it is for a layer of `stack`."""
        return self if self.stack == stack else None

    def record(self, layer: int, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Keep the weights of a pass if `layer` is the one. Args: q: [1, N, H, D]. k: [1, K, H, D]. mask: as below."""
        if layer == self.layer:
            self.weights.append(attention_weights(q, k, mask)[0])

    def matrix(self, keys: int) -> torch.Tensor:
        """The weights of all passes: fp32 [H, queries, keys]. Keys that a pass did not have yet have weight 0."""
        padded = [torch.nn.functional.pad(each, (0, keys - each.shape[2])) for each in self.weights]
        return torch.cat(padded, dim=1)


def attention_weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax of the scores, fp32 [B, H, N, K].

    Args:
        q: [B, N, H, D]. k: [B, K, H, D].
        mask: bool [B or 1, 1, N or 1, K], the visible keys; or fp32 [B, H, N, K], added to the scores. None: all keys.
    """
    scores = torch.einsum("bnhd,bkhd->bhnk", q.float(), k.float()) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def query_tokens(context: Sequence[int], written: Sequence[int]) -> list[QueryToken]:
    """The tokens of a text and then those of its completion, each of which predicts the next one."""
    return [*(QueryToken(token, False) for token in context), *(QueryToken(token, True) for token in written)]
