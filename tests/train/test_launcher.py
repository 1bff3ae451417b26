"""The real `deepspeed` launcher on two CPU processes, and what users can get wrong before and at its start."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.commands import forked
from support.distributed import free_port, run_ranks
from support.project import ROOT
from support.training.training import fit
from support.waiting import wait_until

from data_utils.common.settings import merge

pytestmark = pytest.mark.launcher
# Ranks see that their launcher is gone. The first that ends makes what is left of the launcher signal the others.
ENDED_LAUNCHER = ("the launcher has ended", "SIGTERM")


def command_and_environment(settings, directory, overrides, processes=2):
    config = Path(directory) / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [launcher, "--master_port", free_port(), "--num_gpus", processes]
    command += [ROOT / "pretrain_glm.py", "--config", config, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return [str(x) for x in command], environment


def start(settings, directory, *overrides, **options):
    command, environment = command_and_environment(settings, directory, overrides, **options)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def ranks_of(config):
    """Process ids of the ranks, not of their launchers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(config).encode() in words and not any(b"deepspeed" in word for word in words):
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def running(settings, directory):
    """The launcher of an endless run, in a process group of its own, as in a terminal; its output goes to `output`."""
    command, environment = command_and_environment(settings, directory, ["training.steps=1000000"])
    config = Path(directory) / "config.yaml"
    with (
        (directory / "output").open("w") as output,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        ) as launcher,
    ):
        try:
            yield launcher, config
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("ask", ["SIGTERM to the launcher", "Ctrl-C"])
def test_a_launcher_that_is_ended_does_not_leave_its_ranks_behind(settings, tmp_path, ask):
    run = tmp_path / "run"
    with running(settings, tmp_path) as (launcher, config):
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(losses(run)) > 3, what="the run trains")
        assert len(ranks_of(config)) == 2
        if ask == "Ctrl-C":
            os.killpg(launcher.pid, signal.SIGINT)
        else:
            launcher.terminate()
        wait_until(lambda: not ranks_of(config), what="the ranks end")
    output = (tmp_path / "output").read_text()
    (last,) = (run / "checkpoints").iterdir()
    assert last.name == f"step_{losses(run)[-1][0]:08d}"
    causes = re.findall(r"(SIG\w+|the launcher has ended): finishing this step,", output)
    # Each rank learns it in two ways, from the launcher's end and from a signal, in either order.
    possible = ("SIGINT", "SIGTERM", "the launcher has ended") if ask == "Ctrl-C" else ENDED_LAUNCHER
    assert len(causes) == 1 and causes[0] in possible, output
    assert f"saved {last}" in output and "second signal (" not in output
    assert not (run / "LEASE").exists()


@pytest.mark.slow
def test_a_launcher_that_is_ended_at_the_start_trains_nothing(settings, tmp_path):
    with running(settings, tmp_path) as (launcher, config):
        wait_until((tmp_path / "run/LEASE").exists, what="rank 0 has begun")
        launcher.terminate()
        wait_until(lambda: not ranks_of(config), what="the ranks end")
    output = (tmp_path / "output").read_text()
    causes = re.findall(r"(.*): exiting before the first step\n", output)
    assert len(causes) == 1 and causes[0] in ENDED_LAUNCHER, output
    assert not (tmp_path / "run").exists()


def losses(run):
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["loss"]) for r in map(json.loads, lines) if r["kind"] == "train"]


def test_a_launcher_continues_with_a_stopped_run_which_then_fills_a_blank(settings, tmp_path):
    """Two forked ranks made the first half of the run, and the whole one that it is compared with."""
    settings["training"]["precision"] = "bf16"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, more in ((whole, {}), (parts, {"stop_after_step": 3})):
        run_ranks(fit, 2, merge(settings, {"run": {"directory": str(directory)}, "training": more}))
    assert len(losses(parts)) == 3
    done = start(settings, tmp_path, f"run.directory={parts}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout and "step 6/6" in done.stdout
    assert losses(parts) == losses(whole)  # bf16: the same arithmetic on the same state
    filled = forked("scripts/generate.py", "--checkpoint", parts, "--text", "word1 [MASK] word2", "--json")
    assert filled.returncode == 0, filled.stderr
    assert len(json.loads(filled.stdout)["spans"]) == 1


@pytest.mark.slow
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
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(settings))
        port = str(other.getsockname()[1])
        ours = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = forked("pretrain_glm.py", "--config", config, **ours)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: port {port} is in use on") and done.stderr.count("\n") == 1
    assert "--master_port" in done.stderr
