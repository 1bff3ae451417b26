"""The launcher's environment: this process's ranks, variables that libraries read, and the file for the exit status.

Ranks come from RANK, WORLD_SIZE and LOCAL_RANK (deepspeed, torchrun) or, if srun or mpirun itself started the process,
from their variables. Imports no torch, so that wrong numbers of processes are refused at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from data_utils.common.cores import usable_cores
from data_utils.common.errors import ConfigError

# Rank, number of ranks, rank within the node.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# Set in steps of srun only. Batch scripts have SLURM_NTASKS and SLURM_PROCID too, with a single process.
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
# mpirun of Open MPI, MVAPICH, Cray, and MPICH or Intel MPI; the fourth is the number of ranks on this node.
MPI_VARIABLES: tuple[tuple[str, str, str, str | None], ...] = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

# Below the ports that Linux hands out (32768 and up), above those that services use.
FIRST_PORT, NUMBER_OF_PORTS = 15000, 17000

STATUS_FILE_VARIABLE = "GLM_STATUS_FILE"


@dataclass(frozen=True)
class Launch:
    """This process's ranks and the rendezvous, from the launcher: deepspeed, torchrun, srun, mpirun or none."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str = "127.0.0.1"  # where rank 0 listens, unless MASTER_ADDR and MASTER_PORT say otherwise
    master_port: int | None = None  # None: the launcher must have set MASTER_PORT
    threads: int | None = None  # this rank's share of the cores, for training on CPU; None: torch's default

    @staticmethod
    def from_environment(local_rank: int | None = None) -> Launch:
        """Read the launcher's variables, else those of srun; a process started by hand is rank 0 of 1.

        Args:
            local_rank: the value of the launcher's --local_rank argument, used when the variable is absent.
        """
        names = _variables()
        # A launcher's variables win: torchrun may itself run under srun, whose ranks are then nodes.
        if names == LAUNCHER_VARIABLES:
            rank, world_size, local = map(_number, names, (0, 1, local_rank or 0))
            _check_ranks(rank, world_size, local)
            return Launch(rank, world_size, local, threads=_share_of_cores())
        if names != SLURM_VARIABLES:
            rank, world_size, local = map(_number, names)
            _require_rendezvous(names[1], world_size)
            return Launch(rank, world_size, local, threads=_share_of_cores())
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
        rank, world_size, local = map(_number, names)
        # All ranks compute the same port from the job, without a message.
        port = slurm_port(_number("SLURM_JOB_ID", 0), _number("SLURM_STEP_ID", 0))
        return Launch(rank, world_size, local, first_node(nodes), port)


def _check_ranks(rank: int, world_size: int, local_rank: int) -> None:
    """Raise ConfigError for ranks outside their sizes: the other ranks would wait forever."""
    here = _ranks_of_node(world_size)
    if rank < world_size and here <= world_size and (world_size == 1 or local_rank < here):
        return
    error = ConfigError(
        f"RANK is {rank} and LOCAL_RANK {local_rank}, but WORLD_SIZE is {world_size} with {here} ranks on this node; "
        "ranks must be in [0, size). Start with deepspeed, torchrun or srun, or unset the variables."
    )
    error.only_here = True
    raise error


def _require_rendezvous(name: str, world_size: int) -> None:
    """Raise ConfigError without a rendezvous address: mpirun sets none. Args: name: variable of the number of ranks."""
    missing = [variable for variable in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(variable)]
    if world_size > 1 and missing:
        raise ConfigError(
            f"mpirun started {world_size} ranks ({name}) without {' and '.join(missing)}; give all ranks "
            "MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there (mpirun -x NAME=VALUE or -genv NAME "
            "VALUE), or start with deepspeed, torchrun or srun."
        )


def _variables() -> tuple[str, str, str]:
    """The names of rank, number of ranks and rank within the node, of the launcher that started this process."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return LAUNCHER_VARIABLES
    of_srun = os.environ.get("SLURM_STEP_NUM_TASKS")
    # srun may set MPICH's as well; mpirun in an allocation starts its own daemons by srun, one a node.
    started = [names[:3] for names in MPI_VARIABLES if os.environ.get(names[1], of_srun) != of_srun]
    complete = [names for names in started if names[2] in os.environ]
    if started:
        return complete[0] if complete else started[-1]
    return SLURM_VARIABLES if of_srun is not None else LAUNCHER_VARIABLES


def _ranks_of_node(default: int) -> int:
    of_mpirun = {names[:3]: names[3] for names in MPI_VARIABLES}.get(_variables())
    if of_mpirun is not None:
        return _number(of_mpirun, default)
    return _number("LOCAL_WORLD_SIZE", _number("LOCAL_SIZE", default))  # torchrun's and deepspeed's name


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, str(default))
    if default is None and name not in os.environ:
        raise ConfigError(
            f"environment variable {name} is not set, although its launcher sets others; start with deepspeed, "
            "torchrun or srun, or set RANK, WORLD_SIZE and LOCAL_RANK."
        )
    if not text.isdigit():
        raise ConfigError(
            f"environment variable {name} is {text!r}; it must be a whole number; start with deepspeed, "
            "torchrun or srun, or unset it."
        )
    return int(text)


def rendezvous_address(launch: Launch) -> tuple[str, int, bool]:
    """Address and port of the rendezvous store, and whether this process hosts it.

    Raises: ConfigError if neither launcher nor user set them.
    """
    # torchrun's agent on the first node hosts one.
    hosts_it = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = os.environ.get("MASTER_ADDR", launch.master_addr)
    if "MASTER_PORT" in os.environ:
        return address, _number("MASTER_PORT"), hosts_it
    if launch.master_port is not None:
        return address, launch.master_port, hosts_it
    if launch.world_size > 1:
        raise ConfigError(
            f"{_variables()[1]} is {launch.world_size} but MASTER_PORT is not set; start with deepspeed or "
            "torchrun, or set MASTER_ADDR and MASTER_PORT, where rank 0 listens, for all ranks."
        )
    # A process alone needs no address that others know.
    return address, 0, hosts_it  # any free port, so that two runs started by hand do not collide


def attempt() -> str:
    """Number of restarts by torchrun, a prefix of keys: its store outlives the ranks."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _share_of_cores() -> int | None:
    """Cores per rank of this node: under deepspeed every rank would use all cores.

    None if OMP_NUM_THREADS is set, as by torchrun.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return None
    ranks = _ranks_of_node(1)
    return max(1, usable_cores() // ranks) if ranks > 1 else None


def prepare_environment(deterministic: bool) -> None:
    """Set variables that CUDA's libraries read when torch loads, unless the user did. Call before importing torch."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the next one
        # Batches differ in their number of tokens; blocks of fixed sizes would leave gaps between them.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one of two values that torch accepts


class LauncherMonitor:
    """Detects that the launcher of this process has exited; always False by hand or under srun.

    `deepspeed` is two processes. At SIGTERM or Ctrl-C the first exits without stopping the second.
    """

    def __init__(self) -> None:
        launched = "LOCAL_SIZE" in os.environ or "LOCAL_WORLD_SIZE" in os.environ  # deepspeed, torchrun
        # Remembered at the start: a changed parent later means that the launcher is gone.
        self._launchers = _launchers() if launched else None

    def has_ended(self) -> bool:
        if self._launchers is None:
            return False
        # Process 1 adopts orphans; the parent may have exited before this process first looked.
        orphaned = self._launchers[-1] == 1 and b"deepspeed" not in _proc(1, "cmdline")
        return orphaned or _launchers() != self._launchers


def _launchers() -> list[int]:
    """Process ids: this process's parent and, if that is deepspeed's second process, its parent."""
    parent = os.getppid()
    if b"deepspeed.launcher.launch" not in _proc(parent, "cmdline"):
        return [parent]
    after_name = _proc(parent, "stat").rpartition(b")")[2].split()  # state, parent, ...
    return [parent, int(after_name[1])] if len(after_name) > 1 else [parent]


def _proc(process: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes()
    except OSError:
        return b""


def is_first_of_node() -> bool:
    """True for one process of each node, which reports mistakes that all ranks find."""
    return os.environ.get(_variables()[2], "0") == "0"


def first_node(nodes: str) -> str:
    """The first node of a SLURM node list: rack[2-3]gpu[007-011,20],login1 -> rack2gpu007.

    `scontrol show hostnames` prints the same, but is often missing in containers.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else nodes


def slurm_port(job_id: int, step_id: int = 0) -> int:
    """A port for a job step's rendezvous; jobs and steps that run at once rarely share one."""
    return FIRST_PORT + (job_id * 7 + step_id) % NUMBER_OF_PORTS


def free_slurm_port(job_id: int) -> int:
    """The first port, from the job's own on, that is free on this machine."""
    candidates = range(slurm_port(job_id), FIRST_PORT + NUMBER_OF_PORTS + 100)
    return next(port for port in candidates if _port_error(port) is None)


def slurm_job() -> str:
    """The id of the SLURM job; "" outside of one."""
    return os.environ.get("SLURM_JOB_ID", "")


def check_port_is_free(port: int) -> None:
    """Raises ConfigError if `port` is in use on this machine."""
    error = _port_error(port)
    if error is not None:
        raise ConfigError(
            f"port {port}, chosen from the SLURM job id, cannot be opened on {socket.gethostname()} "
            f"({error.strerror}); set MASTER_PORT to a free one below 32768."
        )


def _port_error(port: int) -> OSError | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error
    return None


def report_status(status: int) -> None:
    """Write the exit status to the file named by GLM_STATUS_FILE, if set; the first process to write wins.

    Launchers lose exit statuses: torchrun always exits with 1, deepspeed with 0 when it was itself killed.
    """
    path = os.environ.get(STATUS_FILE_VARIABLE)
    if path:
        # "x": the first to fail has the cause; later statuses follow from it.
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(f"{int(status)}\n")
