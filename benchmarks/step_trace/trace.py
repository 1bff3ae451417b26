"""One rank's training step on fake devices: the product's own engine, on batches of the configuration's objectives.

`run_case` changes its process for good; worker.py gives every case a process of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.step_trace import guards
from benchmarks.step_trace.fake_cuda import patch
from benchmarks.step_trace.pipes import Sent, connect_stages
from benchmarks.step_trace.record import Recorder
from data_utils.common.settings import build
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.attention import choose
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine import plain
from megatron_lite.engine.engine import Engine
from megatron_lite.estimate.batches import random_batches
from megatron_lite.estimate.block_costs import equal_shares
from megatron_lite.estimate.gpus import gpu_named
from megatron_lite.estimate.sizes import RankGroup
from megatron_lite.parallel.context import ParallelContext, initialize
from megatron_lite.parallel.launch import Launch
from megatron_lite.transformer import build as models
from megatron_lite.transformer.experts import Experts
from megatron_lite.transformer.kernels.fused import choose_kernels
from megatron_lite.transformer.kernels.varlen_kernels import use_attention
from megatron_lite.transformer.micro_batch import MicroBatch

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def layer_units(model: ModelConfig) -> int:
    """Number of equal groups of blocks in a model; without a decoder each group is one block."""
    return math.gcd(model.num_layers, model.decoder_layers)


@dataclass(frozen=True)
class Case:
    """A rank of a layout, to be traced."""

    tree: dict[str, Any]  # of the configuration, see `to_tree`
    processes: int
    rank: int
    layers: int  # units of the traced model (`layer_units`), or blocks of the rank's pipeline stage
    micro_batches: int  # of the traced step
    gpu: str
    received: Sent | None = None  # by a later stage of a pipeline: what the first stage sends


class Rank(NamedTuple):
    """A rank on fake devices, and what the first stage of a pipeline sends."""

    config: Config
    engine: Engine
    recorder: Recorder
    sent: Sent


@contextlib.contextmanager
def fake_rank(case: Case) -> Iterator[Rank]:
    """A rank on fake devices. It changes its process for good."""
    guards.install()
    warnings.filterwarnings("ignore")
    config = _reduced(build(Config, case.tree), case)
    choose_kernels(config.training.kernels)
    gpu = gpu_named(case.gpu)
    use_attention(choose(config, gpu.capability).name, activate=False)  # nothing runs: no package is needed
    groups = _Groups()
    recorder = Recorder(groups.of)
    patch(recorder, gpu)
    _balance_experts()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        context = _context(config, case)
        groups.context = context
        sent = connect_stages(context, case.layers, case.received) if context.pp.size > 1 else []
        yield Rank(config, _engine(config, context, recorder), recorder, sent)


def _balance_experts() -> None:
    """Let each expert have as many tokens, since only a device knows how many; reading that stays a wait."""
    read = Experts._table

    def table(self: Experts, rows: torch.Tensor, counts: torch.Tensor) -> list[list[list[int]]]:
        read(self, rows, counts)
        return equal_shares(self, rows, counts)

    Experts._table = table  # type: ignore[method-assign]


def run_case(case: Case) -> dict[str, Any]:
    """Trace one step in this process: numbers by phase (counts.py), and what describes the rank and its work."""
    with fake_rank(case) as rank:
        config, engine, recorder, sent = rank
        batches = random_batches(config, case.micro_batches)
        static = recorder.memory.now
        micro_batches = [engine.prepared(batch, 1 + i, 1e-3) for i, batch in enumerate(batches)]
        steps = Steps(engine, recorder, micro_batches)
        _warm_up(engine, steps)
        _begin_timers(engine)
        steps.run()
    return {
        "phases": {phase: counts.tree() for phase, counts in recorder.counts.items()},
        "static_bytes": static,
        "sent": sent,
        "rank_parameters": sum(p.numel() for p in engine.named_parameters.values()),
    }


def _reduced(config: Config, case: Case) -> Config:
    """The configuration with the traced number of layers and micro-batches."""
    dp = config.parallel.data_parallel_size(case.processes)
    batch = replace(config.batch, global_batch_size=config.batch.micro_batch_size * dp * case.micro_batches)
    config = replace(config, batch=batch)
    return with_layers(config, case.layers) if config.parallel.pipeline_parallel_size == 1 else config


def with_layers(config: Config, units: int) -> Config:
    """The configuration with so many layers, or units of encoder and decoder."""
    model = config.model
    encoder, decoder = (
        count // layer_units(model) * units for count in (model.num_layers, model.decoder_layers)
    )
    return replace(config, model=replace(model, num_layers=encoder, decoder_layers=decoder))


def _context(config: Config, case: Case) -> ParallelContext:
    """This rank among the others, which exist only as numbers."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", RANK=str(case.rank), LOCAL_RANK="0")
    os.environ.update(WORLD_SIZE=str(case.processes))
    dist.init_process_group("fake", rank=case.rank, world_size=case.processes, store=FakeStore())
    return initialize(Launch(case.rank, case.processes, 0), config.parallel, 600.0)


class _Groups:
    """Names the group of a collective by its members."""

    context: ParallelContext | None = None

    def of(self, func: Any, args: Any) -> RankGroup | None:
        context = self.context
        if context is None:
            return None
        ranks = tuple(dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args)))
        if func in (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default):
            return RankGroup("pp", context.pp.ranks[:2])
        if len(ranks) == 1:
            return None
        names = [name for name in ("tp", "dp", "pp") if ranks == getattr(context, name).ranks]
        whole = "world" if len(ranks) == context.world_size else "other"
        return RankGroup(names[0] if names else whole, ranks)


def _engine(config: Config, context: ParallelContext, recorder: Recorder) -> Engine:
    """The engine, with parameters that begin on the device in the training precision.

    The product makes them on the host and moves them, which neither fake tensors nor the host's memory allow.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    # Compares what ranks have seen; the fake group brings no values.
    coordinator.assert_ints_same_as_other_ranks = lambda *_, **__: None
    torch.nn.Module.to = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    torch.nn.Module.bfloat16 = torch.nn.Module.half = lambda self: self  # type: ignore[method-assign]
    models.initialize_parameters = lambda *_, **__: None  # type: ignore[assignment]
    plain.build_model = _on_device(plain.build_model, config)
    if context.pp.size > 1:
        from megatron_lite.engine import pipeline

        pipeline.initialize_parameters = models.initialize_parameters
        pipeline._Stages.__init__ = _on_device(pipeline._Stages.__init__, config)  # type: ignore[method-assign]
    return plain.make_engine(config, context, len(LOSS_NAMES))


def _on_device(build: Callable[..., Any], config: Config) -> Callable[..., Any]:
    """A function whose parameters are made on the device, in the training precision."""

    def built(*args: Any, **kwargs: Any) -> Any:
        torch.set_default_dtype(PRECISIONS[config.training.precision])
        try:
            with torch.device("cuda:0"):
                return build(*args, **kwargs)
        finally:
            torch.set_default_dtype(torch.float32)

    return built


def _warm_up(engine: Engine, steps: Steps) -> None:
    """Run a first step, which alone allocates gradient sums, exchanges shapes of stages and records ZeRO 3's order."""
    deepspeed = engine._engine
    if engine.context.pp.size > 1:  # one micro-batch says it all
        count, deepspeed.micro_batches = deepspeed.micro_batches, 1
        steps.run(1)
        deepspeed.micro_batches = count
    else:
        steps.run()


def _begin_timers(engine: Engine) -> None:
    """DeepSpeed's timer of throughput begins after some steps, as if they had been."""
    timer = getattr(engine._engine, "tput_timer", None)
    if timer is not None:
        timer.global_step_count = max(timer.global_step_count, timer.start_step)


class Steps:
    """Training steps that tell the recorder where they are."""

    def __init__(self, engine: Engine, recorder: Recorder, micro_batches: list[MicroBatch]):
        self.engine, self.recorder, self.micro_batches = engine, recorder, micro_batches
        self.backwards = 0
        engine._engine.module.register_forward_pre_hook(lambda *_: self._enter("forward"))
        engine.before_update = lambda: self._enter("step")
        torch.autograd.backward = self._backward(torch.autograd.backward)
        backward = engine._engine.backward

        def passed(*args: Any, **kwargs: Any) -> Any:
            result = backward(*args, **kwargs)
            if self.backwards < len(self.micro_batches):
                self._enter("input")
            return result

        engine._engine.backward = passed

    def run(self, count: int | None = None) -> None:
        """One step, of the first `count` micro-batches."""
        self.recorder.reset()
        self.backwards = 0
        self._enter("input")
        self.engine.train_step(self.micro_batches[:count], 1e-4).outcome()

    def _enter(self, phase: str) -> None:
        self.recorder.phase = phase

    def _backward(self, backward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            self.backwards += 1
            last = "last_" if self.backwards == len(self.micro_batches) else ""
            self._enter(f"{last}backward")
            backward(*args, **kwargs)
            self._enter(f"{last}sums")

        return run
