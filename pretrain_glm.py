"""Pretrain GLM: `deepspeed --num_gpus N pretrain_glm.py --config configs/tiny.yaml [section.key=value ...]`.

A table of contents: configuration -> data -> context -> model -> engine -> Trainer.fit.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import yaml

from data_utils.loader import open_datasets
from data_utils.tokenizers import load_tokenizer
from megatron_lite.config import Config, load_config
from megatron_lite.deepspeed_options import check_agreement
from megatron_lite.errors import ConfigError, run_command
from megatron_lite.launch import Launch
from megatron_lite.settings import describe, to_tree


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="settings (file key or override; type, default):\n" + "\n".join(describe(Config)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file; may be repeated, later ones win",
    )
    parser.add_argument(
        "--deepspeed_config", metavar="FILE", help="DeepSpeed JSON, merged; a contradiction is an error"
    )
    parser.add_argument(
        "--deepspeed", action="store_true", help="accepted for DeepSpeed's habit; training always uses it"
    )
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and stop"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings on top of the files"
    )
    arguments, unknown = parser.parse_known_intermixed_args()
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]}; settings are written section.key=value, without dashes."
        )
    if not arguments.config:
        raise ConfigError("no configuration given; pass --config FILE (see configs/).")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    config = load_config(arguments.config, arguments.overrides, arguments.deepspeed_config)
    if arguments.print_config:
        print(yaml.safe_dump(to_tree(config), sort_keys=False), end="")
        return
    train(config, arguments.local_rank)


def train(config: Config, local_rank: int | None) -> None:
    logging.basicConfig(
        format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO, stream=sys.stdout
    )
    launch = Launch.from_environment(local_rank)
    check_agreement(config, config.parallel.data_parallel_size(launch.world_size))
    if config.tokenizer is None:
        raise ConfigError("training needs a tokenizer; set tokenizer.kind and tokenizer.path.")
    tokenizer = load_tokenizer(config.tokenizer)  # a mistake up to here is answered before torch is imported
    config = config.with_vocab_size(tokenizer.vocab_size)
    data = open_datasets(config.data, config.blank_infilling, tokenizer, config.training.seed)

    from megatron_lite.cpu_memory import keep_freed_memory
    from megatron_lite.engine import make_engine
    from megatron_lite.parallel_context import initialize
    from megatron_lite.trainer import Trainer

    context = initialize(launch, config.parallel, config.run.timeout_seconds)
    if context.device.type == "cpu":
        keep_freed_memory()
    if context.is_main:
        save_resolved(config)
    engine = make_engine(config, context, len(data.objective_names))
    Trainer(config, context, engine, data.train, data.validation, data.objective_names).fit()
    context.close()


def save_resolved(config: Config) -> None:
    directory = Path(config.run.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(
            yaml.safe_dump(to_tree(config), sort_keys=False), encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(
            f"run.directory {directory}: {error.strerror}; choose a writable directory."
        ) from None


if __name__ == "__main__":
    # Every rank finds the same mistake in a configuration: one per node reports it.
    run_command(main, quiet=os.environ.get("LOCAL_RANK", "0") != "0")
