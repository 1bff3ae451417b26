"""Sources and targets, a line of two files each: `train.source` with `train.target`, or .src and .tgt.

Gigaword, CNN/DM and XSum are such files. Their targets mark sentences; a model learns the marks as the file has them,
and references for metrics have a sentence in each line.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path

from data_utils.common.errors import DataError
from data_utils.tasks.readers.files import (
    BadLine,
    Intake,
    TaskRecords,
    numbered_lines,
    plain_name,
    require_file,
    utf8_text,
)

_TARGET_OF = {"source": "target", "src": "tgt"}
SUMMARIES = ("gigaword", "cnndm", "cnndailymail", "xsum")
_MARKS = re.compile(r"\s*(?:<S_SEP>|\[X_SEP\]|</?t>)\s*")


def sentences_on_lines(text: str) -> str:
    """A summary whose marks of sentences (<S_SEP>, [X_SEP], <t> </t>) are ends of lines, as ROUGE-Lsum wants it."""
    return "\n".join(part for part in _MARKS.split(text) if part)


def read_pairs(intake: Intake) -> TaskRecords:
    """The pairs of a file of sources and the file of targets beside it. Raises DataError."""
    sources = Path(intake.path)
    targets = target_path(sources)
    if not intake.labelled and not targets.is_file():
        for number, line in numbered_lines(sources):
            with intake.at(number):
                intake.add({"source": _text(line, "source")}, None)
        return intake.finish()
    require_file(sources)
    has_marks = plain_name(intake.config.name) in SUMMARIES
    for (number, source), (other, target) in zip_longest(
        numbered_lines(sources), numbered_lines(targets), fillvalue=(0, None)
    ):
        if source is None or target is None:
            have, lack = (targets, sources) if source is None else (sources, targets)
            raise DataError(
                f"{have}:{number or other}: {lack} has fewer lines; sources and targets must have the same number "
                "of lines."
            )
        with intake.at(number):
            fields = {"source": _text(source, "source"), "target": _text(target, "target")}
            label = fields["target"]
            if has_marks:
                fields["source"] = " ".join(part for part in _MARKS.split(fields["source"]) if part)
                label = sentences_on_lines(label)
            intake.add(fields, label)
    return intake.finish()


def target_path(sources: Path) -> Path:
    """The file of targets for one of sources. Raises DataError if the name has no part `source` or `src`."""
    parts = sources.name.split(".")
    found = [i for i, part in enumerate(parts) if part in _TARGET_OF]
    if not found:
        raise DataError(
            f"{sources} is not a file of sources; its name must contain source or src, as in train.source with "
            "train.target. For JSON lines with src and tgt use task.reader jsonl."
        )
    parts[found[-1]] = _TARGET_OF[parts[found[-1]]]
    return sources.with_name(".".join(parts))


def _text(line: bytes, what: str) -> str:
    text = utf8_text(line)
    if not text.strip():
        raise BadLine(f"the {what} is empty; a pair needs a source and a target")
    return text
