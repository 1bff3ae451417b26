#!/usr/bin/env python3
"""Train a checkpoint on a task, and measure it: OUTPUT/results.json.

    python scripts/finetune.py --checkpoint RUN --task configs/tasks/rte.yaml --output DIR [section.key=value]
    python scripts/finetune.py --checkpoint RUN --tasks configs/tasks/mnli.yaml configs/tasks/qnli.yaml --output DIR

The configuration is that of the run, then the files of --config, the task's file, and the settings of the command line.
Without a checkpoint training begins with initial weights. An exported directory is imported first. `deepspeed`, `srun`
and `torchrun` start it on several GPUs, as pretrain_glm.py. A call that was interrupted goes on when it is repeated.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import logging
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

# isort: split
from data_utils.common.errors import (
    ArgumentParser,
    ConfigError,
    DataError,
    ExitStatus,
    expanded_path,
    run_command,
)
from data_utils.common.files import require_writable
from data_utils.common.settings import merge, to_tree
from megatron_lite.checkpoint.resolve_path import MODEL_OR_EXPORT_PATH, check_output_directory, resolve_model
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.config.attention import require_package
from megatron_lite.config.foreign_options import explain_options, with_deepspeed_file
from megatron_lite.engine.nvidia_apex import require_apex
from megatron_lite.finetune.initial_weights import (
    IMPORTED,
    InitialWeights,
    check_initial_weights,
    initial_weights_of,
    note_initial_weights,
)
from megatron_lite.finetune.setup import (
    Task,
    check_output,
    for_import,
    is_export,
    load_tree,
    located_settings,
    prepare,
)
from megatron_lite.parallel.launch import Launch, is_first_of_node, prepare_environment
from megatron_lite.parallel.rendezvous import Rendezvous
from megatron_lite.runtime.changes import recorded_config
from megatron_lite.runtime.control import RunControl
from megatron_lite.runtime.lease import held
from megatron_lite.runtime.watchdog import Section, Watchdog

log = logging.getLogger(__name__)


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "model YAML, or a name in configs/; repeatable, later files override earlier ones"
    add("--config", type=expanded_path, action="append", default=[], metavar="FILE", help=text)
    text = "task YAML with a section task, or a name in configs/tasks/"
    add("--task", type=expanded_path, metavar="FILE", help=text)
    text = (
        "files of several tasks to train together; settings of the first file apply, task.key=value "
        "applies to all"
    )
    add("--tasks", type=expanded_path, nargs="+", default=[], metavar="FILE", help=text)
    text = "run or checkpoint to start from; default: random initialization"
    add("--checkpoint", type=Path, metavar="RUN", help=text)
    text = "directory for runs, predictions and results.json"
    add("--output", type=Path, required=True, metavar="DIR", help=text)
    add("--local_rank", type=int, help="set by the launcher")
    text = "DeepSpeed JSON: keys that correspond to settings override the files, the others go to DeepSpeed"
    add("--deepspeed_config", type=expanded_path, metavar="FILE", help=text)
    add("--deepspeed", action="store_true", help="accepted for compatibility")
    add("overrides", nargs="*", metavar="section.key=value", help="settings on top of the files")
    given = with_deepspeed_file(sys.argv[1:])
    arguments, unknown = parser.parse_known_intermixed_args(given)
    if unknown:
        raise ConfigError(explain_options(given, unknown))
    if not arguments.config and arguments.checkpoint is None:
        raise ConfigError("no model given; pass --checkpoint RUN, or --config FILE (see configs/).")
    if arguments.tasks and arguments.task is not None:
        raise ConfigError("--task and --tasks are both given; list all tasks in --tasks.")
    return arguments


def main(rendezvous: Rendezvous | None = None) -> ExitStatus:
    arguments = parse_arguments()
    rendezvous = rendezvous or Rendezvous()
    logging.basicConfig(
        format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO, stream=sys.stdout
    )
    launch = Launch.from_environment(arguments.local_rank)
    output: Path = arguments.output
    require_writable(output / "results.json", "--output")
    check_output_directory(output, "--output", is_tuned=True)
    start, pretrained = arguments.checkpoint, None
    if start is not None:
        start = resolve_model(start, "--checkpoint", MODEL_OR_EXPORT_PATH)
    initial = initial_weights_of(start)
    check_initial_weights(output, initial)
    if start is not None:
        if is_export(start):
            start = imported(start, output / IMPORTED, arguments, launch, initial)
        state = find_manifest(start).trainer_state()
        pretrained = to_tree(recorded_config(state).trained(state.step))
    control = RunControl(output, is_main=launch.rank == 0)
    with located_settings(arguments.config, arguments.task, arguments.overrides, arguments.tasks):
        tree = load_tree(
            arguments.config,
            arguments.task,
            arguments.overrides,
            pretrained,
            arguments.tasks,
            arguments.deepspeed_config,
            launch.world_size,
            log.info if launch.rank == 0 else None,
        )
        tree = merge(tree, {"run": {"directory": str(output)}})
        if start is not None:
            tree = merge(tree, {"checkpoint": {"initialize_from": str(start)}})
        control.refuse_if_halted()
        task = prepare(tree)
    if not all(one.train for one in task.all_tasks):
        raise DataError(
            "task.train is null; set it to a training file, or use scripts/evaluate.py to evaluate."
        )
    config = task.config
    check_output(output, config)
    config.deepspeed_options(config.parallel.data_parallel_size(launch.world_size))
    require_apex(config)
    require_package(config)
    with held(output, "trains") if launch.rank == 0 else nullcontext() as lease:
        if lease is not None:
            control.leave = lease.release
            note_initial_weights(output, initial)
        timeouts = config.timeouts
        watchdog = Watchdog(
            timeouts.sections, output, launch.rank, launch.world_size, timeouts.heartbeat_seconds, lease
        )
        return train(task, output, launch, control, watchdog, rendezvous)


def imported(
    source: Path, run: Path, arguments: argparse.Namespace, launch: Launch, initial: InitialWeights
) -> Path:
    """An exported directory as a run, made once."""
    if run.exists():
        return run
    if launch.world_size > 1:
        raise ConfigError(
            f"{source} is an exported directory, which must be imported by a single process; run `python "
            f"scripts/convert_checkpoint.py import --input {source} --output {run}` first, and pass "
            f"--checkpoint {run}."
        )
    from megatron_lite.hf.importing import import_directory

    tree = load_tree(arguments.config, arguments.task, arguments.overrides, tasks=arguments.tasks)
    note_initial_weights(run.parent, initial)
    import_directory(source, run, for_import(tree))
    return run


def train(
    task: Task, output: Path, launch: Launch, control: RunControl, watchdog: Watchdog, rendezvous: Rendezvous
) -> ExitStatus:
    watchdog.enter(Section.SETUP, "loading libraries")
    config = task.config
    prepare_environment(config.training.deterministic)
    from megatron_lite.finetune.data import digest
    from megatron_lite.finetune.run import finetune
    from megatron_lite.parallel.context import ParallelContext
    from megatron_lite.runtime.process import agree_with_ranks, run_with_ranks
    from megatron_lite.train.start import check_start

    # The runs of the seeds are below; here only what all of them begin with is looked at.
    check_start(replace(config, run=replace(config.run, directory=str(output / "none"))))
    records = {f"the records of {one.settings.train}": digest(one.train) for one in task.all_tasks}
    agree_with_ranks(launch, config, watchdog, rendezvous, records)

    def work(context: ParallelContext) -> ExitStatus:
        return finetune(task, output, context, control, watchdog)

    return run_with_ranks(launch, config, control, watchdog, rendezvous, work)


def command() -> None:
    """The entry point. Where all ranks find the same mistake, one per node reports it."""
    rendezvous = Rendezvous()
    run_command(lambda: main(rendezvous), quiet=not is_first_of_node(), leave=rendezvous.leave)


if __name__ == "__main__":
    command()
