"""Compiles the kernels for a GPU on a machine without one: `python tests/support/compile_kernels.py [80 [short]]`.

Args: its compute capability, 90 unless given; short: in one width and type, and of the activations one.

Writes a line of JSON for each: name, width, registers of a thread, bytes of registers that spill into memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def launches(width, dtype, activations=99):
    """Every kernel once, on rows of a width. Args: activations: most of them."""
    import torch

    from megatron_lite.config.model import ACTIVATIONS
    from megatron_lite.transformer.kernels import cross_entropy, fused

    rows, bias = torch.zeros(64, width, dtype=dtype), torch.zeros(width, dtype=dtype)
    keys, salt = torch.zeros(64, dtype=torch.int32), 7
    for shift, centered in ((bias, True), (None, False)):
        dropout = keys, salt, 0.1
        *_, stats = fused.add_norm_kernel(rows, bias, *dropout, rows, bias, shift, 1e-5, centered)
        *_, sums = fused.add_norm_backward_kernel(
            rows, rows, rows, bias, stats, centered, centered, *dropout, True
        )
    fused.finish_sums_kernel([sums, sums, sums, sums], bias)
    for kind in ACTIVATIONS[:activations]:
        for gated in (False, True):
            form, wide = (kind, gated, *dropout), torch.zeros(64, (1 + gated) * width, dtype=dtype)
            fused.activate_kernel(wide, wide[0], *form)
            fused.activate_backward_kernel(wide, wide[0], rows, *form)
    heads = rows.view(64, -1, 64)
    fused.join_pair_kernel(*[heads] * 6, 0, keys, keys[:1])
    log_sums, _ = cross_entropy.log_sums_kernel(rows, keys, 0, width)
    cross_entropy.write_gradient_kernel(rows, keys, log_sums, log_sums, 0, width)


def heads(size, dtype):
    """Those of heads, with all that they can have: normed, turned, and two queries for each key."""
    import torch

    from megatron_lite.transformer.kernels import qkv_heads as heads

    given, angles, scale = (
        torch.zeros(64, 8, size, dtype=dtype),
        torch.zeros(64, 1, size // 2),
        torch.zeros(size, dtype=dtype),
    )
    form = angles, angles, scale, scale, 1e-5, 2, 0.5
    packed = heads.expand_heads_kernel(given, *form)
    for grads in ((packed, None, None), [packed[:, 0].contiguous()] * 3):
        heads.gather_heads_kernel(*grads, 0, given, *form, 64)
    heads.rotate_heads_kernel(packed, angles, angles, True)


def attention(size=64, tokens=128, longest=64):
    """Each kernel of attention under the rule, with all that it can have."""
    import torch

    from megatron_lite.transformer.kernels import rule_attention

    qkv, columns = (
        torch.zeros(tokens, 3, 2, size, dtype=torch.bfloat16),
        torch.zeros(5, tokens, dtype=torch.int32),
    )
    lists = [torch.zeros(*shape, dtype=torch.int32) for shape in ((1,), (1, 1), (1,), (1, 1))]
    line, buckets = torch.zeros(2, 2 * longest + 1), torch.zeros(2 * longest + 1, dtype=torch.int32)
    tables = [torch.zeros(2, tokens, 32, dtype=torch.bfloat16)] * 2
    for of_bias in ((line, buckets, []), (None, buckets, tables), (None, buckets, tables[:1])):
        rest = lists, *of_bias, columns[0], columns[0, 0], 0.1, 0, 16
        out, log_sums = rule_attention.rule_attention_kernel(qkv, columns, *rest)
        given = of_bias[-1], out, qkv, out, log_sums, columns, *rest
        d_qkv, products = rule_attention.rule_attention_queries_kernel(*given)
        given = d_qkv, of_bias[-1], out, qkv, log_sums, products, columns, *rest
        rule_attention.rule_attention_keys_kernel(*given)


def resources(compiled):
    """Registers of a thread and spilled bytes, by NVIDIA's assembler."""
    from triton.backends.nvidia.compiler import get_ptxas

    from benchmarks.step_trace import without_gpu

    number = without_gpu.COMPUTE_CAPABILITY
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        name = f"sm_{number}{'a' * (number >= 90)}"
        command = [get_ptxas(number).path, "-v", "--gpu-name", name, file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    patterns = r"Used (\d+) registers", r"(\d+) bytes spill stores"
    return [int(re.search(pattern, report)[1]) for pattern in patterns]


def main():
    import torch

    from benchmarks.step_trace import without_gpu

    if sys.argv[1:]:
        without_gpu.COMPUTE_CAPABILITY = int(sys.argv[1])
    found = []
    without_gpu.compile_only(found)
    is_short = "short" in sys.argv
    for width, dtype in ((1024, torch.bfloat16), (1024, torch.float32), (8192, torch.bfloat16))[
        : 3 - 2 * is_short
    ]:
        launches(width, dtype, 1 if is_short else 99)
        for name, compiled in found:
            print(json.dumps([name, width, *resources(compiled)]), flush=True)
        found.clear()
    attention()
    for size, dtype in ((128, torch.bfloat16), (256, torch.float32))[: 2 - is_short]:
        heads(size, dtype)
    for name, compiled in found:
        print(json.dumps([name, 64, *resources(compiled)]), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
