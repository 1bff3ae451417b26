"""How a process of a run starts, works and ends together with the other ranks; for every entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from data_utils.common.errors import ExitStatus
from data_utils.common.memory import keep_freed_memory
from data_utils.common.private_names import groups_of, require_names
from megatron_lite.config.sections import TrainingConfig
from megatron_lite.config.tree import Config
from megatron_lite.parallel.context import ParallelContext, initialize
from megatron_lite.parallel.launch import Launch, report_status
from megatron_lite.parallel.rendezvous import Rendezvous
from megatron_lite.runtime.control import Phase, RunControl
from megatron_lite.runtime.rank_agreement import facts
from megatron_lite.runtime.watchdog import Section, Watchdog
from megatron_lite.transformer.attention_choice import set_attention
from megatron_lite.transformer.kernels.fused import choose_kernels


def agree_with_ranks(
    launch: Launch,
    config: Config,
    watchdog: Watchdog,
    rendezvous: Rendezvous,
    extra_facts: Mapping[str, str] | None = None,
) -> None:
    """Return when all ranks have the same facts. Called before data are copied and the model is built.

    Args: extra_facts: name -> value in words, in addition to the facts of the configuration.
    Raises: ConfigError where this rank differs from rank 0; RankLeftError where another rank has refused the start.
    """
    watchdog.at("comparing with the other ranks")
    rendezvous.open(launch, config.timeouts.collective_seconds)
    device = "a GPU" if torch.cuda.is_available() else "a CPU"
    rendezvous.compare({**facts(config, device), **(extra_facts or {})})


def run_with_ranks(
    launch: Launch,
    config: Config,
    control: RunControl,
    watchdog: Watchdog,
    rendezvous: Rendezvous,
    work: Callable[[ParallelContext], ExitStatus],
) -> ExitStatus:
    """Call `work` with this process's context. Returns its status when `work` has returned on all ranks."""
    watchdog.at("waiting for the other ranks")
    rendezvous.gather("ready")
    watchdog.at("joining the process group")
    context = initialize(launch, config.parallel, config.timeouts.collective_seconds, rendezvous)
    watchdog.joined()
    require_names(*groups_of(config.parallel.pipeline_parallel_size, config.parallel.zero_stage))
    set_numerics(config.training, context.device)
    set_attention(config, context.device)
    if context.device.type == "cpu":
        keep_freed_memory()
    try:
        with watchdog.name_dead_ranks():
            status = work(context)
        watchdog.done(status)
    finally:
        control.enter(Phase.OVER)  # launchers repeat their signals while ranks exit one after another
        watchdog.enter(Section.EXIT)  # leaving may hang too, above all after an error
    report_status(status)
    context.barrier()  # launchers kill all processes as soon as one ends with another status than 0
    context.close()
    return status


def set_numerics(training: TrainingConfig, device: torch.device) -> None:
    """Apply `training.tf32`, `deterministic` and `kernels`. `launch.prepare_environment` has prepared cuBLAS."""
    choose_kernels(training.kernels)
    if device.type == "cuda":
        # Set in both cases: NVIDIA's containers switch TF32 on by an environment variable.
        torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
    if training.deterministic:
        # Without warn_only: the attention kernels then keep their changing order, and only warn.
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory before it is written, and filling it costs a pass over every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
