"""The real `deepspeed` launcher on two CPU processes, and what users can get wrong before and at its start."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from distributed import free_port

pytestmark = pytest.mark.launcher


def start(settings, directory, *overrides, processes=2, port=None):
    config = Path(directory) / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [
        launcher,
        "--master_port",
        str(port or free_port()),
        "--num_gpus",
        str(processes),
        str(ROOT / "pretrain_glm.py"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return subprocess.run(
        [str(x) for x in command] + ["--config", str(config), *overrides],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def losses(run):
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["loss"]) for r in map(json.loads, lines) if r["kind"] == "train"]


def test_train_stop_resume_and_fill_a_blank(settings, tmp_path):
    settings["training"]["precision"] = "bf16"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for arguments in (
        [f"run.directory={whole}"],
        [f"run.directory={parts}", "training.stop_after_step=3"],
        [f"run.directory={parts}"],
    ):
        done = start(settings, tmp_path, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout and "step 6/6" in done.stdout
    assert losses(parts) == losses(whole)  # bf16: the same arithmetic on the same state
    command = [
        sys.executable,
        "scripts/generate.py",
        "--checkpoint",
        str(parts),
        "--text",
        "word1 [MASK] word2",
        "--json",
    ]
    filled = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert filled.returncode == 0, filled.stderr
    assert len(json.loads(filled.stdout)["spans"]) == 1


def test_a_world_that_does_not_fit_ends_with_one_message(settings, tmp_path):
    done = start(settings, tmp_path, processes=3)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert output.count("error: ") == 1 and "global_batch_size" in output
    assert "Traceback" not in output
    assert not Path(settings["run"]["directory"]).exists()


def test_a_port_in_use_is_one_line(settings, tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        done = start(settings, tmp_path, processes=1, port=other.getsockname()[1])
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "is in use on" in output and "--master_port" in output and "Traceback" not in output
