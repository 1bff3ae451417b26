"""The report of the day a GPU is there: which steps run, what is read from them, what is written. No GPU is needed."""

from __future__ import annotations

import json
import sys

import pytest
from support.commands import assert_refused, python
from support.waiting import wait_until

from data_utils.common.errors import ExitStatus
from megatron_lite.estimate import gpus
from scripts import gpu_day
from scripts.gpu_day import Step

MACHINE = {
    "gpus": ["NVIDIA H100 80GB HBM3"],
    "gib": [79.1],
    "torch": "2.13.0",
    "cuda": "13.0",
    "nccl": "2.28.3",
    "apex": False,
    "attention": ["fa3", "fa2", "torch"],
    "commit": "abc123",
}
WRITES = "import sys; open(sys.argv[1], 'w').write('[{\"tflops\": 400}]'); print('a table')"
TESTS = """
def test_right(): pass
def test_wrong(): assert 1 + 1 == 3
"""


def test_without_a_gpu_it_says_so(tmp_path):
    done = python("scripts/gpu_day.py", "--output", str(tmp_path / "day"), CUDA_VISIBLE_DEVICES="")
    assert_refused(done, "run this on a machine with an NVIDIA GPU")
    assert not (tmp_path / "day").exists()


@pytest.fixture
def day(monkeypatch, tmp_path):
    """Runs steps as the day of a machine with one GPU; the exit status, the page and the JSON."""

    def run(*planned, seconds=60.0):
        monkeypatch.setattr(gpu_day, "look_at_machine", lambda: MACHINE)
        monkeypatch.setattr(gpu_day, "steps", lambda gpus, gpu: list(planned))
        monkeypatch.setattr(
            sys, "argv", ["gpu_day", "--output", str(tmp_path / "day"), "--seconds", str(seconds)]
        )
        status = gpu_day.main()
        page = (tmp_path / "day/report.md").read_text()
        return status, page, json.loads((tmp_path / "day/report.json").read_text())

    return run


def outcomes(everything):
    return {step["name"]: step["outcome"] for step in everything["steps"]}


def test_a_day_that_passes(day):
    status, page, everything = day(Step("speed", ("-c", WRITES, "{json}"), 30))
    assert status == ExitStatus.FINISHED
    assert everything["machine"] == MACHINE
    (step,) = everything["steps"]
    assert (step["outcome"], step["results"], step["output"]) == ("passed", [{"tflops": 400}], "a table")
    assert "Attention: fa3, fa2, torch." in page
    assert "NVIDIA H100 80GB HBM3 (79.1 GiB)" in page and "Commit abc123" in page
    assert "| speed | passed |" in page and "a table" in page


def test_failures_are_named_and_the_rest_still_runs(day, tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    pytest_run = ("-m", "pytest", str(tmp_path / "test_some.py"), "-c", "/dev/null", "--junit-xml", "{json}")
    status, page, everything = day(
        Step("tests", pytest_run, 60),
        Step("speed", ("-c", WRITES, "{json}"), 30),
    )
    assert status == ExitStatus.CRASHED
    assert outcomes(everything) == {"tests": "failed (exit status 1)", "speed": "passed"}
    tests = {test["name"]: test["outcome"] for test in everything["steps"][0]["tests"]}
    assert tests == {"test_right": "passed", "test_wrong": "failure"}
    assert "| test_wrong | failure |" in page and "test_wrong: `assert (1 + 1) == 3" in page


@pytest.mark.slow
def test_a_step_that_hangs_is_ended(day, monkeypatch):
    """With all that it started, also if it ignores a request."""
    monkeypatch.setattr(gpu_day, "GRACE_SECONDS", 1)
    program = (
        "import os, signal",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "os.fork()",
        r"os.write(1, b'%d\n' % os.getpid())",
        "[signal.pause() for _ in range(9)]",
    )
    hangs = "; ".join(program)
    status, _, everything = day(Step("hangs", ("-c", hangs), 2))
    assert status == ExitStatus.CRASHED
    (step,) = everything["steps"]
    assert step["outcome"] == "failed (timeout after 2 seconds)"
    processes = step["output"].splitlines()
    assert len(processes) == 2
    wait_until(lambda: {state_of(process) for process in processes} == {"Z"})


def state_of(process):
    """A dead process may be waited for by nobody: a zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_what_does_not_fit_is_left_out(day):
    status, _, everything = day(
        Step("two", ("-c", "pass"), 30, least_gpus=2), Step("late", ("-c", "pass"), 30), seconds=1.0
    )
    assert status == ExitStatus.FINISHED
    assert outcomes(everything) == {
        "two": "skipped (needs 2 GPUs)",
        "late": "skipped (out of time)",
    }


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_steps_take_ten_minutes_and_name_what_exists(gpus):
    planned = gpu_day.steps(gpus)
    assert sum(step.limit_seconds for step in planned) <= 600
    for step in planned:
        for name in (argument for argument in step.arguments if argument.endswith(".py")):
            assert (gpu_day.ROOT / name).exists()
    (layouts,) = (step for step in planned if step.name == "layouts")
    chosen = layouts.arguments[layouts.arguments.index("--layouts") + 1 :]
    sizes = [ranks_of(name.partition("+")[0]) for name in chosen]
    assert layouts.least_gpus == 2 and (gpus < 2 or set(sizes) == {gpus})


def ranks_of(layout):
    first, second, third = map(int, layout.split("x"))
    return first * second * third


def test_devices_are_known_by_their_names():
    named = gpus.named_by_device
    assert named("NVIDIA H100 80GB HBM3", 79.1) == "h100" and named("NVIDIA GH200 480GB", 94.5) == "gh200"
    assert named("NVIDIA A100-SXM4-40GB", 39.4) == "a100-40" and named("Tesla T4", 15.0) is None
