"""A process among those of a run: it meets the others, works, and leaves with them. One way for every entry point."""

from __future__ import annotations

from collections.abc import Callable

from data_utils.base.errors import ExitStatus
from data_utils.base.memory import keep_freed_memory
from megatron_lite.config.tree import Config
from megatron_lite.parallel.context import ParallelContext, initialize
from megatron_lite.parallel.launch import Launch, report_status
from megatron_lite.train.engine.numerics import set_numerics
from megatron_lite.train.guard.control import Phase, RunControl
from megatron_lite.train.guard.watchdog import Section, Watchdog


def together(
    launch: Launch,
    config: Config,
    control: RunControl,
    watchdog: Watchdog,
    work: Callable[[ParallelContext], ExitStatus],
) -> ExitStatus:
    """Call `work` with this process's context. Returns its status when all processes have theirs."""
    watchdog.at("joining the process group")
    context = initialize(launch, config.parallel, config.timeouts.collective_seconds)
    watchdog.joined()
    set_numerics(config.training, context.device)
    if context.device.type == "cpu":
        keep_freed_memory()
    try:
        with watchdog.name_dead_ranks():
            status = work(context)
    finally:
        control.enter(Phase.OVER)  # launchers repeat their signals while ranks leave one after the other
        watchdog.enter(Section.EXIT)  # leaving may hang too, above all after an error
    report_status(status)
    context.barrier()  # launchers kill all processes as soon as one ends with another status than 0
    context.close()
    return status
