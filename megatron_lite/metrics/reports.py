"""Reports of a run: its configuration, a log line at the start and one per interval, and the arithmetic behind them."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from data_utils.common.errors import ConfigError
from data_utils.common.settings import to_tree
from megatron_lite.config.tree import Config
from megatron_lite.metrics import version
from megatron_lite.metrics.formatting import fitted, format_count, format_duration
from megatron_lite.metrics.peak_flops import PeakFlops
from megatron_lite.model.build import model_spec
from megatron_lite.parallel.context import ParallelContext

_MEASURES = ("perplexity", "mutual_information", "active_units")
_AGAIN = ("span_boundary", "kl")  # losses whose tokens or sentences have another loss already
SHOWN = 0.05  # fraction of padding, or of the time waited for data, from which the log line shows it


@dataclass
class LogInterval:
    """Sums over the steps since the last log line, all ranks together."""

    num_losses: int
    device: torch.device

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start the next interval now."""
        # On the device: to read a sum in each step would make the host wait.
        self.objective_sums = torch.zeros(self.num_losses, 3, dtype=torch.float64, device=self.device)
        """fp64 [losses, 3]: loss sum, loss weight, z-loss."""
        self.steps = 0
        self.tokens = 0
        self.padded_tokens = 0  # tokens with padding, as they are computed
        self.flops = 0.0
        self.data_seconds = 0.0  # for which the loop waited for data
        self.started = time.perf_counter()
        self.cpu_started = time.process_time()

    def add(self, tokens: int, padded_tokens: int, flops: float, objective_sums: torch.Tensor) -> None:
        """Add a step."""
        self.steps += 1
        self.tokens += tokens
        self.padded_tokens += padded_tokens
        self.flops += flops
        self.objective_sums += objective_sums

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """The time within the context is waiting for data."""
        start = time.perf_counter()
        yield
        self.data_seconds += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time within the context is not training time, and not in the interval."""
        start, cpu_start = time.perf_counter(), time.process_time()
        yield
        self.started += time.perf_counter() - start
        self.cpu_started += time.process_time() - cpu_start


def objective_losses(
    sums: np.ndarray,
    names: Sequence[str],
    factors: Mapping[str, float] | None = None,
    last_divides: bool = False,
) -> dict[str, float]:
    """The loss in total and the mean of each that occurred, {"loss": ..., "loss/token": ...}, from [objectives, 3].

    The total, and `z_loss` where there is one, is what training minimises. Without `factors` it is the sum
    of all losses divided by the number of predicted tokens (of OPTIMUS by that of sentences); what SpanBERT's second
    loss predicts, and the sentences of OPTIMUS's divergence, are counted once. With `factors` (`per_objective`) it is
    the sum of the means, each times its factor; with `last_divides` the sum of all over the weight of the last.
    """
    losses, weights, of_z = sums[:, 0], sums[:, 1], sums[:, 2:]
    means = {
        name: float(of / weight) for name, of, weight in zip(names, losses, weights, strict=True) if weight
    }
    if factors is None:
        counted = names[-1:] if last_divides else [name for name in names if name not in _AGAIN]
        tokens = sum(weight for name, weight in zip(names, weights, strict=True) if name in counted)
        total = float(losses.sum() / tokens) if tokens else float("nan")
    else:
        total = sum(factors.get(name, 1.0) * mean for name, mean in means.items()) if means else float("nan")
    found = {"loss": total, **{f"loss/{name}": mean for name, mean in means.items()}}
    if not of_z.any():
        return found
    apart = objective_losses(np.column_stack([of_z, weights]), names, factors, last_divides)
    return {**found, "z_loss": apart["loss"]}


def train_line(step: int, steps: int, values: dict[str, Any]) -> str:
    """The console line of a training interval. metrics.jsonl holds every number; what is unusual is shown as well."""
    share = (
        f"machine {values['machine_share']:.1%}" if "machine_share" in values else f"MFU {values['mfu']:.1%}"
    )
    parts = [
        f"step {step}/{steps}",
        f"loss {values['loss']:.4f}",
        *([f"z loss {values['z_loss']:.2g}"] if "z_loss" in values else []),
        f"lr {values['lr']:.2e}",
        f"grad norm {values['grad_norm']:.3g}",
        f"{format_count(values['tokens_per_second'])} tokens/s",
        share,
    ]
    if values["skipped_steps"]:
        parts.append(f"skipped {values['skipped_steps']}")
    if values["data_share"] >= SHOWN:
        parts.append(f"data wait {values['data_share']:.0%}")
    if values["padding"] >= SHOWN:
        parts.append(f"padding {values['padding']:.0%}")
    return fitted([*parts, f"{format_duration(values['eta_seconds'])} left"])


def validation_line(step: int, values: dict[str, Any]) -> str:
    """The console line of an evaluation."""
    parts = [
        f"validation at step {step}",
        f"loss {values['loss']:.4f}",
        *(f"{name.replace('_', ' ')} {values[name]:.4g}" for name in _MEASURES if name in values),
    ]
    by_loss = {name.removeprefix("loss/"): values[name] for name in values if name.startswith("loss/")}
    return fitted([*parts, *(f"{name} {value:.4f}" for name, value in by_loss.items())])


def scores_line(step: int, values: Mapping[str, float]) -> str:
    """The console line of a task's evaluation."""
    return fitted([f"scores at step {step}", *(f"{name} {value:.4f}" for name, value in values.items())])


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
        f"{model_spec(config).count(config):,} parameters | {layout(context)} | {config.training.precision} on "
        f"{context.device.type} | step {step} to {config.training.steps}; the first step on a machine compiles"
    )


def start_values(
    config: Config, context: ParallelContext, peak_flops: PeakFlops, restarts: int, program: dict[str, Any]
) -> dict[str, Any]:
    """Who trains from here on. Args: restarts: how often the run was continued from a checkpoint."""
    return {
        "restarts": restarts,
        "processes": context.world_size,
        "layout": layout(context),
        "device": peak_flops.name,
        "compared_with": str(peak_flops),
        "program": version.describe(program),
        "parameters": model_spec(config).count(config),
    }


def layout(context: ParallelContext) -> str:
    return f"pipeline {context.pp.size} x data {context.dp.size} x tensor {context.tp.size}"
