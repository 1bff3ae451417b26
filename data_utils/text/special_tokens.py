"""The ids of GLM's special tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of GLM's tokens in a vocabulary; `smask` and `gmask` may equal `mask`, as in some releases."""

    cls: int
    sep: int
    mask: int
    smask: int
    gmask: int
    sop: int
    eop: int
    eos: int
    pad: int
    unk: int
    dblock: int
