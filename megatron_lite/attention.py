"""Who may look at whom: one rule over three integer arrays, and the kernel that fits the rule's structure.

Every objective describes its visibility by `doc`, `ord` and `grp` per token (data_utils/objectives/base.py):

    key_time(k)    =  ord[k]  if ord[k] >= 0 else +infinity      (when the content of k is revealed)
    query_bound(q) =  ord[q]  if ord[q] >= 0 else -ord[q] - 1    (up to when q may look)
    allowed(q, k)  =  doc[q] == doc[k] and (key_time(k) <= query_bound(q) or grp[q] == grp[k] != 0)

A plan is made once per batch and serves all layers. Two exist so far:

  PrefixPlan  every document is [ord 0 ... | ord 1, 2, 3, ...] and grp is 0 (GLM, prefix LM, causal, bidirectional):
              two calls per document on disjoint query rows, A x A in full and B x [A;B] causal from the bottom right.
              No mask is stored and no forbidden block is computed.
  DensePlan   anything else, and rows of very short documents, where the calls would cost more than the mask saves.

Padding rows see nothing and get zeros.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from megatron_lite.linear import widens

# Mean document length from which PrefixPlan's calls beat one masked call. CPU: measured by
# benchmarks/attention_plan.py (with 4 heads it breaks even there, with more heads or longer rows earlier).
# CUDA: not measured yet; a kernel's start is worth more work there.
_PREFIX_MIN_MEAN_LENGTH = {"cpu": 16, "cuda": 128}


class AttentionPlan(Protocol):
    """Computes attention for one batch; `layer` is the block's index, for plans that keep state per layer."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        """q, k, v [B, S, H heads, D head dim] -> [B, S, H, D], scaled by D^-1/2."""
        ...


def allowed(doc: torch.Tensor, order: torch.Tensor, grp: torch.Tensor) -> torch.Tensor:
    """The rule as a boolean mask: int [B, S] arrays -> bool [B, S queries, S keys], False everywhere on padding."""
    key_time = torch.where(order >= 0, order, torch.iinfo(order.dtype).max)
    query_bound = torch.where(order >= 0, order, -order - 1)
    same_doc = (doc[:, :, None] == doc[:, None, :]) & (doc >= 0)[:, :, None]
    by_time = key_time[:, None, :] <= query_bound[:, :, None]
    by_group = (grp[:, :, None] == grp[:, None, :]) & (grp != 0)[:, :, None]
    return same_doc & (by_time | by_group)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[..., S, H, D] -> [..., H, S, D]; on CPU a copy, in fp32 where half-precision matmuls are slow."""
    x = x.transpose(-3, -2)
    if x.device.type != "cpu":
        return x
    # torch's CPU kernel is 1.2 to 1.3 times faster when the rows of a head lie side by side.
    if widens(x):
        return x.to(torch.float32, memory_format=torch.contiguous_format)
    return x.contiguous()


def attend_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """[B, Sq, H, D] queries over [B, Sk, H, D] keys and values, all of them or those of `mask` [B, 1, Sq, Sk]."""
    dtype = q.dtype
    q, k, v = (_heads_first(x) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return out.transpose(1, 2).to(dtype)


class DensePlan:
    """One masked call over all rows. Memory: B x S x S booleans."""

    def __init__(self, doc: torch.Tensor, order: torch.Tensor, grp: torch.Tensor):
        mask = allowed(doc, order, grp)
        self.sees_nothing = ~mask.any(-1)
        # A row without any key would be NaN: let it see itself, and zero it afterwards.
        self.mask = (mask | torch.diag_embed(self.sees_nothing)).unsqueeze(1)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        out = attend_all(q, k, v, dropout, self.mask)
        return out.masked_fill(self.sees_nothing[:, :, None, None], 0.0)


@dataclass(frozen=True)
class Segment:
    """One document of the flattened batch, or a stretch of padding (context = -1). Lengths in tokens."""

    length: int
    context: int  # part A: rows with ord 0, seen by the whole document


class PrefixPlan:
    """Two calls per document, no mask in memory."""

    def __init__(self, segments: list[Segment]):
        self.segments = segments
        self.lengths = [segment.length for segment in segments]

    def without_padding(self) -> PrefixPlan:
        """The plan for the same documents in one row [1, T], one after the other."""
        return PrefixPlan([segment for segment in self.segments if segment.context >= 0])

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        dtype, (rows, length, heads, head_dim) = q.dtype, q.shape
        # split, not slices: the backward pass of split is one concatenation, that of a slice a zero-filled full tensor.
        parts = (_heads_first(x.flatten(0, 1)).unsqueeze(0).split(self.lengths, dim=2) for x in (q, k, v))
        each = zip(self.segments, *parts, strict=True)
        out = [self._document(segment, q, k, v, dropout) for segment, q, k, v in each]
        return torch.cat(out, dim=2).transpose(1, 2).to(dtype).reshape(rows, length, heads, head_dim)

    @staticmethod
    def _document(
        segment: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        """[1, H, document, D] tensors."""
        a, n = segment.context, segment.length
        attend = functools.partial(F.scaled_dot_product_attention, dropout_p=dropout)
        if a < 0:
            return torch.zeros_like(q)
        if a == n:
            return attend(q, k, v)
        bias = causal_lower_right(n - a, n)
        if a == 0:
            return attend(q, k, v, bias)
        q_a, q_b = q.split([a, n - a], dim=2)
        return torch.cat([attend(q_a, k[:, :, :a], v[:, :, :a]), attend(q_b, k, v, bias)], dim=2)


def prefix_segments(doc: np.ndarray, order: np.ndarray, grp: np.ndarray) -> list[Segment] | None:
    """The documents of a batch if all have prefix structure, else None. Arrays are int [B, S] on the host."""
    if grp.any() or (order < 0).any():
        return None
    rows, length = doc.shape
    doc, order = doc.reshape(-1), order.reshape(-1)
    starts_row = np.zeros(rows * length, bool)
    starts_row[::length] = True
    begins = np.flatnonzero(starts_row | np.r_[True, doc[1:] != doc[:-1]])
    ends = np.r_[begins[1:], rows * length]
    # Within a document ord must be 0 ... 0, 1, 2, 3, ...: each step is +1, or 0 while still at 0.
    step = np.diff(order)
    good_step = (step == 1) | ((step == 0) & (order[1:] == 0))
    good_step[begins[1:] - 1] = True
    padding = doc < 0
    real = begins[~padding[begins]]
    if not (good_step | padding[1:]).all() or (order[real] > 1).any():
        return None
    if np.unique(np.stack([real // length, doc[real]]), axis=1).shape[1] != len(real):
        return None  # a document in several stretches
    contexts = np.add.reduceat((order == 0).astype(np.int64), begins)
    contexts[padding[begins]] = -1
    return [Segment(int(e - b), int(c)) for b, e, c in zip(begins, ends, contexts, strict=True)]


def plan_attention(
    doc: np.ndarray, order: np.ndarray, grp: np.ndarray, device: torch.device, kernel: str = "auto"
) -> AttentionPlan:
    """Choose the kernel for a batch.

    Args:
        doc, order, grp: int32 [B, S] on the host.
        kernel: "auto", "prefix" (error if the structure does not allow it) or "dense".
    """
    segments = prefix_segments(doc, order, grp) if kernel != "dense" else None
    if kernel == "prefix":
        assert segments is not None, "the batch has no prefix structure"
    if segments is not None:
        documents = sum(segment.context >= 0 for segment in segments)
        if kernel == "prefix" or doc.size >= documents * _PREFIX_MIN_MEAN_LENGTH[device.type]:
            return PrefixPlan(segments)
    return DensePlan(*(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (doc, order, grp)))
