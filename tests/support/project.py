"""Where the project is, a copy of it, and the configuration of a very small run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks/README.md"]


def small_run(corpus: Path, directory: Path) -> dict:
    """Configuration tree of a two-layer model on `corpus`: fp32, no dropout, 8 samples a step."""
    dropout = {name: 0.0 for name in ("embedding_dropout", "attention_dropout", "output_dropout")}
    return {
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "max_position": 64,
            **dropout,
        },
        "training": {"steps": 6, "precision": "fp32", "seed": 7, "eval_interval": 0, "eval_samples": 16},
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_steps": 2},
        "tokenizer": {"kind": "bert_wordpiece", "path": str(corpus / "vocab.txt")},
        "data": {
            "train": [{"prefix": str(corpus / "corpus_train")}],
            "validation": [{"prefix": str(corpus / "corpus_validation")}],
            "sequence_length": 64,
        },
        "blank_infilling": {"token_prob": 0.5, "sentence_prob": 0.2},
        "checkpoint": {"save_interval": 0},
        "run": {
            "directory": str(directory),
            "log_interval": 1,
            "tensorboard": False,
            "peak_tflops": 1.0,
        },
    }


def small_corpus(directory: Path) -> Path:
    """A directory with vocab.txt and the datasets corpus_train, corpus_validation: 1 to 60 random words a document."""
    from data_utils.build.corpus import BuildConfig, build_corpus
    from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer

    words = [f"word{i}" for i in range(60)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (directory / "vocab.txt").write_text("\n".join([*special, ".", *words]) + "\n")
    rng = np.random.default_rng(0)
    with (directory / "text.jsonl").open("w") as file:
        for _ in range(400):
            chosen = [*rng.choice(words, rng.integers(1, 60)), "."]
            file.write(json.dumps({"text": " ".join(chosen)}) + "\n")
    tokenizer = TokenizerConfig(kind="bert_wordpiece", path=str(directory / "vocab.txt"))
    build_corpus(
        BuildConfig(
            inputs=[str(directory / "text.jsonl")],
            output=str(directory / "corpus"),
            split="train=0.8,validation=0.2",
        ),
        lambda: load_tokenizer(tokenizer),
    )
    return directory


def copied_project(directory: Path) -> Path:
    """A copy of the program, with what numba has compiled already."""
    for package in ("data_utils", "megatron_lite"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("*.tmp*"))
    shutil.copy2(ROOT / "pretrain_glm.py", directory)
    return directory
