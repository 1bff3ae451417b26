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
    return "\n".join(sentence for sentence in _MARKS.split(text) if sentence)


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
    for (number, source), (target_number, target) in zip_longest(
        numbered_lines(sources), numbered_lines(targets), fillvalue=(0, None)
    ):
        if source is None or target is None:
            longer, shorter = (targets, sources) if source is None else (sources, targets)
            raise DataError(
                f"{longer}:{number or target_number}: {shorter} has fewer lines; sources and targets must have the "
                "same number of lines."
            )
        with intake.at(number):
            fields = {"source": _text(source, "source"), "target": _text(target, "target")}
            label = fields["target"]
            if has_marks:
                fields["source"] = " ".join(filter(None, _MARKS.split(fields["source"])))
                label = sentences_on_lines(label)
            intake.add(fields, label)
    return intake.finish()


def target_path(sources: Path) -> Path:
    """The file of targets for one of sources. Raises DataError for a name without `source` or `src`."""
    name = sources.name.split(".")
    indices = [i for i, word in enumerate(name) if word in _TARGET_OF]
    if not indices:
        raise DataError(
            f"{sources} is not a file of sources; its name must contain source or src, as in train.source with "
            "train.target. For JSON lines with src and tgt use task.reader jsonl."
        )
    name[indices[-1]] = _TARGET_OF[name[indices[-1]]]
    return sources.with_name(".".join(name))


def _text(line: bytes, field: str) -> str:
    text = utf8_text(line)
    if not text.strip():
        raise BadLine(f"the {field} is empty; a pair needs a source and a target")
    return text
