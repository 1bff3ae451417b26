"""Texts and recipes for tests of cleaning, and the steps of datatrove's own example."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import yaml
from datatrove.data import Document
from datatrove.pipeline.dedup import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WhitespaceTokenizer
from support.commands import forked

SCRIPT = "scripts/clean_corpus.py"


class Spaces(WhitespaceTokenizer):
    """Words at spaces, written again for the reference."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split(None)


def words(generator: random.Random, count: int) -> list[str]:
    """Words of letters alone, because datatrove makes every number 0."""
    return ["".join(generator.choices("abcdefghijklmnopqrst", k=7)) for _ in range(count)]


def pair(generator: random.Random, length: int, shared: int) -> tuple[str, str]:
    """Two texts of `length` words that begin with the same `shared` words."""
    common = words(generator, shared)
    first, second = (" ".join(common + words(generator, length - shared)) for _ in range(2))
    return first, second


def similarity(length: int, shared: int) -> float:
    """The Jaccard similarity of the 5-grams of such a pair."""
    both, each = shared - 4, length - 4
    return both / (2 * each - both)


def prose() -> list[str]:
    """Paragraphs of English that every Python has: the documentation of its library."""
    import argparse
    import collections
    import logging
    import pathlib
    import shutil
    import subprocess
    import threading
    import turtle
    import typing

    texts = [
        inspect.getdoc(value) or ""
        for module in (argparse, collections, logging, pathlib, shutil, subprocess, threading, turtle, typing)
        for _, value in inspect.getmembers(module)
    ]
    found = dict.fromkeys(text for text in texts if text.strip())
    generator = random.Random(3)
    joined = [" ".join(generator.sample(list(found), 6)) for _ in range(60)]
    long = sorted(found, key=len)[-40:]
    lines = ["\n".join(" ".join(text.split()) for text in generator.sample(long, 4)) for _ in range(20)]
    return [*found, *joined, *lines]


def write_lines(path: Path, texts: Iterable[str], **fields: Sequence[Any]) -> Path:
    """JSON lines of texts; each field has a value for every text."""
    rows = (
        {"text": text, **{name: values[i] for name, values in fields.items()}} for i, text in enumerate(texts)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(directory: Path, **settings: Any) -> Path:
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def clean(directory: Path, *arguments: Any, **settings: Any) -> CompletedProcess[str]:
    """The command in `directory`, with a recipe of these settings if any are given."""
    chosen = ["--recipe", recipe(directory, **settings)] if settings else []
    return forked(SCRIPT, *chosen, "--workers", "2", *arguments, cwd=directory)


def cleaned(directory: Path, output: str, *arguments: Any, **settings: Any) -> list[dict[str, Any]]:
    """The records of the output, in its order, of a command that must succeed."""
    done = clean(directory, "--output", output, *arguments, **settings)
    assert done.returncode == 0, done.stderr
    return records(directory / output)


def records(output: Path) -> list[dict[str, Any]]:
    files = sorted((output / "text").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


def texts(found: Iterable[dict[str, Any]]) -> list[str]:
    return [record["text"] for record in found]


def without_near_duplicates(folder: Path, documents: Sequence[str], num_buckets: int = 14) -> list[str]:
    """What datatrove's example of MinHash keeps, run by its own steps in one task."""
    config = MinhashConfig(
        hash_config=HashConfig(precision=64, hash_fc="sha1"), num_buckets=num_buckets, hashes_per_bucket=8
    )
    names = [str(folder / name) for name in ("signatures", "buckets", "removed")]

    def read() -> Iterable[Document]:
        return (Document(text, str(number)) for number, text in enumerate(documents))

    MinhashDedupSignature(names[0], config, language=Spaces()).run(read())
    for bucket in range(num_buckets):
        MinhashDedupBuckets(names[0], names[1], config=config).run(None, bucket, num_buckets)
    MinhashDedupCluster(names[1], names[2], config).run(None, 0, 1)
    return [document.text for document in MinhashDedupFilter(names[2]).run(read())]
