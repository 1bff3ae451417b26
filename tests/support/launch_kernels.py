"""Launches kernels on a machine without a GPU, twice each: `python tests/support/launch_kernels.py`.

The first launch of a kind is Triton's own, later ones are ours (launch.py). Writes a line of JSON for each launch: what
was launched, how many times Triton has been asked so far, and what the function in C was called with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def plain(argument):
    """An argument as the function in C reads it."""
    if hasattr(argument, "data_ptr"):
        return argument.data_ptr()
    return [plain(part) for part in argument] if isinstance(argument, (tuple, list)) else argument


def main():
    import torch
    import triton

    from benchmarks.step_trace.without_gpu import compile_only
    from megatron_lite.transformer.kernels import fused

    asked, launched = [], []
    compile_only(asked, lambda *arguments: launched.append(arguments))
    buffer = torch.zeros(64 * 64 + 1, dtype=torch.bfloat16)
    rows, moved = buffer[:-1].view(64, 64), buffer[1:].view(64, 64)
    bias, keys = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32)

    def gelu(x, shift, kind="gelu_tanh"):
        return fused.activate_kernel(x, shift, kind, False, *fused.NO_DROPOUT)

    kinds = {
        "gelu": lambda: gelu(rows, bias),
        "gelu of fewer rows": lambda: gelu(rows[:17], bias),
        "gelu without bias": lambda: gelu(rows, None),
        "gelu of erf": lambda: gelu(rows, bias, "gelu_erf"),
        "gelu in fp32": lambda: gelu(rows.float(), bias.float()),
        "gelu of rows that begin at 2 bytes": lambda: gelu(moved, bias),
        "norm": lambda: fused.add_norm_kernel(rows, bias, keys, -5, 0.1, rows, bias, bias, 1e-5, True),
    }

    def launch(kind):
        kept.append(kinds[kind]())  # else the next results would lie there
        *start, last = launched.pop()
        hooks = 8, 9, 10  # which report launches to a profiler; here there is none
        start = ["" if i in hooks else plain(argument) for i, argument in enumerate(start)]
        print(json.dumps([kind, len(asked), start, plain(last)], default=str), flush=True)

    kept = []
    for kind in kinds:
        launch(kind)
        launch(kind)
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    launch("norm")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
