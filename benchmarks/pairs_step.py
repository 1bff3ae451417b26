#!/usr/bin/env python3
"""CPU seconds of a training step on text pairs, beside sentence-transformers: equal model, batches and optimizer.

Both start from one directory of sentence-transformers (a BERT of the size of all-MiniLM-L6-v2, random weights, dropout
0.1) and train InfoNCE with AdamW in fp32 on the same records, in turns of `--steps` steps. sentence-transformers pads
each column of a batch to its longest text; this project packs all texts of a micro-batch. Texts are random words, one
token each: queries of 4 to 16 words, documents of a log-normal number, or all of one length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import torch

from benchmarks.arguments import check_at_least, check_places, write_json
from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.errors import ArgumentParser, run_command
from data_utils.common.settings import build, merge
from data_utils.loader.loader import open_datasets
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config, load_file
from megatron_lite.engine.plain import make_engine
from megatron_lite.hf.importing import import_directory
from megatron_lite.parallel.context import initialize
from megatron_lite.parallel.launch import Launch
from megatron_lite.train.trainer import Trainer
from megatron_lite.transformer.build import model_spec

WORDS, RATE, TURNS, TIMEOUT_SECONDS = 8_000, 2e-5, 3, 600


def random_texts(rng: np.random.Generator, lengths: np.ndarray) -> list[str]:
    return [" ".join(f"w{word}" for word in rng.integers(0, WORDS, length)) for length in lengths]


def records_of(count: int, longest: int, unequal: bool) -> list[dict[str, str]]:
    rng = np.random.default_rng(0)
    queries, documents = np.full((2, count), longest - 2)  # [CLS] and [SEP] come to each
    if unequal:
        queries = rng.integers(4, 17, count)
        documents = np.minimum(rng.lognormal(np.log(longest / 3), 0.6, count).astype(int) + 1, longest - 2)
    texts = random_texts(rng, queries), random_texts(rng, documents)
    return [{"query": query, "positive": positive} for query, positive in zip(*texts, strict=True)]


def write_model(directory: Path, longest: int, layers: int, size: int) -> None:
    import sentence_transformers
    from sentence_transformers.sentence_transformer import modules
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = directory / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*special, *(f"w{number}" for number in range(WORDS))]) + "\n")
    tokenizer = BertTokenizerFast(str(vocabulary))
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=size, num_hidden_layers=layers, num_attention_heads=size // 32,
        intermediate_size=4 * size, max_position_embeddings=longest,
    )  # fmt: skip
    torch.manual_seed(0)
    BertModel(config).save_pretrained(directory / "bert")
    tokenizer.save_pretrained(directory / "bert")
    transformer = modules.Transformer(str(directory / "bert"), max_seq_length=longest)
    pooling = modules.Pooling(transformer.get_embedding_dimension())
    sentence_transformers.SentenceTransformer(modules=[transformer, pooling]).save(str(directory / "model"))


class Theirs:
    def __init__(self, model: Path, records: list[dict[str, str]], batch: int):
        import sentence_transformers
        from sentence_transformers.sentence_transformer import losses

        self.model = sentence_transformers.SentenceTransformer(str(model), device="cpu").train()
        self.loss_of = losses.MultipleNegativesRankingLoss(self.model, scale=20.0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
        self.batches = [records[first : first + batch] for first in range(0, len(records), batch)]
        self.step = 0

    def train_step(self) -> float:
        batch = self.batches[self.step % len(self.batches)]
        self.step += 1
        columns = [[record[name] for record in batch] for name in ("query", "positive")]
        loss = self.loss_of([self.model.preprocess(column) for column in columns], None)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # as its trainer does
        self.optimizer.step()
        return float(loss.detach())


def our_trainer(directory: Path, longest: int, batch: int, context: Any) -> Trainer:
    import_directory(directory / "model", directory / "run", {})
    imported = load_file(directory / "run/config.yaml")
    tokenizer = build(TokenizerConfig, imported["tokenizer"])
    corpus = BuildConfig(
        inputs=[str(directory / "pairs.jsonl")], output=str(directory / "pairs"), text_pairs=True
    )
    build_corpus(corpus, partial(load_tokenizer, tokenizer))
    changes = {
        "objectives": {"masked_lm": 0.0, "contrastive": 1.0},
        "contrastive": {"query_length": longest, "document_length": longest},
        "data": {
            "train": [{"prefix": str(directory / "pairs"), "objective": "contrastive"}],
            "validation": [],
        },
        "training": {"steps": 1_000_000, "eval_interval": 0, "precision": "fp32"},
        "batch": {"global_batch_size": batch, "micro_batch_size": batch},
        "optimizer": {"lr": RATE},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "checkpoint": {"save_interval": 0},
        "run": {"directory": str(directory / "run"), "tensorboard": False, "peak_tflops": 1.0},
    }
    config = build(Config, merge(imported, changes)).with_vocab_size(load_tokenizer(tokenizer).vocab_size)
    data = open_datasets(
        config.data, config.objective_choices, load_tokenizer(tokenizer), config.training.seed,
        phases=config.phase_plan.samples, unit=config.sample_unit,
    )  # fmt: skip
    engine = make_engine(config, context, len(data.loss_names))
    samples = model_spec(config).samples(config, data.train, "train")
    return Trainer(config, context, engine, samples, None, data.loss_names)


def measure(options: argparse.Namespace, unequal: bool, context: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        records = records_of(options.batch * 64, options.longest, unequal)
        (directory / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        write_model(directory, options.longest, options.layers, options.size)
        theirs = Theirs(directory / "model", records, options.batch)
        trainer = our_trainer(directory, options.longest, options.batch, context)
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(TURNS + 1):
            for which, train_step in (("ours", trainer.train_step), ("theirs", theirs.train_step)):
                start = time.process_time()
                for _ in range(options.steps):
                    train_step()
                if turn:  # the first one warms up
                    seconds[which].append((time.process_time() - start) / options.steps)
        trainer._prefetch.close()
    ratios = [their / our for our, their in zip(seconds["ours"], seconds["theirs"], strict=True)]
    medians = {which: round(statistics.median(values), 4) for which, values in seconds.items()}
    return {"texts": "unequal" if unequal else "of one length", **medians, "ratio": statistics.median(ratios)}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32, help="pairs of a step (32)")
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest text (128)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn (5)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    check_at_least(options, 1, "batch", "layers", "size", "steps", "threads")
    check_at_least(options, 20, "longest")
    check_places(result=options.json)
    torch.set_num_threads(options.threads)
    context = initialize(Launch(0, 1, 0), ParallelConfig(), timeout_seconds=TIMEOUT_SECONDS)
    print("texts         ours, s   sentence-transformers, s   ratio")
    rows = []
    for unequal in (True, False):
        row = measure(options, unequal, context)
        rows.append(row)
        print(f"{row['texts']:<13} {row['ours']:<9.3f} {row['theirs']:<26.3f} {row['ratio']:.2f}", flush=True)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    run_command(main)
