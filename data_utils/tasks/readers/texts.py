"""Texts whose words are to be filled in: a document in each line, or lines with blanks beside the complete ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from data_utils.common.errors import DataError
from data_utils.corpus.json_records import parse_json_object
from data_utils.tasks.readers.files import (
    BadLine,
    Intake,
    TaskRecords,
    file_suffix,
    numbered_lines,
    text_in,
    utf8_text,
)

BLANK = "<blank>"  # in lines whose words are hidden
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


def read_texts(intake: Intake) -> TaskRecords:
    """The documents of a file. Raises DataError."""
    if file_suffix(intake.path) == ".blank":
        return _read_blanks(intake)
    is_json = file_suffix(intake.path) in JSON_SUFFIXES
    for number, line in numbered_lines(Path(intake.path)):
        with intake.at(number):
            text = text_in(parse_json_object(line), "text") if is_json and line.strip() else utf8_text(line)
            if text.strip():
                add_text(intake, text)
    return intake.finish()


def add_text(intake: Intake, text: str, index: int | str | None = None) -> None:
    """A document, which is its own label."""
    intake.add({"text": text}, text, index)


# ------------------------------------------------------------------------------------------------------------
# Lines with blanks


def _read_blanks(intake: Intake) -> TaskRecords:
    """Lines with blanks, beside the lines that they were made of: `test.txt` for `blank/test.maskratio0.1.blank`."""
    path = Path(intake.path)
    name = f"{path.name.partition('.')[0]}.txt"
    original = next(
        (folder / name for folder in (path.parent, path.parent.parent) if (folder / name).is_file()), None
    )
    if original is None and intake.labelled:
        raise DataError(
            f"{path}: {name} with the complete texts is missing in its directory and the one above; add it."
        )
    originals = numbered_lines(original) if original is not None else ()
    for (number, line), (original_number, original_line) in zip_longest(
        numbered_lines(path), originals, fillvalue=(0, None)
    ):
        if line is None or (original_line is None and original is not None):
            longer, shorter = (original, path) if line is None else (path, original)
            raise DataError(
                f"{longer}:{max(number, original_number)}: {shorter} has fewer lines; both must have the same "
                "number of lines."
            )
        with intake.at(number):
            masked = utf8_text(line)
            count = masked.split().count(BLANK)
            if not count or count != masked.count(BLANK):
                raise BadLine(
                    f"the line has {masked.count(BLANK)} {BLANK}, {count} of them separate words; each must be a "
                    "word"
                )
            if original_line is None:
                intake.add({"masked": masked}, None)
                continue
            text = utf8_text(original_line)
            fields = {"text": text, "masked": masked, "fillings": fillings(masked.split(), text.split())}
            intake.add(fields, text)
    return intake.finish()


def fillings(masked: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """The words that each blank hides, the shortest ones from the left where several would do.

    Args: masked, words: of the line with blanks and of the whole line.
    Raises: BadLine if the lines do not agree; a blank hides a word at least.
    """
    stretches: list[list[str]] = [[]]  # the words before, between and after the blanks
    for word in masked:
        if word == BLANK:
            stretches.append([])
        else:
            stretches[-1].append(word)
    first, *middle, last = stretches
    end = len(words) - len(last)
    if list(words[: len(first)]) != first or list(words[end:]) != last:
        raise BadLine("the line with blanks does not agree with the whole text at its beginning or end")
    position, hidden = len(first), []
    for stretch in (*middle, None):
        # The last blank ends where the last stretch begins.
        start = end if stretch is None else _find(words, stretch, position + 1, end)
        if start <= position:
            raise BadLine(f"the line with blanks does not agree with the whole text after word {position}")
        hidden.append(" ".join(words[position:start]))
        position = start + len(stretch or ())
    return tuple(hidden)


def _find(words: Sequence[str], stretch: Sequence[str], start: int, end: int) -> int:
    """Where `stretch` begins first in words[start:end], with a word left after it; 0 = nowhere."""
    for position in range(start, end - len(stretch)):
        if list(words[position : position + len(stretch)]) == stretch:
            return position
    return 0
