"""What the program does on other CPUs than this one: torch's answers about the CPU, forced."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.transformer.kernels import compat

# CPU -> the questions of torch that it affirms.
CPUS = {
    "no half precision": (),
    "AVX512-BF16": ("_is_avx512_bf16_supported",),
    "AMX": ("_is_amx_tile_supported", "_is_avx512_bf16_supported"),
    "AMX with fp16": ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_amx_fp16_supported"),
}
QUESTIONS = CPUS["AMX with fp16"]
# One CPU for each pair of answers that the program gets: whether products of bf16, and of fp16, are native.
DIFFERENT = ("no half precision", "AVX512-BF16", "AMX with fp16")


def pretend(monkeypatch: pytest.MonkeyPatch, cpu: str) -> None:
    """Force the answers in this process and in ranks forked from it. Products are right on any CPU, if slow."""
    for question in QUESTIONS:
        monkeypatch.setattr(torch.cpu, question, lambda answer=question in CPUS[cpu]: answer)
    forget()


def forget() -> None:
    """Ask again: the only function that asks torch keeps the answers."""
    compat.cpu_has_half_matmul.cache_clear()
