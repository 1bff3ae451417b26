"""Attention on CPU: a kernel launch for each query range, or one for several short document groups.

Most query ranges need no mask. A masked one runs in blocks of queries, whose small masks are made when they are needed,
in the backward pass again, so memory grows linearly with the length of a document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron_lite.transformer.attention_backends.cpu_groups import (
    LongGroup,
    PaddedGroups,
    Visibility,
    group_inputs,
    select_keys,
)
from megatron_lite.transformer.attention_backends.cpu_kernels import attend_written_out, heads_first
from megatron_lite.transformer.attention_backends.interface import (
    AttentionFunction,
    Packed,
    ScoreBias,
    query_and_key_dropout,
)
from megatron_lite.transformer.attention_backends.layout import BLIND, DocumentGroup, Layout
from megatron_lite.transformer.kernels.dropout import AttentionDropout

# Document groups whose lengths differ by less than SIMILAR_TOKENS are computed in one launch, if each has at most
# SHORT_PRODUCTS products of query and key (tokens^2 x heads x head size). Measured at 1 to 4 million: 1.1 to 2.8 times
# as fast as one launch per group; at 8 to 16 million 0.8 to 0.9 times as fast, since masked pairs cost more than
# launches.
SHORT_PRODUCTS, SIMILAR_TOKENS = 1 << 22, 32


class CpuPlan:
    """The query ranges of document groups, one after another; short groups are computed together.

    Args:
        layout: of the queries, in the order of the groups.
        order: as for HostPlan.
        keys: number of keys, padding included, where they are other tokens than the queries.
        window: of local layers; 0 = none.
    """

    def __init__(
        self,
        layout: Layout,
        groups: list[DocumentGroup],
        order: np.ndarray,
        keys: int | None = None,
        window: int = 0,
    ):
        self.order, self.groups = order, groups
        self.row_length = layout.shape[1]
        self._visibility = Visibility(layout, groups, window)
        # Tokens of each packed input, and how many of q, k and v it holds.
        lengths = [len(order)] if keys is None else [len(order), keys]
        self._packed_shapes = list(zip(lengths, [3] if keys is None else [1, 2], strict=True))
        # Tokens of no group are padding. Every other token is written by exactly one group, so only these need zeros.
        self._gaps = [_gaps([group.spans[i] for group in groups], n) for i, n in enumerate(lengths)]
        self._launches: list[PaddedGroups | LongGroup] | None = None
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def arrays(self) -> list[np.ndarray]:
        return []

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> CpuPlan:
        return self

    def query_key_pairs(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Queries and keys of each query range that has any keys, one group after another: int64 [Q] and [K]."""
        if self._pairs is None:
            self._pairs = []
            for group in self.groups:
                tokens = torch.arange(group.start, group.stop)
                for each in group.query_ranges:
                    if each.mask != BLIND:
                        self._pairs.append((tokens[each.start : each.stop], select_keys(tokens, each, 0)))
        return self._pairs

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        # The fast path keeps no scores. torch has no CPU flash kernel with dropout, and none that returns a bias's
        # gradient: the rest of this method writes attention out under autograd.
        if dropout is None and bias is None:
            return AttentionFunction.apply(self, *inputs)
        biases: Iterator[torch.Tensor | None] = itertools.repeat(None)
        if bias is not None:
            # In the order of `query_key_pairs`, which leaves out blind ranges; `_written_out` takes the next one for
            # each range that it computes.
            pairs = self.query_key_pairs(inputs[0].device)
            biases = (bias(index, *pair) for index, pair in enumerate(pairs))
        out = {
            start: inputs[0].new_zeros(stop - start, *inputs[0].shape[2:]) for start, stop in self._gaps[0]
        }
        for group in self.groups:
            out[group.start] = self._written_out(group, inputs, dropout, biases)
        return torch.cat([out[start] for start in sorted(out)])

    def _written_out(
        self,
        group: DocumentGroup,
        inputs: Packed,
        dropout: AttentionDropout | None,
        biases: Iterator[torch.Tensor | None],
    ) -> torch.Tensor:
        """The output of a group, [tokens, H, D], under autograd. Args: biases: of its query ranges, [H, Q, K]."""
        q, k, v = (heads_first(x) for x in group_inputs(group, inputs))
        out = []
        for each in group.query_ranges:
            queries = q[:, each.start : each.stop]
            if each.mask == BLIND:
                out.append(torch.zeros_like(queries))
                continue
            keep = None
            if dropout is not None:
                query_dropout, key_dropout = query_and_key_dropout(dropout, inputs)
                query_dropout = query_dropout[group.start + each.start : group.start + each.stop]
                key_dropout = select_keys(key_dropout[slice(*group.spans[-1])], each, 0)
                keep = dropout.keep(query_dropout, key_dropout, len(q))
            mask, added = self._visibility.bias_of(group, each, q.dtype, causal=True), next(biases)
            if added is not None:
                mask = added.to(q.dtype) if mask is None else added + mask
            p = 0.0 if dropout is None else dropout.p
            keys, values = select_keys(k, each, 1), select_keys(v, each, 1)
            out.append(attend_written_out(queries, keys, values, mask, keep, p))
        return torch.cat(out, dim=1).transpose(0, 1).to(inputs[0].dtype)

    def launches_of(self, width: int) -> list[PaddedGroups | LongGroup]:
        """Short groups, put together, and the others. Args: width: heads x head size, the same in all layers."""
        # Made at the first layer and kept for all: the choice and the masks depend on the batch only.
        if self._launches is None:
            short: dict[tuple[int, ...], list[DocumentGroup]] = {}
            long = []
            for group in self.groups:
                lengths = tuple(stop - start for start, stop in group.spans)
                if lengths[0] * lengths[-1] * width <= SHORT_PRODUCTS:
                    # Bins of SIMILAR_TOKENS tokens: padding to the longest group of a bin adds fewer than that to each
                    # group.
                    short.setdefault(tuple(-(-n // SIMILAR_TOKENS) for n in lengths), []).append(group)
                else:
                    long.append(LongGroup(group))
            self._launches = [*map(PaddedGroups, short.values()), *long]
        return self._launches

    def forward(self, inputs: Packed) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """See `AttentionKernels`. Saved are q, k, v with the heads first, and the states of the kernels."""
        out = inputs[0].new_empty(len(inputs[0]), *inputs[0].shape[2:])
        for start, stop in self._gaps[0]:
            out[start:stop] = 0.0
        return out, [
            launch.forward(self._visibility, inputs, out) for launch in self.launches_of(out[0].numel())
        ]

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, saved: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        # fp32: a key's gradient is a sum over query ranges.
        wide = torch.promote_types(out.dtype, torch.float32)
        # Uninitialized: groups write their own tokens, and zeros everywhere would be one more pass over q, k and v.
        grads = [torch.empty(*shape, *out.shape[1:], dtype=wide) for shape in self._packed_shapes]
        for packed, gaps in zip(grads, self._gaps, strict=True):
            for start, stop in gaps:
                packed[start:stop] = 0.0
        for launch, tensors in zip(self.launches_of(out[0].numel()), saved, strict=True):
            launch.backward(self._visibility, grad, out, tensors, grads)
        return [packed.to(grad.dtype) for packed in grads]


def _gaps(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The ranges of [0, length) outside of spans."""
    edges = [0, *itertools.chain(*sorted(spans)), length]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
