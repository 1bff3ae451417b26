"""What a run reports: a console line per interval, the same as JSONL and TensorBoard, and the arithmetic behind it."""

from __future__ import annotations

import contextlib
import datetime
import errno
import io
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_lite.config.tree import ModelConfig
from megatron_lite.model.tensor_parallel import linear

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 16  # of a record in metrics.jsonl

# Dense bf16 peak of one device in TFLOP/s, from the vendor's data sheets, by a part of torch's device name.
GPU_PEAK_TFLOPS = {
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40": 181.0,
    "V100": 125.0,
}


def step_flops(model: ModelConfig, tokens: int, loss_rows: int, visible_keys: int) -> float:
    """Model FLOPs of a training step, forward and backward (3x forward), without recomputation.

    Args:
        tokens: tokens that are not padding.
        loss_rows: rows on which the head runs.
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


def peak_tflops(configured: float | None, dtype: torch.dtype, device: torch.device) -> float:
    """Peak for MFU: the configured one, a known GPU's, or what a matmul reaches here."""
    if configured is not None:
        return configured
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in GPU_PEAK_TFLOPS.items():
            if part in name:
                return peak
    return matmul_tflops(dtype, device)


@dataclass
class Interval:
    """Sums over the steps since the last log line, all ranks together."""

    objective_sums: np.ndarray  # float64 [objectives, 2]: loss sum, loss weight
    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    data_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)


def objective_losses(
    sums: np.ndarray, names: Sequence[str], factors: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The loss in total and the mean of each that occurred, {"loss": ..., "loss/token": ...}, from [objectives, 2].

    The total is what training minimises. Without `factors` all sums together by the number of predicted tokens, which
    SpanBERT's second loss does not add to; with them (`per_objective`) the sum of the means, each times its factor.
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


def keep_aside(directory: Path) -> None:
    """Give the records of an earlier start another name, where a run begins anew: it ended before it had saved."""
    old = directory / "metrics.jsonl"
    with contextlib.suppress(OSError):
        if old.exists() and old.stat().st_size:
            kept = directory / f"metrics_before_{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S_%f}.jsonl"
            old.rename(kept)
            log.warning("no checkpoint to continue from; the records of an earlier start are in %s", kept)


class Metrics:
    """Writes on the main rank only; on the others every call does nothing.

    A disk that is full or fails costs records and a warning, not the run. What is infinite or not a number is
    null in the records, as JSON demands.
    """

    def __init__(self, directory: Path, enabled: bool, tensorboard: bool, step: int = 0):
        """Args: step: of the checkpoint that the run continues from; TensorBoard hides what was logged after it."""
        self._file: io.FileIO | None = None
        self._board: Any = None
        self._lost = 0  # records in a row
        if not enabled:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / "metrics.jsonl").open("ab+", buffering=0)
        _cut_last_line(self._file)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)

    def write(self, kind: str, step: int, values: dict[str, Any], line: str) -> None:
        """One record to JSONL and TensorBoard, `line` to the console."""
        if self._file is None:
            return
        log.info(line)
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        try:
            _append(self._file, json.dumps(_strict(record), allow_nan=False).encode() + b"\n")
        except OSError as error:
            if not self._lost:
                log.warning(
                    "%s: %s; records are lost until it can be written.", self._file.name, error.strerror
                )
            self._lost += 1
        else:
            if self._lost:
                log.warning("%s can be written again; %d records were lost.", self._file.name, self._lost)
            self._lost = 0
        self._write_board(kind, step, values)

    def _write_board(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self._board is None:
            return
        try:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
        except OSError as error:  # from its own thread, which has ended
            self._board = None
            log.warning("TensorBoard's file cannot be written: %s; metrics.jsonl goes on.", error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()


def _strict(value: Any) -> Any:
    """`value` with null for the numbers that JSON does not have: infinity and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value


def _append(file: io.FileIO, line: bytes) -> None:
    """Write a line whole or not at all. Raises OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(line) != len(line):  # the disk was full after a part
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


def _cut_last_line(file: io.FileIO) -> None:
    """Remove a last line without end, which a crash of the machine may leave."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_LINE_BYTES))
    tail = file.read()
    if tail and not tail.endswith(b"\n"):
        file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)


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
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
