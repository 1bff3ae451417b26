"""An engine with state and no model, for tests of what happens to files: starts at once, in any process.

Every element's value says where it belongs and at which step it was written. Ranks own equal runs of each parameter, as
under ZeRO 1.
"""

from __future__ import annotations

import math
import zlib

import torch

from megatron_lite.checkpoint.fragments import Fragment
from megatron_lite.checkpoint.manifest import ADAM_STATE, Checkpoint
from megatron_lite.checkpoint.read import _SliceReader
from megatron_lite.checkpoint.shard_slices import ShardSlice, matrix_shape
from megatron_lite.parallel.collectives import SINGLE
from megatron_lite.transformer.tensor_parallel import Partition

SHAPES = {"words": (300, 32), "dense.weight": (64, 48), "dense.bias": (48,), "norm": (7,)}


def expected(name: str, kind: str, step: int, positions: torch.Tensor) -> torch.Tensor:
    """Values in [0, 1), exact in fp32: no two positions of a tensor share one, whole rows apart or not."""
    first = zlib.crc32(f"{name} {kind} {step}".encode())
    return ((first + 2654435761 * positions) % 2**24).float() / 2**24  # an odd factor: one to one up to 2^24


class StubEngine:
    def __init__(self, rank: int = 0, world_size: int = 1):
        self._own = {}
        for name, shape in SHAPES.items():
            length = -(-math.prod(shape) // world_size)
            start = rank * length
            count = max(0, min(length, math.prod(shape) - start))
            if count:
                self._own[name] = start, {kind: torch.zeros(count) for kind in ADAM_STATE}
        self.step = 0
        self.before_update = lambda: None

    def train(self, step: int) -> None:
        """Give every element its value of this step."""
        self.before_update()
        self.step = step
        for name, (start, tensors) in self._own.items():
            for kind, values in tensors.items():
                values.copy_(expected(name, kind, step, torch.arange(start, start + len(values))))

    def fragments(self):
        for name, (start, tensors) in self._own.items():
            yield Fragment(name, SHAPES[name], Partition(), SINGLE, start, tensors, is_copy=False)

    def holds(self, step: int) -> bool:
        """Whether every element has its value of this step."""
        return all(
            torch.equal(values, expected(name, kind, step, torch.arange(start, start + len(values))))
            for name, (start, tensors) in self._own.items()
            for kind, values in tensors.items()
        )

    def count_parameters(self) -> int:
        return len(SHAPES)

    def scalar_state(self) -> dict:
        return {"adam_step": float(self.step), "loss_scaler": {}}

    def load_scalar_state(self, state: dict) -> None:
        self.step = int(state["adam_step"])
        for value in (*state.get("adam_steps", {}).values(), *state["loss_scaler"].values()):
            torch.zeros(1).fill_(-1 if value is None else value)  # as an engine does

    def gather_weights(self) -> None:
        pass


def whole_state_is(found: Checkpoint, step: int) -> bool:
    """Whether a checkpoint of a stub engine holds, in every element, what it should at this step."""
    reader = _SliceReader(found)
    for name, shape in SHAPES.items():
        rows, columns = matrix_shape(shape)
        for kind in ADAM_STATE:
            matrix = torch.empty(rows, columns)
            reader.fill(matrix, ShardSlice(0, rows, 0, columns), name, kind)
            if not torch.equal(matrix.flatten(), expected(name, kind, step, torch.arange(rows * columns))):
                return False
    return found.step == step
