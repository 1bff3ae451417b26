"""Document groups on CPU: those of similar length in one launch, or each query range of one group by itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from megatron_lite.transformer.attention_backends.cpu_kernels import (
    CPU_KERNELS,
    CpuKernel,
    choose_cpu_kernel,
    heads_first,
)
from megatron_lite.transformer.attention_backends.interface import Packed
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


class Visibility:
    """The attention rule `may_see` on the tokens of a layout, without the comparisons that its groups do not need."""

    def __init__(self, layout: Layout, groups: Sequence[DocumentGroup], window: int):
        document = layout.document
        self._columns = torch.from_numpy(layout.columns)
        self._window = window
        self._joins_documents = any(document[each.start] != document[each.stop - 1] for each in groups)
        self._has_private_groups = bool(layout.grp.any())

    def bias_of(
        self, group: DocumentGroup, query_range: QueryRange, dtype: torch.dtype, *, causal: bool = False
    ) -> torch.Tensor | None:
        """The mask of a query range as a score bias: [Q, K], 0 or -infinity; None where there is no mask.

        Args: causal: also for causal ranges, whose mask the kernels have themselves.
        """
        if query_range.mask != MASKED and not (causal and query_range.mask == CAUSAL):
            return None
        columns = self._columns[:, group.start : group.stop]
        queries = columns[:, query_range.start : query_range.stop, None]
        return as_bias(self._may_see(queries, select_keys(columns, query_range, 1)[:, None]), dtype)

    def of_padded(self, tokens: PaddedRanges) -> torch.Tensor:
        """Which tokens of each padded range see which of the same range: bool [ranges, tokens, tokens]."""
        columns, is_real = self._columns[:, tokens.index], tokens.is_real
        seen = self._may_see(columns[..., None], columns[..., None, :])
        return seen & is_real[..., None] & is_real[:, None]

    def _may_see(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return may_see(
            query,
            key,
            has_private_groups=self._has_private_groups,
            joins_documents=self._joins_documents,
            window=self._window,
        )


def as_bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a key is seen, else -infinity."""
    return torch.full(seen.shape, float("-inf"), dtype=dtype).masked_fill_(seen, 0.0)


def group_inputs(group: DocumentGroup, inputs: Packed) -> list[torch.Tensor]:
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

    def mask(self, visibility: Visibility, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The mask as a score bias, [groups, 1, queries, keys] or None, and which queries see any key.

        Made once for all layers: a few numbers for each token, since groups are short.
        """
        if self._mask is None:
            bias, sees = None, self._queries.is_real
            if self._mask_type == FULL and not self._keys.is_even:
                bias = as_bias(self._keys.is_real, dtype)[:, None, None].expand(-1, 1, sees.shape[1], -1)
            elif self._mask_type == MASKED:
                seen = visibility.of_padded(self._queries)
                sees = seen.any(-1)
                # The softmax of no keys would be NaN: such a query sees all, its output and its gradient are zeroed.
                bias = as_bias(seen | ~sees[..., None], dtype).unsqueeze(1)
            self._mask = bias, sees
        return self._mask

    def forward(self, visibility: Visibility, inputs: Packed, out: torch.Tensor) -> list[torch.Tensor]:
        """Write the output of the groups to their tokens of `out`. Returns what the backward pass needs."""
        heads = [ranges.heads_first(x) for ranges, x in zip(self._ranges, inputs, strict=True)]
        q, k, v = itertools.chain(*heads)
        bias, sees = self.mask(visibility, q.dtype)
        attended, state = flash_forward_on_cpu(q, k, v, 0.0, self._mask_type == CAUSAL, attn_mask=bias)
        if self._mask_type == MASKED:
            attended = attended.masked_fill(~sees[:, None, :, None], 0.0)
        self._queries.write([attended], out[:, None])
        return [*heads, state]

    def backward(
        self,
        visibility: Visibility,
        grad: torch.Tensor,
        out: torch.Tensor,
        saved: Sequence[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> None:
        """Write the gradients of q, k and v to their tokens of `grads`, those of the packed inputs."""
        *heads, state = saved
        q, k, v = itertools.chain(*heads)
        bias, sees = self.mask(visibility, q.dtype)
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
        self._ranges = [each for each in group.query_ranges if each.mask != BLIND]
        self._blind = [slice(each.start, each.stop) for each in group.query_ranges if each.mask == BLIND]

    def forward(self, visibility: Visibility, inputs: Packed, out: torch.Tensor) -> list[torch.Tensor]:
        """Write the output of the group to its tokens of `out`. Returns what the backward pass needs."""
        heads = [heads_first(x).unsqueeze(0) for x in group_inputs(self.group, inputs)]
        out, states = out[self.group.start : self.group.stop], []
        for blind in self._blind:
            out[blind] = 0.0
        for each in self._ranges:
            operands, bias = self._operands(visibility, each, heads)
            attended, state = _kernel(operands, each).forward(*operands, each.mask == CAUSAL, bias)
            out[each.start : each.stop] = attended[0].transpose(0, 1)
            states.append(state)
        return [*heads, *states]

    def backward(
        self,
        visibility: Visibility,
        grad: torch.Tensor,
        out: torch.Tensor,
        saved: Sequence[torch.Tensor],
        grads: list[torch.Tensor],
    ) -> None:
        """Write the gradients of q, k and v to their tokens of `grads`, those of the packed inputs."""
        heads, states = saved[:3], saved[3:]
        grad, out = (x[self.group.start : self.group.stop] for x in (grad, out))
        grad_q, *grad_kv = group_inputs(self.group, grads)
        for blind in self._blind:
            grad_q[blind] = 0.0
        for total in grad_kv:
            total.zero_()
        # Backwards: the last range has most keys, so the sums of rounded numbers begin with it.
        for each, state in zip(reversed(self._ranges), reversed(states), strict=True):
            operands, bias = self._operands(visibility, each, heads)
            range_grad, range_out = (
                x[each.start : each.stop].to(operands[0].dtype).transpose(0, 1).unsqueeze(0)
                for x in (grad, out)
            )
            range_grads = _kernel(operands, each).backward(
                range_grad, *operands, range_out, state, each.mask == CAUSAL, bias
            )
            of_queries, *of_keys = (x[0].transpose(0, 1) for x in range_grads)
            grad_q[each.start : each.stop] = of_queries
            for total, added in zip(grad_kv, of_keys, strict=True):
                parts = added.split([stop - start for start, stop in each.keys])
                for (start, stop), part in zip(each.keys, parts, strict=True):
                    total[start:stop] += part

    def _operands(
        self, visibility: Visibility, query_range: QueryRange, heads: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]:
        """q, k and v of a query range, [1, H, tokens, D], and its mask as a bias. Args: heads: the group's."""
        q, k, v = heads
        operands = (
            q[:, :, query_range.start : query_range.stop],
            select_keys(k, query_range, 2),
            select_keys(v, query_range, 2),
        )
        return operands, visibility.bias_of(self.group, query_range, q.dtype)


def _kernel(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], query_range: QueryRange
) -> type[CpuKernel]:
    """The kernel of a query range. Args: operands: its q, k, v [1, H, tokens, D]."""
    q, k, _ = operands
    return CPU_KERNELS[choose_cpu_kernel(q.dtype, q.shape[2], k.shape[2], is_full=query_range.mask == FULL)]
