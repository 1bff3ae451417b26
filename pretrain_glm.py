"""Pretrain a model, or continue a run: the same command again.

python pretrain_glm.py --config small --dry-run 8                      # will it fit, and how fast?
deepspeed --num_gpus 8 pretrain_glm.py --config small training.steps=5000
"""

from __future__ import annotations

import data_utils.common.entry  # noqa: F401

# isort: split
import argparse
import difflib
import json
import logging
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from data_utils.common.errors import ArgumentParser, ConfigError, ExitStatus, expanded_path, run_command
from data_utils.common.files import require_writable
from data_utils.common.settings import to_tree
from data_utils.common.settings_listed import describe
from data_utils.objectives import OBJECTIVES
from data_utils.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megatron_lite.checkpoint.resolve_path import check_output_directory, resolve_model
from megatron_lite.config.attention import require_package
from megatron_lite.config.foreign_options import explain_options, with_deepspeed_file
from megatron_lite.config.sections import CheckpointConfig
from megatron_lite.config.tree import Config, load_config, require_validation, settings_schema
from megatron_lite.parallel.launch import Launch, is_first_of_node, prepare_environment
from megatron_lite.parallel.rendezvous import Rendezvous
from megatron_lite.runtime.control import RunControl
from megatron_lite.runtime.hub_tokenizer import RunTokenizer, run_tokenizer
from megatron_lite.runtime.lease import held
from megatron_lite.runtime.run_state import RunState, read_run_state
from megatron_lite.runtime.watchdog import Section, Watchdog

if TYPE_CHECKING:  # it brings the compiler
    from data_utils.loader.loader import Datasets

log = logging.getLogger(__name__)


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__, add_help=False)
    add = parser.add_argument
    add(
        "-h",
        "--help",
        action=_Help,
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="SECTION",
        help="show these options and the names of all sections; or the settings of one SECTION, or of all",
    )
    add(
        "--config",
        type=expanded_path,
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file, or a name of configs/ such as small; repeatable, later ones win",
    )
    add(
        "--deepspeed_config",
        type=expanded_path,
        metavar="FILE",
        help="DeepSpeed JSON: its values become settings on top of the YAML files, or go to DeepSpeed",
    )
    add(
        "--deepspeed",
        action="store_true",
        help="accepted for compatibility; training always uses DeepSpeed. With a FILE it is --deepspeed_config",
    )
    add("--local_rank", type=int, help="set by the launcher")
    add(
        "--schema", action=_Schema, nargs=0, help="print a JSON Schema of the settings, for editors, and stop"
    )
    add("--print-config", action="store_true", help="print the resolved configuration and stop")
    add(
        "--dry-run",
        type=int,
        metavar="PROCESSES",
        help="show memory and speed on PROCESSES GPUs, advise the fastest layout, and stop; needs no GPU and no data",
    )
    add("--gpu", help="for --dry-run: h100, h200, gh200, b200, a100 or a100-40 (default h100)")
    text = "for --dry-run: share of the GPU's peak that computation reaches (default 0.4)"
    add("--efficiency", type=float, metavar="SHARE", help=text)
    add("overrides", nargs="*", metavar="section.key=value", help="settings on top of the files")
    command_line = with_deepspeed_file(sys.argv[1:])
    arguments, unknown = parser.parse_known_intermixed_args(command_line)
    if unknown:
        raise ConfigError(explain_options(command_line, unknown))
    if not arguments.config:
        raise ConfigError("no configuration given; pass --config FILE, or a name such as small.")
    if arguments.dry_run is None and (arguments.gpu, arguments.efficiency) != (None, None):
        raise ConfigError("--gpu and --efficiency describe GPUs for --dry-run; add --dry-run PROCESSES.")
    return arguments


class _Help(argparse.Action):
    """--help: the options and the sections. --help SECTION: what can be set there, with type, range and default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, value: Any, option: Any = None
    ) -> None:
        for name in OBJECTIVES if value == "all" else (value,):
            if name in OBJECTIVES:
                OBJECTIVES[name]  # one of a package is imported only now
        settings: dict[str, list[str]] = {}
        lines = [line for line in describe(Config) if line]
        for title, text in zip(lines[::2], lines[1::2], strict=True):
            key = re.split(r"[. ]", title.strip(), maxsplit=1)[0]
            settings.setdefault(key, []).extend((title, text))
        if value is None:
            print(parser.format_help())
            print(
                "sections and single settings; --help SECTION explains what is in one, --help all everything:\n"
            )
            print(textwrap.fill(", ".join(settings), 110, initial_indent="  ", subsequent_indent="  "))
        elif value == "all" or value in settings:
            shown = settings if value == "all" else [value]
            print("settings (file key or override; type, range, default):")
            for key in shown:
                print("", *settings[key], sep="\n")
        else:
            nearest = difflib.get_close_matches(value.partition(".")[0], settings, n=1, cutoff=0)[0]
            raise ConfigError(f"--help {value}: there is no such section; the nearest is {nearest}.")
        sys.exit(0)


class _Schema(argparse.Action):
    """--schema: of all settings, objectives of installed packages among them."""

    def __call__(self, *arguments: Any) -> None:
        print(json.dumps(settings_schema(), indent=1))
        sys.exit(0)


def main(rendezvous: Rendezvous | None = None) -> ExitStatus:
    arguments = parse_arguments()
    rendezvous = rendezvous or Rendezvous()
    if arguments.print_config or arguments.dry_run is not None:
        rendezvous.over()
    launch, notes = Launch.from_environment(arguments.local_rank), list[str]()
    processes = launch.world_size if arguments.dry_run is None else arguments.dry_run
    config = load_config(
        arguments.config, arguments.overrides, arguments.deepspeed_config, processes, notes.append
    )
    if arguments.print_config and arguments.dry_run is not None:
        raise ConfigError("--print-config and --dry-run exclude each other; give one of them.")
    if arguments.print_config:
        print("".join(f"# {note}\n" for note in notes), end="")
        print(yaml.safe_dump(to_tree(config), sort_keys=False), end="")
        return ExitStatus.FINISHED
    if arguments.dry_run is not None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it is asked for its stages, and would look for a GPU
        from megatron_lite.estimate.dry_run import EFFICIENCY, dry_run

        print("".join(f"{note}\n" for note in notes), end="")
        efficiency = EFFICIENCY if arguments.efficiency is None else arguments.efficiency
        dry_run(config, arguments.dry_run, arguments.gpu or "h100", efficiency)
        return ExitStatus.FINISHED
    require_validation(arguments.overrides, config)
    return train(config, launch, rendezvous, notes)


def train(config: Config, launch: Launch, rendezvous: Rendezvous, notes: Iterable[str] = ()) -> ExitStatus:
    """Args: notes: lines on how the configuration was read, for the log."""
    logging.basicConfig(
        format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO, stream=sys.stdout
    )
    if config.task is not None:
        raise ConfigError(
            f"the configuration has the task {config.task.name}, which pretraining would leave out; train it with "
            "scripts/finetune.py, or set task=null."
        )
    for note in notes if launch.rank == 0 else ():
        log.info("%s", note)
    # Refuses a batch that does not divide over the ranks.
    config.deepspeed_options(config.parallel.data_parallel_size(launch.world_size))
    config.profiler.require_ranks(launch.world_size)
    directory, timeouts = Path(config.run.directory), config.timeouts
    control = RunControl(directory, is_main=launch.rank == 0)
    run_state = require_start(directory, config.checkpoint)
    control.refuse_if_halted()
    if config.settings_for_apex:
        from megatron_lite.engine.nvidia_apex import require_apex

        require_apex(config)
    require_package(config)
    if launch.rank == 0 and config.trackers.is_used:
        from megatron_lite.telemetry.trackers import require_trackers

        require_trackers(config.trackers)
    if config.tokenizer is None:
        raise ConfigError("training needs a tokenizer; set tokenizer.kind and tokenizer.path.")
    kept = run_tokenizer(config.tokenizer, directory)
    tokenizer = load_tokenizer(kept.read)
    config.data.require_train()  # mistakes up to here are reported before torch is imported
    kept_tokenizers, decoder_tokenizer = [kept], None
    if config.decoder_tokenizer is None:
        config = config.with_vocab_size(tokenizer.vocab_size)
    else:
        kept_decoder = run_tokenizer(config.decoder_tokenizer, directory)
        kept_tokenizers.append(kept_decoder)
        decoder_tokenizer = load_tokenizer(kept_decoder.read)
        config = config.with_vocab_size(tokenizer.vocab_size, decoder_tokenizer.vocab_size)
        config = replace(config, decoder_tokenizer=kept_decoder.recorded)
    config = replace(config, tokenizer=kept.recorded)
    if run_state.newest is not None:
        from megatron_lite.runtime.finished_runs import nothing_to_do  # brings the compiler

        reason = nothing_to_do(config, run_state)
        if reason is not None:
            if launch.rank == 0:
                log.info("%s", reason)
            return ExitStatus.FINISHED
    # Rank 0 holds the lease for all: the others write nothing before they have met it.
    with held(directory, "trains") if launch.rank == 0 else nullcontext() as lease:
        if lease is not None:
            control.leave = lease.release
        watchdog = Watchdog(
            timeouts.sections, directory, launch.rank, launch.world_size, timeouts.heartbeat_seconds, lease
        )
        return train_with(
            config, tokenizer, decoder_tokenizer, kept_tokenizers, launch, control, watchdog, rendezvous
        )


def train_with(
    config: Config,
    tokenizer: Tokenizer,
    decoder_tokenizer: Tokenizer | None,
    kept_tokenizers: Sequence[RunTokenizer],
    launch: Launch,
    control: RunControl,
    watchdog: Watchdog,
    rendezvous: Rendezvous,
) -> ExitStatus:
    watchdog.enter(Section.SETUP, "loading libraries")
    if launch.rank == 0:
        log.info("processes %d, run.directory %s; loading libraries", launch.world_size, config.run.directory)
    prepare_environment(config.training.deterministic)
    from data_utils.loader.corpus_report import corpus_report, overlap
    from data_utils.loader.drawn_shares import drawn_shares
    from data_utils.loader.loader import open_datasets
    from megatron_lite.engine.engine import memory_advice
    from megatron_lite.engine.plain import make_engine
    from megatron_lite.parallel.context import ParallelContext
    from megatron_lite.runtime.process import agree_with_ranks, run_with_ranks
    from megatron_lite.train.start import check_start, keep_task_rows
    from megatron_lite.train.trainer import Trainer
    from megatron_lite.transformer.build import model_spec

    watchdog.at("checking the checkpoint to begin with")
    check_start(config)  # before corpora are copied and the model is built, which takes minutes
    agree_with_ranks(launch, config, watchdog, rendezvous)
    config = keep_task_rows(config)
    watchdog.at("opening datasets")
    phase_plan, seed = config.phase_plan, config.training.seed
    data = open_datasets(
        config.data,
        config.objective_choices,
        tokenizer,
        seed,
        decoder_tokenizer,
        phase_plan.samples,
        config.sample_unit,
    )
    if launch.rank == 0:
        for kept in kept_tokenizers:
            kept.copy_to_run()
        reading = corpus_report(
            data.train.mixtures, phase_plan.consumed(config.training.steps), phase_plan.largest_batch
        )
        for note in (*data.notes, *phase_plan.lines(), *reading, *overlap(data), *drawn_shares(data.train)):
            log.info("%s", note)

    def fit(context: ParallelContext) -> ExitStatus:
        watchdog.at("building the model")
        if context.is_main:
            log.info("all processes have met; building the model")
        with memory_advice(config):
            engine, spec = make_engine(config, context, len(data.loss_names)), model_spec(config)
            return Trainer(
                config=config,
                context=context,
                engine=engine,
                train_data=spec.samples(config, data.train, "train"),
                validation_data=data.validation and spec.samples(config, data.validation, "validation"),
                loss_names=data.loss_names,
                control=control,
                watchdog=watchdog,
                fill=sample_fillings(config, data, tokenizer) if context.is_main else None,
            ).fit()

    return run_with_ranks(launch, config, control, watchdog, rendezvous, fit)


def sample_fillings(config: Config, data: Datasets, tokenizer: Tokenizer) -> Any:
    """The callback that fills blanks at each evaluation; None unless training.eval_fillings asks for it."""
    if not config.training.eval_fillings or data.validation is None:
        return None
    from megatron_lite.inference.samples import SampleFillings

    return SampleFillings(
        data.validation, tokenizer, config.training.eval_fillings, config.training.eval_samples
    )


def require_start(run: Path, checkpoint: CheckpointConfig) -> RunState:
    """Refuse a start that the run's directories show to be impossible, before libraries are loaded."""
    state = read_run_state(run)
    state.require_start()
    check_output_directory(run, "run.directory")
    require_writable(run / "config.yaml", "run.directory")
    if state.newest is None and checkpoint.initialize_from is not None:
        resolve_model(Path(checkpoint.initialize_from), "checkpoint.initialize_from")
    return state


def command() -> None:
    """The entry point. Where all ranks find the same mistake, one per node reports it."""
    rendezvous = Rendezvous()
    run_command(lambda: main(rendezvous), quiet=not is_first_of_node(), leave=rendezvous.leave)


if __name__ == "__main__":
    command()
