"""Instructions of the kernels for each number, compiled for sm_90: `python tests/support/instructions.py`.

Those of a loop count for the numbers that a turn takes, those outside of loops once a program; programs have as many
turns as for 335M's 8,640 tokens.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS, WIDTH, INNER, WORDS = 64, 1024, 4096, 30592
LINE = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);")


def instructions(kernel: Any) -> tuple[int, int]:
    """Instructions of a thread outside of the longest loop, and in it. NOPs at the end are left out."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        if (found := LINE.match(line)) and "NOP" not in found[1]:
            lines.append(found[1])
    jumps = [
        (labels.get(name, len(lines)), at)
        for at, line in enumerate(lines)
        for name in re.findall(r"`\((\.L_x_\d+)\)", line)
    ]
    loop = max((at - start + 1 for start, at in jumps if start < at), default=0)
    return len(lines) - loop, loop


def cases() -> Iterator[tuple[str, str, tuple[Any, ...], int, int]]:
    """Name, function, arguments, numbers of a thread in a turn, turns of a program."""
    import torch

    def bf(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    def fp(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape)

    x, w, stats, keys = bf(ROWS, WIDTH), bf(WIDTH), fp(2, ROWS), torch.zeros(ROWS, dtype=torch.int32)
    wide, bias, logits, heads = bf(ROWS, INNER), bf(INNER), bf(ROWS, WORDS), bf(ROWS, 16, 64)
    yield "add_norm", "add_norm", (x, w, keys, 5, 0.1, x, w, w, 1e-5, x, x, stats), 16, 1
    yield (
        "add_norm_backward",
        "add_norm_backward",
        (x, x, x, w, stats, keys, 5, 0.1, True, x, x, fp(16, 3 * WIDTH)),
        16,
        34,
    )
    for tail, tanh in (("", True), ("_erf", False)):
        yield f"bias_gelu{tail}", "bias_gelu", (wide, bias, tanh, wide), 32, 1
        yield (
            f"bias_gelu_backward{tail}",
            "bias_gelu_backward",
            (wide, bias, wide, tanh, wide, fp(4, INNER)),
            32,
            9,
        )
    yield "join_pair", "join_pair", (*[heads] * 6, 0, keys, bf(ROWS, 3, 16, 64), fp(16, 3 * WIDTH)), 48, 34
    yield "log_sums", "log_sums", (logits, keys, 0, WORDS - 1, stats[0], stats[1]), 16, 8
    yield "write_gradient", "write_gradient", (logits, keys, stats[0], stats[1], 0, WORDS - 1), 16, 1


def main() -> None:
    from benchmarks.step_trace import without_gpu

    found: list[tuple[str, Any]] = []
    without_gpu.compile_only(found)
    from megatron_lite.model.kernels import triton_kernels

    for name, function, arguments, numbers, turns in cases():
        found.clear()
        getattr(triton_kernels, function)(*arguments)
        outside, loop = instructions(found[-1][1])
        print(name, (outside + loop * turns) / numbers / turns)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
