#!/usr/bin/env python3
"""Our compiled encoders compared with the library and two packages with the same aim: exactness, speed, memory.

    python benchmarks/encoders.py --text corpus.jsonl --tokenizer bpe/tokenizer.json --tokenizer wp/tokenizer.json

The packages gigatoken (BPE) and nanotoken (WordPiece) are measured where they are installed, as a corpus build uses
them. Every encoder runs alone in a process of its own, on one thread, over all texts in batches, after the same number
of warm-up texts, in every repeat in another order. Prints a Markdown table: MB of text per CPU second (median), peak
memory beyond that of the process before the encoder was made, whether every id of the corpus equals the library's, and
how many of the random strings (characters of many scripts, special names, spaces) are encoded differently. Exit status
1 if our encoder differs anywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_utils.common.entry  # noqa: F401

# isort: split
import numpy as np
import tokenizers

from benchmarks.arguments import check_at_least
from data_utils.common.errors import ArgumentParser, DataError, run_command
from data_utils.tokenizers.fast.encoders import SAMPLE, LibraryEncoder, fast_encoder
from data_utils.tokenizers.fast.package_encoders import package_encoder

PACKAGES = {"BPE": "gigatoken", "WordPiece": "nanotoken"}
BATCH_CHARACTERS = 1 << 20
WARM_UP_TEXTS = 200
RANDOM_STRINGS = 20_000


def make(name: str, path: Path) -> Any:
    backend = tokenizers.Tokenizer.from_file(str(path))
    if name == "library":
        return LibraryEncoder(backend)
    if name == "ours":
        encoder = fast_encoder(backend)
        if encoder is None:
            raise DataError(
                f"{path}: there is no compiled encoder for this pipeline; give another tokenizer."
            )
        return encoder
    return package_encoder(name, backend)


def batches(texts: list[str]) -> list[list[str]]:
    """Texts in groups of about BATCH_CHARACTERS."""
    groups: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size > BATCH_CHARACTERS:
            groups.append([])
            size = 0
        groups[-1].append(text)
        size += len(text)
    return groups


def random_strings(count: int) -> list[str]:
    """Strings of up to 12 parts, drawn with a fixed seed from awkward texts, letters, marks and any code points."""
    draw = random.Random(0)
    parts = [
        *(text for text in SAMPLE if 0 < len(text) < 40),
        *"abcXYZ 019.,!?'-_\n\t\u00e9\u0301\u4eca\u5929\ud55c",
    ]
    strings = []
    for _ in range(count):
        made = [draw.choice(parts) for _ in range(draw.randint(1, 12))]
        made += [chr(draw.choice((draw.randrange(0x20, 0x3000), draw.randrange(0xE000, 0x11000))))] * (
            draw.random() < 0.5
        )
        draw.shuffle(made)
        strings.append("".join(made).encode("utf-8", "replace").decode())
    return strings


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(name: str, path: Path, texts: list[str], strings: list[str], results: Any) -> None:
    """In a separate process: put the digest of all ids, CPU seconds, KiB, and the ids of the strings."""
    before = peak_kib()
    encoder = make(name, path)
    encoder.encode(texts[:WARM_UP_TEXTS])
    digest, seconds = hashlib.sha256(), 0.0
    for batch in batches(texts):
        start = time.process_time()
        ids, lengths = encoder.encode(batch)
        seconds += time.process_time() - start
        digest.update(
            np.ascontiguousarray(ids, np.int64).tobytes() + np.ascontiguousarray(lengths, np.int64).tobytes()
        )
    memory = peak_kib() - before
    own = [encoder.encode([text])[0].tolist() for text in strings]
    results.put((digest.hexdigest(), seconds, memory, own))


def plain_pipeline(path: Path, directory: Path) -> Path:
    """A copy of a tokenizer.json that takes names of special tokens for text, as corpora are encoded."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        tree |= {"added_tokens": [], "post_processor": None}
        copy = directory / "tokenizer.json"
        copy.write_text(json.dumps(tree), encoding="utf-8")
        tokenizers.Tokenizer.from_file(str(copy))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"--tokenizer {path}: {error}; give a tokenizer.json.") from None
    return copy


def read_texts(path: Path, megabytes: int) -> list[str]:
    texts, size = [], 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                texts.append(json.loads(line)["text"])
                size += len(texts[-1])
                if size > megabytes << 20:
                    break
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"--text {path}: {error}; give JSON lines with a field text.") from None
    return texts


def compare(path: Path, texts: list[str], repeats: int) -> bool:
    """Print one tokenizer's rows. Returns whether our ids are the library's."""
    kind = type(tokenizers.Tokenizer.from_file(str(path)).model).__name__
    names = ["library", "ours"]
    if importlib.util.find_spec(PACKAGES.get(kind, "-")) is not None:
        names.append(PACKAGES[kind])
    strings = random_strings(RANDOM_STRINGS)
    size = sum(len(text.encode()) for text in texts) / 1e6
    found: dict[str, list[tuple]] = {name: [] for name in names}
    context = multiprocessing.get_context("fork")
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            results = context.SimpleQueue()
            process = context.Process(target=measure, args=(name, path, texts, strings, results))
            process.start()
            while process.is_alive() and results.empty():
                process.join(0.05)
            if results.empty():
                raise DataError(
                    f"{name} ended with status {process.exitcode} on {path}; see its output above."
                )
            found[name].append(results.get())
            process.join()
    expected = found["library"][0]
    for name in names:
        digest, _, _, ids = found[name][0]
        wrong = sum(mine != theirs for mine, theirs in zip(ids, expected[3], strict=True))
        rate = statistics.median(size / seconds for _, seconds, _, _ in found[name])
        memory = max(kib for _, _, kib, _ in found[name]) / 1024
        same = "yes" if digest == expected[0] else "no"
        print(
            f"| {kind} | {name} | {rate:.1f} | {memory:.0f} | {same} | {wrong} of {len(strings)} |",
            flush=True,
        )
    return found["ours"][0][0] == expected[0] and found["ours"][0][3] == expected[3]


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--text", type=Path, required=True, help="JSON lines with a field text")
    add("--tokenizer", type=Path, action="append", required=True, help="a tokenizer.json; may be repeated")
    add("--megabytes", type=int, default=30, help="text used, from the start (default: 30)")
    add("--repeats", type=int, default=3, help="(default: 3)")
    options: argparse.Namespace = parser.parse_args(arguments)
    check_at_least(options, 1, "megabytes", "repeats")
    texts = read_texts(options.text, options.megabytes)
    print(
        "| family | encoder | MB per CPU s | MiB | corpus equal | strings that differ |\n|---|---|---|---|---|---|"
    )
    equal = True
    for path in options.tokenizer:
        with tempfile.TemporaryDirectory() as directory:
            equal &= compare(plain_pipeline(path, Path(directory)), texts, options.repeats)
    return 0 if equal else 1


if __name__ == "__main__":
    run_command(main)
