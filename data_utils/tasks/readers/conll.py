"""Tagged words, one in each line: CoNLL-2003 and files like it.

A blank line ends a sentence. The first column is the word, the last one its tag. Tags of entities come as BIO, whether
the file has BIO (B-TYPE begins every entity) or IOB1, as CoNLL-2003 is distributed (I-TYPE begins an entity too, and
B-TYPE only one that follows another of its type).

Source: Tjong Kim Sang and De Meulder, arXiv:cs/0306050.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_utils.common.setting_files import shown
from data_utils.corpus.json_records import UnusableRecord
from data_utils.tasks.readers.files import BadLine, Intake, TaskRecords, numbered_lines, utf8_text

LABELS = {
    name: ("O", *(f"{begin}-{type_}" for type_ in ("PER", "ORG", "LOC", "MISC") for begin in "BI"))
    for name in ("conll2003", "conll")
}
_BLANKS = re.compile("[ \t]+")  # not those of Unicode, which are parts of words
_DOCUMENT = "-DOCSTART-"

Lines = list[tuple[int, bytes]]


def read_conll(intake: Intake) -> TaskRecords:
    """The sentences of a file: fields words, label tags. Raises DataError."""
    sentences = list(_sentences(numbered_lines(Path(intake.path))))
    has_entities = is_bio(intake.labels)
    scheme = _Scheme(sentences) if has_entities else None
    for sentence in sentences:
        with intake.at(sentence[0][0]):
            words, tags = _columns(intake, sentence)
            if tags is not None and scheme is not None:
                tags = scheme.as_bio(tags, [number for number, _ in sentence])
            intake.add({"words": words}, None if tags is None else known_tags(intake, tags))
    return intake.finish()


def is_bio(labels: Sequence[str]) -> bool:
    """Whether the tags are those of entities, as BIO."""
    return any(label.startswith("B-") for label in labels)


def known_tags(intake: Intake, tags: Sequence[str]) -> tuple[str, ...]:
    """Check tags and return them. Raises BadLine for a tag that the task does not have."""
    for tag in tags:
        intake.class_name(tag)
    return tuple(tags)


def _sentences(lines: Iterator[tuple[int, bytes]]) -> Iterator[Lines]:
    sentence: Lines = []
    for number, line in lines:
        if line.strip(b" \t") and not line.startswith(_DOCUMENT.encode()):
            sentence.append((number, line))
        elif sentence:
            yield sentence
            sentence = []
    if sentence:
        yield sentence


def _columns(intake: Intake, sentence: Lines) -> tuple[tuple[str, ...], list[str] | None]:
    """Words and tags of a sentence; no tags where a file without labels has one column."""
    lines: list[list[str]] = []  # the columns of each
    for number, line in sentence:
        try:
            columns = _BLANKS.split(utf8_text(line).strip(" \t"))
        except UnusableRecord as problem:
            raise BadLine(str(problem), number) from None
        lines.append(columns)
        if len(columns) < len(lines[0]) or (intake.labelled and len(columns) < 2):
            wanted = max(2, len(lines[0])) if intake.labelled else len(lines[0])
            raise BadLine(
                f"the line has {len(columns)} columns, fewer than {wanted} (first the word, last the tag)",
                number,
            )
    tags = None if len(lines[0]) == 1 else [columns[-1] for columns in lines]
    return tuple(columns[0] for columns in lines), tags


class _Scheme:
    """The tagging scheme of a file: BIO if some entity begins with B- where IOB1 would have I-, else IOB1."""

    def __init__(self, sentences: Sequence[Lines]) -> None:
        self.bio_line = 0  # the line that shows it; 0 = none
        for sentence in sentences:
            previous = "O"
            for number, line in sentence:
                tag = line.rstrip(b" \t").rpartition(b" ")[2].rpartition(b"\t")[2].decode("utf-8", "replace")
                if tag.startswith("B-") and previous[2:] != tag[2:]:
                    self.bio_line = number
                    return
                previous = tag

    def as_bio(self, tags: Sequence[str], lines: Sequence[int]) -> list[str]:
        """BIO of a sentence. Raises BadLine for another form of tag, or an I- that continues nothing under BIO."""
        bio_tags: list[str] = []
        previous = "O"
        for tag, line in zip(tags, lines, strict=True):
            if tag != "O" and (tag[:2] not in ("B-", "I-") or not tag[2:]):
                raise BadLine(f"tag {shown(tag)} is not O, B-TYPE or I-TYPE", line)
            begins = tag != "O" and (tag[0] == "B" or previous[2:] != tag[2:])
            if begins and tag[0] == "I" and self.bio_line:
                raise BadLine(
                    f"tag {tag} follows {previous}, so it does not continue an entity; line {self.bio_line} shows "
                    "that the file uses BIO, where every entity begins with B-",
                    line,
                )
            bio_tags.append(f"B-{tag[2:]}" if begins else tag)
            previous = tag
        return bio_tags


def checked_bio(tags: Sequence[str]) -> None:
    """Raise BadLine unless every I- continues an entity of its type."""
    previous = "O"
    for tag in tags:
        if tag.startswith("I-") and previous[2:] != tag[2:]:
            raise BadLine(
                f"tag {tag} follows {previous}, so it does not continue an entity; an entity must begin with B-"
            )
        previous = tag
