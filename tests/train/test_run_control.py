"""Stop and save on request: files, signals, and the second signal that does not wait."""

import contextlib
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.distributed import run_ranks
from support.project import ROOT
from support.training.training import make_trainer

from data_utils.common.errors import ExitStatus, HaltedError
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.parallel.launch import LauncherMonitor
from megatron_lite.runtime.control import STOP_SIGNALS, Requests, RunControl

SAME_REQUEST_SECONDS = 0.8  # shorter than users have it


def fit(context, tree):
    trainer = make_trainer(context, tree)
    return trainer.fit(), trainer.progress.step


def saved_steps(directory):
    return [int(path.name.removeprefix("step_")) for path in list_checkpoints(directory / "checkpoints")]


@pytest.fixture
def directory(settings):
    path = Path(settings["run"]["directory"])
    path.mkdir()
    return path


def test_the_file_save_saves_once_and_the_run_goes_on(settings, directory):
    (directory / "SAVE").touch()
    assert run_ranks(fit, 2, settings) == [(ExitStatus.FINISHED, 6)] * 2
    assert saved_steps(directory) == [1, 6] and not (directory / "SAVE").exists()
    history = read_checkpoint(list_checkpoints(directory / "checkpoints")[-1]).state["events"]["history"]
    assert history == [{"step": 1, "event": "saved at the request of the file SAVE"}]


def test_a_file_save_that_cannot_be_deleted_is_obeyed_once(tmp_path, monkeypatch, caplog):
    def deny(path, missing_ok=False):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("megatron_lite.runtime.control.FILE_CHECK_SECONDS", 0.0)
    control = RunControl(tmp_path, is_main=True)
    (tmp_path / "SAVE").touch()
    assert control.local_requests().save
    monkeypatch.setattr(Path, "unlink", deny)
    control.saved()
    assert not control.local_requests().save and "it is ignored from now on" in caplog.text


def refuse(context, directory):
    with pytest.raises(HaltedError, match=r"STOP exists, .* remove it to train on"):
        RunControl(directory, is_main=True).refuse_if_halted()


def test_the_file_stop_saves_ends_and_stays(settings, directory):
    (directory / "STOP").touch()
    assert run_ranks(fit, 2, settings) == [(ExitStatus.HALTED, 1)] * 2
    assert saved_steps(directory) == [1] and (directory / "STOP").exists()
    run_ranks(refuse, 1, directory)
    assert HaltedError.status == ExitStatus.HALTED


def test_requests_of_any_rank_count():
    assert Requests.from_sums([0.0, 0.0, 0.0]) == Requests()
    assert Requests.from_sums([2.0, 0.0, 1.0]) == Requests(stop=True, halt=False, save=True)


STUCK = """
import ctypes, sys
from pathlib import Path
from megatron_lite.runtime.lease import acquire
from megatron_lite.parallel.launch import LauncherMonitor
from megatron_lite.runtime import control as module
from megatron_lite.runtime.control import Phase, RunControl
module.SAME_REQUEST_SECONDS = float(sys.argv[4])
control = RunControl(Path(sys.argv[2]), is_main=sys.argv[3] == "0")
control.enter(Phase[sys.argv[1]])
if sys.argv[3] == "0":
    control.leave = acquire(Path(sys.argv[2]), "trains").release
print("listening", flush=True)
mutex = ctypes.create_string_buffer(256)  # a lock that is taken twice: native code that no signal interrupts
ctypes.CDLL(None).pthread_mutex_lock(mutex)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@contextmanager
def stuck(phase, directory, rank=0):
    """A process in native code, in a phase of a run."""
    command = [sys.executable, "-c", STUCK, phase, str(directory), str(rank), str(SAME_REQUEST_SECONDS)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "listening\n"
            yield process
        finally:
            process.kill()


def test_a_second_signal_ends_a_process_that_is_stuck_in_native_code(tmp_path, monkeypatch):
    monkeypatch.setenv("GLM_STATUS_FILE", str(tmp_path / "status"))
    with stuck("TRAINING", tmp_path / "run") as process:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # the same request twice, as launchers do
        answer = process.stderr.readline()
        assert answer.startswith("SIGTERM: finishing this step,")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(SAME_REQUEST_SECONDS + 0.5)
        process.send_signal(signal.SIGUSR1)
        assert process.wait() == 128 + signal.SIGUSR1
        assert process.stderr.read() == "second signal (SIGUSR1): exiting now\n"
    assert (tmp_path / "status").read_text() == f"{128 + signal.SIGUSR1}\n"


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_rank_that_has_the_signal_answers_and_one_on_a_node(tmp_path, first):
    with stuck("TRAINING", tmp_path / "run", 0) as main, stuck("TRAINING", tmp_path / "run", 1) as other:
        ranks = [main, other] if first == 0 else [other, main]
        for rank in ranks * 2:  # the second time, after long enough to be another request, it ends
            rank.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(SAME_REQUEST_SECONDS + 0.5)
        said = [rank.stderr.read() for rank in ranks]
        assert said[0].startswith("SIGTERM: finishing this step,") and said[0].count("\n") == 2
        assert said[1] == "second signal (SIGTERM): exiting now\n"
    with stuck("TRAINING", tmp_path / "run", 1) as next_run:  # the earlier answer is forgotten
        next_run.send_signal(signal.SIGTERM)
        assert next_run.stderr.readline().startswith("SIGTERM: finishing this step,")


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[pytest.mark.slow] * (number != signal.SIGTERM)) for number in STOP_SIGNALS],
)
def test_a_signal_before_the_first_step_ends_at_once_in_one_line(tmp_path, monkeypatch, number):
    monkeypatch.setenv("GLM_STATUS_FILE", str(tmp_path / "status"))
    with stuck("STARTING", tmp_path / "run") as process:
        process.send_signal(number)
        assert process.wait() == ExitStatus.STOPPED
        assert process.stderr.read() == f"{number.name}: exiting before the first step\n"
    assert (tmp_path / "status").read_text() == f"{int(ExitStatus.STOPPED)}\n"
    assert not (tmp_path / "run").exists()


def test_signals_to_a_rank_that_is_leaving_are_ignored(tmp_path):
    with stuck("OVER", tmp_path / "run") as process:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(SAME_REQUEST_SECONDS + 0.5)
        process.send_signal(signal.SIGTERM)  # a second request, were the run not over
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()
        assert process.stderr.read() == ""


RANK = """
import os, time
from pathlib import Path
from megatron_lite.runtime.control import Phase, RunControl
control = RunControl(Path(os.environ["RUN"]), is_main=True)
control.enter(Phase.TRAINING)
print("training", flush=True)
deadline = time.monotonic() + 1200
while time.monotonic() < deadline and not control.local_requests().stop:
    time.sleep(0.02)
print("asked" if control.local_requests().stop else "not asked", flush=True)
"""
# A launcher of the given depth: each process starts the next, the last one the rank, and waits for it.
LAUNCHER = """
import subprocess, sys
depth, launcher, rank, name = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
if depth > 1:
    command = [sys.executable, "-c", launcher, str(depth - 1), launcher, rank, name]
else:
    command = [sys.executable, "-c", rank]
sys.exit(subprocess.call(command))
"""


@pytest.mark.parametrize(
    "depth, name", [pytest.param(1, "torchrun", marks=pytest.mark.slow), (2, "deepspeed.launcher.launch")]
)
def test_a_rank_whose_launcher_is_killed_saves_and_ends(depth, name, tmp_path):
    environment = {**os.environ, "LOCAL_SIZE": "1", "RUN": str(tmp_path)}
    command = [sys.executable, "-c", LAUNCHER, str(depth), LAUNCHER, RANK, name]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout.readline() == "training\n"
        launcher.kill()
        assert launcher.stdout.readline() == "asked\n"
        assert "the launcher has ended: finishing this step" in launcher.stderr.read()


def test_a_run_that_was_started_by_hand_outlives_its_shell(monkeypatch):
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    watch = LauncherMonitor()
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert not watch.has_ended()
    monkeypatch.setenv("LOCAL_SIZE", "1")
    assert LauncherMonitor().has_ended()  # before it looked first
