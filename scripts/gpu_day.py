"""Prove and measure this project on the GPUs of this machine, in ten minutes: `python scripts/gpu_day.py`.

Runs the tests marked `gpu` (attention, ZeRO and every layout against plain torch on the CPU, every objective, exact
resume, NCCL on all GPUs, apex if it is installed), then the benchmarks, and writes one report, as report.md and as
report.json. First comes each fused kernel compared with torch's operators, and attention with each implementation that
is installed: the first that differs is named. The exit status is 0 if everything passed, 1 if anything failed, 2
without a GPU.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_utils.common.errors import ArgumentParser, ConfigError, ExitStatus, run_command
from data_utils.common.files import require_writable
from megatron_lite.config.attention import IMPLEMENTATIONS
from megatron_lite.estimate.gpus import named_by_device

ROOT = Path(__file__).resolve().parents[1]
GRACE_SECONDS = 10  # for a step that is asked to stop
MACHINE = """
import importlib.util, json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "gpus": [gpu.name for gpu in gpus],
    "gib": [round(gpu.total_memory / 2**30, 1) for gpu in gpus],
    "torch": torch.__version__, "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
    "apex": importlib.util.find_spec("apex") is not None,
}))
"""


@dataclass(frozen=True)
class Step:
    """A command of the day. {json} in its arguments is a file for its results."""

    name: str
    arguments: tuple[str, ...]
    limit_seconds: float
    least_gpus: int = 1


@dataclass
class Result:
    """The result of a step."""

    name: str
    command: str
    outcome: str  # passed, failed (exit status) or skipped (why)
    seconds: float = 0.0
    output: str = ""  # its last lines
    results: Any = None  # what it wrote to {json}
    tests: list[dict[str, Any]] = field(default_factory=list)


def steps(gpus: int, gpu: str = "h100") -> list[Step]:
    """The commands of the day, the most valuable first. Args: gpu: whose step is estimated."""
    ranks = str(min(8, 1 << (gpus.bit_length() - 1)))
    train_step = ("benchmarks/train_step.py", "--device", "cuda", "--no-transformers", "--json", "{json}")
    layouts = [f"1x1x{ranks}", f"1x1x{ranks}+zero2", f"1x1x{ranks}+zero3", f"2x1x{int(ranks) // 2}+sp"]
    launched = ("benchmarks/parallel.py", "--launched", "--shape", "base", "--dtype", "bf16", "--samples", "64",
                "--micro-batch", "8", "--json", "{json}")  # fmt: skip
    estimate = ("pretrain_glm.py", "--config", "configs/glm-large.yaml", "--dry-run", "1", "--gpu", gpu)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return [
        Step("kernels compared with torch", ("benchmarks/kernels.py", "--json", "{json}"), 75),
        Step("tests", ("-m", "pytest", "tests/gpu", "-m", "gpu", "-v", "--junit-xml", "{json}"), 305),
        Step("training step, 335M", (*train_step, "--shapes", "large", "--micro-batch", "16"), 70),
        Step(f"estimate of a 335M step on one {gpu}", estimate, 60),
        Step("layouts", (*torchrun, *launched, "--layouts", *layouts), 50, least_gpus=2),
        Step("training step, 110M", (*train_step, "--shapes", "base", "--micro-batch", "32", "--optimizer"), 40),
    ]  # fmt: skip


def run_step(step: Step, seconds: float, file: Path) -> Result:
    """Run a step for at most `seconds`; its whole process group ends with it."""
    arguments = [argument.replace("{json}", str(file)) for argument in step.arguments]
    result = Result(step.name, " ".join(("python", *arguments)), "passed")
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
        if process.returncode:
            result.outcome = f"failed (exit status {process.returncode})"
    except subprocess.TimeoutExpired:
        result.outcome = f"failed (timeout after {seconds:.0f} seconds)"
        output = _interrupted(process)
    finally:
        _end_group(process)
    result.seconds = time.monotonic() - started
    result.output = "\n".join(output.splitlines()[-40:])
    if file.exists():
        _read_results(file, result)
    return result


def _interrupted(process: subprocess.Popen[str]) -> str:
    """The output of a process after a request to end, upon which pytest still writes its results so far."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=GRACE_SECONDS)[0]
    _end_group(process)
    return process.communicate()[0]


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read_results(file: Path, result: Result) -> None:
    text = file.read_text(encoding="utf-8")
    if not text.lstrip().startswith("<"):
        result.results = json.loads(text)
        return
    for case in ElementTree.fromstring(text).iter("testcase"):
        verdicts = {child.tag: child.get("message", "") for child in case}
        outcome = next((tag for tag in ("failure", "error", "skipped") if tag in verdicts), "passed")
        result.tests.append(
            {
                "name": case.get("name"),
                "seconds": float(case.get("time", 0.0)),
                "outcome": outcome,
                "message": verdicts.get(outcome, "")[:2000],
            }
        )


def run_steps(planned: list[Step], gpus: int, budget_seconds: float, directory: Path) -> Iterator[Result]:
    """Run the steps that fit in the time, and give the reason why the others did not run."""
    deadline = time.monotonic() + budget_seconds
    for number, step in enumerate(planned):
        left = deadline - time.monotonic()
        if gpus < step.least_gpus:
            yield Result(step.name, "", f"skipped (needs {step.least_gpus} GPUs)")
        elif left < 5:
            yield Result(step.name, "", "skipped (out of time)")
        else:
            yield run_step(step, min(step.limit_seconds, left), directory / f"step_{number}.json")


def report(machine: dict[str, Any], results: list[Result]) -> str:
    """A report of the results in Markdown."""
    gpus = ", ".join(f"{name} ({gib} GiB)" for name, gib in zip(machine["gpus"], machine["gib"], strict=True))
    lines = [
        "# GPU report",
        "",
        f"GPUs: {gpus}. torch {machine['torch']}, CUDA {machine['cuda']}, NCCL {machine['nccl']}, "
        f"NVIDIA apex {'installed' if machine['apex'] else 'not installed'}. Attention: "
        f"{', '.join(machine['attention'])}. Commit {machine['commit']}.",
        "",
        "| step | outcome | seconds |",
        "|---|---|---|",
        *(f"| {result.name} | {result.outcome} | {result.seconds:.0f} |" for result in results),
    ]
    for result in results:
        if not result.command:
            continue
        lines += ["", f"## {result.name}", "", f"`{result.command}`"]
        if result.tests:
            lines += ["", "| test | outcome | seconds |", "|---|---|---|"]
            lines += [f"| {t['name']} | {t['outcome']} | {t['seconds']:.1f} |" for t in result.tests]
            failed = [t for t in result.tests if t["outcome"] in ("failure", "error")]
            lines += [f"\n{t['name']}: `{t['message'].partition(chr(10))[0]}`" for t in failed]
        lines += ["", "```", result.output, "```"]
    return "\n".join(lines) + "\n"


def look_at_machine() -> dict[str, Any]:
    """GPUs and versions, from a separate process: a process that has used CUDA cannot fork ranks."""
    done = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"torch does not start: {done.stderr.strip().splitlines()[-1]}; reinstall it.")
    machine = json.loads(done.stdout)
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    attention = [name for name, one in IMPLEMENTATIONS.items() if one.is_here]
    return {**machine, "attention": attention, "commit": commit or "unknown"}


def main() -> ExitStatus:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("gpu_day"), help="directory of the report (default: gpu_day)"
    )
    parser.add_argument("--seconds", type=float, default=590.0, help="total seconds (default: 590)")
    options = parser.parse_args()
    machine = look_at_machine()
    if not machine["gpus"]:
        raise ConfigError(
            f"torch {machine['torch']} finds no GPU; run this on a machine with an NVIDIA GPU and a CUDA "
            "build of torch."
        )
    require_writable(options.output / "report.md", "--output")
    options.output.mkdir(parents=True, exist_ok=True)
    results, count = [], len(machine["gpus"])
    gpu = named_by_device(machine["gpus"][0], machine["gib"][0]) or "h100"
    for result in run_steps(steps(count, gpu), count, options.seconds, options.output):
        print(f"{result.name}: {result.outcome}, {result.seconds:.0f} s", flush=True)
        results.append(result)
    (options.output / "report.md").write_text(report(machine, results), encoding="utf-8")
    everything = {"machine": machine, "steps": [asdict(result) for result in results]}
    (options.output / "report.json").write_text(json.dumps(everything, indent=1), encoding="utf-8")
    print(f"written: {options.output / 'report.md'} and report.json")
    failed = any(result.outcome.startswith("failed") for result in results)
    return ExitStatus.CRASHED if failed else ExitStatus.FINISHED


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
