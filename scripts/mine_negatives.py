#!/usr/bin/env python3
"""Mine hard negatives of text pairs: the nearest documents that do not belong to a query. See docs/data_text_pairs.md.

    python scripts/embed.py --checkpoint runs/v1 --input pairs.jsonl --text-key query --output queries.npy
    python scripts/embed.py --checkpoint runs/v1 --input pairs.jsonl --text-key positive --output documents.npy
    python scripts/mine_negatives.py --input pairs.jsonl --query-vectors queries.npy \
        --document-vectors documents.npy --negatives 4 --output mined.jsonl

A row of vectors is of one text, in the order of the records. The documents are the positives of the pairs, or the texts
of --documents, which must hold all positives.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from data_utils.build.hard_negatives import Texts, mine, open_vectors
from data_utils.build.text_pairs import objects_of, only_column, texts_of
from data_utils.common.errors import (
    ArgumentParser,
    ConfigError,
    DataError,
    expanded_path,
    local_path,
    run_command,
)
from data_utils.common.files import disk_errors, new_file, require_named
from data_utils.corpus.documents import read_documents
from data_utils.corpus.inputs import expand_inputs
from data_utils.corpus.json_records import UnusableRecord


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add(
        "--input",
        type=expanded_path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines or tables of pairs",
    )
    text = ".npy [records, numbers]: the vector of the query of each record"
    add("--query-vectors", type=local_path, required=True, metavar="FILE", help=text)
    text = ".npy [documents, numbers]: the vector of each document"
    add("--document-vectors", type=local_path, required=True, metavar="FILE", help=text)
    text = "texts to choose negatives from (default: the positives, one of each record)"
    add("--documents", type=expanded_path, nargs="+", metavar="FILE", help=text)
    add("--text-key", default="text", help="field or column of --documents with the text (default: text)")
    add("--query-column", metavar="NAME", help="default: as scripts/preprocess_data.py --text-pairs finds it")
    add("--positive-column", metavar="NAME", help="the same")
    add("--negatives", type=int, default=4, metavar="H", help="of each record, at most (default: 4)")
    text = "how far below the cosine of the positive a negative's is at least (default: 0)"
    add("--margin", type=float, default=0.0, help=text)
    add(
        "--output",
        type=local_path,
        required=True,
        metavar="FILE",
        help="JSON lines: the records with `negatives`",
    )
    arguments = parser.parse_args()
    if arguments.negatives < 1:
        raise ConfigError(f"--negatives is {arguments.negatives}; it must be 1 or more.")
    if not 0 <= arguments.margin <= 2:
        raise ConfigError(
            f"--margin is {arguments.margin}; it must be from 0 to 2, as cosines differ at most."
        )
    require_named(Path(arguments.output), "--output", (".jsonl",))
    return arguments


def documents_of(arguments: argparse.Namespace, positives: Sequence[Sequence[str]]) -> Texts:
    """The documents with their vectors. Raises DataError for positives without a vector."""
    if arguments.documents is None:
        several = next((number for number, texts in enumerate(positives, 1) if len(texts) != 1), None)
        if several is not None:
            raise DataError(
                f"record {several} has {len(positives[several - 1])} positives, so rows of vectors cannot be told; "
                "give the texts with --documents."
            )
        texts = [text for (text,) in positives]
    else:
        texts = [document.text for document in read_documents(arguments.documents, arguments.text_key)]
    path = arguments.document_vectors
    documents = Texts.of(texts, open_vectors(path, "--document-vectors", len(texts), "documents"))
    for number, own in enumerate(positives, start=1):
        if not all(text in documents.numbers for text in own):
            raise DataError(
                f"a positive of record {number} is not among --documents; add all positives to them."
            )
    return documents


def main() -> None:
    arguments = parse_arguments()
    records = list(objects_of(expand_inputs(arguments.input)))
    fields = list(dict.fromkeys(name for record in records for name in record))
    query, positive = (
        getattr(arguments, f"{role}_column") or only_column(role, fields) for role in ("query", "positive")
    )
    queries, positives = [], []
    for number, record in enumerate(records, start=1):
        texts = [located_texts(record, name, number) for name in (query, positive)]
        if len(texts[0]) > 1:
            raise DataError(f"record {number}: field {query!r} holds {len(texts[0])} texts; a query is one.")
        queries.append(texts[0][0])
        positives.append(texts[1])
    vectors = open_vectors(arguments.query_vectors, "--query-vectors", len(queries), "records")
    documents = documents_of(arguments, positives)
    if vectors.shape[1] != documents.vectors.shape[1]:
        raise DataError(
            f"--query-vectors have {vectors.shape[1]} numbers and --document-vectors {documents.vectors.shape[1]}; "
            "make both with one model."
        )
    names, counts = list(documents.numbers), [0] * (arguments.negatives + 1)
    mined = mine(queries, vectors, positives, documents, arguments.negatives, arguments.margin)
    with disk_errors(arguments.output), new_file(Path(arguments.output)) as file:
        for record, (numbers, _) in zip(records, mined, strict=True):
            counts[len(numbers)] += 1
            negatives = [names[number] for number in numbers]
            file.write(orjson.dumps({**record, "negatives": negatives}) + b"\n")
    fewer = sum(counts[:-1])
    print(
        f"{arguments.output}: {len(records):,} records of {len(names):,} documents; {fewer:,} have fewer than "
        f"{arguments.negatives} negatives"
    )


def located_texts(record: dict[str, Any], name: str, number: int) -> list[str]:
    """The texts of a field, at least one. Raises DataError that names the record."""
    try:
        texts = texts_of(record, name, True)
    except UnusableRecord as error:
        raise DataError(f"record {number}: {error}; correct or remove it.") from None
    if not texts:
        raise DataError(f"record {number}: field {name!r} is empty; remove the record.")
    return texts


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
