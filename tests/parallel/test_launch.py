"""Ranks and rendezvous from what launchers and SLURM set, and how a run's end is reported."""

import socket

import pytest

from data_utils.common.errors import ConfigError
from megatron_lite.parallel.launch import (
    MPI_VARIABLES,
    Launch,
    check_port_is_free,
    first_node,
    is_first_of_node,
    rendezvous_address,
    report_status,
    slurm_port,
)

STEP = {  # what srun sets for one of four processes on two nodes
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.fixture
def environment(monkeypatch):
    """A function that replaces all that launchers and SLURM say by the given variables."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_SIZE",
        "LOCAL_WORLD_SIZE",
        "OMP_NUM_THREADS",
        *STEP,
        "SLURM_JOB_NODELIST",
        *(name for names in MPI_VARIABLES for name in names),
    ):
        monkeypatch.delenv(name, raising=False)

    def replace(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return replace


def test_ranks_started_by_srun_need_nothing_else(environment):
    environment(STEP)
    assert Launch.from_environment() == Launch(3, 4, 1, "gpu07", slurm_port(1234, 0))
    assert not is_first_of_node()


def test_a_launcher_inside_an_allocation_knows_better_than_slurm(environment):
    environment({**STEP, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "0"})
    assert Launch.from_environment() == Launch(5, 8, 0)
    assert is_first_of_node()


@pytest.mark.parametrize("names", MPI_VARIABLES, ids=lambda names: names[0])
def test_ranks_started_by_mpirun_need_a_place_to_meet(environment, names):
    environment(dict(zip(names, ("3", "4", "1", "2"), strict=True)))
    with pytest.raises(ConfigError, match=rf"4 ranks \({names[1]}\) without MASTER_ADDR and MASTER_PORT;"):
        Launch.from_environment()
    environment({"MASTER_ADDR": "node1", "MASTER_PORT": "15000"})
    launch = Launch.from_environment()
    assert (launch.rank, launch.world_size, launch.local_rank) == (3, 4, 1)
    assert not is_first_of_node() and rendezvous_address(launch) == ("node1", 15000, False)
    environment({"RANK": "0", "WORLD_SIZE": "1"})  # torchrun, started by mpirun
    assert Launch.from_environment().world_size == 1


def test_an_mpirun_that_does_not_say_the_rank_within_the_node_is_refused(environment):
    environment({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "15000"})
    with pytest.raises(ConfigError, match="MPI_LOCALRANKID is not set"):
        Launch.from_environment()


def test_one_rank_of_mpirun_is_alone_and_srun_with_pmi_is_srun(environment):
    environment({"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"})
    assert Launch.from_environment() == Launch(0, 1, 0, threads=None)
    environment({**STEP, "PMI_RANK": "3", "PMI_SIZE": "4"})  # srun --mpi=pmi2
    assert Launch.from_environment().master_addr == "gpu07"


def test_a_daemon_of_mpirun_is_a_task_of_srun_and_its_ranks_are_not(environment):
    environment({**STEP, "SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "4"})
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_RANK is not set"):
        Launch.from_environment()


def test_a_process_of_a_batch_script_is_alone(environment):
    """A batch script has SLURM_PROCID and SLURM_NTASKS of the whole job, but nobody started the other processes."""
    environment(
        {name: STEP[name] for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID")}
    )
    assert Launch.from_environment() == Launch(0, 1, 0)


@pytest.mark.parametrize(
    "variables, threads",
    [
        ({"LOCAL_SIZE": "2"}, 3),  # deepspeed
        ({"LOCAL_WORLD_SIZE": "2"}, 3),  # torchrun
        ({"LOCAL_SIZE": "16"}, 1),
        ({"LOCAL_SIZE": "1"}, None),
        ({"LOCAL_SIZE": "2", "OMP_NUM_THREADS": "5"}, None),
    ],
)
def test_ranks_of_a_node_share_its_cores(environment, monkeypatch, variables, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(7)))
    environment({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", **variables})
    assert Launch.from_environment().threads == threads


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "3", "WORLD_SIZE": "2"},
        {"RANK": "3"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"},
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"},
    ],
)
def test_ranks_that_do_not_fit_are_refused(environment, variables):
    environment(variables)
    with pytest.raises(ConfigError, match=rf"RANK is {variables['RANK']} and .* ranks must be") as caught:
        Launch.from_environment()
    assert caught.value.only_here


def test_a_number_that_is_none_is_named(environment):
    environment({**STEP, "SLURM_LOCALID": "two"})
    with pytest.raises(ConfigError, match="SLURM_LOCALID is 'two'; it must be a whole number"):
        Launch.from_environment()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login1", "login1"),
        ("a1,b2", "a1"),
        ("gpu[007-011,20],login1", "gpu007"),
        ("gpu[3,5-7]", "gpu3"),
        ("rack[2-3]gpu[10-11]", "rack2gpu10"),
        ("n[01-02].example.org", "n01.example.org"),
        ("127.0.0.[1-2]", "127.0.0.1"),
    ],
)
def test_the_first_node_of_slurms_list(nodes, first):
    assert first_node(nodes) == first


def test_ports_are_below_those_that_the_system_hands_out():
    ports = {slurm_port(job, step) for job in range(20_000) for step in range(3)}
    assert min(ports) >= 15000 and max(ports) < 32000
    assert len({slurm_port(job) for job in range(5000, 7000)}) == 2000  # jobs that run at once


def test_a_port_in_use_is_refused_by_name():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}, .*set MASTER_PORT to a free one"):
            check_port_is_free(port)
    check_port_is_free(port)


def test_the_first_status_reported_stands(monkeypatch, tmp_path):
    monkeypatch.delenv("GLM_STATUS_FILE", raising=False)
    report_status(0)  # nobody asked
    monkeypatch.setenv("GLM_STATUS_FILE", str(tmp_path / "status"))
    report_status(75)
    report_status(2)
    assert (tmp_path / "status").read_text() == "75\n"
    monkeypatch.setenv("GLM_STATUS_FILE", str(tmp_path / "absent" / "status"))
    report_status(0)  # where nothing can be written, the run ends all the same
