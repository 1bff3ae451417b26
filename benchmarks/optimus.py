#!/usr/bin/env python3
"""What the latent vector costs: a step of OPTIMUS compared with its encoder and its decoder alone, in one run.

    python benchmarks/optimus.py                                  # 12 x 768 and 12 x 768, fp32
    python benchmarks/optimus.py --layers 4 --hidden 256 --dtype bf16 --threads 1 --clock process

Forward and backward of one micro-batch of packed sentences of 8 to 64 tokens, dropout 0; batches differ and take turns.
The encoder alone computes the same tokens and the gradient of a sum over its CLS rows; the decoder alone is the causal
run of the same sentences, without slots. `floor` is what OPTIMUS must add: one token in each sentence, in model FLOPs.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import argparse

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.arguments import check_at_least, check_places, write_json
from data_utils.common.errors import ArgumentParser, ConfigError, run_command
from data_utils.common.memory import keep_freed_memory
from data_utils.common.settings import build
from data_utils.loader.loader import collate
from data_utils.objectives import LOSS_NAMES, make_objective
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary
from megatron_lite.config.tree import Config
from megatron_lite.model.build import build_model, model_spec
from megatron_lite.model.lengths import builds_kernels, few_lengths
from megatron_lite.model.micro_batch import MicroBatch
from megatron_lite.models.optimus.batch import LatentBatch
from megatron_lite.models.optimus.config import latent_of
from megatron_lite.models.optimus.model import Optimus

VOCAB_SIZE = 30000
LONGEST = 64
SHORTEST = 8
BATCHES = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
SPECIAL = SpecialTokens(cls=1, sep=2, mask=3, smask=3, gmask=3, sop=4, eop=5, eos=6, pad=0, unk=7, dblock=3)


def config_for(options: argparse.Namespace, memory: bool = True) -> Config:
    sizes = {
        "num_layers": options.layers, "hidden_size": options.hidden, "num_attention_heads": options.hidden // 64,
        "vocab_size": VOCAB_SIZE, "max_position": 2 * LONGEST, "embedding_dropout": 0.0, "attention_dropout": 0.0,
        "output_dropout": 0.0,
    }  # fmt: skip
    tree = {
        "model": {**sizes, "system": "bert"},
        "decoder": {**sizes, "system": "gpt2"},
        "training": {"steps": 1, "precision": options.dtype},
        "schedule": {"warmup_steps": 0},
        "data": {"sequence_length": LONGEST},
        "objectives": {"optimus": 1},
        "optimus": {"latent_size": options.latent_size, "memory": memory, "free_bits": 0.0, "cycles": 1},
    }
    return build(Config, tree)


def batches(config: Config, sentences: int) -> list[LatentBatch]:
    """Each of one row, of random sentences."""
    latent = latent_of(config)
    assert latent is not None
    rng = np.random.default_rng(0)
    vocabulary = Vocabulary(size=VOCAB_SIZE, special=SPECIAL)
    row = sentences * (2 * LONGEST + 4)
    objective = make_objective(config.objective_choices, vocabulary, 0, LONGEST, row)
    made = []
    for number in range(BATCHES):
        lengths = rng.integers(SHORTEST, LONGEST + 1, sentences)
        tokens = rng.integers(10, VOCAB_SIZE, lengths.sum()).astype(np.int32)
        samples = np.array([number])
        fields = collate(objective, tokens, lengths, np.array([sentences]), samples)
        made.append(LatentBatch(fields, samples, 0, latent.latent_size, latent.memory))
    return made


def steps(options: argparse.Namespace) -> tuple[dict[str, Callable[[], None]], float]:
    """What takes turns, by name, and the floor of the ratio."""
    dtype, device = DTYPES[options.dtype], torch.device("cpu")
    config, without = config_for(options), config_for(options, memory=False)
    model = build_model(config, len(LOSS_NAMES))
    assert isinstance(model, Optimus)
    model.to(dtype)
    inputs, plain = (
        [
            MicroBatch.from_batch(
                batch,
                device,
                of.model,
                decoder_config=of.decoder,
                multiple=few_lengths(batch.fields.shape[2], device, dtype),
                few_counts=builds_kernels(device, dtype),
            )
            for batch in batches(of, options.sentences)
        ]
        for of in (config, without)
    )
    whole, alone = (
        sum(
            model_spec(config).flops(
                config, b.tokens, b.loss_tokens, b.visible_keys, b.decoder_tokens, b.decoder_keys
            )
            for b in batches(of, options.sentences)
        )
        for of in (config, without)
    )
    turns, plain_turns, features = itertools.cycle(inputs), itertools.cycle(plain), itertools.cycle(inputs)

    def optimus() -> torch.Tensor:
        batch = next(turns)
        return model(batch)[0] / len(batch.weights)

    def encoder() -> torch.Tensor:
        return model.features(next(features)).float().square().mean()

    def decoder() -> torch.Tensor:
        batch = next(plain_turns)
        count = batch.plan.lengths[0]
        tokens, ids = batch.tokens[count:], batch.ids[:, count:]
        own = replace(batch, tokens=tokens, ids=ids, plan=batch.plan.decoder, dropout=None)
        return (model.decoder.losses(own) * batch.weights).mean()

    def step(loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            loss().backward()
            model.zero_grad(set_to_none=False)

        return run

    return {f.__name__: step(f) for f in (optimus, encoder, decoder)}, whole / alone


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of each step, the median, and the ratios."""
    now = CLOCKS[options.clock]
    work, floor = steps(options)
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in tqdm(range(options.repeats + 1), disable=None, leave=False):
        for name, step in work.items():
            start = now()
            step()
            if turn:
                seconds[name].append(now() - start)
    found = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = [whole / (encoder + decoder) for whole, encoder, decoder in zip(*seconds.values(), strict=True)]
    return {**found, "ratio": statistics.median(ratios), "floor": floor}


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=12, help="of each stack (default: 12)")
    add("--hidden", type=int, default=768, help="width of each stack, a multiple of 64 (default: 768)")
    add("--latent-size", type=int, default=32, help="(default: 32)")
    add("--sentences", type=int, default=16, help="in a micro-batch (default: 16)")
    add("--dtype", default="fp32", choices=DTYPES, help="of weights and activations (default: fp32)")
    add("--repeats", type=int, default=5, help="timed rounds; the median counts (default: 5)")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: torch's)")
    add(
        "--clock",
        default="wall",
        choices=CLOCKS,
        help="process: CPU seconds, for one thread on a shared machine",
    )
    add("--json", type=Path, metavar="FILE", help="also write the numbers there")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = parse_arguments(given)
    check_at_least(options, 1, "layers", "latent_size", "sentences", "repeats", "threads")
    if options.hidden < 64 or options.hidden % 64:
        raise ConfigError(f"--hidden is {options.hidden}; it must be a multiple of 64.")
    check_places(result=options.json)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    found = measure(options)
    print("| step | encoder alone | decoder alone | OPTIMUS / both | floor |\n|---|---|---|---|---|")
    cells = (found["optimus"], found["encoder"], found["decoder"], found["ratio"], found["floor"])
    print("| " + " | ".join(f"{cell:.3g}" for cell in cells) + " |")
    if options.json:
        write_json(options.json, {**vars(options), "json": str(options.json), **found})
    return 0


if __name__ == "__main__":
    run_command(main)
