"""Attention on CPU: a kernel launch for each query range, or one for several short document groups.

Most query ranges need no mask. A masked one runs in blocks of queries, whose small masks are made when they are needed,
in the backward pass again, so memory grows linearly with the length of a document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron_lite.transformer.attention_backends.cpu_kernels import (
    CPU_KERNELS,
    CpuKernel,
    attend_written_out,
    choose_cpu_kernel,
    heads_first,
)
from megatron_lite.transformer.attention_backends.interface import (
    AttentionFunction,
    Packed,
    ScoreBias,
    query_and_key_dropout,
)
from megatron_lite.transformer.attention_backends.layout import (
    BLIND,
    CAUSAL,
    FULL,
    MASKED,
    DocumentGroup,
    Layout,
    QueryRange,
    may_see,
)
from megatron_lite.transformer.kernels.compat import flash_backward_on_cpu, flash_forward_on_cpu
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
        self.order, self.groups, self._window = order, groups, window
        self.row_length = layout.shape[1]
        self._joins_documents = any(
            layout.document[group.start] != layout.document[group.stop - 1] for group in groups
        )
        self._has_private_groups = bool(layout.grp.any())
        self._columns = torch.from_numpy(layout.columns)
        # Tokens of each packed input, and how many of q, k and v it holds.
        lengths = [len(order)] if keys is None else [len(order), keys]
        self._packed_shapes = list(zip(lengths, [3] if keys is None else [1, 2], strict=True))
        # Tokens of no group are padding. Every other token is written by exactly one group, so only these need zeros.
        self._gaps = [_gaps([group.spans[i] for group in groups], n) for i, n in enumerate(lengths)]
        self._works: list[PaddedGroups | LongGroup] | None = None
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
        q, k, v = (heads_first(x) for x in _group_inputs(group, inputs))
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
            mask, added = self.mask_bias(group, each, q.dtype, causal=True), next(biases)
            if added is not None:
                mask = added.to(q.dtype) if mask is None else added + mask
            p = 0.0 if dropout is None else dropout.p
            keys, values = select_keys(k, each, 1), select_keys(v, each, 1)
            out.append(attend_written_out(queries, keys, values, mask, keep, p))
        return torch.cat(out, dim=1).transpose(0, 1).to(inputs[0].dtype)

    def mask_bias(
        self, group: DocumentGroup, query_range: QueryRange, dtype: torch.dtype, *, causal: bool = False
    ) -> torch.Tensor | None:
        """The mask of a query range as a score bias: [Q, K], 0 or -infinity; None where there is no mask.

        Args: causal: also for causal ranges, whose mask the kernels have themselves.
        """
        if query_range.mask != MASKED and not (causal and query_range.mask == CAUSAL):
            return None
        columns = self._columns[:, group.start : group.stop]
        queries = columns[:, query_range.start : query_range.stop, None]
        return _as_bias(self._may_see(queries, select_keys(columns, query_range, 1)[:, None]), dtype)

    def _may_see(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return may_see(
            query,
            key,
            has_private_groups=self._has_private_groups,
            joins_documents=self._joins_documents,
            window=self._window,
        )

    def seen_by_groups(self, tokens: PaddedRanges) -> torch.Tensor:
        """Which keys the queries of padded groups see: bool [groups, tokens, tokens]."""
        columns, is_real = self._columns[:, tokens.index], tokens.is_real
        seen = self._may_see(columns[..., None], columns[..., None, :])
        return seen & is_real[..., None] & is_real[:, None]

    def works(self, width: int) -> list[PaddedGroups | LongGroup]:
        """Short groups, put together, and the others. Args: width: heads x head size, the same in all layers."""
        # Made at the first layer and kept for all: the choice and the masks depend on the batch only.
        if self._works is None:
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
            self._works = [*map(PaddedGroups, short.values()), *long]
        return self._works

    def forward(self, inputs: Packed) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """See `AttentionKernels`. Saved are q, k, v with the heads first, and the states of the kernels."""
        out = inputs[0].new_empty(len(inputs[0]), *inputs[0].shape[2:])
        for start, stop in self._gaps[0]:
            out[start:stop] = 0.0
        return out, [work.forward(self, inputs, out) for work in self.works(out[0].numel())]

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, saved: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        # fp32: a key's gradient is a sum over query ranges.
        wide = torch.promote_types(out.dtype, torch.float32)
        # Uninitialised: groups write their own tokens, and zeros everywhere would be one more pass over q, k and v.
        grads = [torch.empty(*shape, *out.shape[1:], dtype=wide) for shape in self._packed_shapes]
        for packed, gaps in zip(grads, self._gaps, strict=True):
            for start, stop in gaps:
                packed[start:stop] = 0.0
        for work, tensors in zip(self.works(out[0].numel()), saved, strict=True):
            work.backward(self, grad, out, tensors, grads)
        return [packed.to(grad.dtype) for packed in grads]


def _gaps(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The ranges of [0, length) outside of spans."""
    edges = [0, *itertools.chain(*sorted(spans)), length]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _as_bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(seen.shape, float("-inf"), dtype=dtype).masked_fill_(seen, 0.0)


def _group_inputs(group: DocumentGroup, inputs: Packed) -> list[torch.Tensor]:
    """Views of a group's queries, keys and values, [tokens, H, D] each."""
    spans = zip(inputs, group.spans, strict=True)
    return [x for packed, (start, stop) in spans for x in packed[start:stop].unbind(1)]


def select_keys(x: torch.Tensor, query_range: QueryRange, dim: int) -> torch.Tensor:
    """The keys of a query range. Args: x: the keys of its group, along `dim`."""
    selected = [x.narrow(dim, start, stop - start) for start, stop in query_range.keys]
    return selected[0] if len(selected) == 1 else torch.cat(selected, dim)


class PaddedRanges:
    """Token ranges of similar length, each padded to the longest, so that one launch serves them all.

    Args: starts, lengths: int64 [ranges], in the order of the plan.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray):
        columns = np.arange(lengths.max())
        is_real = columns < lengths[:, None]
        # int64 [ranges, tokens], in the order of the plan; padding repeats the first token of the range.
        self.index = torch.from_numpy(starts[:, None] + np.where(is_real, columns, 0))
        self.is_real, self.is_even = torch.from_numpy(is_real), bool(is_real.all())
        self._real = torch.from_numpy(np.flatnonzero(is_real))  # int64 [real tokens], of ranges x tokens
        self._real_index = self.index.flatten()[self._real]  # the same in the order of the plan

    def heads_first(self, x: torch.Tensor) -> torch.Tensor:
        """[T, n, H, D] -> [n, ranges, H, tokens, D], a copy in fp32 or wider."""
        x = x.flatten(1).index_select(0, self.index.flatten()).view(*self.index.shape, *x.shape[1:])
        # fp32: torch's bf16 kernel takes up to six times as long in the backward pass of short sequences
        # (cpu_kernels.py).
        x = x.permute(2, 0, 3, 1, 4)
        return x.to(torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format)

    def write(self, tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Write n tensors [ranges, H, tokens, D] to their tokens of [T, n, H, D]."""
        x = torch.stack([tensor.transpose(1, 2) for tensor in tensors], dim=2).flatten(0, 1).flatten(1)
        # Copied, not added: each token belongs to one group, and padding is left out.
        into.flatten(1).index_copy_(0, self._real_index, x.index_select(0, self._real).to(into.dtype))


class PaddedGroups:
    """Document groups of similar length in one launch instead of several for each. Padding sees nothing.

    A launch on a hundred tokens costs more to prepare than to compute.
    """

    def __init__(self, groups: Sequence[DocumentGroup]):
        spans = [np.array(each).T for each in zip(*(group.spans for group in groups), strict=True)]
        self._ranges = [PaddedRanges(start, stop - start) for start, stop in spans]  # of each packed input
        self._queries, self._keys = self._ranges[0], self._ranges[-1]
        masks = {_group_mask(group) for group in groups}
        is_one = len(masks) == 1 and (self._keys.is_even or CAUSAL not in masks)
        self._mask_type = masks.pop() if is_one else MASKED
        self._mask: tuple[torch.Tensor | None, torch.Tensor] | None = None

    def mask(self, plan: CpuPlan, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The mask as a score bias, [groups, 1, queries, keys] or None, and which queries see any key.

        Made once for all layers: a few numbers for each token, since groups are short.
        """
        if self._mask is None:
            bias, sees = None, self._queries.is_real
            if self._mask_type == FULL and not self._keys.is_even:
                bias = _as_bias(self._keys.is_real, dtype)[:, None, None].expand(-1, 1, sees.shape[1], -1)
            elif self._mask_type == MASKED:
                seen = plan.seen_by_groups(self._queries)
                sees = seen.any(-1)
                # The softmax of no keys would be NaN: such a query sees all, its output and its gradient are zeroed.
                bias = _as_bias(seen | ~sees[..., None], dtype).unsqueeze(1)
            self._mask = bias, sees
        return self._mask

    def forward(self, plan: CpuPlan, inputs: Packed, out: torch.Tensor) -> list[torch.Tensor]:
        """Write the output of the groups to their tokens of `out`. Returns what the backward pass needs."""
        heads = [ranges.heads_first(x) for ranges, x in zip(self._ranges, inputs, strict=True)]
        q, k, v = itertools.chain(*heads)
        bias, sees = self.mask(plan, q.dtype)
        attended, state = flash_forward_on_cpu(q, k, v, 0.0, self._mask_type == CAUSAL, attn_mask=bias)
        if self._mask_type == MASKED:
            attended = attended.masked_fill(~sees[:, None, :, None], 0.0)
        self._queries.write([attended], out[:, None])
        return [*heads, state]

    def backward(
        self,
        plan: CpuPlan,
        grad: torch.Tensor,
        out: torch.Tensor,
        saved: Sequence[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> None:
        """Write the gradients of q, k and v to their tokens of `grads`, those of the packed inputs."""
        *heads, state = saved
        q, k, v = itertools.chain(*heads)
        bias, sees = self.mask(plan, q.dtype)
        grad, out = (self._queries.heads_first(x[:, None])[0] for x in (grad, out))
        # Padding among the queries repeats a real token: without this, that token's gradient would reach the keys
        # twice.
        grad.masked_fill_(~sees[:, None, :, None], 0.0)
        is_causal = self._mask_type == CAUSAL
        grads_qkv = iter(flash_backward_on_cpu(grad, q, k, v, out, state, 0.0, is_causal, attn_mask=bias))
        for ranges, packed in zip(self._ranges, grads, strict=True):
            ranges.write(list(itertools.islice(grads_qkv, packed.shape[1])), packed)


def _group_mask(group: DocumentGroup) -> int:
    """FULL or CAUSAL for one such range of all queries on all keys, else MASKED."""
    (first, *others), (start, stop) = group.query_ranges, group.spans[-1]
    return MASKED if others or first.keys != ((0, stop - start),) else first.mask


class LongGroup:
    """A document group whose query ranges are computed one after another.

    Their masks are made again in the backward pass.
    """

    def __init__(self, group: DocumentGroup):
        self.group = group

    def forward(self, plan: CpuPlan, inputs: Packed, out: torch.Tensor) -> list[torch.Tensor]:
        """Write the output of the group to its tokens of `out`. Returns what the backward pass needs."""
        q, k, v = heads = [heads_first(x).unsqueeze(0) for x in _group_inputs(self.group, inputs)]
        out, states = out[self.group.start : self.group.stop], []
        for each in self.group.query_ranges:
            if each.mask == BLIND:
                out[each.start : each.stop] = 0.0
                continue
            operands = q[:, :, each.start : each.stop], select_keys(k, each, 2), select_keys(v, each, 2)
            bias = plan.mask_bias(self.group, each, q.dtype)
            attended, state = _kernel(operands, each).forward(*operands, each.mask == CAUSAL, bias)
            out[each.start : each.stop] = attended[0].transpose(0, 1)
            states.append(state)
        return [*heads, *states]

    def backward(
        self,
        plan: CpuPlan,
        grad: torch.Tensor,
        out: torch.Tensor,
        saved: Sequence[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> None:
        """Write the gradients of q, k and v to their tokens of `grads`, those of the packed inputs."""
        group, states = self.group, list(saved[3:])
        q, k, v = saved[:3]
        grad, out = (x[group.start : group.stop] for x in (grad, out))
        grad_q, *grad_kv = _group_inputs(group, grads)
        is_first = True
        # The last range has most keys: their gradients are written, and those of the other ranges added.
        for each in reversed(group.query_ranges):
            queries = slice(each.start, each.stop)
            # The first range processed writes with `=`; keys that it does not cover must be zero before others are
            # added.
            if is_first and each.keys != ((0, len(grad_kv[0])),):
                for total in grad_kv:
                    total.zero_()
            if each.mask == BLIND:
                grad_q[queries] = 0.0
            else:
                operands = q[:, :, queries], select_keys(k, each, 2), select_keys(v, each, 2)
                bias = plan.mask_bias(group, each, q.dtype)
                range_grad, range_out = (
                    x[queries].to(q.dtype).transpose(0, 1).unsqueeze(0) for x in (grad, out)
                )
                range_grads = _kernel(operands, each).backward(
                    range_grad, *operands, range_out, states.pop(), each.mask == CAUSAL, bias
                )
                grad_q[queries] = range_grads[0][0].transpose(0, 1)
                for total, added in zip(grad_kv, range_grads[1:], strict=True):
                    _add_key_grads(total, added[0].transpose(0, 1), each, is_first)
            is_first = False


def _kernel(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], query_range: QueryRange
) -> type[CpuKernel]:
    """The kernel of a query range. Args: operands: its q, k, v [1, H, tokens, D]."""
    q, k, _ = operands
    return CPU_KERNELS[choose_cpu_kernel(q.dtype, q.shape[2], k.shape[2], is_full=query_range.mask == FULL)]


def _add_key_grads(total: torch.Tensor, grads: torch.Tensor, query_range: QueryRange, is_first: bool) -> None:
    """Add the gradients of a query range's keys, [keys, H, D], to those of its group; the first range writes them."""
    taken = 0
    for start, stop in query_range.keys:
        added = grads[taken : taken + stop - start]
        if is_first:
            total[start:stop].copy_(added)
        else:
            total[start:stop].add_(added)
        taken += stop - start
