"""Process groups: as few as the layout needs, for any number of processes; and the device that DeepSpeed opens."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from support.distributed import run_ranks
from support.training.engines import tree
from support.training.fake_ranks import fake_context

from data_utils.common.settings import build
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.parallel import context as contexts
from megatron_lite.parallel.context import device_number, set_rendezvous_environment
from megatron_lite.parallel.launch import Launch


def groups_of_a_run(context, rank, world_size, parallel):
    """All that the start of a run makes, DeepSpeed's included: the ranks of each group."""
    made = []
    new_group = dist.new_group

    def counted(ranks=None, **options):
        made.append(tuple(ranks))
        return new_group(ranks, **options)

    dist.new_group = torch.distributed.distributed_c10d.new_group = counted
    fake = fake_context(context, rank, world_size, ParallelConfig(**parallel))
    settings = tree(
        model={"num_layers": 8, "num_attention_heads": 8},
        parallel=parallel,
        batch={"micro_batch_size": 1, "global_batch_size": fake.dp.size * 8},
    )
    make_engine(build(Config, settings), fake, num_losses=3)
    return made


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_pure_data_parallelism_makes_at_most_two_groups(zero_stage):
    """2,049 calls of `new_group` before, minutes of every start with NCCL."""
    (made,) = run_ranks(groups_of_a_run, 1, 777, 1024, {"zero_stage": zero_stage})
    assert made == [(777,)]


@pytest.mark.parametrize(
    "tp, pp, zero_stage, most", [(8, 1, 1, 2), (8, 1, 3, 2), (1, 8, 1, 5), (4, 8, 1, 5), (2, 2, 1, 4)]
)
def test_other_layouts_make_the_groups_that_a_process_is_in(tp, pp, zero_stage, most):
    parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "zero_stage": zero_stage}
    (made,) = run_ranks(groups_of_a_run, 1, 5, 1024, parallel)
    assert len(made) == len(set(made)) <= most
    assert all(5 in ranks and len(ranks) < 1024 for ranks in made)


def sums_along_axes(context):
    sums = {}
    for axis in ("tp", "dp", "pp"):
        group, value = getattr(context, axis), torch.tensor([float(1 << context.rank)])
        if group.size > 1:
            dist.all_reduce(value, group=group.handle)
        expected = sum(1 << rank for rank in group.ranks)
        sums[axis] = group.size, value.item() == expected, group.ranks[group.rank] == context.rank
    return sums


@pytest.mark.parametrize(
    "tp, pp",
    [
        (4, 1),
        (2, 2),
        (1, 2),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 1), (2, 1), (1, 4))),
    ],
)
def test_groups_reach_their_members(tp, pp):
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    for sums in run_ranks(sums_along_axes, 4, parallel=parallel):
        assert sums == {"tp": (tp, True, True), "dp": (4 // tp // pp, True, True), "pp": (pp, True, True)}


def sums_beside_the_device(context):
    """On a device that is said to be a GPU: sums in a group and a stream of their own, made once."""
    entered, made, new_group = [], [], dist.new_group

    def counted(*args, **options):
        made.append(args)
        return new_group(*args, **options)

    dist.new_group = counted
    torch.cuda.Stream = lambda device: f"stream of {device}"

    @contextlib.contextmanager
    def stream(name):
        entered.append(name)
        yield

    torch.cuda.stream = stream
    sums = []
    for value in (1.0, 10.0):
        with context.process_groups.on_side_stream(torch.device("cuda:1")) as group:
            values = torch.tensor([value + context.rank])
            dist.all_reduce(values, group=group)
            sums.append((values.item(), group is not dist.group.WORLD))
    return sums, entered, len(made), context.sum_on_hosts([1.0, context.rank]), len(made)


def test_sums_of_hosts_do_not_queue_behind_the_device():
    """So pure data parallelism makes two groups in all."""
    for sums, entered, made, on_cpu, made_after in run_ranks(sums_beside_the_device, 2):
        assert sums == [(3.0, True), (21.0, True)]
        assert entered == ["stream of cuda:1"] * 2 and made == 1
        assert on_cpu == [2.0, 1.0] and made_after == 1  # on CPU the group of all processes serves


@pytest.mark.parametrize("visible, number", [(1, 0), (8, 3), (0, 3)])
def test_deepspeed_opens_the_device_of_this_process(monkeypatch, visible, number):
    """With one visible GPU per process it opened cuda:3, because the launcher's LOCAL_RANK stayed."""
    monkeypatch.setattr(contexts.torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(contexts.torch.cuda, "device_count", lambda: visible)
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    launch = Launch.from_environment()
    set_rendezvous_environment(launch, device_number(launch))
    assert device_number(launch) == int(os.environ["LOCAL_RANK"]) == number
