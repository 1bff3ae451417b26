"""Instructions of the kernels for each number, compiled for sm_90: `python tests/support/instructions.py [NAME ...]`.

Those of a loop count for the numbers that a turn takes, those outside of loops once a program; programs have as many
turns as for 335M's 8,640 tokens.
"""

from __future__ import annotations

import itertools
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

    from megatron_lite.config.model import ACTIVATIONS

    def bf(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    def fp(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape)

    x, w, stats, keys = bf(ROWS, WIDTH), bf(WIDTH), fp(2, ROWS), torch.zeros(ROWS, dtype=torch.int32)
    wide, bias, logits, heads = bf(ROWS, INNER), bf(INNER), bf(ROWS, WORDS), bf(ROWS, 16, 64)
    yield "add_norm", "add_norm", (x, w, keys, 5, 0.1, x, w, w, 1e-5, True, x, x, stats), 16, 1
    yield "add_rms_norm", "add_norm", (x, None, keys, 5, 0.1, x, w, None, 1e-5, False, x, x, stats[:1]), 16, 1
    for name, is_full, sums in (("add_norm_backward", True, 3), ("add_rms_norm_backward", False, 1)):
        options = x, x, x, w, stats[: 1 + is_full], is_full, is_full, keys, 5, 0.1, is_full
        yield name, "add_norm_backward", (*options, x, x, fp(16, sums * WIDTH)), 16, 34
    for kind, gated, p in (*itertools.product(ACTIVATIONS, (False, True), (0.0,)), ("relu", False, 0.1)):
        given, shift = (bf(ROWS, 2 * INNER), None) if gated else (wide, bias)
        form = kind, gated, keys, 5, p
        name = f"{kind}{gated * '_gated'}{(p > 0) * '_dropped'}"
        yield f"activate_{name}", "activate", (given, shift, *form, wide), 32, 1
        results = given, fp(4, given.shape[1])
        yield (
            f"activate_backward_{name}",
            "activate_backward",
            (given, shift, wide, *form, *results),
            32,
            9 * (1 + gated),
        )
    angles, scale = fp(ROWS, 1, 32), bf(64)
    packed = bf(ROWS, 3, 16, 64)
    for name, scales in (("", (None, None)), ("_normed", (scale, scale))):
        form, given = (angles, angles, *scales, 1e-5, 16, 1.0), packed.view(ROWS, 48, 64)
        yield f"expand_heads{name}", "expand_heads", (given, *form, packed), 32, 1
        back = heads, heads, heads, 0, given, *form, ROWS, given, fp(4 if name else 0, 128)
        yield f"gather_heads{name}", "gather_heads", back, 16, 34 if name else 1
    yield (
        "join_pair",
        "join_pair",
        (*[heads] * 6, 0, keys, None, bf(ROWS, 3, 16, 64), fp(16, 3 * WIDTH)),
        48,
        34,
    )
    yield "log_sums", "log_sums", (logits, keys, 0, WORDS - 1, stats[0], stats[1]), 16, 8
    yield "write_gradient", "write_gradient", (logits, keys, stats[0], stats[1], 0, WORDS - 1), 16, 1


def main() -> None:
    from benchmarks.step_trace import without_gpu

    found: list[tuple[str, Any]] = []
    without_gpu.compile_only(found)
    from megatron_lite.model.kernels import triton_cross_entropy, triton_kernels, triton_qkv_heads

    kernels = {**vars(triton_kernels), **vars(triton_cross_entropy), **vars(triton_qkv_heads)}
    for name, function, arguments, numbers, turns in cases():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        found.clear()
        kernels[function](*arguments)
        outside, loop = instructions(found[-1][1])
        print(name, (outside + loop * turns) / numbers / turns)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
