#!/usr/bin/env python3
"""Step, update and memory of each optimizer compared with AdamW's, and of an average of the weights.

One process trains the same model with an engine for each, in turn (A B C A B C ...), so that a busy machine slows all
of them, and medians are reported. A step is forward, backward and update of one sample of 512 tokens, clipping off.
Bytes are those of weights in fp32, moments and averages, which ranks share at ZeRO 1 and 2.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import torch

from benchmarks.arguments import check_at_least, check_places, write_json
from benchmarks.train_step import VOCAB_SIZE, make_batch
from data_utils.common.errors import ArgumentParser, run_command
from data_utils.common.memory import keep_freed_memory
from data_utils.common.settings import build
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.engine.plain import make_engine
from megatron_lite.parallel.context import initialize
from megatron_lite.parallel.launch import Launch
from megatron_lite.transformer.batch import Batch

KINDS = ("adamw", "lamb", "stable_adamw", "adafactor", "muon")
EMA = {"decay": 0.999, "interval": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    **{kind: {"optimizer": {"kind": kind, "clip_grad_norm": 0.0}} for kind in KINDS},
    "adamw, ema of each step": {"optimizer": {"clip_grad_norm": 0.0}, "ema": EMA},
    "adamw, ema of each 10th": {"optimizer": {"clip_grad_norm": 0.0}, "ema": {**EMA, "interval": 10}},
}
RATE, TIMEOUT_SECONDS = 1e-4, 600


@dataclass
class Row:
    """Medians of a variant, seconds, their ratios to AdamW's in the same turns, and bytes for each parameter."""

    variant: str
    step: float
    of_step: float
    update: float
    of_update: float
    bytes_per_parameter: float


class Timed:
    """An engine whose updates are timed."""

    def __init__(self, config: Config, context: Any):
        self.engine = make_engine(config, context, 3)
        optimizer, self.steps, self.updates = self.engine._engine.optimizer, [], []
        update = optimizer.step

        def timed(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            update(*args, **kwargs)
            self.updates.append(time.perf_counter() - start)

        optimizer.step = timed

    def step(self, batch: Batch, number: int) -> None:
        self.engine.set_step(number)
        start = time.perf_counter()
        self.engine.train_step([self.engine.prepared(batch, number, 1e-3)], RATE)
        self.steps.append(time.perf_counter() - start)


def bytes_per_parameter(engine: Engine) -> float:
    """Bytes of weights in fp32, moments and averages, by the optimizer's own tensors."""
    zero, count = engine._zero, sum(parameter.numel() for parameter in engine.named_parameters.values())
    kept = [bucket.master_shard for bucket in zero.buckets]
    kept += [
        value for state in zero.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    kept += [
        tensor
        for name in engine.named_parameters
        for tensor in (
            zero.optimizer.whole_state(name) if hasattr(zero.optimizer, "whole_state") else {}
        ).values()
    ]
    averaged = 4 * count if engine._averages is not None else 0
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return (sum(storages.values()) + averaged) / count


def measure(options: argparse.Namespace) -> list[Row]:
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed talks
        return _measure(options)


def _measure(options: argparse.Namespace) -> list[Row]:
    context = initialize(Launch(0, 1, 0), ParallelConfig(), TIMEOUT_SECONDS)
    tree = {
        "model": {
            "num_layers": options.layers, "hidden_size": options.hidden, "num_attention_heads": options.hidden // 64,
            "vocab_size": VOCAB_SIZE, "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0,
        },
        "training": {"steps": 10**6, "precision": "fp32"},
        "batch": {"micro_batch_size": 1, "global_batch_size": 1},
    }  # fmt: skip
    timed = {name: Timed(build(Config, {**tree, **sections}), context) for name, sections in VARIANTS.items()}
    batch = Batch(make_batch(1))
    for number in range(options.repeats + 1):  # the first one compiles
        for one in timed.values():
            one.step(batch, number)
    first = timed["adamw"]
    rows = []
    for name, one in timed.items():
        ratios = [
            statistics.median(own / its for own, its in zip(mine[1:], others[1:], strict=True))
            for mine, others in ((one.steps, first.steps), (one.updates, first.updates))
        ]
        kept = bytes_per_parameter(one.engine)
        step, update = (statistics.median(seconds[1:]) for seconds in (one.steps, one.updates))
        rows.append(Row(name, step, ratios[0], update, ratios[1], kept))
    context.close()
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=4, help="blocks (default: 4)")
    add("--hidden", type=int, default=512, help="hidden size, a multiple of 64 (default: 512)")
    add("--repeats", type=int, default=20, help="steps of each variant (default: 20)")
    add("--threads", type=int, default=1, help="threads of torch (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "layers", "repeats", "threads")
    check_at_least(options, 64, "hidden")
    check_places(result=options.json)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    rows = measure(options)
    print("| optimizer | step, ms | of AdamW's | update, ms | of AdamW's | bytes/parameter |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.variant} | {1e3 * row.step:.0f} | {row.of_step:.3f} | {1e3 * row.update:.0f} | "
            f"{row.of_update:.2f} | {row.bytes_per_parameter:.2f} |"
        )
    if options.json:
        write_json(options.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    run_command(main)
