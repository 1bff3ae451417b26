"""Your own samples as JSONL, one object per line, for every kind of task.

    cloze, classification   {"text"} or {"text_a", "text_b"}, "label": a class; or what task.template names
    cloze, several choices  {"inputs_pretokenized", "choices_pretokenized", "label": number of the right one}
    race                    {"article", "questions", "options", "answers"}: RACE's files, one after another
    typing                  {"text", "mention": [start, end], "label": [a class, ...]}
    with task.marks         {"text"} and a span of it for each mark, "label": a class; characters, end not included
    with task.entity_ids    "entities": [[start, end, "name", score], ...] beside these; the score may be left out
    regression              as classification, "label": a number
    seq2seq                 {"src", "tgt"}: text, or a list of tokens; or what task.template names, and "tgt"
    spans                   {"question", "context", "answers": [{"text", "answer_start"}], "is_impossible"}
    tagging                 {"words", "label": a tag for each}
    blanks                  {"text"}

Tables (.csv, .tsv, as RFC 4180 has them) are read as lines of the texts by the names in their first row.

"idx" names a sample ("id" for spans) where it is given. task.text_fields and task.label_field name other fields.
"""

from __future__ import annotations

import csv
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_utils.common.errors import DataError
from data_utils.common.setting_files import shown
from data_utils.corpus.inputs import DELIMITERS
from data_utils.corpus.json_records import parse_json_object
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.conll import checked_bio, is_bio, known_tags
from data_utils.tasks.readers.files import (
    MAX_LINE_BYTES,
    BadLine,
    Intake,
    TaskRecords,
    choice_in,
    file_suffix,
    finite,
    index_in,
    known_in,
    numbered_lines,
    plain_name,
    text_in,
    texts_in,
    value_in,
)
from data_utils.tasks.readers.marked import class_names, is_marked, mentions_in
from data_utils.tasks.readers.questions import add_question
from data_utils.tasks.readers.texts import add_text

_LETTERS = {letter: number for number, letter in enumerate(string.ascii_uppercase)}


def read_json_lines(intake: Intake) -> TaskRecords:
    """The samples of a file. Raises DataError."""
    add = {
        "seq2seq": _add_pair,
        "spans": _add_question,
        "tagging": _add_tagged,
        "blanks": _add_text,
    }.get(intake.config.kind, _add_classified)
    if delimiter := DELIMITERS.get(file_suffix(intake.path)):
        _add_rows(intake, add, delimiter)
        return intake.finish()
    for number, line in numbered_lines(Path(intake.path)):
        with intake.at(number):
            if line.strip():
                add(intake, parse_json_object(line))
    return intake.finish()


def _add_rows(intake: Intake, add: Callable[[Intake, dict[str, Any]], None], delimiter: str) -> None:
    """The rows of a table, each as an object of texts by the names in the first row. An empty label is none."""
    # Bytes that are not UTF-8 are refused with their row, which may have several lines.
    lines = (line.decode("utf-8", "surrogateescape") + "\n" for _, line in numbered_lines(Path(intake.path)))
    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next(filter(None, rows), [])
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise DataError(
                f"{intake.path}:1: several columns are called {shown(twice[0])}; rename all but one."
            )
        for row in filter(None, rows):
            with intake.at(rows.line_num):
                if len(row) != len(names):
                    raise BadLine(f"the row has {len(row)} fields, but the first row has {len(names)}")
                if re.search("[\udc80-\udcff]", "".join(row)):
                    raise BadLine("the row is not UTF-8")
                tree = dict(zip(names, row, strict=True))
                if not tree.get(_label_field(intake.config)):
                    tree.pop(_label_field(intake.config), None)
                add(intake, tree)
    except csv.Error as error:
        raise DataError(
            f"{intake.path}:{rows.line_num}: not a valid table ({error}); enclose a field with quotes in quotes and "
            'double the inner ones ("").'
        ) from None


def _label_field(config: TaskConfig) -> str:
    return config.label_field or "label"


def _add_classified(intake: Intake, tree: dict[str, Any]) -> None:
    if intake.config.kind == "cloze" and "choices_pretokenized" in tree:
        return _add_choices(intake, tree)
    if plain_name(intake.config.name) == "race":
        return _add_race(intake, tree)
    config = intake.config
    fields = {name: text_in(tree, name) for name in _text_fields(config, tree)}
    if not any(text.strip() for text in fields.values()):
        raise BadLine(f"the text is empty ({', '.join(fields)})")
    if is_marked(config):
        fields |= mentions_in(config, tree, fields)
    value = known_in(tree, _label_field(config))
    if value is not None:
        of_kind = {"regression": finite, "typing": lambda value: class_names(intake, value)}
        value = of_kind.get(config.kind, intake.class_name)(value)
    return intake.add(fields, value, index_in(tree))


def _text_fields(config: TaskConfig, tree: dict[str, Any]) -> tuple[str, ...]:
    """Names of the fields to read of a line: those of the settings and the template, else the generic names."""
    names = [*config.text_fields, *_in_template(config.template or "")]
    if names:
        return tuple(dict.fromkeys(names))
    if "text_a" in tree:
        return ("text_a", "text_b") if "text_b" in tree else ("text_a",)
    return ("text",)


def _in_template(template: str) -> list[str]:
    """The fields that a template names; one that cannot be read is refused where it is used."""
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name]
    except ValueError:
        return []


def _add_choices(intake: Intake, tree: dict[str, Any]) -> None:
    choices = texts_in(tree, "choices_pretokenized")
    if len(choices) < 2:
        raise BadLine(f"there are {len(choices)} choices; a sample needs 2 or more")
    stripped = [choice.strip() for choice in choices]
    if "" in stripped:
        raise BadLine(f"choice {stripped.index('')} is empty; each needs text")
    if len(set(stripped)) < len(stripped):
        raise BadLine(f"the choices {shown(choices)} contain duplicates; all choices must be different")
    fields = {"inputs": text_in(tree, "inputs_pretokenized"), "choices": choices}
    intake.add(fields, choice_in(tree, _label_field(intake.config), len(choices)), index_in(tree))


def _add_race(intake: Intake, tree: dict[str, Any]) -> None:
    """A sample for each question of an article; answers are letters."""
    article, questions = text_in(tree, "article"), texts_in(tree, "questions")
    options = value_in(tree, "options")
    answers = None if tree.get("answers") is None else texts_in(tree, "answers")
    counts = [
        len(each) if isinstance(each, (list, tuple)) else 0
        for each in (options, questions if answers is None else answers)
    ]
    if set(counts) != {len(questions)}:
        raise BadLine(
            f"{len(questions)} questions have {counts[0]} lists of options and {counts[1]} answers; each needs one"
        )
    name = index_in(tree, "id")
    for number, question in enumerate(questions):
        choices = texts_in({"options": options[number]}, "options")
        label = None if answers is None else _LETTERS.get(answers[number], -1)
        if len(choices) < 2 or (label is not None and not 0 <= label < len(choices)):
            raise BadLine(
                f"question {number} has {len(choices)} options and the answer {shown(answers and answers[number])}"
            )
        fields = {"context": article, "question": question, "choices": choices}
        intake.add(fields, label, None if name is None else f"{name}-{number}")


def _add_pair(intake: Intake, tree: dict[str, Any]) -> None:
    config = intake.config
    source, target = (*config.text_fields, "src")[0], config.label_field or "tgt"
    names = _in_template(config.template or "") or ["source"]
    fields = {name: _joined(tree, source if name == "source" else name) for name in names}
    if known_in(tree, target) is not None:
        fields["target"] = _joined(tree, target)
    intake.add(fields, fields.get("target"), index_in(tree))


def _joined(tree: dict[str, Any], name: str) -> str:
    """A text, or tokens of WordPiece as the text that they are."""
    if isinstance(value_in(tree, name), list):
        text = " ".join(texts_in(tree, name)).replace(" ##", "")
    else:
        text = text_in(tree, name)
    if not text.strip():
        raise BadLine(f"field {name!r} is empty; a pair needs a source and a target")
    return text


def _add_question(intake: Intake, tree: dict[str, Any]) -> None:
    add_question(intake, tree, text_in(tree, "context"), "id")


def _add_tagged(intake: Intake, tree: dict[str, Any]) -> None:
    config = intake.config
    words = texts_in(tree, (*config.text_fields, "words")[0])
    if not words or not all(word.strip() for word in words):
        raise BadLine("a sentence needs at least one word, and no word may be empty")
    tags = None
    if known_in(tree, _label_field(config)) is not None:
        tags = known_tags(intake, texts_in(tree, _label_field(config)))
        if len(tags) != len(words):
            raise BadLine(f"there are {len(tags)} tags for {len(words)} words; each word needs one")
        if is_bio(intake.labels):
            checked_bio(tags)
    intake.add({"words": words}, tags, index_in(tree))


def _add_text(intake: Intake, tree: dict[str, Any]) -> None:
    text = text_in(tree, (*intake.config.text_fields, "text")[0])
    if not text.strip():
        raise BadLine(f"the text is empty ({shown(text)})")
    add_text(intake, text, index_in(tree))
