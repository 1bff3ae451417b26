"""Files for measuring vectors: pairs of sentences with a score, queries with relevant texts, texts to rank.

STS         two sentences and a score: JSON lines, parquet, CSV or TSV; with named columns, or with three of which
            the first or the last is the score
retrieval   a directory as BEIR has it: corpus.jsonl, queries.jsonl, qrels/test.tsv
reranking   JSON lines as MTEB has them: query, positive, negative; the last two are lists of texts
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.common.errors import DataError
from data_utils.common.setting_files import shorten, shown
from data_utils.corpus.json_records import UnusableRecord, parse_json_object
from data_utils.tasks.readers.files import file_suffix, numbered_lines

_NAMES = {
    "sentence1": ("sentence1", "sentence_a", "text_a", "text1"),
    "sentence2": ("sentence2", "sentence_b", "text_b", "text2"),
    "score": ("score", "relatedness_score", "similarity_score", "label"),
}
_FORMATS = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
_TITLE, _TEXT = "title", "text"  # of a document of BEIR


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs of sentences, and how alike people find them."""

    first: list[str]
    second: list[str]
    scores: list[float]
    without_score: int  # lines that are left out


@dataclass(frozen=True)
class Retrieval:
    """Queries and documents by id, and the relevance of documents for queries."""

    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, dict[str, int]]


def read_scored_pairs(paths: Sequence[Path]) -> ScoredPairs:
    """The pairs of all files together. Raises: DataError with file and line."""
    pairs = ScoredPairs([], [], [], 0)
    without = 0
    for path in paths:
        for place, first, second, score in _pairs(path):
            if score is None or score == "":
                without += 1
                continue
            pairs.first.append(_text(first, place))
            pairs.second.append(_text(second, place))
            pairs.scores.append(_number(score, place))
    if len(set(pairs.scores)) < 2:
        raise DataError(
            f"{', '.join(map(str, paths))} has {len(pairs.scores)} pairs with a score, whose scores are all the same; "
            "a correlation needs different ones."
        )
    return ScoredPairs(pairs.first, pairs.second, pairs.scores, without)


def _pairs(path: Path) -> Iterator[tuple[str, Any, Any, Any]]:
    """The place of each pair, its sentences and its score."""
    suffix = file_suffix(path)
    if suffix not in _FORMATS:
        raise DataError(f"{path} is no file of pairs by its name; it must end in {', '.join(_FORMATS)}.")
    if suffix in (".csv", ".tsv"):
        yield from _of_columns(path, "," if suffix == ".csv" else "\t")
        return
    for place, tree in _objects(path):
        found = {name: _named(tree, names) for name, names in _NAMES.items()}
        if lacking := [name for name, key in found.items() if key is None]:
            raise DataError(
                f"{place}: there is no field {', '.join(lacking)} (fields: {shorten(', '.join(tree))}); rename fields."
            )
        yield place, *(tree[key] for key in found.values())  # type: ignore[misc, index]


def _named(keys: Mapping[str, Any] | Sequence[str], names: Sequence[str]) -> str | None:
    return next((key for key in keys if key.lower() in names), None)


def _of_columns(path: Path, delimiter: str) -> Iterator[tuple[str, Any, Any, Any]]:
    # Tabs separate texts that have quotation marks of their own; commas need them.
    quoting: Any = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    lines = (_decoded(line, f"{path}:{number}") + "\n" for number, line in numbered_lines(path))
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    try:
        rows = [(f"{path}:{reader.line_num}", row) for row in reader if row]
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: {error}; correct the line.") from None
    if not rows:
        raise DataError(f"{path} is empty; give a file of pairs.")
    header = [_named(rows[0][1], names) for names in _NAMES.values()]
    if None not in header:
        columns, rows = [rows[0][1].index(name) for name in header if name is not None], rows[1:]
    elif all(_is_score(row[-1]) for _, row in rows):
        columns = [0, 1, 2]
    elif all(_is_score(row[0]) for _, row in rows):
        columns = [1, 2, 0]
    else:
        names = "; ".join(", ".join(names) for names in _NAMES.values())
        raise DataError(
            f"{path} has neither the columns of pairs (one of {names}) nor three columns of which the first or the "
            "last is a number in every line; name the columns."
        )
    for place, row in rows:
        if len(row) <= max(columns):
            raise DataError(f"{place}: the line has {len(row)} columns; correct it.")
        yield place, *(row[column] for column in columns)  # type: ignore[misc]


def _is_score(text: str) -> bool:
    try:
        return text == "" or math.isfinite(float(text))
    except ValueError:
        return False


def _decoded(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise DataError(f"{place}: the line is not UTF-8; convert the file (iconv -t UTF-8).") from None


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, or the rows of a table, each with its place."""
    if file_suffix(path) == ".parquet":
        from data_utils.corpus.column_files import open_parquet, table_errors

        with table_errors(path):
            rows = open_parquet(path).read().to_pylist()
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    for number, line in numbered_lines(path):
        if line.strip():
            try:
                yield f"{path}:{number}", parse_json_object(line)
            except UnusableRecord as error:
                raise DataError(f"{path}:{number}: {error}; correct the line.") from None


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place}: {shown(value)} is no text; correct the line.")
    return value


def _number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not _is_score(str(value)):
        raise DataError(f"{place}: the score {shown(value)} is no number; correct the line.")
    return float(value)


def read_retrieval(directory: Path) -> Retrieval:
    """A directory of BEIR. Raises: DataError with file and line."""
    documents = {
        identity: " ".join(filter(None, (tree.get(_TITLE), _text(tree.get(_TEXT), place))))
        for place, identity, tree in _identified(directory / "corpus.jsonl")
    }
    queries = {
        identity: _text(tree.get(_TEXT), place)
        for place, identity, tree in _identified(directory / "queries.jsonl")
    }
    path = directory / "qrels" / "test.tsv"
    relevant: dict[str, dict[str, int]] = {}
    for number, line in numbered_lines(path):
        place = f"{path}:{number}"
        columns = _decoded(line, place).split("\t")
        if number == 1 and columns[-1] == "score":
            continue
        if len(columns) != 3 or not columns[2].lstrip("-").isdigit():
            raise DataError(f"{place}: the line must be query, document and a whole number; correct it.")
        query, document, score = columns
        for name, known in ((query, queries), (document, documents)):
            if name not in known:
                raise DataError(f"{place}: {shown(name)} is in no file of texts; correct the line.")
        relevant.setdefault(query, {})[document] = int(score)
    if not relevant:
        raise DataError(f"{path} has no line; nothing can be measured.")
    return Retrieval({query: queries[query] for query in relevant}, documents, relevant)


def _identified(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for place, tree in _objects(path):
        identity = tree.get("_id")
        if not isinstance(identity, str):
            raise DataError(f"{place}: _id is {shown(identity)}; it must be a text.")
        yield place, identity, tree


def read_reranking(path: Path) -> list[tuple[str, list[str], list[str]]]:
    """Each query with the texts that suit it and those that do not. Raises: DataError with file and line."""
    found = []
    for place, tree in _objects(path):
        for name in ("positive", "negative"):
            texts = tree.get(name)
            if not isinstance(texts, list) or not texts:
                raise DataError(f"{place}: {name} is {shown(texts)}; it must be a list of texts.")
        positive, negative = (
            [_text(text, place) for text in tree[name]] for name in ("positive", "negative")
        )
        found.append((_text(tree.get("query"), place), positive, negative))
    if not found:
        raise DataError(f"{path} has no line; give a file with query, positive and negative.")
    return found
