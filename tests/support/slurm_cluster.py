"""A real SLURM of two nodes on this machine, from the distribution's packages: munged, slurmctld and two slurmd.

Everything lives in one temporary directory, listens on 127.0.0.1 and is stopped at the end. Both nodes are this host
under another port, and their names are loopback addresses, so that what launchers derive from the list of nodes can be
connected to. Needs root: slurmd starts jobs as their users, and munge runs as its user.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from support.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
PACKAGES = ("slurm-wlm", "munge")
NODES = ("127.0.0.1", "127.0.0.2")
PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def reason_to_skip() -> str | None:
    """None if a cluster can be started here, after installing what is missing; else why not."""
    if os.geteuid() != 0:
        return "starting a SLURM needs root: slurmd starts jobs as their users"
    missing = missing_programs()
    if not missing:
        return None
    if shutil.which("apt-get") is None:
        return f"{', '.join(missing)} are not installed and there is no apt-get to install them"
    command = ["apt-get", "install", "--yes", "--no-install-recommends", "--no-upgrade", *PACKAGES]
    command += ["-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10"]  # without a network: skip soon
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"installing {' '.join(PACKAGES)} took more than 240 s"
    if done.returncode or missing_programs():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{', '.join(missing)} are not installed, and apt-get install failed: {last}"
    return None


def free_ports(count: int) -> list[int]:
    """Ports that are free now, below those that the system hands out to whoever connects in the next moment."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            break
    return found


class Cluster:
    """The commands of a running cluster. `directory` is shared by its nodes."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(directory / "slurm.conf")}

    def run(self, *command: str, **variables: str) -> str:
        """Output of a SLURM command. Raises AssertionError with its message if it fails."""
        done = subprocess.run(command, env={**self.environment, **variables}, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def send_usr1(self, job: str) -> None:
        """SIGUSR1 to the steps of a job. For a task of an array, scancel may fail without a word and yet signal it."""
        subprocess.run(["scancel", "--signal=USR1", job], env=self.environment)

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, for example JobState or Restarts."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(item.partition("=")[::2] for item in shown)[name]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, what=what, logs=self.logs)

    def logs(self) -> str:
        """The ends of the daemons' logs, for the message of a failure."""
        files = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files)


def _configuration(directory: Path) -> str:
    control, first, second = free_ports(3)
    host = socket.gethostname()
    return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmctldTimeout=30
SlurmdTimeout=60
NodeName={NODES[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 RealMemory=2000
NodeName={NODES[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 RealMemory=2000
PartitionName=all Nodes={",".join(NODES)} Default=YES MaxTime=60 State=UP
"""


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start the daemons, wait until both nodes are idle, stop everything at the end."""
    with ExitStack() as stack:
        # Not below pytest's directories: munge's user must be able to enter it.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")))
        directory.chmod(0o755)
        (directory / "state").mkdir()
        for node in NODES:
            (directory / f"spool-{node}").mkdir()
        (directory / "slurm.conf").write_text(_configuration(directory))
        cluster = Cluster(directory)
        _start_munge(directory, stack)
        _start(["slurmctld", "-D"], cluster, "slurmctld.out", stack)
        for node in NODES:
            _start(["slurmd", "-D", "-N", node], cluster, f"slurmd-{node}.out", stack)
        stack.callback(_cancel_everything, cluster)
        cluster.wait(lambda: _idle_nodes(cluster) == len(NODES), "the cluster's nodes are idle")
        yield cluster


def _start_munge(directory: Path, stack: ExitStack) -> None:
    home = directory / "munge"
    home.mkdir()
    key = home / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for path in (home, key):
        shutil.chown(path, "munge", "munge")
    options = ["--socket", home / "socket", "--key-file", key, "--log-file", home / "log"]
    options += ["--pid-file", home / "pid", "--seed-file", home / "seed"]
    with (directory / "munged.log").open("wb") as output:
        process = subprocess.Popen(
            [shutil.which("munged", path=PATH) or "munged", "--foreground", *map(str, options)],
            user="munge", group="munge", extra_groups=[], stdout=output, stderr=output, cwd="/",
        )  # fmt: skip
    stack.callback(_stop, process)
    wait_until(lambda: (home / "socket").exists(), what="munged listens")


def _start(command: list[str], cluster: Cluster, log: str, stack: ExitStack) -> None:
    with (cluster.directory / log).open("wb") as output:
        process = subprocess.Popen(
            command, env=cluster.environment, stdout=output, stderr=output, start_new_session=True
        )
    stack.callback(_stop, process)


def _stop(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _idle_nodes(cluster: Cluster) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env=cluster.environment, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.split().count("idle")


def _cancel_everything(cluster: Cluster) -> None:
    subprocess.run(["scancel", "--user=root", "--full"], env=cluster.environment)
    with suppress(AssertionError):  # the daemons are stopped next
        wait_until(lambda: not cluster.run("squeue", "--noheader"))
