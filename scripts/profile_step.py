"""Show what a training step does on a GPU, for a layout of any size, without one.

    python scripts/profile_step.py --config configs/glm-large.yaml --processes 64 --gpu h100

The step is the product's own, on fake devices: nothing is computed. Attention calls and launches are those of a layer,
waits and copies of a micro-batch, bytes of collectives of a step on one rank.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

from data_utils.common.errors import ArgumentParser, ConfigError, expanded_path, local_path, run_command
from data_utils.common.files import require_writable
from megatron_lite.config.tree import load_config
from megatron_lite.estimate.gpus import gpu_named


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
    add("overrides", nargs="*", metavar="section.key=value", help="settings on top of the files")
    arguments = parser.parse_intermixed_args()
    if not arguments.config:
        raise ConfigError("no configuration given; pass --config FILE, or a name such as small.")
    if arguments.processes < 1:
        raise ConfigError(f"--processes is {arguments.processes}; it must be at least 1.")
    if arguments.json:
        require_writable(Path(arguments.json), "--json")
    require_checkout()
    from benchmarks.step_trace.report import report
    from benchmarks.step_trace.request import Request, profile
    from megatron_lite.estimate.step_estimate import with_vocabulary

    config = with_vocabulary(load_config(arguments.config, arguments.overrides))
    gpu = gpu_named(arguments.gpu)
    found = profile(Request.of(config, arguments.processes, gpu))
    print(report(config, arguments.processes, gpu, found))
    if arguments.json:
        numbers = json.dumps(asdict(found.expected), indent=2)
        Path(arguments.json).write_text(f"{numbers}\n", encoding="utf-8")


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
