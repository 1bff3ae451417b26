"""Where this process stands among the others: ranks, groups and device, built once and passed explicitly.

Nothing else in the project reads the launcher's environment variables or asks torch.distributed for a default group.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_lite.errors import ConfigError
from megatron_lite.launch import Launch


@dataclass(frozen=True)
class ParallelContext:
    """Ranks and groups of one process. Only data parallelism so far: every rank holds the whole model."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def dp_rank(self) -> int:
        return self.rank

    @property
    def dp_size(self) -> int:
        return self.world_size

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The group over which gradients are averaged; None = all processes."""
        return None

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes metrics."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` over the data-parallel ranks, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values, group=self.dp_group)
        return values

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def initialize(launch: Launch, timeout_seconds: int) -> ParallelContext:
    """Start DeepSpeed's process group (NCCL on GPUs, gloo on CPU) and return this process's context."""
    # A rank started by hand needs the rendezvous variables that a launcher would have set; localhost only.
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("RANK", str(launch.rank)),
        ("WORLD_SIZE", str(launch.world_size)),
        ("LOCAL_RANK", str(launch.local_rank)),
    ):
        os.environ.setdefault(name, value)
    if launch.world_size == 1:
        os.environ.setdefault(
            "MASTER_PORT", "0"
        )  # port 0: any free one, so that two runs by hand do not collide
    elif "MASTER_PORT" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE is {launch.world_size} but MASTER_PORT is not set; start through deepspeed or torchrun."
        )

    use_gpu = torch.cuda.is_available()
    if not use_gpu:
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # else DeepSpeed warns on every rank that it found no GPU

    import deepspeed
    from deepspeed.ops import __compatible_ops__

    # Its build takes minutes, needs ninja, and a killed build leaves a lock on which every later start hangs.
    __compatible_ops__["deepspeed_shm_comm"] = False
    if use_gpu:
        torch.cuda.set_device(launch.local_rank)
    device = torch.device("cuda", launch.local_rank) if use_gpu else torch.device("cpu")
    deepspeed.init_distributed(
        dist_backend="nccl" if use_gpu else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    return ParallelContext(launch.rank, launch.world_size, launch.local_rank, device)
