#!/usr/bin/env python3
"""What attention costs: per objective the plan's kernels compared with one dense masked kernel, and each kernel alone.

The second table has the three kernels of megatron_lite/transformer/attention_backends/cpu_kernels.py, casts
included, and the one that a plan takes, for calls of [batch, heads, tokens, head size] in which every query sees
every key.

Rows come from each objective's own Examples, filled with one document or packed with documents as long as those of a
real corpus. A step is forward and backward of one layer. Times are medians of rounds in which both plans take turns.
Peak memory is that of a forked process beyond the inputs (q, k, v and the gradient): it counts masks and copies.
`plan ms` is the time to make the plan, once per batch.

    python benchmarks/attention.py --threads 1 --clock process --plot attention.png
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import torch
import yaml

from benchmarks.arguments import check_at_least, check_places, write_json
from benchmarks.collate import make_vocabulary
from data_utils.common.batch_fields import DOC
from data_utils.common.errors import ArgumentParser, ConfigError, run_command
from data_utils.common.files import require_named, write_picture
from data_utils.common.memory import keep_freed_memory
from data_utils.loader.loader import collate
from data_utils.objectives import OBJECTIVES, make_one
from data_utils.objectives.interface import DOCUMENT_OVERHEAD
from megatron_lite.transformer.attention_backends.cpu_kernels import (
    CPU_KERNELS,
    CpuKernel,
    choose_cpu_kernel,
)
from megatron_lite.transformer.attention_backends.plan import plan_attention
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.kernels.compat import widens

SHAPES = ("32,4,136,32", "4,4,136,32", "1,16,568,64", "4,16,512,64", "1,16,2048,64")
HEAD_DIM = 64
MEDIAN_DOCUMENT, MEAN_DOCUMENT = 440, 870  # tokens, of the quickstart's corpus; lengths are log-normal
TOKENS = 4096  # per micro-batch of the shorter sequences
RECIPES = Path(__file__).resolve().parents[1] / "configs/objectives"
ROWS_OF_A_MIXTURE = 8  # times as many sequences where types of examples are mixed
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
PLANS = ("auto", "dense")
COLUMNS = (
    *("objective", "documents", "length", "row tokens", "plan ms"),
    *("ours ms", "dense ms", "dense / ours", "ours MB", "dense MB"),
)


def documents(packed: bool, sequence_length: int) -> Iterator[int]:
    """Lengths of documents in tokens, without end."""
    sigma = math.sqrt(2 * math.log(MEAN_DOCUMENT / MEDIAN_DOCUMENT))
    rng = np.random.default_rng(0)
    while True:
        length = rng.lognormal(math.log(MEDIAN_DOCUMENT), sigma) if packed else sequence_length
        yield max(4, int(length))


def make_batch(objective: str, sequence_length: int, rows: int, packed: bool) -> np.ndarray:
    """int32 [rows, fields, row length]: windows of `sequence_length` over documents, as the sampler cuts them."""
    kind, _, recipe = objective.partition(":")
    settings = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())[kind] if recipe else {}
    made = make_one(kind, OBJECTIVES[kind].config_class(**settings), make_vocabulary(), 1, sequence_length)
    lengths: list[int] = []
    counts: list[int] = []
    rest = 0
    source = documents(packed, sequence_length)
    for _ in range(rows):
        room, before = sequence_length, len(lengths)
        while room > DOCUMENT_OVERHEAD:
            if not rest:
                rest = next(source)
                room -= DOCUMENT_OVERHEAD
            piece = min(rest, room)
            lengths.append(piece)
            rest, room = rest - piece, room - piece
        rest = rest if packed else 0
        counts.append(len(lengths) - before)
    tokens = np.random.default_rng(1).integers(1000, 30000, sum(lengths)).astype(np.int32)
    return collate(made, tokens, np.array(lengths), np.array(counts), np.arange(rows))


class Step:
    """Forward and backward of one layer's attention with one plan; as in the model, without the padding."""

    def __init__(self, batch: np.ndarray, kernel: str, heads: int, dtype: torch.dtype):
        self.batch, self.kernel = batch, kernel
        shape = (batch[:, DOC].size, 3, heads, HEAD_DIM)
        if kernel != "dense":
            shape = (int((batch[:, DOC] >= 0).sum()), 3, heads, HEAD_DIM)
        generator = torch.Generator().manual_seed(0)
        self.qkv = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        self.grad = torch.randn((shape[0], heads, HEAD_DIM), generator=generator).to(dtype)

    def plan(self) -> None:
        plan = plan_attention(Batch(self.batch).layout, torch.device("cpu"), self.kernel)
        self.made = plan.on_device([torch.from_numpy(array) for array in plan.arrays()], torch.device("cpu"))

    def run(self) -> None:
        out = self.made.attend(0, [self.qkv], None)
        torch.autograd.grad(out, self.qkv, self.grad)


def peak_kilobytes(work: Callable[[], object]) -> int:
    """Largest resident size of a forked process that does `work`."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise ConfigError(
            f"a process that measured memory ended with status {status}; if it ran out of memory, lower --heads or "
            "--lengths."
        )
    return usage.ru_maxrss


def memory_megabytes(batch: np.ndarray, kernel: str, heads: int, dtype: torch.dtype) -> float:
    """Peak of plan and step beyond the inputs."""

    def step(of: np.ndarray) -> None:
        torch.set_num_threads(1)  # the threads of a process do not survive its fork
        made = Step(of, kernel, heads, dtype)
        made.plan()
        made.run()

    step(batch[:1, :, :16])  # buffers that libraries keep
    inputs = peak_kilobytes(lambda: Step(batch, kernel, heads, dtype))
    return max(0, peak_kilobytes(lambda: step(batch)) - inputs) / 1024


def milliseconds(works: list[Callable[[], None]], repeats: int, clock: str) -> list[float]:
    """Median of each; they take turns, after one untimed round."""
    now = CLOCKS[clock]
    times: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        for work, mine in zip(works, times, strict=True):
            start = now()
            work()
            if turn:
                mine.append(now() - start)
    return [1e3 * statistics.median(mine) for mine in times]


def cases(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    for length in options.lengths:
        for packed in [kind == "packed" for kind in options.documents]:
            for objective in options.objectives:
                rows = max(1, TOKENS // length) * (ROWS_OF_A_MIXTURE if ":" in objective else 1)
                batch = make_batch(objective, length, rows, packed)
                kind = "packed" if packed else "one"
                yield {"objective": objective, "documents": kind, "length": length, "rows": rows}, batch


def kernel_of(q: torch.Tensor) -> str:
    """The kernel that a plan takes for a call with as many keys as queries; without AMX it casts half precision."""
    return "flash fp32" if widens(q) else choose_cpu_kernel(q.dtype, q.shape[2], q.shape[2], is_full=True)


def measure_kernels(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per shape: the time of each kernel, and which one is taken."""
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    columns = [
        "batch, heads, tokens, head size",
        *(f"{name} ms" for name in CPU_KERNELS),
        "taken",
        "over the best",
    ]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    records = []
    for shape in options.shapes:
        generator = torch.Generator().manual_seed(0)
        sizes = [int(size) for size in shape.split(",")]
        q, k, v, grad = (torch.randn(sizes, generator=generator).to(DTYPES[options.dtype]) for _ in range(4))

        def run(kernel: type[CpuKernel], q=q, k=k, v=v, grad=grad) -> None:  # type: ignore[no-untyped-def]
            out, state = kernel.forward(q, k, v, False, None)
            kernel.backward(grad, q, k, v, out, state, False, None)

        works = [functools.partial(run, kernel) for kernel in CPU_KERNELS.values()]
        times = dict(zip(CPU_KERNELS, milliseconds(works, options.repeats, options.clock), strict=True))
        taken = kernel_of(q)
        over = times[taken] / min(times.values())
        records.append({"shape": sizes, "dtype": options.dtype, **times, "taken": taken, "over": over})
        cells = " | ".join(f"{ms:.3g}" for ms in times.values())
        print(f"| {', '.join(map(str, sizes))} | {cells} | {taken} | {over:.2f} |", flush=True)
    return records


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per case. Memory comes first: later, freed memory is kept, and there are threads."""
    dtype = DTYPES[options.dtype]
    records = []
    for record, batch in cases(options):
        peaks = [memory_megabytes(batch, kernel, options.heads, dtype) for kernel in PLANS]
        records.append(
            record | {"row tokens": batch.shape[2]} | dict(zip(("ours MB", "dense MB"), peaks, strict=True))
        )
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for record, (_, batch) in zip(records, cases(options), strict=True):
        steps = [Step(batch, kernel, options.heads, dtype) for kernel in PLANS]
        (record["plan ms"],) = milliseconds([steps[0].plan], options.repeats, options.clock)
        steps[1].plan()
        times = milliseconds([step.run for step in steps], options.repeats, options.clock)
        record["ours ms"], record["dense ms"] = times
        record["dense / ours"] = times[1] / times[0]
        cells = (f"{record[c]:.3g}" if isinstance(record[c], float) else str(record[c]) for c in COLUMNS)
        print(f"| {' | '.join(cells)} |", flush=True)
    return records


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Time and memory per sequence by sequence length, a line for each objective and plan."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = sorted({record["documents"] for record in records})
    colors = plt.get_cmap("tab20").colors
    figure, grid = plt.subplots(2, len(kinds), figsize=(6 * len(kinds), 9), squeeze=False)
    for column, kind in enumerate(kinds):
        for axis, unit in zip(grid[:, column], ("ms", "MB"), strict=True):
            for number, objective in enumerate(dict.fromkeys(record["objective"] for record in records)):
                mine = [r for r in records if (r["objective"], r["documents"]) == (objective, kind)]
                x = [r["row tokens"] for r in mine]
                for which, style in (("ours", "-o"), ("dense", "--x")):
                    y = [r[f"{which} {unit}"] / r["rows"] for r in mine]
                    label = f"{objective}" if which == "ours" else None
                    axis.loglog(
                        x,
                        y,
                        style,
                        color=colors[number % len(colors)],
                        label=label,
                        markersize=4,
                        linewidth=1,
                    )
            axis.set_title(f"{kind}: solid ours, dashed dense")
            axis.set_xlabel("tokens per row")
            axis.set_ylabel(f"{unit} per row, forward + backward")
    grid[0, 0].legend(fontsize=7)
    figure.tight_layout()
    write_picture(path, figure, "--plot", dpi=100)


def shape(text: str) -> str:
    """The argument, four positive numbers with commas."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*){3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not batch,heads,tokens,head size, as 1,16,512,64")
    return text


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    recipes = [f"blank_infilling:{path.stem}" for path in sorted(RECIPES.glob("*.yaml"))]
    add(
        "--objectives",
        nargs="*",
        default=[*OBJECTIVES, "blank_infilling:paper"],
        choices=[*OBJECTIVES, *recipes],
        help="with its defaults, or blank_infilling:NAME as in configs/objectives (default: all, and the paper's GLM)",
    )
    add(
        "--lengths",
        nargs="+",
        type=int,
        default=[512, 2048, 8192],
        help="source tokens (default: 512 2048 8192)",
    )
    add(
        "--documents", nargs="+", default=["one", "packed"], choices=["one", "packed"], help="(default: both)"
    )
    add(
        "--shapes",
        nargs="*",
        default=SHAPES,
        type=shape,
        metavar="B,H,T,D",
        help=f"of calls for the kernels' table (default: {' '.join(SHAPES)})",
    )
    add("--heads", type=int, default=4, help=f"of {HEAD_DIM} dimensions (default: 4)")
    add("--dtype", default="fp32", choices=DTYPES, help="(default: fp32)")
    add("--repeats", type=int, default=3, help="timed rounds; the median counts (default: 3)")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: torch's)")
    add(
        "--clock",
        default="wall",
        choices=CLOCKS,
        help="process: CPU seconds, for one thread on a shared machine",
    )
    add("--plot", type=Path, metavar="FILE", help="also draw time and memory by length")
    add("--json", type=Path, metavar="FILE", help="also write the records")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    check_at_least(options, 1, "heads", "repeats", "threads")
    check_at_least(options, 16, "lengths")
    check_places(result=options.json)
    if options.plot is not None:
        require_named(options.plot, "--plot")
    if options.clock == "process" and options.threads > 1:
        raise ConfigError("--clock process counts CPU time of one thread; use it with --threads 1.")
    records = measure(options) if options.objectives else []
    kernels = measure_kernels(options)
    if options.json:
        write_json(options.json, {"objectives": records, "kernels": kernels})
    if options.plot and records:
        plot(records, options.plot)
    return 0


if __name__ == "__main__":
    run_command(main)
