"""Request and result of a profile, which is traced in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data_utils.common.errors import ConfigError, ExitStatus
from data_utils.common.settings import to_tree
from megatron_lite.config.attention import choose
from megatron_lite.config.tree import Config
from megatron_lite.estimate.gpus import Gpu
from megatron_lite.estimate.step_estimate import require_one_transformer

TRACED_LAYERS = 2  # and one more: equal layers cost the same


@dataclass(frozen=True)
class Request:
    """One layout of a configuration."""

    tree: dict[str, Any]  # of the configuration, see `to_tree`; with model.vocab_size
    processes: int
    gpu: str
    layers: int = TRACED_LAYERS  # that are traced of a model, or of a pipeline stage; 0 = all

    @staticmethod
    def of(config: Config, processes: int, gpu: Gpu, layers: int = TRACED_LAYERS) -> Request:
        """Raises ConfigError if the processes do not fit the layout or the batch, there are two Transformers, or the
        chosen attention does not run on the GPU."""
        require_one_transformer(config)
        choose(config, gpu.capability)
        config.deepspeed_options(config.parallel.data_parallel_size(processes))
        return Request(to_tree(config), processes, gpu.name, layers)


@dataclass(frozen=True)
class Expected:
    """A training step on one rank, of a pipeline on the rank that has most."""

    attention_calls_per_layer: float
    launches_per_layer_forward: float
    launches_per_layer_backward: float
    waits_per_micro_batch: float
    copies_per_micro_batch: float
    unaligned_matmuls: float  # of a micro-batch
    collective_mb: dict[str, float]  # of a step: the largest tensor of each call, by group
    peak_gib: float


@dataclass(frozen=True)
class Details:
    """Where the numbers come from."""

    places: dict[
        str, dict[str, float]
    ]  # waits, pinned, pageable, unaligned, attention -> place -> times of a micro-batch
    step_places: dict[str, float]  # waits of a step beside those of its micro-batches
    sums_per_layer: (
        float  # launches by which the optimizer takes gradients, beside those of the backward pass
    )
    stage_gib: list[float]  # peak of each traced pipeline stage
    rank_parameters: float  # of the fullest rank


@dataclass(frozen=True)
class Profile:
    expected: Expected
    details: Details


def profiles(requests: Sequence[Request]) -> list[Profile | str]:
    """The profile of each request, or why a rank refused it: one line.

    Raises: ConfigError where torch or the machine are unknown to fake devices.
    """
    text = json.dumps([asdict(request) for request in requests])
    fake = {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    answers = [json.loads(line) for line in run_module("benchmarks.step_trace.worker", text, fake)]
    return [read_answer(answer) for answer in answers]


def run_module(module: str, text: str, variables: Mapping[str, str] | None = None) -> list[str]:
    """The lines that a module's process writes, given `text`. Raises ConfigError with its last line if it fails."""
    path = os.pathsep.join(filter(None, sys.path))  # a script of a checkout has added its root
    # Triton's interpreter would take the place of what is compiled and counted.
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", **(variables or {})}
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=text,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["without a message"])[-1].removeprefix("error: ")
        if done.returncode == ExitStatus.USER_ERROR:
            raise ConfigError(reason)
        raise ConfigError(
            f"{module} ended with status {done.returncode}: {reason}; see whether the packages are those of "
            "requirements.txt."
        )
    return done.stdout.splitlines()


def read_answer(answer: dict[str, Any]) -> Profile | str:
    """A line of the worker. Raises RuntimeError with the traceback of a rank that failed."""
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    if "refused" in answer:
        return str(answer["refused"])
    return Profile(Expected(**answer["expected"]), Details(**answer["details"]))


def profile(request: Request) -> Profile:
    """The profile of one request. Raises ConfigError for what a rank refuses, and as `profiles`."""
    (found,) = profiles([request])
    if isinstance(found, str):
        raise ConfigError(found)
    return found
