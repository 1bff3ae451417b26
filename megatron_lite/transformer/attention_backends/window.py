"""Local layers, whose tokens see only keys within a window: their query ranges on CPU, and a model with both kinds.

On CUDA the kernel has the window (varlen.py) where each token's index among the keys of its sequence is its position,
as in documents that are read in order. Where positions begin again (blanks, decoders, two streams) kernels that
evaluate the rule serve all layers (blocks.py). On CPU masked ranges compare positions, so any layout is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from megatron_lite.transformer.attention_backends.interface import BatchPlan, Packed, ScoreBias
from megatron_lite.transformer.attention_backends.layout import (
    BLIND,
    BLOCK_QUERIES,
    LEAST_FULL_QUERIES,
    MASKED,
    DocumentGroup,
    Layout,
    QueryRange,
    make_document_groups,
    may_see,
)
from megatron_lite.transformer.kernels.dropout import AttentionDropout


class LayeredPlan:
    """The plans of a model with global layers, whose tokens see all, and local layers; both have the same order.

    Args: global_plan: of layers 0, n, 2 n, ..., where n is `global_every`. local_plan: of the others.
    """

    def __init__(self, global_plan: BatchPlan, local_plan: BatchPlan, global_every: int):
        self.global_plan, self.local_plan, self.global_every = global_plan, local_plan, global_every
        # One order for all layers: no layer moves tokens.
        self.order = global_plan.order

    def arrays(self) -> list[np.ndarray]:
        return [*self.global_plan.arrays(), *self.local_plan.arrays()]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> LayeredPlan:
        count = len(self.global_plan.arrays())
        global_plan = self.global_plan.on_device(arrays[:count], device)
        return LayeredPlan(global_plan, self.local_plan.on_device(arrays[count:], device), self.global_every)

    def layer_plan(self, layer: int) -> BatchPlan:
        return self.local_plan if layer % self.global_every else self.global_plan

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        return self.layer_plan(layer).attend(layer, inputs, dropout, bias)


def keys_are_at_positions(layout: Layout) -> bool:
    """Whether two tokens are as far apart among the keys of their query range as their positions are.

    The window of CUDA's kernel counts indices among the keys, of which the queries are the last.
    """
    groups = make_document_groups(layout, square_causal_only=False)
    query_ranges = [each for group in groups for each in group.query_ranges]
    return _steps_by_one(layout) and all(
        len(each.keys) == 1 and each.keys[0][1] == each.stop for each in query_ranges
    )


def _steps_by_one(layout: Layout) -> bool:
    """Whether positions rise by one within each document, so that indices differ as positions do."""
    return bool((np.diff(layout.position) == 1)[np.diff(layout.document) == 0].all())


def count_window_keys(layout: Layout, window: int) -> np.ndarray:
    """Number of keys that each token sees in a local layer, int64 [T]."""
    visible, index = layout.visible_keys, np.arange(len(layout.batch_index))
    has_stream = (visible.stream_start != visible.stream_stop).any()
    if _steps_by_one(layout) and visible.is_exact.all() and not has_stream:
        # Positions rise by one and each token sees one range: the window is an interval, and no pairs are compared.
        first = np.maximum(visible.content_start, index - window)
        return (np.minimum(visible.content_stop, index + window + 1) - first).clip(min=0)
    count, columns = np.zeros(len(index), np.int64), layout.columns
    # In blocks of queries: all pairs of a long document at once would be quadratic in memory.
    for start, stop in itertools.pairwise([*range(0, len(count), BLOCK_QUERIES), len(count)]):
        first, last = np.searchsorted(layout.document, layout.document[[start, stop - 1]] + [0, 1])
        keys = _window_keys(layout, slice(start, stop), slice(first, last), window)
        pairs = may_see(columns[:, start:stop, None], columns[:, None, keys], window=window)
        count[start:stop] = pairs.sum(1)
    return count


def _window_keys(layout: Layout, queries: slice, keys: slice, window: int) -> np.ndarray:
    """The keys with positions from the first key to the last that any of the queries may see: int64, ascending."""
    query_positions, key_positions = layout.position[queries], layout.position[keys]
    first = query_positions.min() - window
    last = query_positions.max() + window
    is_near = (key_positions >= first) & (key_positions <= last)
    return keys.start + np.flatnonzero(is_near)


def window_groups(layout: Layout, groups: list[DocumentGroup], window: int) -> list[DocumentGroup]:
    """The groups of local layers on CPU: masked blocks of queries, each with the keys that are near one of them.

    Groups whose positions all lie within the window stay as they are.
    """
    key_counts = count_window_keys(layout, window)
    return [
        group
        if np.ptp(layout.position[group.start : group.stop]) <= window
        else DocumentGroup(group.start, group.stop, tuple(_window_ranges(group, layout, key_counts, window)))
        for group in groups
    ]


def _window_ranges(
    group: DocumentGroup, layout: Layout, key_counts: np.ndarray, window: int
) -> Iterator[QueryRange]:
    """Args: key_counts: of each token of the layout, see `count_window_keys`."""
    visible, begin = layout.visible_keys, group.start
    # Ranges in which either all tokens see a key or none does: a softmax over no keys would be NaN.
    changes = begin + 1 + np.flatnonzero(np.diff(key_counts[begin : group.stop] == 0))
    for start, stop in itertools.pairwise([begin, *changes.tolist(), group.stop]):
        if not key_counts[start]:
            yield QueryRange(BLIND, start - begin, stop - begin)
            continue
        # Blocks of about equal size; a last block of a few tokens would cost a whole launch.
        blocks = -(-(stop - start) // BLOCK_QUERIES)
        edges = [start + (stop - start) * i // blocks for i in range(blocks + 1)]
        for first, last in itertools.pairwise(edges):
            starts = visible.stream_start[first:last].min(), visible.content_start[first:last].min()
            stops = visible.stream_stop[first:last].max(), visible.content_stop[first:last].max()
            near = _window_keys(layout, slice(first, last), slice(min(starts), max(stops)), window) - begin
            # A small gap between keys is cheaper to mask than the ranges to join.
            cuts = np.flatnonzero(np.diff(near) > LEAST_FULL_QUERIES)
            ends = zip(near[np.r_[0, cuts + 1]], near[np.r_[cuts, len(near) - 1]] + 1, strict=True)
            keys = tuple((int(key), int(end)) for key, end in ends)
            yield QueryRange(MASKED, first - begin, last - begin, keys)
