#!/usr/bin/env python3
"""From which document length on does PrefixPlan beat DensePlan? The threshold in megatron_lite/attention.py.

Rows are packed with documents of one length, a fifth of it in part B as in the token objective, and each plan
computes one layer's attention, forward and backward. PrefixPlan saves the work between documents and part A's
on part B, but makes two calls per document: many short documents cost more in calls than the mask saves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from megatron_lite.attention import plan_attention
from megatron_lite.cpu_memory import keep_freed_memory
from megatron_lite.errors import ConfigError, run_command

ROW_LENGTH = 576  # divisible by the document lengths, near the token objective's rows
HEAD_DIM = 64
PART_B_SHARE = 0.2
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def packed_rows(rows: int, length: int, document: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """doc, ord, grp int32 [rows, length] of rows filled with documents of `document` tokens."""
    position = np.arange(length)
    context = document - round(PART_B_SHARE * document)
    order = np.maximum(0, position % document - context + 1)
    planes = (position // document, order, np.zeros(length))
    doc, order, grp = (np.tile(plane.astype(np.int32), (rows, 1)) for plane in planes)
    return doc, order, grp


def attention_step(
    kernel: str, rows: int, length: int, document: int, heads: int, dtype: torch.dtype
) -> Callable[[], None]:
    """Forward and backward of one layer's attention on the CPU."""
    plan = plan_attention(*packed_rows(rows, length, document), torch.device("cpu"), kernel)
    qkv = torch.randn(rows, length, 3, heads, HEAD_DIM).to(dtype).requires_grad_()

    def step() -> None:
        out = plan.attend(0, *qkv.unbind(2), 0.0)
        torch.autograd.grad(out, qkv, torch.ones_like(out))

    return step


def milliseconds(steps: list[Callable[[], None]], repeats: int, clock: str) -> list[float]:
    """Median of each step; they take turns, after one untimed round."""
    now = CLOCKS[clock]
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(repeats + 1):
        for step, mine in zip(steps, times, strict=True):
            start = now()
            step()
            if turn:
                mine.append(now() - start)
    return [1e3 * statistics.median(mine) for mine in times]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--documents", nargs="+", type=int, default=[16, 24, 36, 48, 72, 96, 144, 288, 576], help="lengths")
    add("--heads", nargs="+", type=int, default=[4, 16], help="(default: 4 16)")
    add("--dtype", default="bf16", choices=DTYPES, help="(default: bf16)")
    add("--micro-batch", type=int, default=2, help="rows (default: 2)")
    add("--row-length", type=int, default=ROW_LENGTH, help=f"tokens (default: {ROW_LENGTH})")
    add("--repeats", type=int, default=5, help="timed rounds; the median counts (default: 5)")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: torch's)")
    add(
        "--clock",
        default="wall",
        choices=CLOCKS,
        help="process: CPU seconds, for one thread on a shared machine",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    for name in ("micro_batch", "row_length", "repeats", "threads"):
        if getattr(options, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1."
            )
    if options.clock == "process" and options.threads > 1:
        raise ConfigError("--clock process counts CPU time of one thread; use it with --threads 1.")
    if min(options.documents) < 2:
        raise ConfigError(f"--documents holds {min(options.documents)}; a document needs at least 2 tokens.")
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    print("| heads | document length | prefix ms | dense ms | dense / prefix |\n|---|---|---|---|---|")
    for heads in options.heads:
        for document in options.documents:
            shape = (options.micro_batch, options.row_length, document, heads, DTYPES[options.dtype])
            steps = [attention_step(kernel, *shape) for kernel in ("prefix", "dense")]
            prefix, dense = milliseconds(steps, options.repeats, options.clock)
            print(f"| {heads} | {document} | {prefix:.1f} | {dense:.1f} | {dense / prefix:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
