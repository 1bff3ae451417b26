"""The step of a profile on the device that is there: times by events, memory, launches, and a trace for the profiler.

`python -m benchmarks.step_trace.measure` reads a request as JSON from stdin and writes the numbers as a line of JSON.
It runs one process: layouts of several are measured by a run (its log has tokens/s and MFU).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.step_trace.request import Request
from data_utils.common.errors import run_command
from data_utils.common.settings import build
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.estimate.batches import random_batches
from megatron_lite.model.attention_choice import set_attention
from megatron_lite.model.flops import step_flops
from megatron_lite.parallel.context import initialize
from megatron_lite.parallel.launch import Launch

WARM_UP, STEPS = 3, 5


@dataclass(frozen=True)
class Measured:
    """Medians over the steps. Launches are kernels on a GPU, operations on a CPU."""

    device: str
    step_ms: float  # of the device
    host_ms: float  # until the host has issued the step
    peak_gib: float
    launches: float  # of a step
    mfu: float


def measure(request: Request, trace: str | None = None) -> Measured:
    """Train some steps of random batches in this process. Args: trace: a file for the profiler's trace."""
    config = build(Config, request.tree)
    context = initialize(Launch(0, 1, 0), config.parallel, config.timeouts.collective_seconds)
    set_attention(config, context.device)
    engine = make_engine(config, context, len(LOSS_NAMES))
    batches = random_batches(config, config.batch.accumulation_steps(1))
    micro_batches = [
        engine.prepared(batch, 1 + i, 1.0 / max(1, batch.loss_tokens)) for i, batch in enumerate(batches)
    ]

    def step() -> None:
        engine.train_step(micro_batches, 1e-4)

    for _ in range(WARM_UP):
        step()
    step_ms, host_ms = times(step, context.device)
    from megatron_lite.estimate.gpus import gpu_named

    flops = step_flops(
        config.model,
        sum(batch.tokens for batch in batches),
        sum(batch.loss_tokens for batch in batches),
        sum(batch.layer_keys(config.model) for batch in batches),
        sum(batch.decoder_tokens for batch in batches),
        sum(batch.decoder_keys for batch in batches),
    )
    on_gpu = context.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    launches = count_launches(step, context.device, trace)
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    mfu = flops / step_ms / gpu_named(request.gpu).peak_tflops / 1e9
    return Measured(name, step_ms, host_ms, peak, launches, mfu)


def times(step: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Median milliseconds of the device and of the host for a step."""
    on_device, on_host = [], []
    for _ in range(STEPS):
        if device.type != "cuda":
            start = time.perf_counter()
            step()
            on_device.append((time.perf_counter() - start) * 1e3)
            on_host.append(on_device[-1])
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start = time.perf_counter()
        begin.record()
        step()
        end.record()
        on_host.append((time.perf_counter() - start) * 1e3)
        end.synchronize()
        on_device.append(begin.elapsed_time(end))
    return sorted(on_device)[STEPS // 2], sorted(on_host)[STEPS // 2]


def count_launches(step: Callable[[], None], device: torch.device, trace: str | None) -> float:
    """Kernels of one step by torch's profiler, whose trace goes to a file."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as record:
        step()
    if trace is not None:
        record.export_chrome_trace(trace)
    launches = [
        event for event in record.events() if event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
    ]
    return len(launches) if device.type == "cuda" else len(record.events())


def beside(expected: dict[str, Any], measured: Measured) -> str:
    """A table of expected and measured figures of a step, for a terminal."""
    longer = max(expected["host_ms"], expected["roofline_ms"])
    rows = [
        ("step ms", longer, measured.step_ms),
        ("host ms", expected["host_ms"], measured.host_ms),
        ("peak GiB", expected["peak_gib"], measured.peak_gib),
        ("MFU", expected["expected_mfu"], measured.mfu),
    ]
    lines = [f"{measured.device:20} {'expected':>12} {'measured':>12}"]
    lines += [f"{name:20} {left:12.4g} {right:12.4g}" for name, left, right in rows]
    return "\n".join([*lines, f"{'launches':20} {'':12} {measured.launches:12,.0f}"])


def main() -> None:
    asked = json.load(sys.stdin)
    print(json.dumps(asdict(measure(Request(**asked["request"]), asked["trace"]))))


if __name__ == "__main__":
    run_command(main)
