"""GLUE's tab-separated files, and others with a line of names: no quoting, ever.

A quote is a character of the text; GLUE's texts hold single ones, and a reader of CSV would join lines at them. CoLA
has no line of names but in its test file.

Source: Wang et al., arXiv:1804.07461, and its files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.setting_files import shorten, shown
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.files import (
    BadLine,
    Intake,
    TaskRecords,
    finite,
    numbered_lines,
    plain_name,
    utf8_text,
)

_TWO_WAY = ("entailment", "not_entailment")
_THREE_WAY = ("contradiction", "entailment", "neutral")
_YES_NO = ("0", "1")
LABELS = {
    **dict.fromkeys(("cola", "sst2", "mrpc", "qqp", "wnli"), _YES_NO),
    **dict.fromkeys(("rte", "qnli"), _TWO_WAY),
    **dict.fromkeys(("mnli", "mnlimm", "ax"), _THREE_WAY),
}


@dataclass(frozen=True)
class _Columns:
    """Names of columns in the file."""

    texts: tuple[str, ...]
    label: str
    index: str = "index"


_PAIR = ("sentence1", "sentence2")
_COLUMNS = {
    "cola": _Columns(("sentence",), "label"),
    "sst2": _Columns(("sentence",), "label"),
    "mrpc": _Columns(("#1 String", "#2 String"), "Quality"),
    "stsb": _Columns(_PAIR, "score"),
    "qqp": _Columns(("question1", "question2"), "is_duplicate", "id"),
    "qnli": _Columns(("question", "sentence"), "label"),
    **dict.fromkeys(("rte", "wnli"), _Columns(_PAIR, "label")),
    **dict.fromkeys(("mnli", "mnlimm", "ax"), _Columns(_PAIR, "gold_label")),
}
_COLA = ("source", "label", "mark", "sentence")


def read_glue(intake: Intake) -> TaskRecords:
    """The samples of a .tsv file: fields text_a and text_b, or those that task.text_fields names.

    Raises: DataError; ConfigError for an unknown task without names of columns.
    """
    columns = _columns(intake.config)
    lines = numbered_lines(Path(intake.path))
    header: list[str] = []
    for number, line in lines:
        if not line.strip():
            continue
        with intake.at(number):
            cells = utf8_text(line).split("\t")
            if not header:
                header = _header(intake, columns, cells)
                if header == cells:
                    continue
            if len(cells) < len(header):
                raise BadLine(
                    f"the line has {len(cells)} columns, fewer than {len(header)} ({', '.join(header)})"
                )
            _add(intake, columns, dict(zip(header, cells, strict=False)))
    return intake.finish()


def _columns(config: TaskConfig) -> _Columns:
    if config.text_fields:
        return _Columns(config.text_fields, config.label_field or "label")
    name = plain_name(config.name)
    if name not in _COLUMNS:
        raise ConfigError(
            f"task.name is {shown(config.name)}, which is not a GLUE task ({', '.join(_COLUMNS)}); for your own "
            "task set task.text_fields and task.label_field to its columns."
        )
    return _COLUMNS[name]


def _header(intake: Intake, columns: _Columns, first: Sequence[str]) -> list[str]:
    """The names of the columns: the file's first line, or those of CoLA, which has none."""
    name = plain_name(intake.config.name)
    if name == "cola" and not intake.config.text_fields and "sentence" not in first:
        return list(_COLA)
    wanted = (*columns.texts, *((columns.label,) if intake.labelled else ()))
    for column in wanted:
        if column not in first:
            raise DataError(
                f"{intake.path}:1: there is no column {column!r} (columns: {shorten(', '.join(first), 400)}); the "
                "first line must hold the column names, separated by tabs (task.reader jsonl reads .csv), and a file "
                "without labels belongs in task.test."
            )
    return list(first)


def _add(intake: Intake, columns: _Columns, row: dict[str, str]) -> None:
    names = intake.config.text_fields or ("text_a", "text_b")
    fields = {name: row[column] for name, column in zip(names, columns.texts, strict=False)}
    label: Any = row.get(columns.label)
    if label is not None:
        label = finite(label) if intake.config.kind == "regression" else intake.class_name(label)
    intake.add(fields, label, _index(row.get(columns.index)))


def _index(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else text
