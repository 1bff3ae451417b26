"""Launches that a CUDA graph could not replay: those of the blocks that differ between two batches of one length.

Each launch of a pass is noted with the numbers that the host passes it, the shapes of its tensors and where they lie:
in which allocation of the pass, in the order of first use, and where in it. A graph repeats all of these. Parameters,
sums of gradients and static buffers must be the same allocations besides.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from benchmarks.step_trace.record import place
from benchmarks.step_trace.trace import Case, Steps, fake_rank
from megatron_lite.estimate.batches import random_batches
from megatron_lite.transformer import cuda_graphs as graphs
from megatron_lite.transformer import fused_block
from megatron_lite.transformer.fused_block import FusedParameters
from megatron_lite.transformer.micro_batch import MicroBatch

_SEARCHED = 24  # batches, among which two are of one length
Note = tuple[str, str, tuple[Any, ...]]  # operation, place in the code, numbers and tensors


class Notes:
    """The launches of a pass within blocks."""

    def __init__(self) -> None:
        self.launches: list[Note] = []
        self.entered: dict[
            str, None
        ] = {}  # tensors from outside of the blocks that lie elsewhere in each pass
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._is_within = 0

    def begin(self) -> None:
        self._seen = weakref.WeakSet(self._numbers)  # what is still there
        self._numbers = weakref.WeakKeyDictionary()
        self.launches, self.entered = [], {}

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose launches are noted."""

        def run(*arguments: Any, **options: Any) -> Any:
            self._is_within += 1
            try:
                return function(*arguments, **options)
            finally:
                self._is_within -= 1

        return run

    def note(self, name: str, values: tuple[Any, ...]) -> None:
        if not self._is_within:
            return
        made = {leaf.untyped_storage() for leaf in tree_leaves(values[2:]) if isinstance(leaf, FakeTensor)}
        for leaf in tree_leaves(values[:2]):
            if isinstance(leaf, FakeTensor):
                storage = leaf.untyped_storage()
                if storage not in self._numbers and storage not in self._seen and storage not in made:
                    self.entered[
                        f"{name} at {place()} reads what lies elsewhere in each pass: {tuple(leaf.shape)}"
                    ] = None
        self.launches.append((name, place(), tuple(map(self._described, tree_leaves(values)))))

    def _described(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            storage = value.untyped_storage()
            number = self._numbers.setdefault(storage, len(self._numbers))
            return f"memory {number}", value.storage_offset(), tuple(value.shape), tuple(value.stride())
        return value.tolist() if isinstance(value, torch.Tensor) else value


def differences(case: Case) -> list[str]:
    """Differences between the passes of two batches of one length, each once: `operation at place: one -> other`.

    No graph is captured: with `training.cuda_graphs` these are the launches that one would repeat.
    """
    graphs.MOST_SHAPES = 0
    notes, block = Notes(), fused_block.FusedBlock
    with fake_rank(replace(case, micro_batches=1)) as rank:
        FusedParameters.forward = notes.within(FusedParameters.forward)  # type: ignore[method-assign]
        block.backward = staticmethod(notes.within(block.backward))
        batches = random_batches(rank.config, _SEARCHED)
        pair = _of_one_length([rank.engine.prepared(batch, 1 + i) for i, batch in enumerate(batches)])
        passes = []
        for micro_batch in (pair[0], *pair):  # the first pass allocates
            notes.begin()
            rank.recorder.watch = notes.note
            Steps(rank.engine, rank.recorder, [micro_batch]).run()
            passes.append(notes.launches)
    return [*notes.entered, *_compared(*passes[1:])]


def _of_one_length(made: list[MicroBatch]) -> list[MicroBatch]:
    """Two batches of one length, with plans of one shape if there are such ones."""
    alike: dict[tuple[Any, ...], list[MicroBatch]] = {}
    for one in made:
        plan = one.plan.shape if one.plan.has_fixed_shapes else ()
        alike.setdefault((len(one.tokens), *plan), []).append(one)
    return next(found[:2] for found in alike.values() if len(found) > 1)


def _compared(first: list[Note], second: list[Note]) -> Iterator[str]:
    if len(first) != len(second):
        yield f"{len(first)} -> {len(second)} launches"
    found: dict[tuple[str, str, int], str] = {}  # the first of each place
    for one, other in zip(first, second, strict=False):
        for slot, (mine, theirs) in enumerate(zip(one[2], other[2], strict=False)):
            if (one[:2], mine) != (other[:2], theirs):
                found.setdefault((*one[:2], slot), f"{one[0]} at {one[1]}: {mine} -> {theirs}")
    yield from found.values()
