"""Arrays by name in one buffer, which reaches a device in one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch


class Entry(NamedTuple):
    """The shape and type of one array; the arrays follow each other in the order of the table."""

    shape: tuple[int, ...]
    is_float: bool


@dataclass(frozen=True)
class NamedBuffer:
    """Arrays of int32 and fp32 in one buffer, on the host or on a device."""

    data: torch.Tensor  # int32 [elements of all arrays]
    table: Mapping[str, Entry]

    @staticmethod
    def pack(arrays: Mapping[str, np.ndarray], *, pin: bool) -> NamedBuffer:
        """The buffer on the host: integers become int32, floats fp32.

        Args: pin: the memory is pinned, which an asynchronous copy to a GPU needs.
        """
        table = {name: Entry(x.shape, np.issubdtype(x.dtype, np.floating)) for name, x in arrays.items()}
        flat = []
        for name, array in arrays.items():
            if table[name].is_float:
                # By their bits: one type, so one buffer and one copy.
                array = array.astype(np.float32, copy=False).reshape(-1).view(np.int32)
            flat.append(array.reshape(-1).astype(np.int32, copy=False))
        data = torch.from_numpy(np.concatenate(flat))
        return NamedBuffer(data.pin_memory() if pin else data, table)

    def to(self, device: torch.device, into: torch.Tensor | None = None) -> NamedBuffer:
        """The buffer on a device, at the beginning of `into` if given. On a GPU the copy is asynchronous."""
        if into is None:
            return replace(self, data=self.data.to(device, non_blocking=True))
        return replace(self, data=into[: len(self.data)].copy_(self.data, non_blocking=True))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The arrays by name, as views of the buffer."""
        flat = self.data.split([math.prod(entry.shape) for entry in self.table.values()])
        return {
            name: (x.view(torch.float32) if entry.is_float else x).view(entry.shape)
            for (name, entry), x in zip(self.table.items(), flat, strict=True)
        }
