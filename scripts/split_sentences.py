"""Cut documents into sentences, one a line: the corpora of the objective optimus. See docs/latent.md.

    python scripts/split_sentences.py --input 'raw/*.jsonl' --output sentences.txt

A sentence ends at . ! ? or such a mark of another script before white space and a letter that is not small or a digit,
at a full-width mark, and at an empty line. That is right for prose, apart from abbreviations before names ("Dr. Who"),
and not for Thai, which has no such marks: there use a segmenter of your own that writes one sentence a line. Sentences
of more than --most-words words, cut at spaces, are left out and counted.
"""

from __future__ import annotations

if __name__ == "__main__":
    import entry  # noqa: F401

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from data_utils.common.errors import ArgumentParser, ConfigError, DataError, expanded_path, run_command
from data_utils.common.files import disk_errors, new_file, require_writable
from data_utils.common.words import SENTENCE_END
from data_utils.corpus.documents import (
    add_reading_options,
    read_documents,
)

_BEGIN = re.compile(r"[\"'“‘«(\[]?([^\W_])")  # noqa: RUF001  quotation marks and brackets may come before a sentence
_FULL_WIDTH = frozenset("。！？｡")  # noqa: RUF001
_PARAGRAPH = re.compile(r"\n\s*\n")


def sentences_of(text: str) -> Iterator[str]:
    """The sentences of a document, each on one line."""
    for paragraph in _PARAGRAPH.split(text):
        line = " ".join(paragraph.split())
        start = 0
        for end in SENTENCE_END.finditer(line):
            begin = _BEGIN.match(line, end.end())
            if line[end.start()] in _FULL_WIDTH or (begin and not begin[1].islower()):
                yield line[start : end.start(1)]
                start = end.end()
        if start < len(line):
            yield line[start:]


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse_arguments(arguments)
    output = Path(args.output)
    with disk_errors(args.output), new_file(output) as file:
        written, skipped = _write(args, file)
    print(f"{output}: {written} sentences; skipped: {skipped} with more than {args.most_words} words")


def _write(args: argparse.Namespace, file: IO[bytes]) -> tuple[int, int]:
    """The numbers of sentences written and left out. Raises DataError if none is written."""
    reading = args.text_key, args.text_split, args.on_bad_record, args.max_bad_records
    written = skipped = 0
    for document in read_documents(args.input, *reading):
        for sentence in sentences_of(document.text):
            if len(sentence.split()) > args.most_words:
                skipped += 1
                continue
            file.write(f"{sentence}\n".encode())
            written += 1
    if not written:
        raise DataError(
            f"--input {' '.join(args.input)} has no sentence of at most {args.most_words} words; give other texts, or "
            "raise --most-words."
        )
    return written, skipped


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument
    text = "files or globs, as scripts/preprocess_data.py takes them"
    add("--input", type=expanded_path, required=True, nargs="+", help=text)
    text = "output text file, for preprocess_data.py --text-split lines"
    add("--output", type=Path, required=True, help=text)
    add("--most-words", type=int, default=64, help="skip longer sentences (default: 64)")
    add_reading_options(parser)
    args = parser.parse_args(arguments)
    if args.most_words < 1:
        raise ConfigError(f"--most-words is {args.most_words}; it must be 1 or more.")
    if Path(args.output).exists():
        raise DataError(f"{args.output} exists; remove it or choose another --output.")
    require_writable(Path(args.output), "--output")
    return args


def command() -> None:
    run_command(main)


if __name__ == "__main__":
    command()
