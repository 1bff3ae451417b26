#!/usr/bin/env python3
"""CPU seconds of a training step of a mixture of experts, beside transformers' class of equal weights.

Forward and backward pass of one batch of texts, without an optimizer. The class is Qwen3MoeForCausalLM with attention
by sdpa, with implementations of experts that transformers has: `eager` loops over them, `grouped_mm` is one product of
all. `batched_mm` copies the weights of each token's experts, which takes gigabytes, so it must be asked for. All take
turns, a ratio is of one turn, and the losses must agree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import torch
from torch import nn

from benchmarks.arguments import check_at_least, check_places, write_json
from benchmarks.train_step import DTYPES, SPECIAL, training_step
from data_utils.common.batch_fields import TOKENS
from data_utils.common.errors import ArgumentParser, run_command
from data_utils.common.settings import build
from data_utils.loader.loader import collate
from data_utils.objectives import LOSSES
from data_utils.objectives.causal import Causal, CausalConfig
from data_utils.tokenizers.vocabulary import Vocabulary
from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.published.source import open_published
from megatron_lite.hf.published.tensor_map import to_ours
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
WORDS = 3000
LOSSES_AGREE = {"fp32": 1e-4, "bf16": 2e-2}  # relative


def models(options: argparse.Namespace) -> tuple[Transformer, Any]:
    """Ours and the class, of one directory of random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    heads = options.size // 64
    config = Qwen3MoeConfig(
        vocab_size=WORDS, hidden_size=options.size, num_hidden_layers=options.layers, head_dim=64, use_cache=False,
        num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=options.width, norm_topk_prob=True,
        moe_intermediate_size=options.width, num_experts=options.experts, num_experts_per_tok=options.per_token,
        max_position_embeddings=options.length,
    )  # fmt: skip
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        Qwen3MoeForCausalLM(config).save_pretrained(directory)
        theirs = Qwen3MoeForCausalLM.from_pretrained(directory, attn_implementation="sdpa").train()
        source = open_published(Path(directory))
        ours = Transformer(build(ModelConfig, source.settings), num_losses=len(LOSSES))
        weights = to_ours(source.theirs, source.mappings)
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                read = weights.read(name)
                parameter.zero_()
                parameter[: len(read)] = read
    dtype = DTYPES[options.dtype]
    return ours.to(dtype), theirs.to(dtype)


def losses(options: argparse.Namespace) -> dict[str, tuple[nn.Module, Callable[[], torch.Tensor]]]:
    """The model and the loss of a batch, of each variant."""
    ours, theirs = models(options)
    objective = Causal(CausalConfig(begin="none"), Vocabulary(SPECIAL, WORDS), 1, options.length)
    lengths = np.full(options.samples, options.length)
    text = np.random.default_rng(0).integers(0, WORDS, lengths.sum())
    numbers = np.arange(options.samples)
    rows = collate(objective, text, lengths, np.ones(options.samples, np.int64), numbers)
    inputs = MicroBatch.from_batch(Batch(rows), torch.device("cpu"), ours.config)
    ids = torch.from_numpy(rows[:, TOKENS].astype(np.int64))

    def of_class(implementation: str) -> Callable[[], torch.Tensor]:
        def loss() -> torch.Tensor:
            theirs.set_experts_implementation(implementation)
            return theirs(input_ids=ids, labels=ids).loss

        return loss

    variants = {name: (theirs, of_class(name)) for name in options.implementations}
    return {"ours": (ours, lambda: ours(inputs)[0] / len(inputs.targets)), **variants}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    variants = losses(options)
    with torch.no_grad():
        values = {name: float(loss()) for name, (_, loss) in variants.items()}
    expected, limit = values["ours"], LOSSES_AGREE[options.dtype]
    assert all(abs(value - expected) <= limit * expected for value in values.values()), values
    steps = {name: training_step(*variant) for name, variant in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.repeats + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if turn:  # the first one warms up
                seconds[name].append(time.process_time() - start)
    rows = []
    for name, times in seconds.items():
        ratios = [their / our for their, our in zip(times, seconds["ours"], strict=True)]
        rows.append(
            {"variant": name, "seconds": statistics.median(times), "ratio": statistics.median(ratios)}
            | {"lowest": min(ratios), "highest": max(ratios)}
        )
    return rows


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4, help="texts of a step (4)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text (256)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--width", type=int, default=384, help="of an expert (384)")
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=["eager", "grouped_mm"],
        help="of transformers (eager grouped_mm)",
    )
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--repeats", type=int, default=5, help="turns (5)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    check_at_least(options, 1, "samples", "layers", "experts", "per_token", "width", "repeats", "threads")
    check_at_least(options, 64, "size")
    check_at_least(options, 2, "length")
    check_places(result=options.json)
    torch.set_num_threads(options.threads)
    rows = measure(options)
    print("variant      s/step   times ours (of each turn)")
    for row in rows:
        spread = f"{row['lowest']:.2f}-{row['highest']:.2f}"
        print(f"{row['variant']:<12} {row['seconds']:<8.3f} {row['ratio']:.2f} ({spread})")
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    run_command(main)
