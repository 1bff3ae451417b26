"""What checkpoints ask of an engine: the fp32 weights and optimizer state that this rank owns, parameter by parameter.

A `Fragment` is what DeepSpeed calls a tensor fragment and Megatron a ShardedTensor with a flattened range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_lite.checkpoint.shard_slices import FlattenedRange, flattened_ranges
from megatron_lite.parallel.collectives import Group
from megatron_lite.transformer.tensor_parallel import Partition


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of one parameter's flattened tensor-parallel shard that this rank owns, with their state.

    Optimizer state that is not per element (Adafactor's row and column means) is a separate fragment, whole on every
    rank.
    """

    name: str
    shape: tuple[int, ...]  # of this rank's tensor-parallel shard
    partition: Partition
    tp: Group
    start: int  # first element, in the flattened shard
    tensors: dict[str, torch.Tensor]  # weight, exp_avg, ...: fp32 views of the engine's state, of one shape
    is_copy: bool  # a replica: another rank owns and writes the same values

    def ranges(self) -> Iterator[FlattenedRange]:
        """Which slices of the whole parameter the fragment's elements are."""
        count = next(iter(self.tensors.values())).numel()
        return flattened_ranges(self.shape, self.partition, self.tp.rank, self.tp.size, self.start, count)


class StateOwner(Protocol):
    """Weights and optimizer state under any parallel sizes: `Engine` in megatron_lite/engine/engine.py."""

    before_update: Callable[[], None]  # called before each change of the fragments

    def fragments(self) -> Iterator[Fragment]:
        """This rank's fragments. Together the ranks hold every element; of replicas all but one are copies."""
        ...

    def count_parameters(self) -> int:
        """Parameter tensors of the whole model, over all pipeline stages."""
        ...

    def scalar_state(self) -> dict[str, Any]:
        """Adam's step count and the loss scaler, as JSON values."""
        ...

    def load_scalar_state(self, state: dict[str, Any]) -> None: ...

    def gather_weights(self) -> None:
        """Copy changed fragments to the model weights in training precision, on every rank."""
        ...
