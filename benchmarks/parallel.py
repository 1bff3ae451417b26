#!/usr/bin/env python3
"""What tensor, sequence, pipeline and data parallelism cost: time and bytes of a training step, at equal work.

Every layout trains the same model on the same samples, in micro-batches of one size, optimizer step included. On CPU
the ranks are forked with one thread each; where they outnumber the cores, the wall clock says little and the CPU
seconds of all ranks together say what the layout adds. On GPUs, or on several machines, start it with a launcher and
`--launched`: layouts then need as many ranks as there are processes.

Bytes are counted where torch.distributed is called and are what a rank sends with ring algorithms: all-reduce of b
bytes over n ranks 2 b (n-1)/n, reduce-scatter and broadcast b (n-1)/n, all-gather its part n-1 times, send b.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the ranks are forked by the tests' harness

import data_utils.common.entry  # noqa: F401, E402

# isort: split
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks import train_step  # noqa: E402
from benchmarks.arguments import check_at_least, check_places, write_json  # noqa: E402
from data_utils.common.batch_fields import DOC, WEIGHTS  # noqa: E402
from data_utils.common.errors import ArgumentParser, ConfigError, run_command  # noqa: E402
from data_utils.common.settings import build  # noqa: E402
from megatron_lite.config.sections import ParallelConfig  # noqa: E402
from megatron_lite.config.tree import Config  # noqa: E402
from megatron_lite.engine.plain import make_engine  # noqa: E402
from megatron_lite.parallel.context import ParallelContext, initialize  # noqa: E402
from megatron_lite.parallel.launch import Launch  # noqa: E402
from megatron_lite.telemetry.peak_flops import known_peak_tflops  # noqa: E402
from megatron_lite.transformer.batch import Batch  # noqa: E402
from megatron_lite.transformer.flops import step_flops  # noqa: E402

DEFAULT_LAYOUTS = [
    "1x1x1", "1x1x1+selective", "1x1x1+full", "1x1x2", "1x1x2+zero2", "1x1x2+zero3", "1x1x2+offload", "2x1x1",
    "2x1x1+sp", "1x2x1", "1x1x4", "4x1x1", "4x1x1+sp", "1x4x1", "2x2x1", "2x2x1+sp", "2x1x2", "1x2x2", "2x2x2+sp",
]  # fmt: skip
OPTIONS = ("sp", "zero2", "zero3", "selective", "full", "offload")


@dataclass(frozen=True)
class ParallelLayout:
    """Parsed from `TxPxD`, tensor x pipeline x data parallel ranks, with options as in `2x1x2+sp+zero2`."""

    text: str
    tensor: int
    pipeline: int
    data: int
    options: frozenset[str]

    @staticmethod
    def parse(text: str) -> ParallelLayout:
        degrees, *options = text.split("+")
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", degrees)
        if match is None or not set(options) <= set(OPTIONS):
            raise ConfigError(
                f"--layouts {text} is no layout; write tensor x pipeline x data ranks such as 2x1x2, "
                f"and +option of {', '.join(OPTIONS)}."
            )
        tensor, pipeline, data = map(int, match.groups())
        return ParallelLayout(text, tensor, pipeline, data, frozenset(options))

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def parallel(self) -> dict[str, Any]:
        return {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "sequence_parallel": "sp" in self.options,
            "zero_stage": 3 if "zero3" in self.options else 2 if "zero2" in self.options else 1,
            "offload_optimizer": "offload" in self.options,
        }

    @property
    def recompute(self) -> str:
        return next((option for option in ("selective", "full") if option in self.options), "none")


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    layout: str
    ranks: int
    seconds: float  # wall clock of a step
    cpu_seconds: float  # of a step, all ranks together
    megabytes: float  # sent by a rank in a step, on average
    calls: float  # collectives and sends of a rank in a step
    tflops: float  # per rank, useful FLOPs
    mfu: float | None  # on GPUs


# Bytes


class Traffic:
    """Counts calls and bytes of torch.distributed, for this process."""

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0.0

    def watch(self) -> None:
        """From now on; before the process group exists, because DeepSpeed keeps some of the functions."""
        for name, (argument, share) in SENT.items():
            setattr(dist, name, self._counted(getattr(dist, name), argument, share))

    def _counted(self, function: Callable, argument: str, share: Callable[[int], float]) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            size = dist.get_world_size(given.get("group"))
            if size > 1:
                self.calls += 1
                self.bytes += given[argument].numel() * given[argument].element_size() * share(size)
            return function(*args, **kwargs)

        return call


def _once_around(size: int) -> float:
    return (size - 1) / size


# Which argument's bytes a rank sends, and how often, by the size of the group.
SENT: dict[str, tuple[str, Callable[[int], float]]] = {
    "all_reduce": ("tensor", lambda size: 2 * _once_around(size)),
    "broadcast": ("tensor", _once_around),
    "reduce": ("tensor", _once_around),
    "all_gather": ("tensor", lambda size: size - 1),
    "all_gather_into_tensor": ("input_tensor", lambda size: size - 1),
    "reduce_scatter_tensor": ("input", _once_around),
    "send": ("tensor", lambda size: 1),
    "isend": ("tensor", lambda size: 1),
}


# A layout


def configuration(layout: ParallelLayout, options: argparse.Namespace) -> Config:
    tree = {
        "model": asdict(train_step.model_config(options.shape, train_step.SHAPES[options.shape][0])),
        "training": {"steps": 1000, "precision": options.dtype, "recompute": layout.recompute},
        "batch": {"micro_batch_size": options.micro_batch, "global_batch_size": options.samples},
        "data": {"sequence_length": train_step.SEQUENCE_LENGTH},
        "parallel": layout.parallel,
    }
    return build(Config, tree)


def measure(
    context: ParallelContext, layout: ParallelLayout, options: argparse.Namespace, traffic: Traffic
) -> Row:
    """Median step of a layout, the same on every rank."""
    config = configuration(layout, options)
    engine = make_engine(config, context, num_losses=64)
    samples = train_step.make_batch(options.samples)
    factor = 1.0 / np.count_nonzero(samples[:, WEIGHTS])
    size, dp = options.micro_batch, context.dp
    micro_batches = [
        engine.prepared(Batch(samples[(m * dp.size + dp.rank) * size :][:size]), 0, factor)
        for m in range(config.batch.accumulation_steps(dp.size))
    ]
    engine.train_step(micro_batches, 1e-4)  # allocates
    wall, cpu = [], []
    traffic.calls, traffic.bytes = 0, 0.0
    for _ in range(options.repeats):
        _synchronize(context)
        start, cpu_start = time.perf_counter(), time.process_time()
        engine.train_step(micro_batches, 1e-4)
        _synchronize(context)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    mine = [statistics.median(cpu), traffic.bytes / options.repeats, traffic.calls / options.repeats]
    totals = context.sum(torch.tensor(mine, dtype=torch.float64, device=context.device)).tolist()
    seconds, ranks = statistics.median(wall), context.world_size
    tokens, rows = int((samples[:, DOC] >= 0).sum()), int(np.count_nonzero(samples[:, WEIGHTS]))
    flops = step_flops(config.model, tokens, rows, Batch(samples).visible_keys)
    tflops = flops / seconds / ranks / 1e12
    is_gpu = context.device.type == "cuda"
    peak = known_peak_tflops(torch.cuda.get_device_name(context.device)) if is_gpu else None
    mfu = None if peak is None else tflops / peak
    return Row(
        layout.text, ranks, seconds, totals[0], totals[1] / ranks / 1e6, totals[2] / ranks, tflops, mfu
    )


def _synchronize(context: ParallelContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize()
    context.barrier()


def forked(layout: ParallelLayout, options: argparse.Namespace) -> Row:
    """On freshly forked ranks of this machine, one thread each."""
    from support.distributed import run_ranks

    traffic = Traffic()
    originals = {name: getattr(dist, name) for name in SENT}
    traffic.watch()
    try:
        parallel = ParallelConfig(tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline)
        return run_ranks(
            measure,
            layout.ranks,
            layout,
            options,
            traffic,
            parallel=parallel,
            limit_seconds=options.limit_seconds,
        )[0]
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def launched(layouts: Sequence[ParallelLayout], options: argparse.Namespace) -> list[Row]:
    """In the processes that a launcher started, all of them for every layout."""
    launch, traffic, rows = Launch.from_environment(options.local_rank), Traffic(), []
    traffic.watch()
    for layout in layouts:
        if layout.ranks != launch.world_size:
            raise ConfigError(
                f"--layouts {layout.text} needs {layout.ranks} processes, but {launch.world_size} were started; start "
                "as many, or choose layouts of as many."
            )
        parallel = ParallelConfig(tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline)
        context = initialize(launch, parallel, 1800)
        rows.append(measure(context, layout, options, traffic))
    context.close()
    return rows if launch.rank == 0 else []


# The table


def table(rows: Sequence[Row]) -> str:
    """Markdown; ratios are to the first row."""
    lines = [
        "| layout | ranks | s/step | speed-up | CPU s/step, all ranks | of the first | MB sent per rank | calls "
        "| TFLOP/s per rank | MFU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row.layout,
            str(row.ranks),
            f"{row.seconds:.3g}",
            f"{rows[0].seconds / row.seconds:.2f}x",
            f"{row.cpu_seconds:.3g}",
            f"{row.cpu_seconds / rows[0].cpu_seconds:.2f}x",
            f"{row.megabytes:.1f}",
            f"{row.calls:.0f}",
            f"{row.tflops:.3g}",
            "" if row.mfu is None else f"{row.mfu:.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--layouts",
        nargs="+",
        default=DEFAULT_LAYOUTS,
        metavar="TxPxD[+option]",
        help="(default: 19 of them)",
    )
    add("--shape", default="tiny", choices=train_step.SHAPES, help="model (default: tiny)")
    add("--dtype", default="fp32", choices=train_step.DTYPES, help="(default: fp32)")
    add("--samples", type=int, default=8, help="per step, all ranks together (default: 8)")
    add("--micro-batch", type=int, default=1, help="samples per pass (default: 1)")
    add("--repeats", type=int, default=3, help="timed steps; the median counts (default: 3)")
    add("--limit-seconds", type=float, default=600.0, help="for one layout (default: 600)")
    add("--launched", action="store_true", help="use the processes of a launcher (deepspeed, torchrun)")
    add("--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    add("--json", type=Path, metavar="FILE", help="also write the rows there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    check_at_least(options, 1, "samples", "micro_batch", "repeats", "limit_seconds")
    check_places(result=options.json)
    layouts = [ParallelLayout.parse(text) for text in options.layouts]
    for layout in layouts:
        configuration(layout, options).batch.accumulation_steps(
            layout.data
        )  # refused before anything is timed
    rows = launched(layouts, options) if options.launched else [forked(layout, options) for layout in layouts]
    if not rows:
        return 0
    print(
        f"{options.shape}, {options.dtype}, {options.samples} samples x {train_step.SEQUENCE_LENGTH} source tokens per "
        f"step in micro-batches of {options.micro_batch}, median of {options.repeats}, torch {torch.__version__}\n"
    )
    print(table(rows))
    if options.json:
        write_json(options.json, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    run_command(main)
