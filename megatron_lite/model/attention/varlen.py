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

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from data_utils.base.errors import ConfigError
from megatron_lite.model.attention.layout import BLIND, CAUSAL, FULL, MASKED, Layout, Unit, padded_order
from megatron_lite.model.kernels.compat import Gradients, varlen_kernel
from megatron_lite.model.kernels.dropout import AttentionDropout
from megatron_lite.model.kernels.fused import has_kernels, join_pair_kernel

# Padding is computed as documents of this many tokens, because writing zeros would need another launch.
_PADDING_DOCUMENT = 64
_HEAD_DIM_MULTIPLE, _LARGEST_HEAD_DIM = 8, 256  # of FlashAttention


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


class VarlenPlan:
    """The calls of a batch.

    Args: units: with calls of any kind but masked ones. length: T, the tokens of the batch and padding after them.
    """

    def __init__(self, layout: Layout, units: Sequence[Unit], length: int):
        pieces: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {FULL: [], CAUSAL: []}
        blind = [np.empty(0, np.int64)]
        for unit in units:
            for call in unit.calls:
                assert call.kind != MASKED
                queries = np.arange(unit.start + call.start, unit.start + call.stop)
                if call.kind == BLIND:
                    blind.append(queries)
                    continue
                keys = [np.arange(unit.start + start, unit.start + stop) for start, stop in call.keys]
                pieces[call.kind].append((queries, np.concatenate(keys)))
        kind_of_padding = FULL if pieces[FULL] or not pieces[CAUSAL] else CAUSAL
        for start in range(len(layout.rows), length, _PADDING_DOCUMENT):
            padding = np.arange(start, min(start + _PADDING_DOCUMENT, length))
            pieces[kind_of_padding].append((padding, padding))
        place = np.concatenate([*(queries for kind in pieces.values() for queries, _ in kind), *blind])
        self.length = length
        self.blind = slice(length - sum(map(len, blind)), length)
        self.order = padded_order(layout, length)[place]
        moved = np.empty(length, np.int64)
        moved[place] = np.arange(length)
        self.calls: list[VarlenCall] = []
        first = 0
        for kind, kind_pieces in pieces.items():
            if kind_pieces:
                self.calls.append(_call(kind == CAUSAL, kind_pieces, moved, first))
                first = self.calls[-1].queries.stop

        # GLM's case: two calls, the first on a slice of keys, the second on keys each gathered once.
        self.is_pair = (
            len(self.calls) == 2 and self.calls[0].keys is not None and len(self.calls[1].place) > 0
        )

    def arrays(self) -> list[np.ndarray]:
        return [
            array
            for call in self.calls
            for array in (call.gathered, call.place, call.query_ends, call.key_ends)
        ]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> VarlenPlan:
        parts = iter(arrays)
        self.calls = [
            replace(
                call,
                gathered=next(parts),
                place=next(parts),
                query_ends=next(parts),
                key_ends=next(parts),
            )
            for call in self.calls
        ]
        return self

    def attend(self, layer: int, qkv: torch.Tensor, dropout: AttentionDropout | None) -> torch.Tensor:
        p = self.prepare(qkv.shape[-1], qkv.device, dropout)
        return _VarlenCalls.apply(qkv, self, p)

    def prepare(self, head_dim: int, device: torch.device, dropout: AttentionDropout | None) -> float:
        """Before the calls of a layer: seeds their kernels. Returns the probability of dropout."""
        _require_head_dim(head_dim)
        if dropout is None:
            return 0.0
        dropout.seed_kernel(device)
        return dropout.p


def _call(
    causal: bool, pieces: list[tuple[np.ndarray, np.ndarray]], moved: np.ndarray, first: int
) -> VarlenCall:
    """Args: pieces: (queries, keys) of each sequence, in the layout. moved: the place of each token. first: query."""
    query_lengths = np.array([len(queries) for queries, _ in pieces])
    key_lengths = np.array([len(keys) for _, keys in pieces])
    queries = slice(first, first + int(query_lengths.sum()))
    gathered = moved[np.concatenate([keys for _, keys in pieces])].astype(np.int32)
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


def _places(gathered: np.ndarray, tokens: int) -> np.ndarray:
    if len(np.unique(gathered)) < len(gathered):
        return gathered[:0]
    place = np.full(tokens, -1, np.int32)
    place[gathered] = np.arange(len(gathered), dtype=np.int32)
    return place


def _require_head_dim(size: int) -> None:
    if size % _HEAD_DIM_MULTIPLE or size > _LARGEST_HEAD_DIM:
        raise ConfigError(
            f"model.hidden_size over model.num_attention_heads is {size}; CUDA's attention kernels need a multiple of "
            f"{_HEAD_DIM_MULTIPLE} up to {_LARGEST_HEAD_DIM}: change one of them."
        )


class _VarlenCalls(torch.autograd.Function):
    """All calls as one autograd node: [T, 3, H, D] -> [T, H, D]."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, plan: VarlenPlan, dropout: float) -> torch.Tensor:
        whole, keys, states = forward_calls(plan, qkv, dropout)
        ctx.plan, ctx.dropout, ctx.keys = plan, dropout, len(keys)
        ctx.lengths = [len(state) for state in states]
        ctx.save_for_backward(qkv, whole, *keys, *(tensor for state in states for tensor in state))
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        qkv, whole, *saved = ctx.saved_tensors
        keys, saved = saved[: ctx.keys], iter(saved[ctx.keys :])
        states = [list(itertools.islice(saved, length)) for length in ctx.lengths]
        return backward_calls(ctx.plan, qkv, whole, keys, states, grad, ctx.dropout)[0], None, None


def forward_calls(
    plan: VarlenPlan, qkv: torch.Tensor, dropout: float
) -> tuple[torch.Tensor, list[torch.Tensor], list[Any]]:
    """The output [T, H, D] of all calls, and what `backward_calls` needs: gathered keys and values, states of kernels.

    Args: qkv: [T, 3, H, D]. dropout: probability.
    """
    kernel = varlen_kernel(qkv.dtype)
    q, k, v = qkv.unbind(1)
    outs, kept, states = [], [], []
    for call in plan.calls:
        if call.keys is None:
            kept.append(qkv[:, 1:].index_select(0, call.gathered))
            keys, values = kept[-1].unbind(1)
        else:
            keys, values = k[call.keys], v[call.keys]
        out, state = kernel.forward(q[call.queries], keys, values, call, dropout)
        outs.append(out)
        states.append(state)
    if plan.blind.start < plan.blind.stop:
        outs.append(qkv.new_zeros(plan.blind.stop - plan.blind.start, *qkv.shape[2:]))
    return outs[0] if len(outs) == 1 else torch.cat(outs), kept, states


def backward_calls(
    plan: VarlenPlan, qkv: torch.Tensor, whole: torch.Tensor, kept: Sequence[torch.Tensor], states: Sequence[Any],
    grad: torch.Tensor, dropout: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The gradient of qkv, [T, 3, H, D], and its partial sums over tokens, fp32 [P, 3 H D], where they cost nothing.

    Args: whole, kept, states: of `forward_calls`. grad: of `whole`.
    """
    kernel = varlen_kernel(qkv.dtype)
    q, k, v = qkv.unbind(1)
    gathered = iter(kept)
    grads = []
    for call, state in zip(plan.calls, states, strict=True):
        keys, values = (k[call.keys], v[call.keys]) if call.keys is not None else next(gathered).unbind(1)
        rows = call.queries
        grads.append(kernel.backward(grad[rows], q[rows], keys, values, whole[rows], state, call, dropout))
    if plan.is_pair and has_kernels(grad):
        first, second = plan.calls
        assert first.keys is not None
        return join_pair_kernel(*grads[0], *grads[1], first.keys.start, second.place)
    return _joined(qkv, plan, grads), None


def _joined(qkv: torch.Tensor, plan: VarlenPlan, grads: list[Gradients]) -> torch.Tensor:
    """The gradient of qkv from those of the calls."""
    total = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    of_queries = [dq for dq, _, _ in grads]
    if plan.blind.start < plan.blind.stop:
        of_queries.append(qkv.new_zeros(plan.blind.stop - plan.blind.start, *qkv.shape[2:]))
    torch.cat(of_queries, out=total[:, 0])
    # The first call's keys are written if they are a slice, all others added to zeros.
    call, (_, dk, dv) = plan.calls[0], grads[0]
    written = 0
    if call.keys is not None:
        torch.stack([dk, dv], dim=1, out=total[call.keys, 1:])
        written = 1
    if len(plan.calls) > written or call.keys != slice(0, plan.length):
        _clear_others(total[:, 1:], plan.calls[0].keys)
    for call, (_, dk, dv) in zip(plan.calls[written:], grads[written:], strict=True):
        for of_keys, part in zip(total[:, 1:].unbind(1), (dk, dv), strict=True):
            if call.keys is not None:
                of_keys[call.keys] += part
            else:
                of_keys.index_add_(0, call.gathered, part)
    return total


def _clear_others(of_keys: torch.Tensor, written: slice | None) -> None:
    """Zero the gradients of all keys but the written ones."""
    if written is None:
        of_keys.zero_()
        return
    for part in (of_keys[: written.start], of_keys[written.stop :]):
        if len(part):
            part.zero_()
