"""What a run reports: its configuration, a line at the start and one per interval, and the arithmetic behind them."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from data_utils.base.errors import ConfigError
from data_utils.base.settings import to_tree
from megatron_lite.config.parameter_count import parameter_count
from megatron_lite.config.tree import Config, ModelConfig
from megatron_lite.model.tensor_parallel import linear
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train import version

# Dense bf16 peak of one device in TFLOP/s, from the vendor's data sheets, by words of torch's device name. The first
# entry whose words all occur counts: cards of the same chip with less power come before the usual form.
GPU_PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800 PCIe": 756.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "V100": 125.0,  # fp16: it has no bf16
}


def step_flops(model: ModelConfig, tokens: int, loss_rows: int, visible_keys: int) -> float:
    """Model FLOPs of a training step, forward and backward (3x forward), without recomputation.

    Args:
        tokens: tokens that are not padding.
        loss_rows: tokens on which the head runs.
        visible_keys: sum over tokens of the number of keys each may attend to.
    """
    assert model.vocab_size is not None
    h = model.hidden_size
    blocks = 2.0 * 12 * h * h * model.num_layers * tokens
    attention = 2.0 * 2 * h * model.num_layers * visible_keys
    head = 2.0 * (model.embedding_size or h) * model.vocab_size * loss_rows
    return 3.0 * (blocks + attention + head)


def matmul_tflops(dtype: torch.dtype, device: torch.device, seconds: float = 0.3) -> float:
    """Measured rate of a large matmul on this device with the project's own linear layer, in TFLOP/s."""
    size = 8192 if device.type == "cuda" else 1024
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    linear(x, weight)
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        linear(x, weight)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e12


def known_peak_tflops(device_name: str) -> float | None:
    """The data sheet's peak of a GPU by torch's name of it; None if it is unknown, or a part of a GPU (MIG)."""
    words = set(re.split(r"[\s-]+", device_name))
    if "MIG" in words:
        return None
    known = (peak for name, peak in GPU_PEAK_TFLOPS.items() if words.issuperset(name.split()))
    return next(known, None)


def peak_tflops(configured: float | None, dtype: torch.dtype, device: torch.device) -> float:
    """Peak for MFU: the configured one, a known GPU's, or that of a measured matmul."""
    if configured is not None:
        return configured
    known = known_peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return matmul_tflops(dtype, device) if known is None else known


@dataclass
class Interval:
    """Sums over the steps since the last log line, all ranks together."""

    objective_sums: torch.Tensor  # fp64 [objectives, 2], on the device: loss sum, loss weight
    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    data_seconds: float = 0.0  # in which the loop waited for data
    started: float = field(default_factory=time.perf_counter)


def objective_losses(
    sums: np.ndarray, names: Sequence[str], factors: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The loss in total and the mean of each that occurred, {"loss": ..., "loss/token": ...}, from [objectives, 2].

    The total is what training minimises. Without `factors` it is the sum of all losses divided by the number of
    predicted tokens; SpanBERT's second loss predicts the same tokens again. With `factors` (`per_objective`) it is the
    sum of the means, each times its factor.
    """
    means = {name: float(total / weight) for name, (total, weight) in zip(names, sums, strict=True) if weight}
    if factors is None:
        tokens = sum(weight for name, (_, weight) in zip(names, sums, strict=True) if name != "span_boundary")
        total = float(sums[:, 0].sum() / tokens) if tokens else float("nan")
    else:
        total = sum(factors.get(name, 1.0) * mean for name, mean in means.items()) if means else float("nan")
    return {"loss": total, **{f"loss/{name}": mean for name, mean in means.items()}}


def format_duration(seconds: float) -> str:
    seconds = int(seconds)
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    return (f"{days}d" if days else "") + f"{hours:02d}:{minutes:02d}:{seconds % 60:02d}"


def train_line(step: int, steps: int, values: dict[str, Any]) -> str:
    """The console line of a training interval."""
    parts = [
        f"step {step}/{steps}",
        f"samples {values['consumed_samples']:,}",
        f"tokens {values['consumed_tokens']:,}",
    ]
    parts += [f"{name} {values[name]:.4f}" for name in values if name == "loss" or name.startswith("loss/")]
    parts += [
        f"lr {values['lr']:.3e}",
        f"grad norm {values['grad_norm']:.3f}",
        f"scale {values['loss_scale']:g}",
    ]
    parts += [f"skipped {values['skipped_steps']}", f"{values['tokens_per_second']:,.0f} tokens/s"]
    parts += [
        f"{values['tflops_per_device']:.3g} TFLOP/s",
        f"MFU {values['mfu']:.1%}",
        f"mem {values['memory_gib']:.1f} GiB",
    ]
    parts += [f"data {values['data_share']:.1%}", f"ETA {format_duration(values['eta_seconds'])}"]
    return " | ".join(parts)


def memory_gib(device: torch.device) -> float:
    """Peak memory: allocated on the GPU, or the process's resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def save_resolved(config: Config, program: dict[str, Any]) -> None:
    """Write run.directory/config.yaml: every setting, a valid configuration itself. Raises ConfigError.

    Args: program: of `version.program`, for a comment.
    """
    path = Path(config.run.directory) / "config.yaml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(to_tree(config), sort_keys=False)
        path.write_text(f"# {version.NAME} {version.describe(program)}\n{text}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"run.directory {path.parent}: {error.strerror}; choose a writable directory."
        ) from None


def start_line(config: Config, context: ParallelContext, step: int) -> str:
    """The console line before the first step, which takes minutes if kernels must be compiled."""
    return (
        f"{parameter_count(config.model):,} parameters | pipeline {context.pp.size} x data {context.dp.size} x "
        f"tensor {context.tp.size} ranks | {config.training.precision} on {context.device.type} | "
        f"step {step} to {config.training.steps}; the first step on a machine compiles"
    )
