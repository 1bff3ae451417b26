"""One rank of a layout of any size: collectives of torch's `fake` process group leave their tensors as they are."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_lite.config.sections import ParallelConfig
from megatron_lite.parallel.context import ParallelContext, ProcessGroups


def fake_context(
    context: ParallelContext, rank: int, world_size: int, parallel: ParallelConfig
) -> ParallelContext:
    """This process as `rank` of many that do not exist, instead of what it is in `context`."""
    context.close()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    groups = ProcessGroups(rank, world_size, datetime.timedelta(seconds=60))
    sizes = (
        parallel.tensor_parallel_size,
        parallel.data_parallel_size(world_size),
        parallel.pipeline_parallel_size,
    )
    axes = groups.along_axes(*sizes)
    return ParallelContext(rank, world_size, 0, torch.device("cpu"), **axes, process_groups=groups)
