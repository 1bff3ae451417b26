"""The GPUs of this machine, which only tests marked `gpu` may use.

All other tests fork their ranks and compare with a CPU, so the GPUs are hidden from them, and kernels for GPUs run in
Triton's interpreter, on the CPU. This process never uses CUDA.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
import torch

VARIABLE = "CUDA_VISIBLE_DEVICES"
INTERPRET = "TRITON_INTERPRET"
NONE = "torch sees no GPU"
_given = os.environ.get(VARIABLE)


def hide() -> None:
    """Before torch looks for GPUs, and Triton for a request to interpret its kernels."""
    os.environ[VARIABLE] = ""
    os.environ[INTERPRET] = "1"


def show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo `hide` for the processes that one test starts."""
    monkeypatch.delenv(INTERPRET)
    if _given is None:
        monkeypatch.delenv(VARIABLE)
    else:
        monkeypatch.setenv(VARIABLE, _given)


def hide_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo `show`."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv(INTERPRET, "1")


@functools.cache
def count() -> int:
    """How many GPUs torch sees, asked in a process of its own if torch is built for CUDA."""
    if torch.version.cuda is None:
        return 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        show(monkeypatch)
        code = "import torch; print(torch.cuda.device_count())"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)
