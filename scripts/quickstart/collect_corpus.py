"""Collect English text from the documentation inside this Python's installed packages.

    python -m scripts.quickstart.collect_corpus --output corpus.jsonl

Sources: string constants of the standard library and the installed packages, package READMEs, and .md, .rst and .txt
files. Modules are parsed, never imported, so nothing runs. Of paragraphs that read as English prose whole sentences are
kept, without code, names of modules or lists of arguments. Paragraphs that differ from an earlier one only in names and
numbers are dropped. One document per file.

The text is technical and depends on what is installed: it suits a demonstration, not a model. Files are visited in the
order of a hash of their names, so that a size limit takes a sample of all packages. The same packages and limit give
the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import re
import string
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from data_utils.common.cores import usable_cores
from data_utils.common.errors import (
    ArgumentParser,
    ConfigError,
    DataError,
    expanded_path,
    local_path,
    run_command,
)
from data_utils.common.files import require_writable, write_whole
from data_utils.common.progress import progress_bar

SUFFIXES = (".py", ".md", ".rst", ".txt")
SKIPPED_DIRECTORIES = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "testing"}
MAX_FILE_BYTES = 1 << 20  # larger ones are generated tables
FILES_PER_TASK = 64

MIN_PARAGRAPH_WORDS = 8
MIN_SENTENCE_WORDS, MAX_SENTENCE_WORDS = 5, 60
MIN_DOCUMENT_CHARS = 200
MAX_OTHERS = 0.2  # share of bytes that are neither letter nor space: prose has about 0.05, code about 0.3
MIN_COMMON_WORDS = 0.2  # share of the words below: prose has about 0.4, lists of names nearly none
COMMON_WORDS = frozenset(
    """a an and are as at be been but by can do does for from had has have he her his how i if in into is it
    its may more must no not of on one only or other our out over set should so some such than that the their
    them then there these they this to up use used using was we were what when where which while who will with
    would you your""".split()  # noqa: SIM905  a list of 80 quoted words is harder to read
)

_MARKUP = (
    (re.compile(r":[A-Za-z][\w:+-]*:`~?\.?([^`<]*?)(?:\s*<[^`]*>)?`"), r"\1"),  # :class:`~module.Name`
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),  # [text](address)
    (re.compile(r"<(?:https?://|/?[a-zA-Z])[^>]*>"), " "),  # <tag>, <address>
    (re.compile(r"`+|\*\*+|^\s*(?:[-*+#>]|\.\.)+\s+", re.MULTILINE), ""),  # emphasis, bullets, headings
)
_CODE = re.compile(
    r">>>|^\s*(?:\$ |import |from \S+ import |def |class |[\w.]+ = |\.\. \w+::)"
    r"|^\s*(?:for|if|while|with)\b.*:\s*$|[{};]\s*$|={2,}|-{4,}",
    re.MULTILINE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")
_NOT_PROSE = re.compile(
    r"[{}\[\]=<>|\\_*#~@^$`\"]|::|--| : |https?|\w\.\w|\w\(\)|\d{3}"
    r"|\b(?:Args|Returns|Parameters|Raises|Examples?|optional|kwargs|bool|int|str|float|None|dtype|ndarray)\b"
)
_LETTERS = (string.ascii_letters + " ").encode()
_WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?")
_NAME = re.compile(r"\S*[\d_A-Z(){}\[\]=/\\<>.]\S+|[A-Z]\S*")


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    # The default: the standard library and the site-packages of the running interpreter, without repetition.
    names = args.root or dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    for root in names:
        if not Path(root).is_dir():
            raise ConfigError(f"--root {root} is not a directory; name one that holds Python packages.")
    output = Path(args.output)
    require_writable(output, "--output")
    documents = collect(map(Path, names), int(args.max_megabytes * 1e6), args.workers)
    if not documents:
        raise DataError(f"no English text below {', '.join(names)}; name other directories with --root.")
    lines = [json.dumps({"text": text, "source": source}, ensure_ascii=False) for source, text in documents]
    write_whole(output, "".join(line + "\n" for line in lines).encode(), "--output")
    size = sum(len(text.encode()) for _, text in documents)
    print(f"{args.output}: {len(documents):,} documents, {size / 1e6:.1f} MB of text")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--output", type=local_path, required=True, help="file to write: JSON lines of text and source")
    add(
        "--root",
        type=expanded_path,
        action="append",
        default=[],
        help="directory to search; repeatable (default: this Python's)",
    )
    add("--max-megabytes", type=float, default=6.0, help="stop at this much text (default: 6.0)")
    add("--workers", type=int, default=usable_cores(), help="processes (default: all cores)")
    args = parser.parse_args(arguments)
    if not 0 < args.max_megabytes < math.inf:
        raise ConfigError(f"--max-megabytes is {args.max_megabytes}; it must be a positive number.")
    if args.workers < 1:
        raise ConfigError(f"--workers is {args.workers}; it must be at least 1.")
    return args


def collect(roots: Iterable[Path], max_bytes: int, workers: int) -> list[tuple[str, str]]:
    """(source, text) of the documents below `roots`, the same list for any number of workers."""
    seen: set[str] = set()
    documents: list[tuple[str, str]] = []
    total_bytes = 0
    progress = progress_bar(total=max_bytes, unit="B", unit_scale=True, desc="text")
    with progress, ProcessPoolExecutor(workers) as executor:
        for source, paragraphs in executor.map(read_file, find_files(roots), chunksize=FILES_PER_TASK):
            text = "\n\n".join(unseen(paragraphs, seen))
            if len(text) < MIN_DOCUMENT_CHARS:
                continue
            documents.append((source, text))
            size = len(text.encode())
            progress.update(min(size, max_bytes - total_bytes))
            total_bytes += size
            if total_bytes >= max_bytes:
                executor.shutdown(cancel_futures=True)
                break
    return documents


def find_files(roots: Iterable[Path]) -> list[tuple[Path, str]]:
    """(path, name relative to its root) of the files to read, ordered by a hash of the name."""
    paths: dict[str, Path] = {}
    for root in roots:
        for directory, names, files in os.walk(root):
            names[:] = [name for name in names if name not in SKIPPED_DIRECTORIES]
            for file in files:
                path = Path(directory, file)
                if path.suffix in SUFFIXES or file == "METADATA":
                    paths.setdefault(path.relative_to(root).as_posix(), path)
    names = sorted(paths, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [(paths[name], name) for name in names]


def read_file(file: tuple[Path, str]) -> tuple[str, list[str]]:
    """(name, English paragraphs) of a file."""
    path, name = file
    return name, [paragraph for text in read_texts(path) for paragraph in english_paragraphs(text)]


def read_texts(path: Path) -> Iterator[str]:
    """The texts of a file: a module's string constants, a package's README, or all. Nothing if unreadable."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    if path.suffix == ".py":
        yield from string_constants(content)
    elif path.name == "METADATA":
        yield content.partition("\n\n")[2]  # the README follows the headers
    else:
        yield content


def string_constants(source: str) -> list[str]:
    """String literals of a module that span lines, in source order, dedented; none if it does not parse."""
    if '"""' not in source and "'''" not in source:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the invalid escapes of other people's modules
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    constants = [
        (node.lineno, node.col_offset, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value
    ]
    return [textwrap.dedent(text.expandtabs()) for _, _, text in sorted(constants)]


def english_paragraphs(text: str) -> Iterator[str]:
    """The whole sentences of paragraphs that read as English prose, markup removed, each paragraph on one line."""
    for block in re.split(r"\n\s*\n", text):
        if _CODE.search(block):
            continue
        for pattern, replacement in _MARKUP:
            block = pattern.sub(replacement, block)
        paragraph = " ".join(block.split())
        if is_english(paragraph) and (prose := " ".join(whole_sentences(paragraph))):
            yield prose


def whole_sentences(paragraph: str) -> Iterator[str]:
    """The sentences of a paragraph that are prose from their capital letter to their end."""
    for sentence in _SENTENCE_END.split(paragraph):
        is_whole = sentence[0].isupper() and sentence[-1] in ".!?"
        words = len(sentence.split())
        if is_whole and MIN_SENTENCE_WORDS <= words <= MAX_SENTENCE_WORDS and not _NOT_PROSE.search(sentence):
            yield sentence


def is_english(paragraph: str) -> bool:
    """True if the paragraph has enough words, letters and common English words."""
    words = _WORD.findall(paragraph)
    if len(words) < MIN_PARAGRAPH_WORDS:
        return False
    encoded = paragraph.encode(errors="replace")
    others = len(encoded.translate(None, _LETTERS))
    common = sum(word.lower() in COMMON_WORDS for word in words)
    return others <= MAX_OTHERS * len(encoded) and common >= MIN_COMMON_WORDS * len(words)


def unseen(paragraphs: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Paragraphs that differ from those in `seen` by more than names and numbers; `seen` grows."""
    for paragraph in paragraphs:
        key = " ".join(_WORD.findall(_NAME.sub(" ", paragraph)))
        if key not in seen:
            seen.add(key)
            yield paragraph


if __name__ == "__main__":
    run_command(main)
