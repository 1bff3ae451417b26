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

from data_utils.common.errors import ConfigError, system_remedy
from data_utils.common.losses import MTP
from data_utils.common.settings import to_tree
from megatron_lite.config.tree import Config
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.telemetry import version
from megatron_lite.telemetry.formatting import fit_line, format_count, format_duration
from megatron_lite.telemetry.peak_flops import PeakFlops
from megatron_lite.transformer.attention_choice import describe_attention
from megatron_lite.transformer.build import model_spec

_VALIDATION_METRICS = ("perplexity", "mutual_information", "active_units")
# Losses of tokens or sentences that another loss counts already, and the one that is no part of the total.
_NOT_COUNTED = ("span_boundary", "kl", MTP.name)
MIN_SHOWN = 0.05  # smallest fraction of padding, or of time spent waiting for data, that the log line shows


@dataclass
class LogInterval:
    """Sums over the steps since the last log line, all ranks together."""

    num_losses: int
    device: torch.device

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start the next interval now."""
        # On the device: reading a sum in each step would make the host wait.
        self.objective_sums = torch.zeros(self.num_losses, 3, dtype=torch.float64, device=self.device)
        """fp64 [losses, 3]: loss sum, loss weight, z-loss."""
        self.steps = 0
        self.tokens = 0
        self.padded_tokens = 0  # tokens that are computed, padding included
        self.flops = 0.0
        self.data_seconds = 0.0  # seconds for which the loop waited for data
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
        """Count the time within the context as waiting for data."""
        start = time.perf_counter()
        yield
        self.data_seconds += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time within the context out of the interval: it is not training."""
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
    the sum of the means, each times its factor; with `last_divides` the sum of all over the weight of the last. The
    loss of further tokens (MTP) is shown apart, and is no part of it.
    """
    losses, weights, z_losses = sums[:, 0], sums[:, 1], sums[:, 2:]
    is_main = np.array([name != MTP.name for name in names])
    means = {
        name: float(loss / weight)
        for name, loss, weight in zip(names, losses, weights, strict=True)
        if weight
    }
    if factors is None:
        counted = names[-1:] if last_divides else [name for name in names if name not in _NOT_COUNTED]
        tokens = sum(weight for name, weight in zip(names, weights, strict=True) if name in counted)
        total = float(losses[is_main].sum() / tokens) if tokens else float("nan")
    else:
        total = sum(factors.get(name, 1.0) * mean for name, mean in means.items()) if means else float("nan")
    values = {"loss": total, **{f"loss/{name}": mean for name, mean in means.items()}}
    if not z_losses.any():
        return values
    z_values = objective_losses(np.column_stack([z_losses, weights]), names, factors, last_divides)
    return {**values, "z_loss": z_values["loss"]}


def train_line(step: int, steps: int, values: dict[str, Any]) -> str:
    """The console line of a training interval: usual numbers, and unusual ones where they matter.

    metrics.jsonl has all numbers.
    """
    share = (
        f"machine {values['machine_share']:.1%}" if "machine_share" in values else f"MFU {values['mfu']:.1%}"
    )
    items = [
        f"step {step}/{steps}",
        f"loss {values['loss']:.4f}",
        *([f"mtp {values['loss/mtp']:.4f}"] if "loss/mtp" in values else []),
        *([f"z loss {values['z_loss']:.2g}"] if "z_loss" in values else []),
        *(
            [f"experts {values['expert_load_lowest']:.2f}-{values['expert_load_highest']:.2f}"]
            if "expert_load_highest" in values
            else []
        ),
        f"lr {values['lr']:.2e}",
        f"grad norm {values['grad_norm']:.3g}",
        f"{format_count(values['tokens_per_second'])} tokens/s",
        share,
    ]
    if values["skipped_steps"]:
        items.append(f"skipped {values['skipped_steps']}")
    if values["data_share"] >= MIN_SHOWN:
        items.append(f"data wait {values['data_share']:.0%}")
    if values["padding"] >= MIN_SHOWN:
        items.append(f"padding {values['padding']:.0%}")
    return fit_line([*items, f"{format_duration(values['eta_seconds'])} left"])


def validation_line(step: int, values: dict[str, Any]) -> str:
    """The console line of an evaluation."""
    items = [
        f"validation at step {step}",
        f"loss {values['loss']:.4f}",
        *(f"{name.replace('_', ' ')} {values[name]:.4g}" for name in _VALIDATION_METRICS if name in values),
    ]
    by_loss = {name.removeprefix("loss/"): values[name] for name in values if name.startswith("loss/")}
    return fit_line([*items, *(f"{name} {value:.4f}" for name, value in by_loss.items())])


def scores_line(step: int, values: Mapping[str, float]) -> str:
    """The console line of a task's evaluation."""
    return fit_line([f"scores at step {step}", *(f"{name} {value:.4f}" for name, value in values.items())])


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
            f"run.directory {path.parent}: {error.strerror}; {system_remedy(error, 'choose a writable directory')}."
        ) from None


def start_line(config: Config, context: ParallelContext, step: int) -> str:
    """The console line before the first step, which takes minutes if kernels must be compiled."""
    attention = describe_attention(config, context.device)
    device = context.device.type if attention is None else f"{context.device.type}, attention {attention}"
    return (
        f"{model_spec(config).described_count(config)} parameters | {layout(context)} | {config.training.precision} on "
        f"{device} | step {step} to {config.training.steps}; the first step on a machine compiles"
    )


def start_record(
    config: Config, context: ParallelContext, peak_flops: PeakFlops, restarts: int, program: dict[str, Any]
) -> dict[str, Any]:
    """The record of a start: model, machine and program. Args: restarts: how often the run was continued before."""
    return {
        "restarts": restarts,
        "processes": context.world_size,
        "layout": layout(context),
        "device": peak_flops.name,
        "compared_with": str(peak_flops),
        "attention": describe_attention(config, context.device),
        "program": version.describe(program),
        "parameters": model_spec(config).count(config),
    }


def layout(context: ParallelContext) -> str:
    return f"pipeline {context.pp.size} x data {context.dp.size} x tensor {context.tp.size}"
