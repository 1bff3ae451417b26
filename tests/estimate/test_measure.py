"""The parts of the measuring command that need no GPU: it measures a step on the CPU, and compares."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

from support.project import ROOT

from benchmarks.step_trace.measure import Measured, beside
from benchmarks.step_trace.request import Request
from megatron_lite.config.tree import load_config
from megatron_lite.estimate.gpus import GPUS


def test_a_step_is_measured_on_the_device_that_is_there(tmp_path):
    settings = ["model.vocab_size=300", "tokenizer=null", "training.precision=fp32", "model.hidden_size=64"]
    config = load_config([ROOT / "configs/tiny.yaml"], settings)
    asked = {
        "request": dataclasses.asdict(Request.of(config, 1, GPUS["h100"])),
        "trace": str(tmp_path / "trace.json"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step_trace.measure"],
        input=json.dumps(asked), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = Measured(**json.loads(done.stdout.splitlines()[-1]))
    assert found.step_ms > 0 and found.launches > 100 and 0 < found.mfu < 1
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_expected_stands_beside_measured():
    expected = {"host_ms": 15.0, "roofline_ms": 44.0, "peak_gib": 7.5, "expected_mfu": 0.39}
    lines = beside(expected, Measured("NVIDIA H100", 55.0, 12.0, 8.25, 1300.0, 0.31)).splitlines()
    assert lines[1].split() == ["step", "ms", "44", "55"] and lines[4].split() == ["MFU", "0.39", "0.31"]
