"""Tasks about mentions whose best score is 1, and which only marks, or only entities, can solve.

typing      a text has two names, one of them between marks; the labels are the types of this one
relation    a text has two names, the head and the tail; some heads have no relation, others one that the tail says
entities    a text has one word, which has two meanings; the types follow from the entity that it is linked to
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

TYPES = ("person", "place", "work", "group")
RELATIONS = ("wrote", "visited", "no_relation")
NAMES, FILLERS, WORDS = 6, 4, 4
SIZE, THRESHOLD = 8, 0.3
# Names -> numbers of their types; each has some, two of them one alone.
TYPES_OF = [(0, 1), (1,), (0, 2), (2, 3), (3,), (1, 2, 3)]
VOCABULARY = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "#", "$", "\u3002"),
    *(f"{word}{i}" for word in ("name", "then", "word") for i in range(max(NAMES, FILLERS, WORDS))),
]


def _text(words: list[str]) -> tuple[str, list[list[int]]]:
    """The words as a text, and the place of each."""
    ends = np.cumsum([len(word) + 1 for word in words])
    return " ".join(words), [
        [int(end) - 1 - len(word), int(end) - 1] for word, end in zip(words, ends, strict=True)
    ]


def _two_names(rng: np.random.Generator) -> tuple[str, list[int], list[list[int]]]:
    """A text with two names; which they are, and their places, in an order that the text does not show."""
    names = rng.permutation(NAMES)[:2].tolist()
    first, second, last = (f"then{i}" for i in rng.integers(FILLERS, size=3))
    text, places = _text([first, f"name{names[0]}", second, f"name{names[1]}", last])
    order = [0, 1] if rng.integers(2) else [1, 0]
    return text, [names[i] for i in order], [places[1 + 2 * i] for i in order]


def typing(rng: np.random.Generator) -> dict[str, Any]:
    text, names, places = _two_names(rng)
    return {"text": text, "mention": places[0], "label": [TYPES[number] for number in TYPES_OF[names[0]]]}


def relation(rng: np.random.Generator) -> dict[str, Any]:
    text, names, places = _two_names(rng)
    head, tail = names
    label = RELATIONS[2 if head < NAMES // 3 else tail % 2]
    return {"text": text, "head": places[0], "tail": places[1], "label": label}


def entities(rng: np.random.Generator) -> dict[str, Any]:
    """The entity of a word, a wrong one of a low score, and one that no file of numbers has."""
    word, meaning = int(rng.integers(WORDS)), int(rng.integers(2))
    text, places = _text([f"then{rng.integers(FILLERS)}", f"word{word}", f"then{rng.integers(FILLERS)}"])
    linked = [[*places[1], f"Q{2 * word + meaning}", 0.9], [*places[0], f"Q{2 * word + 1 - meaning}", 0.1]]
    linked.append([*places[2], "unknown", 0.9])
    return {"text": text, "mention": places[1], "label": [TYPES[meaning]], "entities": linked}


SECTIONS: dict[str, dict[str, Any]] = {
    "typing": {"kind": "typing", "labels": list(TYPES)},
    "relation": {
        "kind": "classification", "labels": list(RELATIONS), "marks": {"head": "#", "tail": "$"},
        "metrics": ["micro_f1", "accuracy"], "negative": "no_relation",
    },
    "entities": {"kind": "typing", "labels": list(TYPES[:2]), "min_score": THRESHOLD},
}  # fmt: skip
_DRAWN: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "typing": typing, "relation": relation, "entities": entities,
}  # fmt: skip


def write_lines(path: Path, name: str, count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    path.write_text("".join(json.dumps(_DRAWN[name](rng)) + "\n" for _ in range(count)))
    return str(path)


def write_ernie(directory: Path) -> tuple[str, str]:
    """The files of entity numbers and of their vectors."""
    count = 2 * WORDS
    names = "".join(f"Q{entity}\t{entity}\n" for entity in range(count))
    (directory / "ids.txt").write_text(f"{count}\n{names}")
    np.save(directory / "vectors.npy", np.random.default_rng(3).normal(size=(count, SIZE)).astype(np.float32))
    return str(directory / "ids.txt"), str(directory / "vectors.npy")


def write_task(directory: Path, name: str, train: int = 512, **task: Any) -> tuple[str, str]:
    """A model's file and a task's file with their data, as `support.tasks.tasks.write_task`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    model: dict[str, Any] = {
        "model": {
            "system": "bert", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position": 31,
            "init_std": 0.1, "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0,
            "task_head": {"dropout": 0.0},
        },
        "tokenizer": {"kind": "bert_wordpiece", "path": str(directory / "vocab.txt"), "added_tokens": "none"},
        "data": {"sequence_length": 28}, "objectives": {"masked_lm": 1},
        "training": {"precision": "fp32"},
        "batch": {"micro_batch_size": 16, "global_batch_size": 16},
        "optimizer": {"lr": 5e-3, "beta2": 0.99, "weight_decay": 0.0},
        "run": {"log_interval": 10, "tensorboard": False},
    }  # fmt: skip
    if name == "entities":
        ids, vectors = write_ernie(directory)
        task = {"entity_ids": ids, **task}
        model["objectives"] = {"entities": 1}
        model["entities"] = {"size": SIZE, "heads": 2, "vectors": vectors}
    section = {
        "name": name, "reader": "jsonl", "sequence_length": 24,
        "train": write_lines(directory / "train.jsonl", name, train, 1),
        "validation": [write_lines(directory / "validation.jsonl", name, 128, 2)],
        **SECTIONS[name], **task,
    }  # fmt: skip
    files = []
    for file, tree in (("model", model), ("task", {"task": section, "finetune": {"epochs": 6}})):
        path = directory / f"{file}.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
        files.append(str(path))
    return files[0], files[1]
