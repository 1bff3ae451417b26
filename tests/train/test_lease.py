"""One start at a time holds a run's directory: on one machine, on several, with file locks and without."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import yaml
from support.commands import Forked, forked
from support.project import ROOT
from support.waiting import HANG_SECONDS, wait_until

from data_utils.common.errors import ConfigError, ExitStatus
from megatron_lite.runtime import lease
from megatron_lite.runtime.lease import LeaseError, acquire, held

HOLDER = """
import sys, time
from pathlib import Path
from megatron_lite.runtime import lease
lease.RENEW_SECONDS = 0.1
try:
    ours = lease.acquire(Path(sys.argv[1]), "trains")
except lease.LeaseError as error:
    print(error, flush=True)
    sys.exit(2)
print("held", flush=True)
while sys.stdin.readable() and not ours.lost_to():
    time.sleep(0.02)
"""


def start_holder(directory, **variables):
    """A process that asks for the lease, and renews it until it is killed."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        cwd=ROOT, env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@contextmanager
def holder(directory, **variables):
    with start_holder(directory, **variables) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def elsewhere(monkeypatch):
    """We seem to be on another machine, with a file system whose locks do not reach it."""
    monkeypatch.setattr(lease, "_boot_id", lambda: "another kernel")
    monkeypatch.setattr(lease, "_lock", lambda descriptor: None)
    monkeypatch.setattr(lease, "STALE_SECONDS", HANG_SECONDS)  # a living holder is seen by its next renewal


def test_a_second_start_is_refused_in_one_line_and_changes_nothing(settings, tmp_path):
    run = tmp_path / "run"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "pretrain_glm.py", "--config", str(config)]
    with holder(run, SLURM_JOB_ID="77") as first:
        before = {path: path.read_bytes() for path in run.iterdir()}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"error: {run} is in use: process {first.pid} on " in done.stderr
        assert ", SLURM job 77 trains in it, since 20" in done.stderr and f"touch {run}/STOP" in done.stderr
        assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_of_many_starts_at_once_one_goes_on(tmp_path):
    processes = [start_holder(tmp_path / "run") for _ in range(6)]
    try:
        answers = sorted(process.stdout.readline() for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert answers.count("held\n") == 1 and sum("is in use" in answer for answer in answers) == 5


def test_a_killed_holder_does_not_keep_the_lease(tmp_path):
    with holder(tmp_path) as first:
        with pytest.raises(LeaseError, match=f"process {first.pid} on "):
            acquire(tmp_path, "trains")
        first.kill()
        first.wait()
        with held(tmp_path, "trains"):
            assert json.loads((tmp_path / "LEASE").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_living_holder_on_another_machine_is_seen_by_its_renewals(tmp_path, elsewhere):
    with holder(tmp_path) as first, pytest.raises(LeaseError, match=f"process {first.pid} on "):
        acquire(tmp_path, "trains")


def test_a_dead_holder_on_another_machine_is_one_that_does_not_renew(
    tmp_path, elsewhere, caplog, monkeypatch
):
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.2)
    with holder(tmp_path):
        pass
    with held(tmp_path, "trains"):
        assert "exited without releasing it; this start takes over" in caplog.text


def test_a_lease_that_is_released_while_it_is_watched_is_free(tmp_path, elsewhere):
    first = acquire(tmp_path, "trains")
    released = []
    timer = threading.Timer(0.5, lambda: (released.append(True), first.release()))
    timer.start()
    second = acquire(tmp_path, "trains")
    assert released and json.loads((tmp_path / "LEASE").read_text())["pid"] == os.getpid()
    second.release()
    timer.join()
    assert list(tmp_path.iterdir()) == []


def test_of_two_machines_that_take_over_at_once_one_goes_on(tmp_path, elsewhere, monkeypatch):
    """Without common locks both find the holder dead: the one whose record is overwritten ends."""
    with holder(tmp_path):
        pass
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.2)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.0)
    taken, both, write = [], threading.Barrier(2), lease._write
    monkeypatch.setattr(lease, "_write", lambda *arguments: (both.wait(HANG_SECONDS), write(*arguments)))
    threads = [threading.Thread(target=lambda: taken.append(acquire(tmp_path, "trains"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert sorted(each.lost_to() is None for each in taken) == [False, True]


def test_a_start_between_making_the_file_and_locking_it_is_no_dead_one(tmp_path, monkeypatch, caplog):
    """Another start gets the lock first, but it gives it back while it watches, and then sees the record."""
    refused = []

    def look():
        with pytest.raises(LeaseError) as caught:
            acquire(tmp_path, "trains")
        refused.append(caught.value)

    def wait_until_another_watches(descriptor, operation):
        monkeypatch.setattr(lease, "fcntl", fcntl)
        other.start()
        wait_until(lambda: "waiting up to" in caplog.text)
        fcntl.flock(descriptor, operation)

    other = threading.Thread(target=look)
    monkeypatch.setattr(
        lease, "fcntl", SimpleNamespace(flock=wait_until_another_watches, LOCK_EX=fcntl.LOCK_EX)
    )
    with held(tmp_path, "trains"):
        other.join(HANG_SECONDS)
    assert "is in use: " in str(refused[0])


def test_a_damaged_lease_is_waited_for(tmp_path, elsewhere, monkeypatch):
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.2)
    for content in ("", "{", '{"token": 1}', "[]"):
        (tmp_path / "LEASE").write_text(content)
        found = acquire(tmp_path, "trains")
        assert json.loads((tmp_path / "LEASE").read_text())["pid"] == os.getpid()
        found.release()
        assert list(tmp_path.iterdir()) == []


def test_what_was_made_for_a_refused_start_is_removed(tmp_path):
    with pytest.raises(ConfigError, match="set it"), held(tmp_path / "a/run", "trains"):
        assert (tmp_path / "a/run/LEASE").exists()
        raise ConfigError("set it")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run.directory .*/file/run: Not a directory; choose"):
        acquire(tmp_path / "file/run", "trains")


TAKEN = """
import sys, time
from pathlib import Path
from megatron_lite.runtime import lease
from megatron_lite.runtime.watchdog import Watchdog
lease.RENEW_SECONDS = 0.1
run = Path(sys.argv[1])
dog = Watchdog({"setup": 60}, run, 0, 1, 0.5, lease.acquire(run, "trains"))
(run / "LEASE").write_text(sys.argv[2])
time.sleep(60)
"""


def test_a_run_whose_lease_was_taken_over_ends(tmp_path):
    """As one would that was stopped for minutes, and then goes on."""
    other = lease.Holder("token", "trains", "node7", 1, "now", "", "")
    command = [sys.executable, "-c", TAKEN, str(tmp_path), json.dumps(other.__dict__)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == ExitStatus.USER_ERROR
    assert done.stderr == f"error: {tmp_path} was taken over by process 1 on node7; this process exits.\n"


def test_a_run_holds_its_directory_until_it_has_ended(settings, tmp_path):
    settings["training"]["steps"] = 100_000
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(settings))
    command = ["pretrain_glm.py", "--config", config]
    first = Forked(*command)
    try:
        wait_until((run / "metrics.jsonl").exists, what="the run trains")
        done = forked(*command)
        assert done.returncode == 2 and f"is in use: process {first.pid} on " in done.stderr
    finally:
        os.kill(first.pid, signal.SIGTERM)
    assert first.result().returncode == ExitStatus.STOPPED
    assert not (run / "LEASE").exists() and len(list((run / "checkpoints").iterdir())) == 1
