"""The interface between checkpoints and an engine: the elements that this rank owns, and their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_lite.checkpoint.shard_slices import Run, runs
from megatron_lite.model.tensor_parallel import Partition
from megatron_lite.parallel.collectives import Group


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of one parameter's flattened shard that this rank owns: fp32 weights and moments.

    State that belongs to no single element is a fragment of its own, which is whole on every rank.
    """

    name: str
    shape: tuple[int, ...]  # of this rank's tensor-parallel shard
    partition: Partition
    tp: Group
    start: int  # first element, in the flattened shard
    tensors: dict[str, torch.Tensor]  # weight, exp_avg, ...: fp32 views of the engine's state, of one shape
    is_copy: bool  # the same values are owned by another rank, which writes them

    def runs(self) -> Iterator[Run]:
        """Where the fragment's elements lie in the whole parameter."""
        count = next(iter(self.tensors.values())).numel()
        return runs(self.shape, self.partition, self.tp.rank, self.tp.size, self.start, count)


class StateOwner(Protocol):
    """Weights and optimizer state under any layout; megatron_lite/engine/engine.py is one."""

    before_update: Callable[[], None]  # called before each change of the fragments

    def fragments(self) -> Iterator[Fragment]:
        """The fragments this rank owns. Together the ranks own every element, some of them several times."""
        ...

    def count_parameters(self) -> int:
        """Parameter tensors of the whole model, over all pipeline stages."""
        ...

    def scalar_state(self) -> dict[str, Any]:
        """Adam's step count and the loss scaler, as JSON values."""
        ...

    def load_scalar_state(self, state: dict[str, Any]) -> None: ...

    def publish_weights(self) -> None:
        """Copy changed fragments to the model weights in training precision, on every rank."""
        ...
