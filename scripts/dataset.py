#!/usr/bin/env python3
"""Inspect, verify, merge and push finished datasets, and adopt those of other programs. See docs/data_format.md.

python scripts/dataset.py inspect data/corpus_train
python scripts/dataset.py verify data/corpus_train data/corpus_validation
python scripts/dataset.py push data/corpus_train s3://bucket/corpus_train
python scripts/dataset.py merge data/books data/news --output data/all
python scripts/dataset.py stats data/all --histogram lengths.png
python scripts/dataset.py adopt megatron/books_text_document
python scripts/dataset.py vectors entity2vec.vec --output entities.npy
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_utils.common.errors import (
    ArgumentParser,
    ConfigError,
    DataError,
    expanded_path,
    local_path,
    run_command,
)
from data_utils.common.files import require_named
from data_utils.common.setting_files import shorten
from data_utils.common.urls import is_url
from data_utils.dataset import verification
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import read_manifest, require_local, tokenizer_name
from data_utils.dataset.sources import sources_of
from data_utils.dataset.tools import (
    adopt_dataset,
    length_statistics,
    merge_datasets,
    token_counts,
)
from data_utils.dataset.transfer import push_dataset, verify_stored
from data_utils.dataset.vectors import convert_vectors
from data_utils.tokenizers.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer

TEXT_CHARACTERS = 600  # of a sample document


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    inspect = commands.add_parser(
        "inspect", help="print a summary of the manifest and some documents as text"
    )
    inspect.add_argument("prefix", type=expanded_path)
    inspect.add_argument("--documents", type=int, default=3, help="number of documents to show (default: 3)")
    inspect.add_argument(
        "--document", type=int, nargs="+", help="show the documents with these indices instead"
    )

    verify = commands.add_parser(
        "verify", help="read the whole dataset and check checksums, index, ids and document ends"
    )
    verify.add_argument("prefix", type=expanded_path, nargs="+")

    push = commands.add_parser("push", help="write a dataset into a bucket, its manifest last")
    push.add_argument("prefix", type=expanded_path)
    push.add_argument("url", type=expanded_path, help="prefix in the bucket: s3://bucket/name (gs://, az://)")
    push.add_argument("--overwrite", action="store_true", help="replace another dataset of this name")

    merge = commands.add_parser(
        "merge", help="merge datasets with the same tokenizer, without tokenizing again"
    )
    merge.add_argument("prefix", type=expanded_path, nargs="+")
    merge.add_argument("--output", type=expanded_path, required=True, help="output prefix")
    merge.add_argument("--overwrite", action="store_true", help="replace existing output")

    stats = commands.add_parser(
        "stats", help="print the numbers of documents and tokens and the document lengths"
    )
    stats.add_argument("prefix", type=expanded_path)
    stats.add_argument(
        "--histogram", type=local_path, metavar="FILE", help="plot the document lengths (PNG, SVG or PDF)"
    )
    stats.add_argument(
        "--tokens", action="store_true", help="also count every token (reads the whole dataset)"
    )

    adopt = commands.add_parser("adopt", help="write a manifest for .bin and .idx files of another program")
    adopt.add_argument("prefix", type=expanded_path, nargs="+")

    text = "make each sequence a document, even if the index joins several (sentences) to one"
    adopt.add_argument("--by-sequence", action="store_true", help=text)

    vectors = commands.add_parser("vectors", help="convert entity vectors from text to a .npy file")
    vectors.add_argument(
        "text",
        type=expanded_path,
        help="text file with one line of numbers per entity, in the order of the ids",
    )
    vectors.add_argument("--output", type=local_path, required=True, help="output file, *.npy")

    for command in (inspect, stats):
        text = "current path of the tokenizer's files (default: the one in the manifest)"
        command.add_argument("--tokenizer-path", type=expanded_path, help=text)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if getattr(arguments, "documents", 0) < 0:
        raise ConfigError(f"--documents is {arguments.documents}; it must be 0 or more.")
    if getattr(arguments, "histogram", None):
        require_named(Path(arguments.histogram), "--histogram")
    if arguments.command not in ("inspect", "verify"):
        prefixes = getattr(arguments, "prefix", [])
        for prefix in [prefixes] if isinstance(prefixes, str) else prefixes:
            require_local(prefix)
    COMMANDS[arguments.command](arguments)


def inspect(arguments: argparse.Namespace) -> None:
    if is_url(arguments.prefix):
        manifest = read_manifest(arguments.prefix)
        print_stored(arguments.prefix, manifest)
        print_facts(manifest)
        return
    dataset = IndexedDataset(arguments.prefix)
    print_size(dataset)
    print_facts(dataset.manifest)
    count = min(arguments.documents, len(dataset))
    numbers = arguments.document or np.linspace(0, len(dataset) - 1, count).astype(int).tolist()
    tokenizer = find_tokenizer(dataset, arguments.tokenizer_path) if numbers else None
    for number in numbers:
        print_document(dataset, number, tokenizer)


def print_facts(manifest: Mapping[str, Any]) -> None:
    """What a manifest says besides the size."""
    for key in (
        "adopted",
        "num_sequences",
        "largest_id",
        "tokenizer",
        "split",
        "merged",
        "bad_records",
        "duplicates",
        "contamination",
        "cleaning",
        "entities",
        "text_pairs",
    ):
        if value := manifest.get(key):
            print(f"  {key}: {shorten(described(key, value), TEXT_CHARACTERS)}")
    if first := next(sources_of(manifest), None):
        count = sum(1 for _ in sources_of(manifest))
        print(f"  sources: {count:,}, the first {first[0]} ({first[1]:,} bytes)")


def described(key: str, value: Any) -> str:
    """An entry of a manifest in words."""
    if key == "tokenizer":
        return tokenizer_name(value)
    if key == "cleaning":
        return "; ".join(map(cleaned, value))
    return in_words(value)


def cleaned(record: dict[str, Any]) -> str:
    """The record of a cleaning run in words, without its thresholds."""
    counts = {name: rule.get("documents") for name, rule in record.get("rules", {}).items()}
    kept = f"{in_words(record['out']['documents'])} of {in_words(record['in']['documents'])} documents"
    return f"{record['output']}, {kept}, rules: {in_words(counts) or 'none met a document'}"


def in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {in_words(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, list):
        return "; ".join(map(in_words, value)) or "none"
    return f"{value:,}" if type(value) is int else str(value)


def print_size(dataset: IndexedDataset) -> None:
    size = dataset.num_tokens * dataset.dtype.itemsize / 1e6
    print(
        f"{dataset.prefix}: {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens, "
        f"{dataset.dtype.name}, {size:,.1f} MB"
    )


def print_stored(prefix: str, manifest: Mapping[str, Any]) -> None:
    """As `print_size`, of a dataset in a store."""
    size = sum(entry["bytes"] for entry in manifest["files"].values()) / 1e6
    print(
        f"{prefix}: {manifest['num_documents']:,} documents, {manifest['num_tokens']:,} tokens, "
        f"{manifest['dtype']}, {size:,.1f} MB in all"
    )


def print_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> None:
    tokens = dataset.document(number)
    print(f"--- document {number}, {len(tokens):,} tokens")
    if tokenizer is None:
        print(" ".join(map(str, tokens[: TEXT_CHARACTERS // 6])))
        return
    wrong = tokens[(tokens < 0) | (tokens >= tokenizer.vocab_size)]  # opening does not read the tokens
    if len(wrong):
        ids = f"the tokenizer has {tokenizer.vocab_size} ids"
        raise dataset.damaged(".bin", f"has the id {wrong[0]} in document {number}, but {ids}")
    text = tokenizer.decode(tokens[:TEXT_CHARACTERS])  # a token is rarely shorter than a character
    print(text if len(tokens) <= TEXT_CHARACTERS >= len(text) else text[:TEXT_CHARACTERS] + " ...")


def find_tokenizer(dataset: IndexedDataset, path: str | None) -> Tokenizer | None:
    """The tokenizer that the manifest names; None, with the reason on stderr, if it cannot be loaded."""
    recorded = (dataset.manifest.get("tokenizer") or {}).get("config")
    if recorded is None and path:
        raise ConfigError("--tokenizer-path is given, but the manifest has no tokenizer; remove it.")
    if recorded is None:
        print("  the manifest has no tokenizer, so ids are shown", file=sys.stderr)
        return None
    try:
        tokenizer = load_tokenizer(TokenizerConfig(**{**recorded, **({"path": path} if path else {})}))
    except (DataError, TypeError) as error:
        if path:
            raise
        print(f"  ids are shown, because {error} (set its path with --tokenizer-path)", file=sys.stderr)
        return None
    dataset.require_tokenizer(tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.special.eos)
    return tokenizer


def verify(arguments: argparse.Namespace) -> None:
    for prefix in arguments.prefix:
        if is_url(prefix):
            manifest = verify_stored(prefix)
            count = f"{manifest['num_documents']:,} documents, {manifest['num_tokens']:,} tokens"
            print(f"{prefix}: {count}, all blocks have the checksums of the manifest")
            continue
        dataset = IndexedDataset(prefix, sequential=True)
        verification.verify(dataset)
        print(f"{prefix}: {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens, all good")


def push(arguments: argparse.Namespace) -> None:
    print(f"{arguments.prefix} is at {push_dataset(arguments.prefix, arguments.url, arguments.overwrite)}")


def adopt(arguments: argparse.Namespace) -> None:
    for prefix in arguments.prefix:
        dataset = adopt_dataset(prefix, arguments.by_sequence)
        print_size(dataset)
        if joined := dataset.manifest.get("num_sequences"):
            print(
                f"  {joined:,} sequences are joined to documents according to the index (keep them separate with "
                "--by-sequence)"
            )


def merge(arguments: argparse.Namespace) -> None:
    print_size(merge_datasets(arguments.prefix, arguments.output, arguments.overwrite))


def vectors(arguments: argparse.Namespace) -> None:
    rows, size = convert_vectors(arguments.text, arguments.output)
    print(f"{arguments.output}: {rows:,} vectors of {size}")


def stats(arguments: argparse.Namespace) -> None:
    dataset = IndexedDataset(arguments.prefix, sequential=True)
    print_size(dataset)
    lengths = length_statistics(dataset)
    print("\n".join(lengths.lines()))
    if arguments.histogram:
        lengths.save_histogram(arguments.histogram, str(dataset.prefix))
        print(f"  {arguments.histogram} written")
    if arguments.tokens:
        print_token_counts(dataset, find_tokenizer(dataset, arguments.tokenizer_path))


def print_token_counts(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> None:
    counts = token_counts(dataset)
    used = int(np.count_nonzero(counts))
    vocabulary = dataset.manifest.get("vocab_size") or len(counts)
    print(f"{used:,} of {vocabulary:,} ids occur; the most frequent:")
    for token in np.argsort(-counts, kind="stable")[: min(20, used)].tolist():
        name = repr(tokenizer.token_to_text(token)) if tokenizer else ""
        print(f"  {token:>7} {counts[token]:>16,} {counts[token] / dataset.num_tokens:7.2%}  {name}")
    if tokenizer and "unk" not in tokenizer.lacking and tokenizer.special.unk < len(counts):
        share = counts[tokenizer.special.unk] / dataset.num_tokens
        print(f"unknown tokens: {counts[tokenizer.special.unk]:,} ({share:.4%})")


COMMANDS = {f.__name__: f for f in (inspect, verify, push, merge, stats, adopt, vectors)}


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
