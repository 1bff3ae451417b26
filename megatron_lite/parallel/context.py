"""This process among the others: ranks, groups and device, made once and passed explicitly.

Only this file uses torch.distributed's group of all processes, and sets the environment variables of its rendezvous.
launch.py reads what the launcher set; MASTER_PORT, which a launcher may leave open, is read here too.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from data_utils.base.errors import ConfigError
from megatron_lite.config.tree import ParallelConfig
from megatron_lite.parallel.collectives import SINGLE, Group
from megatron_lite.parallel.launch import Launch, check_port_is_free

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelContext:
    """Ranks and groups of one process.

    Ranks are numbered pipeline x data x tensor: tensor-parallel ranks are neighbours, on the same node if possible,
    since they communicate most; pipeline stages are farthest apart.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    tp: Group  # ranks that share every layer
    dp: Group  # ranks that share the samples of a step
    pp: Group  # ranks that share the sequence of layers

    @staticmethod
    def alone(device: torch.device | None = None) -> ParallelContext:
        """One process without a process group."""
        return ParallelContext(0, 1, 0, device or torch.device("cpu"), SINGLE, SINGLE, SINGLE)

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes metrics."""
        return self.rank == 0

    @property
    def counts_samples(self) -> bool:
        """True on one rank per group of ranks that work on the same samples."""
        return self.tp.rank == 0 and self.pp.rank == 0

    @property
    def counts_losses(self) -> bool:
        """True on one rank per group that computes the same losses: in the last stage."""
        return self.tp.rank == 0 and self.pp.rank == self.pp.size - 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """`values` of every process, by rank; of one shape on all."""
        if self.world_size == 1:
            return [values]
        gathered = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(gathered, values)
        return gathered

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


class Mpu:
    """The names under which DeepSpeed asks for tensor- and data-parallel ranks."""

    def __init__(self, context: ParallelContext):
        self._tp, self._dp = context.tp, context.dp

    def get_model_parallel_rank(self) -> int:
        return self._tp.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tp.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._tp.handle

    def get_data_parallel_rank(self) -> int:
        return self._dp.rank

    def get_data_parallel_world_size(self) -> int:
        return self._dp.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._dp.handle

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


def _groups(
    rank: int, tp_size: int, dp_size: int, pp_size: int, timeout: datetime.timedelta
) -> dict[str, Group]:
    """This rank's group along each axis. Every process creates every group, in the same order, as torch requires."""
    grid = np.arange(pp_size * dp_size * tp_size).reshape(pp_size, dp_size, tp_size)
    mine = {}
    for name, axis in (("tp", 2), ("dp", 1), ("pp", 0)):
        for members in np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist():
            handle = dist.new_group(members, timeout=timeout)  # else torch takes its own default
            if rank in members:
                mine[name] = Group(handle, members.index(rank), len(members), tuple(members))
    return mine


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log what is written to stderr meanwhile, by child processes too, at level debug only.

    DeepSpeed's import tries to link against libaio, and the linker reports its absence.
    """
    sys.stderr.flush()
    shown = os.dup(2)
    logging.disable(logging.INFO)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(shown, 2)
            os.close(shown)
            logging.disable(logging.NOTSET)
            kept.seek(0)
            log.debug("%s", kept.read().decode(errors="replace"))


def initialize(launch: Launch, parallel: ParallelConfig, timeout_seconds: float) -> ParallelContext:
    """Start DeepSpeed's process group (NCCL on GPUs, gloo on CPU) and return this process's context."""
    dp_size = parallel.data_parallel_size(launch.world_size)
    use_gpu = torch.cuda.is_available()
    # srun may show each rank only its own GPU, as number 0.
    local_rank = 0 if use_gpu and torch.cuda.device_count() == 1 else launch.local_rank
    # A launcher sets these; a rank started by hand or by srun lacks them.
    for name, value in (
        ("MASTER_ADDR", launch.master_addr),
        ("RANK", str(launch.rank)),
        ("WORLD_SIZE", str(launch.world_size)),
        ("LOCAL_RANK", str(local_rank)),
    ):
        os.environ.setdefault(name, value)
    if launch.master_port is not None and "MASTER_PORT" not in os.environ:
        if launch.rank == 0:
            check_port_is_free(launch.master_port)
        os.environ["MASTER_PORT"] = str(launch.master_port)
    if launch.world_size == 1:
        os.environ.setdefault("MASTER_PORT", "0")  # any free one, so that two runs by hand do not collide
    elif "MASTER_PORT" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE is {launch.world_size} but MASTER_PORT is not set; start through deepspeed or torchrun."
        )

    if not use_gpu:
        # Without it DeepSpeed warns on every rank that there is no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if launch.threads is not None:
            torch.set_num_threads(launch.threads)

    with _quiet():
        import deepspeed
        from deepspeed.ops import __compatible_ops__

    # Building it takes minutes and needs ninja, and a killed build leaves a lock on which every later start hangs.
    __compatible_ops__["deepspeed_shm_comm"] = False
    if use_gpu:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        deepspeed.init_distributed(
            dist_backend="nccl" if use_gpu else "gloo",
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timeout,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"port {os.environ['MASTER_PORT']} is in use on {socket.gethostname()}, perhaps by another run; choose one "
            "with --master_port of the launcher, or MASTER_PORT."
        ) from None
    sizes = (parallel.tensor_parallel_size, dp_size, parallel.pipeline_parallel_size)
    groups = _groups(launch.rank, *sizes, timeout)
    return ParallelContext(launch.rank, launch.world_size, local_rank, device, **groups)
