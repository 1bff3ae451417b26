"""Stop and save on request: files, signals, and the second signal that does not wait."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from distributed import run_ranks
from test_trainer import make_trainer

from megatron_lite.checkpoint import list_checkpoints, read_checkpoint
from megatron_lite.errors import ExitStatus, HaltedError
from megatron_lite.run_control import SAME_REQUEST_SECONDS, Requests, RunControl


def fit(context, tree):
    trainer = make_trainer(context, tree)
    return trainer.fit(), trainer.step


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

    monkeypatch.setattr("megatron_lite.run_control.FILE_CHECK_SECONDS", 0.0)
    control = RunControl(tmp_path, is_main=True)
    (tmp_path / "SAVE").touch()
    assert control.agreed(control.local_requests()).save
    monkeypatch.setattr(Path, "unlink", deny)
    control.saved()
    assert not control.agreed(control.local_requests()).save and "it is ignored from now on" in caplog.text


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
    assert RunControl.agreed([0.0, 0.0, 0.0]) == Requests()
    assert RunControl.agreed([2.0, 0.0, 1.0]) == Requests(stop=True, halt=False, save=True)


STUCK = """
import ctypes, sys
from pathlib import Path
from megatron_lite.run_control import RunControl
RunControl(Path("."), is_main=True)
print("listening", flush=True)
mutex = ctypes.create_string_buffer(256)  # a lock that is taken twice: native code that no signal interrupts
ctypes.CDLL(None).pthread_mutex_lock(mutex)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_a_second_signal_ends_a_process_that_is_stuck_in_native_code(tmp_path, monkeypatch):
    monkeypatch.setenv("GLM_STATUS_FILE", str(tmp_path / "status"))
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "listening\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # the same request twice, as launchers do
        time.sleep(SAME_REQUEST_SECONDS + 0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 128 + signal.SIGUSR1
        assert process.stderr.read() == "second signal (SIGUSR1): ending at once\n"
    assert (tmp_path / "status").read_text() == f"{128 + signal.SIGUSR1}\n"
