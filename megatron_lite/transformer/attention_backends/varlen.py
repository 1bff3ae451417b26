"""Attention on CUDA as at most two launches of a fused kernel for the whole batch, without a mask.

The query ranges that need no mask are of two sorts: full ones, whose queries see all their keys, and causal ones, whose
last query sees all keys (aligned at the bottom right). The kernels of CUDA compute many sequences, each some queries
with their keys, in one launch, so all query ranges of a sort become the sequences of one launch. The tokens are ordered
[queries of the full launch | queries of the causal launch | tokens that see nothing], so queries and outputs are
slices. Keys are a slice too where they are the launch's queries, and gathered otherwise: for GLM those of the causal
launch, parts A and B of each document.

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
from megatron_lite.config.attention import HEAD_MULTIPLE, LARGEST_HEAD
from megatron_lite.transformer.attention_backends.interface import AttentionFunction, Packed, ScoreBias
from megatron_lite.transformer.attention_backends.layout import (
    BLIND,
    CAUSAL,
    FULL,
    DocumentGroup,
    Layout,
    padded_order,
)
from megatron_lite.transformer.kernels.compat import Gradients
from megatron_lite.transformer.kernels.dropout import AttentionDropout
from megatron_lite.transformer.kernels.fused import has_kernels, join_pair_kernel
from megatron_lite.transformer.kernels.qkv_heads import (
    HeadTransform,
    gather_head_grads,
    gather_heads_kernel,
    identity_transform,
)
from megatron_lite.transformer.kernels.varlen_kernels import varlen_kernel

# Padding is computed as documents of this many tokens, because writing zeros would need another launch.
_PADDING_DOCUMENT = 64

# Queries [start, stop) and the ranges of their keys, tokens of the layout.
_Sequence = tuple[tuple[int, int], Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class VarlenLaunch:
    """One launch of the kernel: sequences of queries, each with its keys. Arrays are on the host or the device."""

    causal: bool
    queries: slice  # of the ordered tokens
    keys: slice | None  # of the ordered tokens; None: those of `gathered`
    gathered: Any  # int32 [keys], of the ordered tokens
    gathered_index: (
        Any  # int32 [T]: index of each token in `gathered`, -1 = none; empty if a token is there twice
    )
    cu_seqlens_q: Any  # int32 [sequences + 1], from 0: where each one's queries begin, and the last one's end
    cu_seqlens_k: Any  # int32 [sequences + 1]
    max_seqlen_q: int
    max_seqlen_k: int
    window: int = 0  # of a local layer; 0 = none


_ARRAYS = ("gathered", "gathered_index", "cu_seqlens_q", "cu_seqlens_k")


class VarlenPlan:
    """The launches of a batch, whose queries follow each other.

    Args:
        order: as for HostPlan.
        blind_tokens: how many tokens follow the queries of all launches; they see nothing.
        zeroed: int32, queries of launches whose output is set to zero.
    """

    def __init__(
        self,
        launches: list[VarlenLaunch],
        order: np.ndarray,
        blind_tokens: int = 0,
        zeroed: np.ndarray | None = None,
    ):
        self.launches, self.order, self.blind_tokens = launches, order, blind_tokens
        self.length = len(order)
        self.zeroed: Any = zeroed
        # GLM's case: two launches, the first on a slice of keys, the second on keys each gathered once.
        self.is_pair = (
            len(launches) == 2 and launches[0].keys is not None and len(launches[1].gathered_index) > 0
        )
        self.in_first_launch: Any = (
            None  # of a pair with fixed shapes: int32 [T], 1 for queries of the first launch
        )

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether the numbers of tokens and of sequences determine all shapes, see `with_fixed_shapes`."""
        return all(launch.queries == slice(0, self.length) for launch in self.launches)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The arrays of all launches, on the host or the device."""
        return [getattr(launch, name) for launch in self.launches for name in _ARRAYS]

    @functools.cached_property
    def shape(self) -> tuple[Any, ...]:
        """Numbers that must be equal in two plans with fixed shapes so that their launches are equal."""
        return self.length, *(
            (each.causal, each.max_seqlen_k, len(each.cu_seqlens_q)) for each in self.launches
        )

    def with_fixed_shapes(self, longest: int) -> VarlenPlan:
        """The same launches with all tokens as queries and as keys, or as many gathered ones; CUDA graphs need that.

        Where sequences begin and end says which queries a launch computes; the other queries keep what memory held.
        Counts of sequences are powers of 2, most often the same: at least three for each row; the last ones are empty.
        Returns the plan itself where its launches are not GLM's, or one on its own queries.

        Args: longest: the most tokens of a row.
        """
        first, others = self.launches[0], self.launches[1:]
        if (
            self.blind_tokens
            or self.zeroed is not None
            or first.keys != first.queries
            or (others and not self.is_pair)
        ):
            return self
        whole, most = slice(0, self.length), max(longest, _PADDING_DOCUMENT)
        count = max(3 * self.length // most, *(len(launch.cu_seqlens_k) - 1 for launch in self.launches))
        plan = VarlenPlan(
            [
                replace(
                    launch,
                    queries=whole,
                    keys=None if launch.keys is None else whole,
                    gathered=np.resize(launch.gathered, self.length if launch.keys is None else 0),
                    cu_seqlens_q=_with_empty_sequences(launch.cu_seqlens_q + launch.queries.start, count),
                    cu_seqlens_k=_with_empty_sequences(launch.cu_seqlens_k, count),
                    max_seqlen_q=most,
                    max_seqlen_k=most,
                )
                for launch in self.launches
            ],
            self.order,
        )
        if others:
            plan.in_first_launch = (np.arange(self.length) < first.queries.stop).astype(np.int32)
        return plan

    def within(self, window: int) -> VarlenPlan:
        """The same launches for local layers; the index of each token among the keys must be its position."""
        launches = [replace(launch, window=window) for launch in self.launches]
        return VarlenPlan(launches, self.order, self.blind_tokens)

    def arrays(self) -> list[np.ndarray]:
        optional = (self.zeroed, self.in_first_launch)
        return [*self.tensors, *(array for array in optional if array is not None)]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> VarlenPlan:
        rest: Any = iter(arrays)
        self.launches = [replace(each, **{name: next(rest) for name in _ARRAYS}) for each in self.launches]
        if self.zeroed is not None:
            self.zeroed = next(rest).long()
        if self.in_first_launch is not None:
            self.in_first_launch = next(rest).view(torch.bool)[
                ::4
            ]  # the first bytes of numbers that are 0 or 1
        return self

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        assert bias is None, "the kernels take none"
        kernels = VarlenAttention(self, self.prepare(inputs[0].shape[-1], inputs[0].device, dropout))
        out = AttentionFunction.apply(kernels, *inputs)
        return out if self.zeroed is None or not len(self.zeroed) else out.index_fill(0, self.zeroed, 0.0)

    def prepare(self, head_dim: int, device: torch.device, dropout: AttentionDropout | None) -> float:
        """Before the launches of a layer: seeds their kernels. Returns the probability of dropout."""
        if head_dim % HEAD_MULTIPLE or head_dim > LARGEST_HEAD:
            raise ConfigError(
                f"model.hidden_size over model.num_attention_heads is {head_dim}; CUDA's attention kernels need a "
                f"multiple of {HEAD_MULTIPLE} up to {LARGEST_HEAD}: change one of them."
            )
        if dropout is None:
            return 0.0
        dropout.seed_kernel(device)
        return dropout.p


@dataclass(frozen=True)
class VarlenAttention:
    """The launches of a plan for one layer, see `AttentionKernels`."""

    plan: VarlenPlan
    dropout_p: float

    def forward(self, inputs: Packed) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """Saved are the inputs, and of each launch the gathered keys and values and the kernel's state."""
        plan, kernel = self.plan, varlen_kernel(inputs[0].dtype)
        q, key_value = _split_packed(inputs)
        outs, saved = [], [[*inputs]]
        for launch in plan.launches:
            gathered = [key_value.index_select(0, launch.gathered)] if launch.keys is None else []
            k, v = (key_value[launch.keys] if launch.keys is not None else gathered[0]).unbind(1)
            out, state = kernel.forward(q[launch.queries], k, v, launch, self.dropout_p)
            outs.append(out)
            saved.append([*gathered, *state])
        if plan.blind_tokens:
            outs.append(q.new_zeros(plan.blind_tokens, *q.shape[1:]))
        if plan.in_first_launch is not None:
            return torch.where(plan.in_first_launch[:, None, None], outs[0], outs[1]), saved
        return outs[0] if len(outs) == 1 else torch.cat(outs), saved

    def backward(
        self, grad: torch.Tensor, out: torch.Tensor, saved: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        inputs, grads = saved[0], self._launch_grads(grad, out, saved)
        if len(inputs) == 1 and has_kernels(grad):
            return [self._packed_grad(inputs, grads)[0]]
        return self._summed_grads(inputs, grads)

    def head_grads(
        self,
        grad: torch.Tensor,
        out: torch.Tensor,
        saved: Sequence[Sequence[torch.Tensor]],
        transform: HeadTransform | None,
        heads: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The gradient of the heads from which `transform` has made the packed input; on a GPU, not in cross-attention.

        Args:
            grad: of `out`, the output.
            transform: None = the heads are the packed input.
            heads: [T, H + 2 K, D], what was normed; None without norms.
        Returns: the gradient; its partial sums over tokens, fp32 [P, 3 H D], where they cost nothing; the partial sums
            of the gradients of the transform's scales.
        """
        grads = self._launch_grads(grad, out, saved)
        keys = self.plan.launches[0].keys
        if transform is not None and len(grads) == 1 and keys is not None:
            total, scale_sums = gather_heads_kernel(
                *grads[0], keys.start, heads, *transform, self.plan.length
            )
            return total, None, scale_sums
        total, sums = self._packed_grad(saved[0], grads)
        if transform is None:
            return total, sums, None
        total, scale_sums = gather_head_grads(total, heads, transform)
        return total, None, scale_sums

    def _launch_grads(
        self, grad: torch.Tensor, out: torch.Tensor, saved: Sequence[Sequence[torch.Tensor]]
    ) -> list[Gradients]:
        """The gradients of q, k and v of each launch."""
        inputs, *states = saved
        kernel = varlen_kernel(out.dtype)
        q, key_value = _split_packed(inputs)
        grads = []
        for launch, state in zip(self.plan.launches, states, strict=True):
            if launch.keys is None:
                launch_keys, state = state[0], state[1:]
            else:
                launch_keys = key_value[launch.keys]
            k, v = launch_keys.unbind(1)
            queries = launch.queries
            grads.append(
                kernel.backward(grad[queries], q[queries], k, v, out[queries], state, launch, self.dropout_p)
            )
        return grads

    def _packed_grad(
        self, inputs: Packed, grads: list[Gradients]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient of the one packed input by one kernel, where there is one: [T, 3, H, D].

        And its partial sums over tokens, fp32 [P, 3 H D], where that kernel makes them.
        """
        plan = self.plan
        first = plan.launches[0].keys
        if len(grads) == 1 and first is not None:
            transform = identity_transform(grads[0][0].shape[1])
            total, _ = gather_heads_kernel(*grads[0], first.start, None, *transform, plan.length)
            return total.view_as(inputs[0]), None
        if plan.is_pair:
            assert first is not None
            second = plan.launches[1]
            second_start = None if plan.in_first_launch is None else second.cu_seqlens_q[:1]
            return join_pair_kernel(*grads[0], *grads[1], first.start, second.gathered_index, second_start)
        return self._summed_grads(inputs, grads)[0], None

    def _summed_grads(self, inputs: Packed, grads: list[Gradients]) -> list[torch.Tensor]:
        """The gradients of the inputs from the gradients of the launches, by torch's operators."""
        launches = self.plan.launches
        totals = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[-1:]]
        if len(inputs) == 2:
            # Cross-attention is one launch of all queries, so its gradient is the queries' gradient as it is.
            totals.insert(0, grads[0][0].unsqueeze(1))
        grad_queries, grad_keys = _split_packed(totals)
        if len(inputs) == 1:
            launch_grads = [grad_q for grad_q, _, _ in grads]
            if self.plan.blind_tokens:
                launch_grads.append(grad_queries.new_zeros(self.plan.blind_tokens, *grad_queries.shape[1:]))
            torch.cat(launch_grads, out=grad_queries)
        # The keys of the first launch are written if they are a slice, all others added to zeros.
        first, (_, grad_k, grad_v) = launches[0], grads[0]
        written = 0
        if first.keys is not None:
            torch.stack([grad_k, grad_v], dim=1, out=grad_keys[first.keys])
            written = 1
        if len(launches) > written or first.keys != slice(0, len(grad_keys)):
            others = (
                [grad_keys]
                if first.keys is None
                else [grad_keys[: first.keys.start], grad_keys[first.keys.stop :]]
            )
            for other in others:
                if len(other):
                    other.zero_()
        for launch, (_, *key_value_grads) in zip(launches[written:], grads[written:], strict=True):
            for total, added in zip(grad_keys.unbind(1), key_value_grads, strict=True):
                if launch.keys is not None:
                    total[launch.keys] += added
                else:
                    total.index_add_(0, launch.gathered, added)
        return totals


def _split_packed(packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, H, D], and keys and values [K, 2, H, D]."""
    return packed[0][:, 0], packed[0][:, 1:] if len(packed) == 1 else packed[1]


def varlen_plan(layout: Layout, groups: Sequence[DocumentGroup], length: int) -> VarlenPlan:
    """The plan of a batch whose tokens see each other.

    Args: groups: with query ranges of any mask type but MASKED. length: T, the tokens of the batch and padding.
    """
    sequences: dict[int, list[_Sequence]] = {FULL: [], CAUSAL: [], BLIND: []}
    for group in groups:
        for mask, start, stop, keys in group.query_ranges:
            key_ranges = [(group.start + first, group.start + last) for first, last in keys]
            sequences[mask].append(((group.start + start, group.start + stop), key_ranges))
    blind = sequences.pop(BLIND)
    # Padding joins a launch that exists anyway: its own launch would be one more in each direction and layer.
    padding_mask = FULL if sequences[FULL] or not sequences[CAUSAL] else CAUSAL
    for start in range(len(layout.batch_index), length, _PADDING_DOCUMENT):
        padding = start, min(start + _PADDING_DOCUMENT, length)
        sequences[padding_mask].append((padding, [padding]))
    # The order of the plan: queries of the full launch, of the causal launch, then tokens that see nothing.
    layout_index, _ = _expand([queries for queries, _ in itertools.chain(*sequences.values(), blind)])
    # The inverse permutation: from an index of the layout to one of the plan.
    plan_index = np.empty(length, np.int64)
    plan_index[layout_index] = np.arange(length)
    launches: list[VarlenLaunch] = []
    for mask, launched in sequences.items():
        if launched:
            first = launches[-1].queries.stop if launches else 0
            launches.append(_make_launch(mask == CAUSAL, launched, plan_index, first))
    blind_tokens = sum(stop - start for (start, stop), _ in blind)
    return VarlenPlan(launches, padded_order(layout, length)[layout_index], blind_tokens)


def cross_varlen_plan(groups: Sequence[DocumentGroup], order: np.ndarray, keys: int) -> VarlenPlan:
    """The plan of cross-attention: one launch of all queries, those of each group with its keys.

    The launch takes every token of the decoder, so those that see nothing go with the document before them. Tokens
    among them get zeros afterwards. Padding keeps its output: no token reads it, so no gradient comes from it.

    Args: groups: see `cross_attention_groups`. order: of the decoder's plan. keys: Te.
    """
    is_blind = order >= 0
    for group in groups:
        is_blind[group.start : group.stop] = False
    key_ranges = [group.spans[1] for group in groups] or [(0, keys)]
    ends = [0, *(group.start for group in groups[1:]), len(order)]
    sequences = [
        (queries, [key_range])
        for queries, key_range in zip(itertools.pairwise(ends), key_ranges, strict=True)
    ]
    launch = _make_launch(False, sequences, np.arange(keys), 0)
    return VarlenPlan(
        [replace(launch, gathered_index=launch.gathered_index[:0])],
        order,
        zeroed=np.flatnonzero(is_blind).astype(np.int32),
    )


def _make_launch(
    causal: bool, sequences: Sequence[_Sequence], plan_index: np.ndarray, first: int
) -> VarlenLaunch:
    """Args: sequences: of the layout. plan_index: of each token of the layout. first: query, in the plan."""
    query_lengths = np.array([stop - start for (start, stop), _ in sequences])
    keys, lengths = _expand([key_range for _, key_ranges in sequences for key_range in key_ranges])
    begins = np.cumsum([0, *(len(key_ranges) for _, key_ranges in sequences[:-1])])
    key_lengths = np.add.reduceat(lengths, begins)
    gathered = plan_index[keys].astype(np.int32)
    # Keys that follow each other are read where they are; only others are gathered, which is a copy of K and V.
    is_slice = (np.diff(gathered) == 1).all()
    gathered_index = gathered[:0]
    if not is_slice:
        index = np.full(len(plan_index), -1, np.int32)
        index[gathered] = np.arange(len(gathered), dtype=np.int32)
        # A token gathered twice gets two gradients, for which one index per token is not enough: then they are added
        # by `index_add_`.
        if np.count_nonzero(index >= 0) == len(gathered):
            gathered_index = index
    return VarlenLaunch(
        causal=causal,
        queries=slice(first, first + int(query_lengths.sum())),
        keys=slice(int(gathered[0]), int(gathered[-1]) + 1) if is_slice else None,
        gathered=gathered[:0] if is_slice else gathered,
        gathered_index=gathered_index,
        cu_seqlens_q=np.r_[0, np.cumsum(query_lengths)].astype(np.int32),
        cu_seqlens_k=np.r_[0, np.cumsum(key_lengths)].astype(np.int32),
        max_seqlen_q=int(query_lengths.max()),
        max_seqlen_k=int(key_lengths.max()),
    )


def _expand(ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of all ranges, one range after another, int64, and the length of each."""
    starts, stops = np.array(ranges, np.int64).reshape(-1, 2).T
    lengths = stops - starts
    ends = np.cumsum(lengths)
    return np.repeat(stops - ends, lengths) + np.arange(lengths.sum()), lengths


def _with_empty_sequences(cu_seqlens: np.ndarray, count: int) -> np.ndarray:
    """With empty sequences at the end, up to a power of 2, at least `count`."""
    return np.pad(cu_seqlens, (0, (1 << (count - 1).bit_length()) + 1 - len(cu_seqlens)), mode="edge")
