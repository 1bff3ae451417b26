"""Attention on CUDA as at most two calls of a fused kernel for the whole batch, without a mask.

The calls of `make_units` that need no mask are of two kinds: queries that see all their keys, and causal ones, whose
last query sees all keys (aligned at the bottom right). The kernels of CUDA compute many pairs of (queries, keys) of
different lengths in one call, so all calls of a kind become one. The tokens are ordered [queries of the full call |
queries of the causal call | tokens that see nothing], so queries and outputs are slices. Keys are a slice too where
they are the call's queries, and gathered otherwise: for GLM those of the causal call, parts A and B of each document.

bf16 and fp16 take FlashAttention (arXiv:2307.08691), fp32 the memory-efficient kernel (arXiv:2112.05682). Dropout of
attention weights happens within the kernel, from torch's generator of the device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from data_utils.common.errors import ConfigError
from megatron_lite.model.attention_backends.calls import Attend, Packed, ScoreBias, spans_of
from megatron_lite.model.attention_backends.layout import BLIND, CAUSAL, FULL, Layout, Unit, padded_order
from megatron_lite.model.kernels.compat import Gradients
from megatron_lite.model.kernels.dropout import AttentionDropout
from megatron_lite.model.kernels.fused import has_kernels, join_pair_kernel
from megatron_lite.model.kernels.qkv_heads import HeadForm, gather_heads_kernel, of_heads, plain_form
from megatron_lite.model.kernels.varlen_kernels import varlen_kernel

# Padding is computed as documents of this many tokens, because writing zeros would need another launch.
_PADDING_DOCUMENT = 64
_HEAD_DIM_MULTIPLE, _LARGEST_HEAD_DIM = 8, 256  # of FlashAttention


# A sequence of queries, and the stretches of its keys.
_Piece = tuple[tuple[int, int], Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class VarlenCall:
    """One call of the kernel: sequences of queries, each with its keys. Arrays are on the host or the device."""

    causal: bool
    queries: slice  # of the ordered tokens
    keys: slice | None  # of the ordered tokens; None: those of `gathered`
    gathered: Any  # int32 [keys]
    place: Any  # int32 [T]: where each token is among the gathered keys, -1 = nowhere; empty if a token is there twice
    query_ends: (
        Any  # int32 [sequences + 1], from 0: where each sequence of queries begins and the last one ends
    )
    key_ends: Any  # int32 [sequences + 1]
    longest_queries: int
    longest_keys: int
    window: int = 0  # of a local layer; 0 = none


_ARRAYS = ("gathered", "place", "query_ends", "key_ends")


class VarlenPlan:
    """The calls of a batch, whose queries follow each other.

    Args:
        order: as for HostPlan.
        blind: number of tokens after the queries of all calls; they see nothing.
        hidden: int32, queries of calls whose output is zeroed.
    """

    def __init__(
        self, calls: list[VarlenCall], order: np.ndarray, blind: int = 0, hidden: np.ndarray | None = None
    ):
        self.calls, self.order, self.blind, self.length = calls, order, blind, len(order)
        self.hidden: Any = hidden
        # GLM's case: two calls, the first on a slice of keys, the second on keys each gathered once.
        self.is_pair = len(calls) == 2 and calls[0].keys is not None and len(calls[1].place) > 0
        self.is_first: Any = None  # of a fixed pair: int32 [T], 1 for queries of the first call

    @property
    def is_fixed(self) -> bool:
        """Whether the number of tokens and those of sequences say all shapes, see `fixed`."""
        return all(call.queries == slice(0, self.length) for call in self.calls)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The arrays of all calls, on the host or the device."""
        return [getattr(call, name) for call in self.calls for name in _ARRAYS]

    @functools.cached_property
    def shape(self) -> tuple[Any, ...]:
        """Numbers that must be equal in two fixed plans so that their launches are equal."""
        return self.length, *((call.causal, call.longest_keys, len(call.query_ends)) for call in self.calls)

    def fixed(self, longest: int) -> VarlenPlan:
        """The same calls with all tokens as queries and as keys, or as many gathered ones; CUDA graphs need that.

        Where sequences begin and end says which rows a call computes; others hold what was there. Counts of sequences
        are powers of 2, most often the same: at least three for each row; the last ones are empty. The plan itself
        where calls are not GLM's, or one on its own queries.

        Args: longest: the most tokens of a row.
        """
        first, rest = self.calls[0], self.calls[1:]
        if (
            self.blind
            or self.hidden is not None
            or first.keys != first.queries
            or (rest and not self.is_pair)
        ):
            return self
        whole, most = slice(0, self.length), max(longest, _PADDING_DOCUMENT)
        count = max(3 * self.length // most, *(len(call.key_ends) - 1 for call in self.calls))
        calls = [
            replace(
                call, queries=whole, keys=None if call.keys is None else whole,
                gathered=np.resize(call.gathered, self.length if call.keys is None else 0),
                query_ends=_filled(call.query_ends + call.queries.start, count), key_ends=_filled(call.key_ends, count),
                longest_queries=most, longest_keys=most,
            )
            for call in self.calls
        ]  # fmt: skip
        made = VarlenPlan(calls, self.order)
        if rest:
            made.is_first = (np.arange(self.length) < first.queries.stop).astype(np.int32)
        return made

    def within(self, window: int) -> VarlenPlan:
        """The same calls for local layers; the place of each token among the keys must be its position."""
        calls = [replace(call, window=window) for call in self.calls]
        return VarlenPlan(calls, self.order, self.blind)

    def arrays(self) -> list[np.ndarray]:
        return [*self.tensors, *(array for array in (self.hidden, self.is_first) if array is not None)]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> VarlenPlan:
        rest: Any = iter(arrays)
        self.calls = [replace(call, **{name: next(rest) for name in _ARRAYS}) for call in self.calls]
        if self.hidden is not None:
            self.hidden = next(rest).long()
        if self.is_first is not None:
            self.is_first = next(rest).view(torch.bool)[::4]  # the first bytes of numbers that are 0 or 1
        return self

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        assert bias is None, "the kernels take none"
        out = Attend.apply(self, self.prepare(inputs[0].shape[-1], inputs[0].device, dropout), *inputs)
        return out if self.hidden is None or not len(self.hidden) else out.index_fill(0, self.hidden, 0.0)

    def prepare(self, head_dim: int, device: torch.device, dropout: AttentionDropout | None) -> float:
        """Before the calls of a layer: seeds their kernels. Returns the probability of dropout."""
        _require_head_dim(head_dim)
        if dropout is None:
            return 0.0
        dropout.seed_kernel(device)
        return dropout.p

    def forward(self, inputs: Packed, p: float) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """See `Attend`. Kept are the inputs, and of each call the gathered keys and values and the kernel's state."""
        kernel = varlen_kernel(inputs[0].dtype)
        q, key_value = _halves(inputs)
        outs, kept = [], [[*inputs]]
        for call in self.calls:
            gathered = [key_value.index_select(0, call.gathered)] if call.keys is None else []
            keys, values = (key_value[call.keys] if call.keys is not None else gathered[0]).unbind(1)
            out, state = kernel.forward(q[call.queries], keys, values, call, p)
            outs.append(out)
            kept.append([*gathered, *state])
        if self.blind:
            outs.append(q.new_zeros(self.blind, *q.shape[1:]))
        if self.is_first is not None:
            return torch.where(self.is_first[:, None, None], outs[0], outs[1]), kept
        return outs[0] if len(outs) == 1 else torch.cat(outs), kept

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, kept: Sequence[list[torch.Tensor]], p: float
    ) -> list[torch.Tensor]:
        return self.gradients(grad, out, kept, p)[0]

    def gradients(
        self, grad: torch.Tensor, out: torch.Tensor, kept: Sequence[list[torch.Tensor]], p: float,
        form: HeadForm | None = None, heads: torch.Tensor | None = None,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """The gradient of each input or, with a form, of the heads that became the one input.

        And its partial sums over tokens, fp32 [P, 3 H D], where they cost nothing, and those of the form's scales.

        Args: grad: of `out`, the output. form: on a GPU. heads: as for `gather_heads`.
        """
        inputs, *tensors = kept
        kernel = varlen_kernel(out.dtype)
        q, key_value = _halves(inputs)
        grads = []
        for call, state in zip(self.calls, tensors, strict=True):
            gathered, state = (
                (key_value[call.keys], state) if call.keys is not None else (state[0], state[1:])
            )
            keys, values = gathered.unbind(1)
            rows = call.queries
            grads.append(kernel.backward(grad[rows], q[rows], keys, values, out[rows], state, call, p))
        if len(inputs) == 2 or not has_kernels(grad):
            return _joined(inputs, self, grads), None, None
        first = self.calls[0].keys
        if len(grads) == 1 and first is not None:
            given = form or plain_form(q.shape[1])
            total, of_scales = gather_heads_kernel(*grads[0], first.start, heads, *given, self.length)
            return [total if form else total.view_as(inputs[0])], None, of_scales
        if self.is_pair:
            assert first is not None
            second = self.calls[1]
            border = None if self.is_first is None else second.query_ends[:1]
            total, sums = join_pair_kernel(*grads[0], *grads[1], first.start, second.place, border)
        else:
            (total,), sums = _joined(inputs, self, grads), None
        if form is None:
            return [total], sums, None
        total, of_scales = of_heads(total, heads, form)
        return [total], None, of_scales


def varlen_plan(layout: Layout, units: Sequence[Unit], length: int) -> VarlenPlan:
    """The plan of a batch whose tokens see each other.

    Args: units: with calls of any kind but masked ones. length: T, the tokens of the batch and padding after them.
    """
    pieces: dict[int, list[_Piece]] = {FULL: [], CAUSAL: [], BLIND: []}
    for unit in units:
        for kind, start, stop, keys in unit.calls:
            spans = [(unit.start + first, unit.start + last) for first, last in keys]
            pieces[kind].append(((unit.start + start, unit.start + stop), spans))
    blind = pieces.pop(BLIND)
    # Padding joins a call that exists anyway: a call of its own would be a launch in each direction and layer.
    kind_of_padding = FULL if pieces[FULL] or not pieces[CAUSAL] else CAUSAL
    for start in range(len(layout.rows), length, _PADDING_DOCUMENT):
        padding = start, min(start + _PADDING_DOCUMENT, length)
        pieces[kind_of_padding].append((padding, [padding]))
    # The order of the plan: queries of the full call, of the causal call, then tokens that see nothing.
    place, _ = _tokens([queries for queries, _ in itertools.chain(*pieces.values(), blind)])
    moved = np.empty(length, np.int64)
    # The inverse permutation: from an index of the layout to one of the plan.
    moved[place] = np.arange(length)
    calls: list[VarlenCall] = []
    for kind, its_pieces in pieces.items():
        if its_pieces:
            calls.append(_call(kind == CAUSAL, its_pieces, moved, calls[-1].queries.stop if calls else 0))
    hidden = sum(stop - start for (start, stop), _ in blind)
    return VarlenPlan(calls, padded_order(layout, length)[place], hidden)


def _tokens(spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of all spans, one after another, int64, and how many each has."""
    starts, stops = np.array(spans, np.int64).reshape(-1, 2).T
    lengths = stops - starts
    ends = np.cumsum(lengths)
    return np.repeat(stops - ends, lengths) + np.arange(lengths.sum()), lengths


def cross_varlen_plan(units: Sequence[Unit], order: np.ndarray, keys: int) -> VarlenPlan:
    """The plan of cross-attention: one call of all queries, those of each unit with its keys.

    The call takes every row of the decoder, so those that see nothing go with the document before them. Tokens among
    them get zeros afterwards. Padding keeps what it gets: no token reads it, so no gradient comes from it.

    Args: units: see `rectangles`. order: of the decoder's plan. keys: Te.
    """
    is_blind = order >= 0
    for unit in units:
        is_blind[unit.start : unit.stop] = False
    spans = [spans_of(unit)[1] for unit in units] or [(0, keys)]
    ends = [0, *(unit.start for unit in units[1:]), len(order)]
    pieces = [(queries, [span]) for queries, span in zip(itertools.pairwise(ends), spans, strict=True)]
    call = _call(False, pieces, np.arange(keys), 0)
    return VarlenPlan(
        [replace(call, place=call.place[:0])], order, hidden=np.flatnonzero(is_blind).astype(np.int32)
    )


def _call(causal: bool, pieces: Sequence[_Piece], moved: np.ndarray, first: int) -> VarlenCall:
    """Args: pieces: in the layout. moved: the place of each token. first: query."""
    query_lengths = np.array([stop - start for (start, stop), _ in pieces])
    keys, lengths = _tokens([span for _, spans in pieces for span in spans])
    begins = np.cumsum([0, *(len(spans) for _, spans in pieces[:-1])])
    key_lengths = np.add.reduceat(lengths, begins)
    queries = slice(first, first + int(query_lengths.sum()))
    gathered = moved[keys].astype(np.int32)
    # Keys that follow each other are read where they are; only others are gathered, which is a copy of K and V.
    is_slice = (np.diff(gathered) == 1).all()
    return VarlenCall(
        causal,
        queries,
        slice(int(gathered[0]), int(gathered[-1]) + 1) if is_slice else None,
        gathered[:0] if is_slice else gathered,
        gathered[:0] if is_slice else _places(gathered, len(moved)),
        np.r_[0, np.cumsum(query_lengths)].astype(np.int32),
        np.r_[0, np.cumsum(key_lengths)].astype(np.int32),
        int(query_lengths.max()),
        int(key_lengths.max()),
    )


def _filled(ends: np.ndarray, count: int) -> np.ndarray:
    """With empty sequences at the end, up to a power of 2, at least `count`."""
    return np.pad(ends, (0, (1 << (count - 1).bit_length()) + 1 - len(ends)), mode="edge")


def _places(gathered: np.ndarray, tokens: int) -> np.ndarray:
    place = np.full(tokens, -1, np.int32)
    place[gathered] = np.arange(len(gathered), dtype=np.int32)
    # A token gathered twice gets two gradients, which one place per token cannot describe: then they are added by
    # index.
    return place if np.count_nonzero(place >= 0) == len(gathered) else gathered[:0]


def _require_head_dim(size: int) -> None:
    if size % _HEAD_DIM_MULTIPLE or size > _LARGEST_HEAD_DIM:
        raise ConfigError(
            f"model.hidden_size over model.num_attention_heads is {size}; CUDA's attention kernels need a multiple of "
            f"{_HEAD_DIM_MULTIPLE} up to {_LARGEST_HEAD_DIM}: change one of them."
        )


def _halves(packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, H, D], and keys and values [K, 2, H, D]."""
    return packed[0][:, 0], packed[0][:, 1:] if len(packed) == 1 else packed[1]


def _joined(inputs: Packed, plan: VarlenPlan, grads: list[Gradients]) -> list[torch.Tensor]:
    """The gradients of the inputs from those of the calls."""
    totals = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[-1:]]
    if len(inputs) == 2:
        # Cross-attention is one call of all queries, so its gradient is the queries' gradient as it is.
        totals.insert(0, grads[0][0].unsqueeze(1))
    of_queries, of_keys = _halves(totals)
    if len(inputs) == 1:
        parts = [dq for dq, _, _ in grads]
        if plan.blind:
            parts.append(of_queries.new_zeros(plan.blind, *of_queries.shape[1:]))
        torch.cat(parts, out=of_queries)
    # The first call's keys are written if they are a slice, all others added to zeros.
    call, (_, dk, dv) = plan.calls[0], grads[0]
    written = 0
    if call.keys is not None:
        torch.stack([dk, dv], dim=1, out=of_keys[call.keys])
        written = 1
    if len(plan.calls) > written or call.keys != slice(0, len(of_keys)):
        _clear_others(of_keys, plan.calls[0].keys)
    for call, (_, *parts) in zip(plan.calls[written:], grads[written:], strict=True):
        for total, part in zip(of_keys.unbind(1), parts, strict=True):
            if call.keys is not None:
                total[call.keys] += part
            else:
                total.index_add_(0, call.gathered, part)
    return totals


def _clear_others(of_keys: torch.Tensor, written: slice | None) -> None:
    """Zero the gradients of all keys but the written ones."""
    if written is None:
        of_keys.zero_()
        return
    for part in (of_keys[: written.start], of_keys[written.stop :]):
        if len(part):
            part.zero_()
