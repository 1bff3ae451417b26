#!/usr/bin/env python3
"""Tokens per second of fine-tuning and of scoring, compared with pretraining on the same shapes, in one run.

    python benchmarks/finetune.py                      # 6 layers of width 384, sequences of 128 tokens, fp32
    python benchmarks/finetune.py --dtype bf16 --layers 2

All steps take turns in one process: forward, backward and AdamW of one micro-batch of about the same number of tokens.
Tokens are those that the model computes, without padding. Texts of unequal lengths show what packing is worth: padding
them to the longest would compute `padded` tokens for each real one.

    pretraining     blank infilling on rows full of text
    tuning, full    cloze with texts that fill the rows, every choice of one token
    tuning, mixed   the same with texts of 8 to 120 words
    choices         the same with choices of several tokens: a document for each
    sequence        sequence to sequence, a quarter of the tokens are the target
    scoring         forward of `mixed` alone, as scripts/evaluate.py does it; its ratio is to pretraining's forward
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import torch

from benchmarks.arguments import check_at_least, check_places, write_json
from data_utils.common.errors import ArgumentParser, run_command
from data_utils.common.memory import keep_freed_memory
from data_utils.common.settings import build
from data_utils.loader.loader import collate
from data_utils.objectives import LOSS_NAMES, make_objective
from data_utils.tasks.base import TaskRecord
from data_utils.tasks.templates.render import Renderer
from data_utils.tokenizers.tokenizer import load_tokenizer
from data_utils.tokenizers.vocabulary import vocabulary_of
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import PlainEngine
from megatron_lite.finetune.data import make_task_batch
from megatron_lite.finetune.setup import make_renderer
from megatron_lite.model.batch import Batch
from megatron_lite.parallel.context import ParallelContext, initialize
from megatron_lite.parallel.launch import Launch

WORDS = 4000
CHOICES = {"one token": ("w1", "w2", "w3", "w4"), "several": ("w1 w5", "w2 w6 w7", "w3", "w4 w8 w9 w10")}
BATCHES = 4  # of different texts, taken in turn


def config_for(options: Any, vocabulary: Path, **task: Any) -> Config:
    tree = {
        "model": {
            "num_layers": options.layers, "hidden_size": options.hidden, "num_attention_heads": options.hidden // 64,
            "max_position": 2 * options.length, "embedding_dropout": 0.0, "attention_dropout": 0.0,
            "output_dropout": 0.0,
        },
        "tokenizer": {"kind": "bert_wordpiece", "path": str(vocabulary)},
        "training": {"steps": 1, "precision": options.dtype},
        "schedule": {"warmup_steps": 0},
        "data": {"sequence_length": options.length},
        "batch": {"micro_batch_size": options.rows, "global_batch_size": options.rows},
        "task": {"name": "own", "kind": "cloze", "reader": "jsonl", "sequence_length": options.length, **task},
    }  # fmt: skip
    return build(Config, tree)


def text(rng: np.random.Generator, words: int) -> str:
    return " ".join(f"w{n}" for n in rng.integers(0, WORDS, words))


def pretraining_batches(config: Config, rows: int) -> list[Batch]:
    assert config.tokenizer is not None
    vocabulary = vocabulary_of(load_tokenizer(config.tokenizer))
    objective = make_objective(config.objective_choices, vocabulary, 1, config.data.sequence_length)
    rng, length = np.random.default_rng(0), config.data.sequence_length - 4
    lengths, chunks = np.full(rows, length), np.ones(rows, np.int64)
    return [
        Batch(collate(objective, rng.integers(5, WORDS, rows * length), lengths, chunks, np.arange(rows)))
        for _ in range(BATCHES)
    ]


def task_batches(
    renderer: Renderer, records: Callable[[np.random.Generator], TaskRecord], tokens: int
) -> list[Batch]:
    """Micro-batches of about so many tokens."""
    rng, batches, number = np.random.default_rng(0), [], 0
    for _ in range(BATCHES):
        samples, total = [], 0
        while total < tokens:
            samples.append(renderer.sample(records(rng), number))
            total += sum(len(document.tokens) for document in samples[-1].documents)
            number += 1
        batches.append(make_task_batch(samples, range(number - len(samples), number), renderer))
    return batches


def cases(options: Any, directory: Path) -> tuple[Config, dict[str, list[Batch]]]:
    vocabulary = directory / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *(f"w{n}" for n in range(WORDS))]) + "\n")
    plain = config_for(options, vocabulary)
    assert plain.tokenizer is not None
    tokenizer = load_tokenizer(plain.tokenizer)
    plain = plain.with_vocab_size(tokenizer.vocab_size)
    full, tokens = options.length - 12, options.rows * options.length
    made: dict[str, list[Batch]] = {"pretraining": pretraining_batches(plain, options.rows)}

    def add(name: str, words: Callable[[np.random.Generator], int], **task: Any) -> None:
        config = config_for(options, vocabulary, **task).with_vocab_size(tokenizer.vocab_size)
        is_cloze = task.get("kind", "cloze") == "cloze"

        def record(rng: np.random.Generator) -> TaskRecord:
            count = words(rng)
            if is_cloze:
                return TaskRecord(0, {"text": text(rng, count)}, "0")
            source, target = text(rng, 3 * count // 4), text(rng, count // 4)
            return TaskRecord(0, {"source": source, "target": target}, target)

        made[name] = task_batches(make_renderer(config, tokenizer), record, tokens)

    def mixed(rng: np.random.Generator) -> int:
        return int(rng.integers(8, full))

    def cloze(kind: str) -> dict[str, Any]:
        return {"template": "{text} w0 [MASK]", "verbalizers": dict(zip("0123", CHOICES[kind], strict=True))}

    add("tuning, full", lambda rng: full, **cloze("one token"))
    add("tuning, mixed", mixed, **cloze("one token"))
    add("choices", mixed, **cloze("several"))
    add("sequence", lambda rng: full, kind="seq2seq", target_length=options.length // 2)
    return plain, made


def measure(
    engine: PlainEngine, batches: dict[str, list[Batch]], repeats: int
) -> dict[str, dict[str, float]]:
    """Medians over the repeats; all cases take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in (*batches, "forward", "scoring")}
    for repeat in range(-1, repeats):
        for name, made in batches.items():
            batch = made[repeat % len(made)]
            micro = engine.prepared(batch, None, 1.0 / max(batch.loss_divisor, 1.0))
            seconds[name].append(timed(lambda micro=micro: engine.train_step([micro], 1e-6).grad_norm))
        plain, asked = batches["pretraining"][repeat % BATCHES], batches["tuning, mixed"][repeat % BATCHES]
        seconds["forward"].append(timed(lambda batch=plain: engine.evaluate([batch])))
        seconds["scoring"].append(timed(lambda batch=asked: engine.predict(batch)))
    of = {**batches, "forward": batches["pretraining"], "scoring": batches["tuning, mixed"]}
    found = {}
    for name, made in of.items():
        rates = [
            made[repeat % len(made)].tokens / taken
            for repeat, taken in zip(range(repeats), seconds[name][1:], strict=True)
        ]
        padded = statistics.mean(batch.fields[:, 0].size / batch.tokens for batch in made)
        tokens = statistics.mean(batch.tokens for batch in made)
        found[name] = {"tokens_per_second": statistics.median(rates), "tokens": tokens, "padded": padded}
    for name, values in found.items():
        beside = found["forward" if name in ("forward", "scoring") else "pretraining"]
        values["ratio"] = values["tokens_per_second"] / beside["tokens_per_second"]
    return found


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def table(found: dict[str, dict[str, float]]) -> str:
    lines = [f"{'':16}{'tokens':>8}{'padded':>8}{'tokens/s':>12}{'ratio':>8}"]
    lines += [
        f"{name:16}{v['tokens']:8.0f}{v['padded']:8.2f}{v['tokens_per_second']:12,.0f}{v['ratio']:8.2f}"
        for name, v in found.items()
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=6)
    add("--hidden", type=int, default=384, help="a multiple of 64 (default: 384)")
    add("--length", type=int, default=128, help="tokens of a sequence (default: 128)")
    add("--rows", type=int, default=16, help="sequences of a micro-batch (default: 16)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--threads", type=int, default=None)
    add("--repeats", type=int, default=8)
    add("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args(arguments)
    check_at_least(options, 1, "layers", "rows", "repeats", "threads")
    check_at_least(options, 64, "hidden", "length")
    check_places(result=options.json)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as directory:
        config, batches = cases(options, Path(directory))
        context: ParallelContext = initialize(Launch.from_environment(None), config.parallel, 600.0)
        engine = PlainEngine(replace(config), context, len(LOSS_NAMES) + 1)
        found = measure(engine, batches, options.repeats)
        context.close()
    print(table(found))
    if options.json is not None:
        write_json(options.json, found)
    return 0


if __name__ == "__main__":
    run_command(main)
