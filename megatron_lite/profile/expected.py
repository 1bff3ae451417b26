"""The expected numbers of a training step of any size: traced ranks, extended to all layers and micro-batches.

Equal layers cost the same, so two traces with different numbers of layers give the numbers of all; so with the
micro-batches of a step. Memory is extended phase by phase, because its peak may move from one phase to another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data_utils.base.errors import ConfigError
from data_utils.base.settings import to_tree
from megatron_lite.config.tree import Config
from megatron_lite.profile.counts import extended
from megatron_lite.profile.gpus import Gpu

TRACED_LAYERS = 2  # and one more
TRACED_MICRO_BATCHES = 2
# Phases that every micro-batch has, those of all but the last one, and those of a step.
_EVERY, _OTHERS, _ONCE = ("input", "forward"), ("backward", "sums"), ("last_backward", "last_sums", "step")


@dataclass(frozen=True)
class Case:
    """A rank of a layout, to be traced (see trace.py)."""

    tree: dict[str, Any]  # of the configuration, see `to_tree`
    processes: int
    rank: int
    layers: int  # of the traced model, or of the rank's pipeline stage
    micro_batches: int  # of the traced step
    gpu: str


@dataclass(frozen=True)
class Expected:
    """What a rank does in a step: the numbers that the profile shows. Times are of a step, memory of the device."""

    attention_calls_per_layer: float
    launches_per_layer_forward: float
    launches_per_layer_backward: float
    waits_per_micro_batch: float
    copies_per_micro_batch: float
    unaligned_matmuls: float  # in a micro-batch
    collective_mb: dict[str, float]  # bytes of the largest tensor of each call, by group
    peak_gib: float
    host_ms: float
    roofline_ms: float
    expected_mfu: float

    def tree(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Details:
    """Where the numbers come from."""

    places: dict[str, dict[str, float]]  # kind -> place -> times per micro-batch, or per step
    kinds: dict[str, float]  # kind of kernel -> ms of a step by the roofline
    launches: float  # of a step
    pageable_per_micro_batch: float
    waits_per_step: float  # beside those of the micro-batches
    collectives: dict[str, float]  # group -> calls of a step
    launch_us: float
    rank_parameters: float


def run_worker(cases: Sequence[Case]) -> tuple[float, list[dict[str, Any]]]:
    """Microseconds of a launch on this CPU, and the result of each case, from a process of its own.

    Raises: ConfigError for what a traced rank refuses, and where torch or the machine are unknown to fake devices.
    """
    path = os.pathsep.join(filter(None, sys.path))  # a script of a checkout has added its root
    environment = {**os.environ, "DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, "-m", "megatron_lite.profile.worker"]
    text = json.dumps([asdict(case) for case in cases])
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(lines) != len(cases) + 1:
        raise ConfigError(
            f"the process that traces ended with status {done.returncode}: {_last_line(done.stderr)}; see whether "
            "this version of torch is one of requirements.txt."
        )
    for result in lines[1:]:
        if "refused" in result:
            raise ConfigError(result["refused"])
        if "failed" in result:
            raise RuntimeError(result["failed"])
    return lines[0]["launch_us"], lines[1:]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["without a message"])[-1]


def expect(config: Config, processes: int, gpu: Gpu, *, all_layers: bool = False) -> tuple[Expected, Details]:
    """What a rank of a layout without pipeline stages does in a step.

    Args: all_layers: trace every layer; slower, and exact where DeepSpeed's buckets fill up.
    Raises: ConfigError if the processes do not fit the layout or the batch, and as `run_worker`.
    """
    depth = config.model.num_layers if all_layers else min(config.model.num_layers, TRACED_LAYERS)
    launch_us, results = run_worker(cases_of(config, processes, gpu, depth))
    return summarize(config, processes, gpu, depth, launch_us, results)


def cases_of(config: Config, processes: int, gpu: Gpu, depth: int = TRACED_LAYERS) -> list[Case]:
    """The ranks to trace: one with `depth` layers, and one with a layer more."""
    traced = min(_micro_batches(config, processes), TRACED_MICRO_BATCHES)
    tree = to_tree(config)
    return [Case(tree, processes, 0, depth + more, traced, gpu.name) for more in (0, 1)]


def _micro_batches(config: Config, processes: int) -> int:
    return config.batch.accumulation_steps(config.parallel.data_parallel_size(processes))


def summarize(
    config: Config, processes: int, gpu: Gpu, depth: int, launch_us: float, results: Sequence[dict[str, Any]]
) -> tuple[Expected, Details]:
    """The numbers of the whole model and step, from the results of `cases_of`."""
    from megatron_lite.train.reports import step_flops  # imports torch

    less, more = results
    micro_batches = _micro_batches(config, processes)
    traced = min(micro_batches, TRACED_MICRO_BATCHES)
    whole = extended(less, more, config.model.num_layers - depth)

    def step(key: str) -> Any:
        return _of_step(whole["phases"], key, traced, micro_batches)

    def micro(key: str) -> Any:
        return _of_micro_batch(whole["phases"], key, traced)

    def layer(key: str, phases: Sequence[str]) -> float:
        """Of one layer and micro-batch."""
        return sum(more["phases"][p][key] - less["phases"][p][key] for p in phases) / traced

    kinds = {kind: value / 1e3 for kind, value in step("micros").items()}
    launches = step("launches") + sum(step("collectives").values())
    host_ms, roofline_ms = launches * launch_us / 1e3, sum(kinds.values())
    work = (whole[key] * micro_batches / traced for key in ("tokens", "loss_rows", "visible_keys"))
    ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    flops = step_flops(config.model, *map(int, work)) / ranks
    expected = Expected(
        attention_calls_per_layer=layer("attention", ["forward"]),
        launches_per_layer_forward=layer("launches", ["forward"]),
        launches_per_layer_backward=layer("launches", ["backward", "last_backward"]),
        waits_per_micro_batch=sum(micro("waits").values()),
        copies_per_micro_batch=sum(micro("pinned").values()) + sum(micro("pageable").values()),
        unaligned_matmuls=sum(micro("unaligned").values()),
        collective_mb={group: size / 1e6 for group, size in sorted(step("collective_bytes").items())},
        peak_gib=max(counts["peak"] for counts in whole["phases"].values()) / 2**30,
        host_ms=host_ms,
        roofline_ms=roofline_ms,
        expected_mfu=flops / (max(host_ms, roofline_ms) / 1e3) / (gpu.peak_tflops * 1e12),
    )
    details = Details(
        places={key: micro(key) for key in ("waits", "pageable", "pinned", "unaligned")},
        kinds=kinds,
        launches=launches,
        pageable_per_micro_batch=sum(micro("pageable").values()),
        waits_per_step=sum(whole["phases"]["step"]["waits"].values()),
        collectives=step("collectives"),
        launch_us=launch_us,
        rank_parameters=whole["rank_parameters"],
    )
    return expected, details


def _of_step(phases: dict[str, Any], key: str, traced: int, micro_batches: int) -> Any:
    """A number, or numbers by name, of a whole step."""
    factors = dict.fromkeys(_EVERY, micro_batches / traced) | dict.fromkeys(_ONCE, 1.0)
    factors |= dict.fromkeys(_OTHERS, (micro_batches - 1) / (traced - 1) if traced > 1 else 0.0)
    return _weighted(phases, key, factors)


def _of_micro_batch(phases: dict[str, Any], key: str, traced: int) -> Any:
    """The same of one micro-batch, on average over those of the traced step."""
    within = (*_EVERY, *_OTHERS, "last_backward", "last_sums")
    return _weighted(phases, key, dict.fromkeys(within, 1.0 / traced))


def _weighted(phases: dict[str, Any], key: str, factors: dict[str, float]) -> Any:
    values = [(phases[phase][key], factor) for phase, factor in factors.items()]
    if not isinstance(values[0][0], dict):
        return sum(value * factor for value, factor in values)
    total: Counter[str] = Counter()
    for tree, factor in values:
        for name, value in tree.items():
            total[name] += value * factor
    return {name: value for name, value in total.items() if value}
