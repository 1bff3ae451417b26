"""The launchers under a real SLURM of two nodes: training, requeue after a signal, a killed rank, chains of tasks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.project import ROOT
from support.slurm_cluster import Cluster, reason_to_skip, running_cluster
from support.waiting import HANG_SECONDS, wait_until

from data_utils.common.errors import ExitStatus
from data_utils.common.settings import merge
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.runtime.heartbeats import read_heartbeats

pytestmark = pytest.mark.launcher

LAUNCHERS = ("srun", "deepspeed", "torchrun")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    with running_cluster() as cluster:
        yield cluster


class Job:
    """A submitted job of scripts/slurm_train.sh, and what its run has written."""

    def __init__(
        self,
        cluster: Cluster,
        settings: dict,
        tmp_path: Path,
        ranks_per_node: int,
        *options: str,
        **variables: str,
    ):
        self.cluster, self.tmp_path = cluster, tmp_path
        self.directory = Path(settings["run"]["directory"])
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(settings))
        environment = {"PYTHON": sys.executable, "LOGS": str(tmp_path / "logs"), "DS_ACCELERATOR": "cpu"}
        command = [
            "sbatch",
            "--parsable",
            f"--chdir={ROOT}",
            "--nodes=2",
            f"--ntasks-per-node={ranks_per_node}",
        ]
        command += [f"--output={tmp_path}/job.out", "--time=20", *options]
        command += ["scripts/slurm_train.sh", "--config", str(config)]
        self.id = cluster.run(*command, **environment, **variables)

    def steps(self) -> list[int]:
        """Steps in the order in which they were logged."""
        try:
            lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        records = map(json.loads, lines)
        return [record["step"] for record in records if record["kind"] == "train"]

    def newest_checkpoint(self) -> int:
        return int(list_checkpoints(self.directory / "checkpoints")[-1].name.removeprefix("step_"))

    def restarts(self) -> int:
        return int(self.cluster.field(self.id, "Restarts"))

    def wait_for_requeue(self, seconds: float, what: str) -> None:
        """Wait until the job is queued again, and spare it the two minutes that SLURM lets such jobs wait."""
        wait_until(lambda: self.restarts() == 1, seconds, what, self.logs)
        wait_until(
            lambda: self.cluster.field(self.id, "JobState") == "PENDING",
            what="the job is pending",
            logs=self.logs,
        )
        self.cluster.run(
            "scontrol", "update", f"JobId={self.id}", "StartTime=now+5"
        )  # the same second: "already killed"

    def wait_for_steps(self, count: int, what: str) -> None:
        wait_until(lambda: len(self.steps()) >= count, what=what, logs=self.logs)

    def wait_for_end(self) -> str:
        """The job's exit status, as SLURM knows it."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_until(
            lambda: self.cluster.field(self.id, "JobState") in ended, what="the job ends", logs=self.logs
        )
        return self.cluster.field(self.id, "ExitCode").partition(":")[0]

    def halt(self) -> None:
        """End the run for good by the file STOP, and check that the job tells so and is not queued again."""
        (self.directory / "STOP").touch()
        assert self.wait_for_end() == str(int(ExitStatus.HALTED)), self.logs()

    def logs(self) -> str:
        files = [self.tmp_path / "job.out", *sorted((self.tmp_path / "logs").rglob("*.log"))]
        shown = [f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files if file.exists()]
        return "\n".join([*shown, self.cluster.logs()])


@pytest.fixture
def endless(settings: dict) -> dict:
    """A run that only ends on a signal."""
    return merge(settings, {"training": {"steps": 1_000_000}, "checkpoint": {"keep_last": 2}})


def interrupt_and_continue(cluster, settings, tmp_path, ranks_per_node, **variables):
    """SIGUSR1 to the job's steps: all ranks save and end, the job is queued again, and not one step is lost."""
    job = Job(cluster, settings, tmp_path, ranks_per_node, **variables)
    job.wait_for_steps(5, "the job trains")
    cluster.send_usr1(job.id)
    job.wait_for_requeue(HANG_SECONDS, "the job is queued again")
    saved, before = job.newest_checkpoint(), job.steps()
    assert before == list(range(1, saved + 1)), "the last step that was made is the saved one"
    job.wait_for_steps(saved + 3, "the job continues")
    job.halt()
    steps = job.steps()
    assert steps == list(range(1, len(steps) + 1)), "every step once, in order"
    logs = tmp_path / "logs" / job.id
    assert (logs / "attempt-0.status").read_text() == f"{int(ExitStatus.STOPPED)}\n"
    assert f"resumed from {job.directory}/checkpoints" in (logs / "attempt-1.node-0.log").read_text()
    assert (logs / "attempt-1.node-1.log").exists() and not (logs / "failures").exists()


@pytest.mark.slow
def test_a_two_node_job_trains_and_continues_after_a_signal(cluster, endless, tmp_path):
    interrupt_and_continue(cluster, endless, tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_with_two_ranks_a_node_continues_after_a_signal(cluster, endless, tmp_path, launcher):
    interrupt_and_continue(cluster, endless, tmp_path, 2, LAUNCHER=launcher)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_node(cluster, settings, tmp_path, launcher):
    job = Job(cluster, settings, tmp_path, 2, "--nodes=1", LAUNCHER=launcher)
    assert job.wait_for_end() == "0", job.logs()
    assert job.steps() == list(range(1, settings["training"]["steps"] + 1))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_job_which_continues_from_its_last_checkpoint(
    cluster, endless, tmp_path, launcher
):
    job = Job(cluster, merge(endless, {"checkpoint": {"save_interval": 10}}), tmp_path, 2, LAUNCHER=launcher)
    job.wait_for_steps(25, "the job trains")
    heartbeats = job.directory / "heartbeats"
    # A rank whose watchdog began before the run's directory existed is first heard of ten seconds later.
    wait_until(
        lambda: 3 in [beat.rank for beat in read_heartbeats(heartbeats)], what="a heartbeat", logs=job.logs
    )
    victim = next(beat for beat in read_heartbeats(heartbeats) if beat.rank == 3)
    os.kill(victim.pid, signal.SIGKILL)
    start = time.monotonic()
    job.wait_for_requeue(60, "the whole job ends within 60 s of the death of a rank")
    print(f"{launcher}: queued again {time.monotonic() - start:.1f} s after the death of rank 3")
    saved, before = job.newest_checkpoint(), job.steps()
    assert saved % 10 == 0 and 0 <= before[-1] - saved < 11
    job.wait_for_steps(len(before) + 2, "the job continues")
    job.halt()
    assert job.steps()[len(before)] == saved + 1
    assert len((tmp_path / "logs" / job.id / "failures").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_chain_of_tasks_continues_one_run_and_ends_with_it(cluster, settings, tmp_path):
    """Three tasks, of which the first gets a signal; the second finishes, the third is not needed."""
    settings = merge(settings, {"training": {"steps": 1000}})
    job = Job(cluster, settings, tmp_path, 1, "--array=1-3%1", CHAIN="yes")
    job.wait_for_steps(5, "the first task trains")
    cluster.send_usr1(f"{job.id}_1")
    # A task that has ended may long be "completing" where its node is busy.
    waiting = ("squeue", "--noheader", "--states=PENDING,RUNNING")
    wait_until(lambda: not cluster.run(*waiting), what="all tasks end", logs=job.logs)
    assert job.steps() == list(range(1, 1001))
    attempts = sorted((tmp_path / "logs").rglob("attempt-*.status"))
    assert [int(path.read_text()) for path in attempts] == [ExitStatus.STOPPED, ExitStatus.FINISHED]


@pytest.mark.slow
def test_a_mistake_is_not_repeated(cluster, settings, tmp_path):
    job = Job(cluster, merge(settings, {"tokenizer": {"path": "absent"}}), tmp_path, 1)
    assert job.wait_for_end() == "2", job.logs()
    assert job.restarts() == 0
    assert f"error: tokenizer {ROOT}/absent does not exist" in job.logs()
