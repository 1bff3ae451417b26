"""Local layers, whose tokens see only keys within a window: their pairs, their calls on CPU, the plan of both kinds.

On CUDA the kernel has the window (varlen.py) where each token's place among the keys of its call is its position, as in
documents that are read in order. Where positions begin again (blanks, decoders, two streams) kernels that evaluate the
rule serve all layers (blocks.py). On CPU masked calls compare positions, so any layout is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megatron_lite.model.attention_backends.blocks import block_plan
from megatron_lite.model.attention_backends.calls import Packed, ScoreBias
from megatron_lite.model.attention_backends.dense import DensePlan
from megatron_lite.model.attention_backends.layout import (
    BLIND,
    BLOCK_ROWS,
    LEAST_FULL_ROWS,
    MASKED,
    Call,
    Layout,
    Unit,
    make_units,
    may_see,
)
from megatron_lite.model.attention_backends.plan import CallPlan, plan_attention
from megatron_lite.model.attention_backends.varlen import VarlenPlan
from megatron_lite.model.kernels.dropout import AttentionDropout


class LayeredPlan:
    """The plans of a model whose layers see all or what is near; both have the same order.

    Args: whole, near: HostPlans, on the device AttentionPlans: of layers 0, n, 2 n, ..., and of the others.
    """

    def __init__(self, whole: Any, near: Any, global_every: int):
        self.whole, self.near, self.global_every = whole, near, global_every
        # One order for both kinds of layers: no layer moves tokens.
        self.order = whole.order

    def arrays(self) -> list[np.ndarray]:
        return [*self.whole.arrays(), *self.near.arrays()]

    def on_device(self, arrays: list[torch.Tensor], device: torch.device) -> LayeredPlan:
        # Both plans' arrays travel in one buffer and are taken apart again here.
        first = len(self.whole.arrays())
        whole = self.whole.on_device(arrays[:first], device)
        return LayeredPlan(whole, self.near.on_device(arrays[first:], device), self.global_every)

    def of(self, layer: int) -> Any:
        """The plan of a layer."""
        return self.near if layer % self.global_every else self.whole

    def attend(
        self, layer: int, inputs: Packed, dropout: AttentionDropout | None, bias: ScoreBias | None = None
    ) -> torch.Tensor:
        return self.of(layer).attend(layer, inputs, dropout, bias)


def plan_layers(
    layout: Layout, device: torch.device, kernel: str, multiple: int, window: int, global_every: int
) -> LayeredPlan:
    """The plan of a model with local layers. Args: device, kernel, multiple: as for `plan_attention`."""
    whole: Any = plan_attention(layout, device, kernel, multiple)
    near: Any
    if isinstance(whole, CallPlan):
        # The order of the units is that of the whole plan, so its `order` serves as it is.
        near = CallPlan(layout, near_units(layout, whole.units, window), whole.order, window=window)
    elif isinstance(whole, DensePlan):
        near = DensePlan(layout, window=window)
    elif isinstance(whole, VarlenPlan) and _has_positions_as_places(layout):
        # The kernel's window counts places among the keys; these are positions only where they rise by one.
        near = whole.within(window)
    else:
        # Both kinds by the rule's kernels, since the two plans must agree on the order and length of tokens.
        whole, near = (block_plan(layout, len(whole.order), each) for each in (0, window))
    return LayeredPlan(whole, near, global_every)


def _has_positions_as_places(layout: Layout) -> bool:
    """Whether tokens of a call are as far apart among its keys, which end with its queries, as their positions."""
    units = make_units(layout, square_causal_only=False)
    calls = [call for unit in units for call in unit.calls]
    return _steps_by_one(layout) and all(
        len(call.keys) == 1 and call.keys[0][1] == call.stop for call in calls
    )


def _steps_by_one(layout: Layout) -> bool:
    """Whether positions rise by one within each document, so that places differ as positions do."""
    return bool((np.diff(layout.position) == 1)[np.diff(layout.document) == 0].all())


def near_keys(layout: Layout, window: int) -> np.ndarray:
    """Number of keys that each token sees in a local layer, int64 [T]."""
    views, place = layout.views, np.arange(len(layout.rows))
    if _steps_by_one(layout) and views.exact.all() and (views.stream_start == views.stream_stop).all():
        # Positions rise by one and every view is one stretch: the window is an interval, and no pairs are compared.
        first = np.maximum(views.content_start, place - window)
        return (np.minimum(views.content_stop, place + window + 1) - first).clip(min=0)
    seen, columns = np.zeros(len(place), np.int64), layout.columns
    # In blocks of queries: all pairs of a long row at once would be quadratic in memory.
    for start, stop in itertools.pairwise([*range(0, len(seen), BLOCK_ROWS), len(seen)]):
        first, last = np.searchsorted(layout.document, layout.document[[start, stop - 1]] + [0, 1])
        keys = _near(layout, slice(start, stop), slice(first, last), window)
        pairs = may_see(columns[:, start:stop, None], columns[:, None, keys], window=window)
        seen[start:stop] = pairs.sum(1)
    return seen


def _near(layout: Layout, queries: slice, keys: slice, window: int) -> np.ndarray:
    """Those of the keys that are within the window of a query, or between such: int64, ascending."""
    of_queries, of_keys = layout.position[queries], layout.position[keys]
    is_near = (of_keys >= of_queries.min() - window) & (of_keys <= of_queries.max() + window)
    return keys.start + np.flatnonzero(is_near)


def near_units(layout: Layout, units: list[Unit], window: int) -> list[Unit]:
    """The calls of local layers on CPU: masked blocks of queries, each with the keys that are near one of them.

    Units whose positions all lie within the window keep their calls.
    """
    seen = near_keys(layout, window)
    return [
        unit
        if np.ptp(layout.position[unit.start : unit.stop]) <= window
        else Unit(unit.start, unit.stop, tuple(_calls(unit, layout, seen, window)))
        for unit in units
    ]


def _calls(unit: Unit, layout: Layout, seen: np.ndarray, window: int) -> Iterator[Call]:
    """Args: seen: number of keys of each token of the layout."""
    views, begin = layout.views, unit.start
    # Stretches in which either all tokens see a key or none does: a softmax over no keys would be NaN.
    changes = begin + 1 + np.flatnonzero(np.diff(seen[begin : unit.stop] == 0))
    for start, stop in itertools.pairwise([begin, *changes.tolist(), unit.stop]):
        if not seen[start]:
            yield Call(BLIND, start - begin, stop - begin)
            continue
        # Blocks of about equal size; a last block of a few tokens would cost a whole call.
        blocks = -(-(stop - start) // BLOCK_ROWS)
        edges = [start + (stop - start) * i // blocks for i in range(blocks + 1)]
        for first, last in itertools.pairwise(edges):
            starts = views.stream_start[first:last].min(), views.content_start[first:last].min()
            stops = views.stream_stop[first:last].max(), views.content_stop[first:last].max()
            near = _near(layout, slice(first, last), slice(min(starts), max(stops)), window) - begin
            # Few keys in between are cheaper to mask than to join.
            cuts = np.flatnonzero(np.diff(near) > LEAST_FULL_ROWS)
            ends = zip(near[np.r_[0, cuts + 1]], near[np.r_[cuts, len(near) - 1]] + 1, strict=True)
            yield Call(MASKED, first - begin, last - begin, tuple((int(key), int(end)) for key, end in ends))
