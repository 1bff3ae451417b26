"""GPU kernels on CPU tensors, through Triton's interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import triton

from megatron_lite.transformer.kernels import fused


@contextlib.contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Let fused.py use kernels for tensors of the CPU."""
    assert triton.knobs.runtime.interpret  # see gpus.py
    with mock.patch.object(fused, "DEVICES", ("cuda", "cpu")):
        yield
