"""Show what a training step does on a GPU, for a layout of any size, without one.

    python scripts/profile_step.py --config configs/glm-large.yaml --processes 64 --gpu h100

The step is the product's own, on fake devices: nothing is computed. Attention calls and launches are those of a layer,
waits and copies those of a micro-batch, collectives and times those of a step on one rank. The roofline leaves out
communication. Expected MFU is that of the longer of host and roofline.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from data_utils.common.errors import ArgumentParser, ConfigError, expanded_path, local_path, run_command
from data_utils.common.files import require_writable
from megatron_lite.config.tree import load_config
from megatron_lite.estimate.gpus import gpu_named

if TYPE_CHECKING:
    from benchmarks.step_trace.request import Profile, Request


def require_checkout() -> None:
    """Raise ConfigError in an installed package, which leaves the trace out."""
    if (
        importlib.util.find_spec("benchmarks") is None
        or importlib.util.find_spec("benchmarks.step_trace") is None
    ):
        raise ConfigError(
            "benchmarks/step_trace is not installed; run scripts/profile_step.py in a checkout, or use "
            "pretrain_glm.py --dry-run, which needs no trace."
        )


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "YAML file, or a name in configs/; repeatable, later files override earlier ones"
    add("--config", type=expanded_path, action="append", default=[], metavar="FILE", help=text)
    add("--processes", type=int, required=True, metavar="N", help="number of processes, one GPU each")
    add("--gpu", default="h100", help="h100, h200, gh200, b200, a100 or a100-40 (default h100)")
    add("--json", type=local_path, metavar="FILE", help="write the numbers to this JSON file too")
    add(
        "--all-layers",
        action="store_true",
        help="trace all layers instead of extrapolating from two and three (slower)",
    )
    add("--measure", action="store_true", help="also run the step on this machine's GPU (one process only)")
    text = "with --measure: write the torch.profiler trace"
    add("--trace", type=local_path, metavar="FILE", help=text)
    add("overrides", nargs="*", metavar="section.key=value", help="settings on top of the files")
    arguments = parser.parse_intermixed_args()
    if not arguments.config:
        raise ConfigError("no configuration given; pass --config FILE, or a name such as small.")
    if arguments.processes < 1:
        raise ConfigError(f"--processes is {arguments.processes}; it must be at least 1.")
    if arguments.measure:
        require_measurable(arguments.processes)
    if arguments.trace:
        require_writable(Path(arguments.trace), "--trace")
    if arguments.json:
        require_writable(Path(arguments.json), "--json")
    require_checkout()
    from benchmarks.step_trace.report import report
    from benchmarks.step_trace.request import TRACED_LAYERS, Request, profile
    from megatron_lite.estimate.step_estimate import with_vocabulary

    config = with_vocabulary(load_config(arguments.config, arguments.overrides))
    gpu = gpu_named(arguments.gpu)
    layers = 0 if arguments.all_layers else TRACED_LAYERS
    request = Request.of(config, arguments.processes, gpu, layers)
    found = profile(request)
    print(report(config, arguments.processes, gpu, found))
    if arguments.measure:
        print(f"\n{measured_beside(request, found, arguments.trace)}")
    if arguments.json:
        numbers = json.dumps(asdict(found.expected), indent=2)
        Path(arguments.json).write_text(f"{numbers}\n", encoding="utf-8")


def require_measurable(processes: int) -> None:
    """Raise ConfigError before the trace, which takes a minute, if there is nothing to measure on."""
    import torch

    if processes != 1:
        raise ConfigError(f"--measure runs one process, but --processes is {processes}; set it to 1.")
    if not torch.cuda.is_available():
        raise ConfigError("--measure needs a GPU, but torch finds none; remove it.")


def measured_beside(request: Request, found: Profile, trace: str | None) -> str:
    """Expected and measured numbers."""
    asked = json.dumps({"request": asdict(request), "trace": trace})
    from benchmarks.step_trace.measure import Measured, beside
    from benchmarks.step_trace.request import run_module

    line = run_module("benchmarks.step_trace.measure", asked)[-1]
    return beside(asdict(found.expected), Measured(**json.loads(line)))


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
