"""Small tasks with a known answer, a tokenizer of whole words, and the configuration of a model for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data_utils.common.settings import merge
from megatron_lite.finetune.setup import Task, load_tree, prepare

WORDS = ["good", "bad", "film", "plot", "Yes", "No", "yes", "no", "It", "was", ".", "?", ",", '"']


def write_vocabulary(directory: Path) -> Path:
    """vocab.txt of BERT's kind, without GLM's tokens."""
    path = directory / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return path


def votes(seed: int, count: int, words: int = 5) -> list[dict[str, Any]]:
    """Texts of good and bad, labelled by the majority."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 2, (count, words))
    return [
        {
            "text": " ".join("good" if word else "bad" for word in row),
            "label": str(int(row.sum() > words // 2)),
        }
        for row in drawn
    ]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def write_task(directory: Path, train: int = 64, **task: Any) -> tuple[str, str]:
    """A model's file and a task's file with their data. Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    model = {
        "model": {
            "num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_position": 48, "init_std": 0.1,
            "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0, "task_head": {"dropout": 0.0},
        },
        "tokenizer": {"kind": "bert_wordpiece", "path": str(write_vocabulary(directory))},
        "data": {"sequence_length": 32},
        "training": {"precision": "fp32", "steps": 100000},
        "schedule": {"warmup_steps": 5000},
        "batch": {"micro_batch_size": 8, "global_batch_size": 16},
        "optimizer": {"lr": 3e-3},
        "run": {"log_interval": 10, "tensorboard": False},
    }  # fmt: skip
    section = {
        "name": "votes",
        "kind": "classification",
        "reader": "jsonl",
        "train": write_lines(directory / "train.jsonl", votes(0, train)),
        "validation": [write_lines(directory / "validation.jsonl", votes(1, 32))],
        "labels": ["0", "1"],
        "sequence_length": 24,
        **task,
    }
    files = []
    for name, tree in (("model", model), ("task", {"task": section, "finetune": {"epochs": 8}})):
        path = directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        files.append(str(path))
    return files[0], files[1]


def task_of(files: tuple[str, str], output: Path, *overrides: str) -> Task:
    """The task of a model's file and a task's file, with overrides, for a run below `output`."""
    tree = load_tree([files[0]], files[1], overrides)
    return prepare(merge(tree, {"run": {"directory": str(output)}}))
