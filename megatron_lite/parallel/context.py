"""ParallelContext: ranks, process groups and device of this process, made once and passed explicitly.

Only this file uses torch.distributed's default group, and sets the environment variables of its rendezvous. launch.py
reads what the launcher set.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from data_utils.common.imports import not_imported
from data_utils.common.private_names import lookup
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.parallel.collectives import SINGLE, Group
from megatron_lite.parallel.launch import Launch, rendezvous_address
from megatron_lite.parallel.rendezvous import Rendezvous

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelContext:
    """Ranks and process groups of one process (Megatron: parallel_state).

    Ranks are numbered pipeline x data x tensor: tensor-parallel ranks are neighbours, on the same node if possible,
    since they communicate most; pipeline stages are farthest apart.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    tp: Group  # tensor parallel: ranks that split every layer
    dp: Group  # data parallel: ranks that split the samples of a step
    pp: Group  # pipeline parallel: ranks that split the sequence of layers
    process_groups: ProcessGroups | None = None  # None: one process without a process group
    ep: Group = (
        SINGLE  # expert parallel: data-parallel ranks, neighbours, that split the experts of every layer
    )
    edp: Group = SINGLE  # data-parallel ranks that hold the same experts

    @staticmethod
    def alone(device: torch.device | None = None) -> ParallelContext:
        """One process without a process group."""
        return ParallelContext(0, 1, 0, device or torch.device("cpu"), SINGLE, SINGLE, SINGLE)

    def pipeline_ends(self) -> Group:
        """The group of the first and the last pipeline stage; this process must be one of them."""
        # Both ends are the whole axis, whose group exists.
        if self.pp.size <= 2:
            return self.pp
        assert self.process_groups is not None
        ends = (self.pp.ranks[0], self.pp.ranks[-1])
        return Group(self.process_groups.group(ends), ends.index(self.rank), 2, ends)

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes metrics."""
        return self.rank == 0

    @property
    def counts_samples(self) -> bool:
        """True on one rank of each group that works on the same samples."""
        return self.tp.rank == 0 and self.pp.rank == 0

    @property
    def counts_stages(self) -> bool:
        """True on one rank of each pipeline stage."""
        return self.tp.rank == 0 and self.dp.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def sum_losses(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum of losses over all samples, each counted once, on its last pipeline stage; stays on the device."""
        counts = self.tp.rank == 0 and self.pp.rank == self.pp.size - 1
        # Zeros from the other ranks, since a collective needs every rank: losses exist on the last stage only.
        return self.sum(sums if counts else torch.zeros_like(sums))

    def sum_on_hosts(self, values: Sequence[float]) -> list[float]:
        """Sum over all processes of numbers on the host. Does not wait for work that is queued on the device."""
        if self.world_size == 1:
            return list(values)
        assert self.process_groups is not None
        with self.process_groups.on_side_stream(self.device) as group:
            # fp64 is exact up to 2^53, where fp32 loses single tokens from 2^24 on.
            sums = torch.tensor(values, dtype=torch.float64, device=self.device)
            dist.all_reduce(sums, group=group)
            return sums.tolist()

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """`values` of every process, by rank; of one shape on all."""
        if self.world_size == 1:
            return [values]
        gathered = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(gathered, values)
        return gathered

    def barrier(self) -> None:
        if self.world_size > 1:
            # NCCL would otherwise guess the device from the rank.
            dist.barrier(device_ids=[self.local_rank] if self.device.type == "cuda" else None)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


class ProcessGroups:
    """Torch's process groups by their ranks: each is created once, and by its members only.

    `new_group` usually waits for all processes, so a job of 1,024 would wait for each of its thousands of groups.
    Created by members only, a process waits for the few groups it belongs to. All processes ask for groups along the
    same axes in the same order, so that no two wait for each other.
    """

    def __init__(self, rank: int, world_size: int, timeout: datetime.timedelta):
        self._rank = rank
        self._timeout = timeout
        self._all = tuple(range(world_size))
        assert dist.group.WORLD is not None
        # By members, so that two axes with the same ranks share a group: each group costs NCCL buffers on the GPU.
        self._groups = {self._all: dist.group.WORLD}
        self._side_stream: tuple[dist.ProcessGroup, torch.cuda.Stream] | None = None

    def group(self, ranks: Iterable[int]) -> dist.ProcessGroup | None:
        """The process group of these ranks; None if this process is no member."""
        members = tuple(ranks)
        if self._rank not in members:
            return None
        if members not in self._groups:
            self._groups[members] = self._new_group(members)
        return self._groups[members]

    def _new_group(self, members: tuple[int, ...]) -> dist.ProcessGroup:
        return dist.new_group(
            list(members),
            timeout=self._timeout,  # else torch takes its own default
            use_local_synchronization=True,
        )

    @contextlib.contextmanager
    def on_side_stream(self, device: torch.device) -> Iterator[dist.ProcessGroup]:
        """The group of all processes for sums that do not queue behind the device's work.

        On a GPU it needs another stream and other NCCL communicators: those of the default group execute gradient
        collectives in order.
        """
        if device.type != "cuda":
            yield self._groups[self._all]
            return
        if self._side_stream is None:
            self._side_stream = self._new_group(self._all), torch.cuda.Stream(device)
        group, stream = self._side_stream
        with torch.cuda.stream(stream):
            yield group

    def along_axes(self, tp_size: int, dp_size: int, pp_size: int, ep_size: int = 1) -> dict[str, Group]:
        """This rank's group along each axis of the grid. An axis of one rank needs no process group.

        Args: ep_size: ranks of the data-parallel axis that split the experts.
        """
        grid = np.arange(pp_size * dp_size * tp_size).reshape(pp_size, dp_size, tp_size)
        coordinate = dict(zip(("pp", "dp", "tp"), np.argwhere(grid == self._rank)[0], strict=True))
        lines = {
            "tp": grid[coordinate["pp"], coordinate["dp"], :],
            "dp": grid[coordinate["pp"], :, coordinate["tp"]],
            "pp": grid[:, coordinate["dp"], coordinate["tp"]],
        }
        first = coordinate["dp"] // ep_size * ep_size
        lines["ep"] = lines["dp"][first : first + ep_size]
        lines["edp"] = lines["dp"][coordinate["dp"] % ep_size :: ep_size]
        groups = {}
        for name, line in lines.items():
            members = tuple(line.tolist())
            # Every rank asks for its groups in this order, which rules out two ranks that wait for each
            # other.
            handle = self.group(members) if len(members) > 1 else None
            groups[name] = Group(handle, members.index(self._rank), len(members), members)
        return groups

    @contextlib.contextmanager
    def shared_with_deepspeed(self) -> Iterator[None]:
        """Let DeepSpeed's pipeline, which creates every group of its grid on every rank, get the existing ones."""
        import deepspeed.comm

        new_group = deepspeed.comm.new_group
        # Its PipelineParallelGrid would create all groups on all processes: 2,049 for 1,024 data-parallel ranks.
        deepspeed.comm.new_group = self.group
        try:
            yield
        finally:
            deepspeed.comm.new_group = new_group


class Mpu:
    """The `mpu` interface by which DeepSpeed reads tensor- and data-parallel ranks.

    DeepSpeed treats None as all processes, so an axis of one rank gets a group of this process alone.
    """

    def __init__(self, context: ParallelContext):
        assert context.process_groups is not None, "DeepSpeed needs a process group"
        self._tp, self._dp = context.tp, context.dp
        self._handles = {
            axis: group.handle or context.process_groups.group((context.rank,))
            for axis, group in (("tp", context.tp), ("dp", context.dp))
        }

    def get_model_parallel_rank(self) -> int:
        return self._tp.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tp.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._handles["tp"]

    def get_data_parallel_rank(self) -> int:
        return self._dp.rank

    def get_data_parallel_world_size(self) -> int:
        return self._dp.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._handles["dp"]

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect stderr, of child processes too, to the debug log.

    DeepSpeed's import tries to link against libaio, and the linker reports its absence.
    """
    sys.stderr.flush()
    # The linker is a child process that writes to descriptor 2: replacing sys.stderr would not catch it.
    stderr = os.dup(2)
    logging.disable(logging.INFO)
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            logging.disable(logging.NOTSET)
            output.seek(0)
            log.debug("%s", output.read().decode(errors="replace"))


def set_rendezvous_environment(launch: Launch, local_rank: int) -> None:
    """Set the variables that torch and DeepSpeed read. A rank started by hand or by srun lacks all of them.

    Raises: ConfigError without a rendezvous address.
    """
    address, port, _ = rendezvous_address(launch)
    for name, value in (
        ("MASTER_ADDR", address),
        ("MASTER_PORT", str(port)),
        ("RANK", str(launch.rank)),
        ("WORLD_SIZE", str(launch.world_size)),
    ):
        # A launcher's values stay: they name the rendezvous that the other ranks use.
        os.environ.setdefault(name, value)
    # Not the launcher's: DeepSpeed opens the device of this number, which may be the only one that is visible.
    os.environ["LOCAL_RANK"] = str(local_rank)


def device_number(launch: Launch) -> int:
    """Index of this process's GPU among the visible ones; srun may show each rank its own GPU only, as number 0."""
    return 0 if torch.cuda.is_available() and torch.cuda.device_count() == 1 else launch.local_rank


def _join(backend: str, launch: Launch, rendezvous: Rendezvous, timeout: datetime.timedelta) -> None:
    """Initialize the default process group.

    Torch's group is not bound to a device, as DeepSpeed would do: every new group would then be split off by all
    processes together. Unbound, NCCL connects the members of a group when they first use it.
    """
    import deepspeed

    if not dist.is_initialized():  # the fake-device trace has its own
        # One TCP server serves the rendezvous and torch; the prefix keeps their keys apart.
        store = dist.PrefixStore("group", rendezvous.open(launch, timeout.total_seconds()))
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
    rendezvous.over()
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


def initialize(
    launch: Launch, parallel: ParallelConfig, timeout_seconds: float, rendezvous: Rendezvous | None = None
) -> ParallelContext:
    """Start the process group (NCCL on GPUs, gloo on CPU), also for DeepSpeed, and return this process's context."""
    dp_size = parallel.data_parallel_size(launch.world_size)
    use_gpu = torch.cuda.is_available()
    local_rank = device_number(launch)
    set_rendezvous_environment(launch, local_rank)
    if not use_gpu:
        # Without it DeepSpeed warns on every rank that there is no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if launch.threads is not None:
            torch.set_num_threads(launch.threads)

    # DeepSpeed's import takes 2 CPU seconds with mlflow, which only its autotuner uses, and half a second without.
    with _quiet(), not_imported("mlflow"):
        compatible_ops = lookup("deepspeed.ops.__compatible_ops__")
    # Building it takes minutes and needs ninja, and a killed build leaves a lock on which every later start hangs.
    compatible_ops["deepspeed_shm_comm"] = False
    if use_gpu:
        # Before the process group: NCCL's communicators are made on the current device.
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    timeout = datetime.timedelta(seconds=timeout_seconds)
    _join("nccl" if use_gpu else "gloo", launch, rendezvous or Rendezvous(), timeout)
    groups = ProcessGroups(launch.rank, launch.world_size, timeout)
    axes = groups.along_axes(
        parallel.tensor_parallel_size,
        dp_size,
        parallel.pipeline_parallel_size,
        parallel.expert_parallel_size,
    )
    return ParallelContext(launch.rank, launch.world_size, local_rank, device, **axes, process_groups=groups)
