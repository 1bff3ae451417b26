"""scripts/slurm_train.sh without a cluster: what it gives to srun, which a script of this test stands for."""

import os
import stat
import subprocess
import sys

import pytest
from support.project import ROOT

COMMANDS = {
    "srun": 'printf "%s\\n" "$@" >"$SEEN"; echo "$MASTER_PORT" >>"$SEEN"; echo 0 >"$GLM_STATUS_FILE"',
    "scontrol": "echo node1; echo node2",
    "squeue": "echo RUNNING",
    "container": 'echo container >>"$ENTERED"; exec "$@"',
}


@pytest.fixture
def start(tmp_path):
    """Run the script as sbatch does. Returns its result, and the words that srun was given."""
    for name, text in COMMANDS.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(**variables):
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER"))},
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SEEN": str(tmp_path / "seen"),
            "ENTERED": str(tmp_path / "entered"),
            "LOGS": str(tmp_path / "logs"),
            "PYTHON": sys.executable,
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            **variables,
        }
        command = ["bash", "scripts/slurm_train.sh", "--config", "configs/tiny.yaml"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        seen = tmp_path / "seen"
        return done, seen.read_text().splitlines() if seen.exists() else []

    return run


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_ranks_of_a_node_follow_from_the_tasks_however_they_were_asked_for(start, tmp_path, launcher):
    """sbatch --ntasks=16 sets no SLURM_NTASKS_PER_NODE."""
    done, words = start(
        LAUNCHER=launcher, SLURM_NTASKS="16", SLURM_TASKS_PER_NODE="8(x2)", SLURM_CPUS_PER_TASK="3"
    )
    assert done.returncode == 0, done.stderr
    assert "--ntasks=2" in words and "--ntasks-per-node=1" in words and "--cpus-per-task=24" in words
    assert (tmp_path / "logs/7/hostfile").read_text() == "node1 slots=8\nnode2 slots=8\n"
    assert 15000 <= int(words[-1]) < 32768


def test_nodes_with_several_numbers_of_ranks_are_refused(start):
    done, words = start(SLURM_NTASKS="15", SLURM_TASKS_PER_NODE="8,7")
    assert done.returncode == 2 and not words
    assert done.stderr == (
        "error: the nodes have 8,7 ranks; every node must have as many: give --ntasks-per-node instead of --ntasks.\n"
    )


def test_gpus_without_a_rank_are_reported(start):
    done, _ = start(LAUNCHER="torchrun", SLURM_TASKS_PER_NODE="1(x2)", SLURM_GPUS_ON_NODE="8")
    assert done.returncode == 0 and "a node has 8 GPUs and 1 rank(s)" in done.stderr


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"PYTHON": "/absent/python"}, "error: /absent/python does not run this program; set PYTHON"),
        ({"SETUP": "/absent/setup"}, "error: SETUP is /absent/setup, which is no file"),
        ({"LAUNCHER": "mpirun"}, "error: LAUNCHER is mpirun; it must be srun, deepspeed or torchrun."),
    ],
)
def test_what_cannot_start_is_refused_before_srun(start, variables, message):
    done, words = start(**variables)
    assert done.returncode == 2 and not words
    assert message in done.stderr


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_setup_file_gives_modules_a_container_and_options_of_srun(start, tmp_path, launcher):
    setup = tmp_path / "setup.sh"
    setup.write_text(
        "export FROM_MODULE=yes\nlaunch_prefix=(container 'with space')\nlaunch_prefix=(container)\n"
        "srun_options=(--mpi=none --comment='two words')\n"
    )
    done, words = start(LAUNCHER=launcher, SETUP=str(setup))
    assert done.returncode == 0, done.stderr
    assert "--mpi=none" in words and "--comment=two words" in words
    program = sys.executable if launcher == "srun" else "bash"
    assert words[words.index("container") + 1] == program
    assert (tmp_path / "entered").read_text() == "container\n"  # to find a free port
