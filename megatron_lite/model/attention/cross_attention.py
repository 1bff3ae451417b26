"""Attention of a model with an encoder and a decoder: three plans from the layout of a batch.

A token is the decoder's if its `ord` is above 0. The rule of layout.py, restricted to pairs of parts, is the three
attentions: encoder x encoder and decoder x decoder are plans of plan.py on a part of the layout. Of the encoder a
decoder's token sees what is content (`ord` 0), and all of it, which is one stretch: so cross-attention is a full
rectangle for each document, without a mask. MASS's hidden fragment has `ord` -1 and lies outside of it.

  CrossCalls    CPU: a kernel call for each document. Short ones of similar size share one.
  CrossVarlen   CUDA: one call of a fused kernel for the whole batch (varlen.py).
  CrossDense    the reference: one masked call, B x S x S booleans.

Shapes: Te, Td rows of encoder and decoder, padding included; H heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from megatron_lite.model.attention.cpu_kernels import (
    KERNELS,
    Flash,
    Kernel,
    attend_written_out,
    choose,
    heads_first,
)
from megatron_lite.model.attention.dense import DenseMask, columns_in_place, seen_pairs
from megatron_lite.model.attention.layout import Layout
from megatron_lite.model.attention.plan import (
    SHORT_PRODUCTS,
    SIMILAR_ROWS,
    HostPlan,
    PaddedRows,
    plan_attention,
)
from megatron_lite.model.attention.varlen import VarlenCall
from megatron_lite.model.kernels.compat import varlen_kernel
from megatron_lite.model.kernels.dropout import AttentionDropout


class CrossPlan(Protocol):
    """Cross-attention of one batch, on the host as on the device."""

    def arrays(self) -> list[np.ndarray]:
        """int32 arrays that the plan needs on the device."""
        ...

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> CrossPlan:
        """The plan, from its arrays on the device."""
        ...

    def attend(
        self, layer: int, q: torch.Tensor, key_value: torch.Tensor, dropout: AttentionDropout | None
    ) -> torch.Tensor:
        """q [Td, H, D], key_value [Te, 2, H, D] -> [Td, H, D]; dropout has the keys of encoder and decoder rows."""
        ...


@dataclass(frozen=True)
class PartsPlan:
    """The plans of both parts of a batch, whose tokens are the encoder's rows and then the decoder's."""

    encoder: Any  # HostPlan, on the device AttentionPlan
    decoder: Any
    cross: CrossPlan
    lengths: tuple[int, int]  # Te, Td
    order: np.ndarray  # int64 [Te + Td], as for HostPlan

    @property
    def _parts(self) -> tuple[Any, Any, Any]:
        return self.encoder, self.decoder, self.cross

    def arrays(self) -> list[np.ndarray]:
        return [array for part in self._parts for array in part.arrays()]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> PartsPlan:
        rest = iter(arrays)
        sent = [
            part.on_device(list(itertools.islice(rest, len(part.arrays()))), device) for part in self._parts
        ]
        return replace(self, encoder=sent[0], decoder=sent[1], cross=sent[2])


def plan_parts(
    layout: Layout,
    device: torch.device,
    kernel: str = "auto",
    multiple: int = 1,
    length: int | None = None,
    has_cross: bool = True,
) -> PartsPlan:
    """Choose the kernels of a batch for encoder and decoder, and lay out the tokens of both.

    Args:
        kernel, multiple: as for `plan_attention`, for each part.
        length: Te + Td; None = as many as there are, and padding. At least those of `constant_length`.
        has_cross: whether the decoder attends to the encoder's rows.
    """
    of_encoder, of_decoder = layout.parts
    encoder = plan_attention(of_encoder, device, kernel, multiple)
    if length is not None:
        multiple = length - len(encoder.order)
    decoder = plan_attention(of_decoder, device, kernel, multiple)
    return PartsPlan(
        encoder,
        decoder,
        _plan_cross(layout, encoder, decoder, device, kernel) if has_cross else NoCross(),
        (len(encoder.order), len(decoder.order)),
        np.concatenate([encoder.order, decoder.order]),
    )


def constant_length(places: int, multiple: int) -> int:
    """Rows Te + Td that suffice for any batch of `places` tokens, each part padded to a multiple and never empty."""
    return (-(-places // multiple) + 1) * multiple


def _plan_cross(
    layout: Layout, encoder: HostPlan, decoder: HostPlan, device: torch.device, kernel: str
) -> CrossPlan:
    if kernel == "dense":
        return CrossDense(layout)
    found = rectangles(layout, decoder.order, encoder.order)
    if kernel == "calls" or (kernel == "auto" and device.type == "cpu"):
        return CrossCalls(found)
    return CrossVarlen(found, decoder.order, len(encoder.order))


@dataclass(frozen=True)
class Rectangle:
    """Queries [start, stop) of the decoder's rows, each of which sees [key_start, key_stop) of the encoder's."""

    start: int
    stop: int
    key_start: int
    key_stop: int


def rectangles(layout: Layout, queries: np.ndarray, keys: np.ndarray) -> list[Rectangle]:
    """Ranges of encoder keys that ranges of decoder queries see, in the order of the queries; empty ones are left out.

    Args: queries, keys: the orders of the parts' plans.
    """
    places = layout.shape[0] * layout.shape[1]
    document = np.full(places + 1, -1, np.int64)  # the last place is padding's, index -1
    document[layout.rows] = layout.document
    of_queries = document[queries]
    document[layout.rows[layout.key_time != 0]] = -1
    of_keys = {number: (start, stop) for start, stop, number in _stretches(document[keys])}
    assert len(of_keys) == sum(1 for _ in _stretches(document[keys])), "a document's content is one stretch"
    return [
        Rectangle(start, stop, *of_keys[number])
        for start, stop, number in _stretches(of_queries)
        if number in of_keys
    ]


def _stretches(document: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Start, stop and number of the stretches of one document; padding has numbers below 0."""
    begins = np.flatnonzero(np.r_[len(document) > 0, np.diff(document) != 0])
    ends = np.r_[begins[1:], len(document)]
    for start, stop, number in zip(begins.tolist(), ends.tolist(), document[begins].tolist(), strict=True):
        if number >= 0:
            yield start, stop, number


class NoCross:
    """Placeholder for models of two stacks without cross-attention (OPTIMUS)."""

    def arrays(self) -> list[np.ndarray]:
        return []

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> NoCross:
        return self

    def attend(
        self, layer: int, q: torch.Tensor, key_value: torch.Tensor, dropout: AttentionDropout | None
    ) -> torch.Tensor:
        raise AssertionError("neither stack has cross-attention")


class CrossDense:
    """One masked call over all tokens: the reference. Both parts have the rows of the whole batch."""

    _masked: DenseMask

    def __init__(self, layout: Layout):
        is_target = np.zeros(layout.shape[0] * layout.shape[1], np.int32)
        is_target[layout.rows[layout.is_target]] = 1
        self.columns = np.concatenate([columns_in_place(layout), is_target.reshape(1, *layout.shape)])

    def arrays(self) -> list[np.ndarray]:
        return [self.columns]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> CrossDense:
        (columns,) = arrays
        is_target = columns[4] != 0
        seen = seen_pairs(columns[:4])
        self._masked = DenseMask(seen & is_target[..., None] & ~is_target[..., None, :])
        return self

    def attend(
        self, layer: int, q: torch.Tensor, key_value: torch.Tensor, dropout: AttentionDropout | None
    ) -> torch.Tensor:
        of_keys, of_queries = _token_keys(q, key_value, dropout)
        k, v = key_value.unbind(1)
        return self._masked.attend(q, k, v, dropout, of_queries, of_keys)


def _token_keys(
    q: torch.Tensor, key_value: torch.Tensor, dropout: AttentionDropout | None
) -> Sequence[torch.Tensor]:
    """For dropout: of the encoder's rows, of the decoder's."""
    return (q[:0], q[:0]) if dropout is None else dropout.keys.split([len(key_value), len(q)])


class CrossGroup:
    """Documents of similar sizes, each filled up to the largest, in one call."""

    def __init__(self, members: Sequence[Rectangle]):
        start, stop, key_start, key_stop = np.array(
            [(m.start, m.stop, m.key_start, m.key_stop) for m in members]
        ).T
        self.queries = PaddedRows(start, stop - start)
        self.keys = PaddedRows(key_start, key_stop - key_start)

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Score bias that hides padding keys, [documents, 1, queries, keys]: 0 or -infinity; None: there are none."""
        is_real = self.keys.is_real
        if is_real.all():
            return None
        bias = torch.full(is_real.shape, float("-inf"), dtype=dtype).masked_fill_(is_real, 0.0)
        return bias[:, None, None].expand(-1, 1, self.queries.place.shape[1], -1)


class CrossCalls:
    """A kernel call for each document, on CPU; short documents are computed in groups."""

    def __init__(self, found: list[Rectangle]):
        self.rectangles = found
        self._parts: tuple[list[CrossGroup], list[Rectangle]] | None = None

    def arrays(self) -> list[np.ndarray]:
        return []

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> CrossCalls:
        return self

    def attend(
        self, layer: int, q: torch.Tensor, key_value: torch.Tensor, dropout: AttentionDropout | None
    ) -> torch.Tensor:
        if dropout is None:
            return _CrossOnCpu.apply(q, key_value, self)
        out = torch.zeros_like(q)
        if not self.rectangles:
            return out
        of_keys, of_queries = _token_keys(q, key_value, dropout)
        parts, rows = [], []
        for each in self.rectangles:
            queries, keys = slice(each.start, each.stop), slice(each.key_start, each.key_stop)
            k, v = (heads_first(x) for x in key_value[keys].unbind(1))
            stays = dropout.keep(of_queries[queries], of_keys[keys], q.shape[1])
            part = attend_written_out(heads_first(q[queries]), k, v, None, stays, dropout.p)
            parts.append(part.transpose(0, 1).to(q.dtype))
            rows.append(torch.arange(each.start, each.stop))
        return out.index_copy(0, torch.cat(rows), torch.cat(parts))

    def parts(self, width: int) -> tuple[list[CrossGroup], list[Rectangle]]:
        """Groups of short documents, and the other ones. Args: width: heads x head size, the same at each call."""
        if self._parts is None:
            groups: dict[tuple[int, int], list[Rectangle]] = {}
            long = []
            for each in self.rectangles:
                sizes = each.stop - each.start, each.key_stop - each.key_start
                if sizes[0] * sizes[1] * width <= SHORT_PRODUCTS:
                    groups.setdefault(
                        (-(-sizes[0] // SIMILAR_ROWS), -(-sizes[1] // SIMILAR_ROWS)), []
                    ).append(each)
                else:
                    long.append(each)
            self._parts = [CrossGroup(members) for members in groups.values()], long
        return self._parts


class _CrossOnCpu(torch.autograd.Function):
    """All calls of a plan as one autograd node, which saves as `attention._CallsOnCpu` does."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, key_value: torch.Tensor, plan: CrossCalls) -> torch.Tensor:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        saved = [out]
        groups, long = plan.parts(q[0].numel())
        for group in groups:
            (queries,), keys = group.queries.heads_first(q[:, None]), group.keys.heads_first(key_value)
            part, state = Flash.forward(queries, keys[0], keys[1], False, group.bias(queries.dtype))
            group.queries.put([part], out[:, None])
            saved += [queries, keys, state]
        for each in long:
            rows, kernel = slice(each.start, each.stop), _kernel(each, q)
            heads = [heads_first(x)[None] for x in (q[rows], *_keys_of(each, key_value).unbind(1))]
            part, state = kernel.forward(heads[0], heads[1], heads[2], False, None)
            out[rows] = part[0].transpose(0, 1)
            saved += [*heads, state]
        ctx.plan, ctx.keys = plan, len(key_value)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        out, *rest = ctx.saved_tensors
        saved = iter(rest)
        of_queries = torch.zeros_like(out)
        of_keys = out.new_zeros(ctx.keys, 2, *out.shape[1:])
        groups, long = ctx.plan.parts(out[0].numel())
        for group in groups:
            queries, keys, state = (next(saved) for _ in range(3))
            given, outs = (group.queries.heads_first(x[:, None])[0] for x in (grad, out))
            given.masked_fill_(~group.queries.is_real[:, None, :, None], 0.0)
            bias = group.bias(queries.dtype)
            grads = Flash.backward(given, queries, keys[0], keys[1], outs, state, False, bias)
            group.queries.put(grads[:1], of_queries[:, None])
            group.keys.put(grads[1:], of_keys)
        for each in long:
            heads, state = [next(saved) for _ in range(3)], next(saved)
            rows = slice(each.start, each.stop)
            given, outs = (x[rows].to(heads[0].dtype).transpose(0, 1)[None] for x in (grad, out))
            q, k, v = heads
            grads = [
                x[0].transpose(0, 1)
                for x in _kernel(each, out).backward(given, q, k, v, outs, state, False, None)
            ]
            of_queries[rows] = grads[0]
            _keys_of(each, of_keys).copy_(torch.stack(grads[1:], dim=1))
        return of_queries, of_keys, None


def _keys_of(each: Rectangle, x: torch.Tensor) -> torch.Tensor:
    return x[each.key_start : each.key_stop]


def _kernel(each: Rectangle, q: torch.Tensor) -> type[Kernel]:
    sizes = each.stop - each.start, each.key_stop - each.key_start
    return KERNELS[choose(q.dtype, *sizes, is_full=True)]


class CrossVarlen:
    """One call of CUDA's fused kernel: the queries of each document with its keys.

    The call takes every row of the decoder, so those that see nothing go with the document before them. Tokens among
    them get zeros afterwards. Padding keeps what it gets: no token reads it, so no gradient comes from it.

    Args: order: of the decoder's plan. keys: Te.
    """

    def __init__(self, found: list[Rectangle], order: np.ndarray, keys: int):
        queries = len(order)
        is_blind = order >= 0
        for each in found:
            is_blind[each.start : each.stop] = False
        self.blind: Any = np.flatnonzero(is_blind).astype(np.int32)
        found = found or [Rectangle(0, queries, 0, keys)]
        gathered = np.concatenate(
            [np.arange(each.key_start, each.key_stop, dtype=np.int32) for each in found]
        )
        is_slice = (np.diff(gathered) == 1).all()
        ends = np.array([0, *(each.start for each in found[1:]), queries], np.int32)
        key_lengths = np.array([each.key_stop - each.key_start for each in found])
        self.call = VarlenCall(
            False,
            slice(0, queries),
            slice(int(gathered[0]), int(gathered[-1]) + 1) if is_slice else None,
            gathered[:0] if is_slice else gathered,
            gathered[:0],
            ends,
            np.r_[0, np.cumsum(key_lengths)].astype(np.int32),
            int(np.diff(ends).max()),
            int(key_lengths.max()),
        )

    def arrays(self) -> list[np.ndarray]:
        return [self.blind, self.call.gathered, self.call.query_ends, self.call.key_ends]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> CrossVarlen:
        blind, gathered, query_ends, key_ends = arrays
        self.blind = blind.long()
        self.call = replace(self.call, gathered=gathered, query_ends=query_ends, key_ends=key_ends)
        return self

    def attend(
        self, layer: int, q: torch.Tensor, key_value: torch.Tensor, dropout: AttentionDropout | None
    ) -> torch.Tensor:
        if dropout is not None:
            dropout.seed_kernel(q.device)
        out = _CrossOnCuda.apply(q, key_value, self.call, 0.0 if dropout is None else dropout.p)
        return out.index_fill(0, self.blind, 0.0) if len(self.blind) else out


class _CrossOnCuda(torch.autograd.Function):
    """[Td, H, D], [Te, 2, H, D] -> [Td, H, D]"""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, key_value: torch.Tensor, call: VarlenCall, dropout: float
    ) -> torch.Tensor:
        keys = key_value[call.keys] if call.keys is not None else key_value.index_select(0, call.gathered)
        out, state = varlen_kernel(q.dtype).forward(q, keys[:, 0], keys[:, 1], call, dropout)
        ctx.call, ctx.dropout, ctx.shape = call, dropout, key_value.shape
        ctx.save_for_backward(q, keys, out, *state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, keys, out, *state = ctx.saved_tensors
        call = ctx.call
        kernel = varlen_kernel(q.dtype)
        of_queries, *others = kernel.backward(grad, q, keys[:, 0], keys[:, 1], out, state, call, ctx.dropout)
        of_keys, total = torch.stack(others, dim=1), grad.new_zeros(ctx.shape)
        if call.keys is not None:
            total[call.keys] = of_keys
        else:
            total.index_add_(0, call.gathered, of_keys)
        return of_queries, total, None, None
