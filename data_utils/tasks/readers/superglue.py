"""SuperGLUE's JSONL: eight tasks and two diagnostic sets.

Each task is one function from a line's object to samples. Labels become class names: true and false, the texts of the
file, 0 and 1 of MultiRC. Models read typographic quotes and dashes of WSC and ReCoRD as ASCII, as in the reference, so
that the words of spans are found; each is one character, so offsets stay. Entities and answers of ReCoRD stay as the
file has them: the server compares them with its own.

Source: Wang et al., arXiv:1905.00537, and its files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.corpus.json_records import parse_json_object
from data_utils.tasks.readers.files import (
    BadLine,
    Intake,
    TaskRecords,
    choice_in,
    index_in,
    numbered_lines,
    object_in,
    objects_in,
    plain_name,
    text_in,
    whole_number_in,
)

_YES_NO = ("false", "true")
_TWO_WAY = ("entailment", "not_entailment")
LABELS = {
    "boolq": _YES_NO,
    "cb": ("entailment", "contradiction", "neutral"),
    "multirc": ("0", "1"),
    "rte": _TWO_WAY,
    "axb": _TWO_WAY,
    "axg": _TWO_WAY,
    "wic": _YES_NO,
    "wsc": _YES_NO,
}
PLACEHOLDER = "@placeholder"  # in a query of ReCoRD
_ASCII = str.maketrans("\u201c\u201d\u2018\u2019\u2013", "\"\"''-")


def in_ascii(text: str) -> str:
    """A text whose typographic quotes and dashes are ASCII."""
    return text.translate(_ASCII)


def read_superglue(intake: Intake) -> TaskRecords:
    """The samples of a file of one of the tasks. Raises DataError; ConfigError for an unknown task."""
    name = plain_name(intake.config.name)
    if name not in _TASKS:
        raise ConfigError(
            f"task.name is {shown(intake.config.name)}, which is not a SuperGLUE task; task.reader superglue "
            f"supports {', '.join(_TASKS)}. Use jsonl for your own format."
        )
    for number, line in numbered_lines(Path(intake.path)):
        with intake.at(number):
            if line.strip():
                _TASKS[name](intake, parse_json_object(line))
    return intake.finish()


def _texts(**names: str) -> Callable[[Intake, dict[str, Any]], None]:
    """A task whose samples are texts and a class. Args: name in the TaskRecord = name in the file."""

    def read(intake: Intake, tree: dict[str, Any]) -> None:
        fields = {name: text_in(tree, key) for name, key in names.items()}
        intake.add(fields, intake.class_name(tree.get("label")), index_in(tree))

    return read


def _copa(intake: Intake, tree: dict[str, Any]) -> None:
    fields = {name: text_in(tree, name) for name in ("premise", "choice1", "choice2", "question")}
    if fields["question"] not in ("cause", "effect"):
        raise BadLine(f"field 'question' is {shown(fields['question'])}; it must be cause or effect")
    intake.add(fields, choice_in(tree, "label", 2), index_in(tree))


def _wic(intake: Intake, tree: dict[str, Any]) -> None:
    fields: dict[str, Any] = {name: text_in(tree, name) for name in ("word", "sentence1", "sentence2")}
    for name in ("start1", "end1", "start2", "end2"):
        if name in tree:
            fields[name] = whole_number_in(tree, name)
    intake.add(fields, intake.class_name(tree.get("label")), index_in(tree))


def _wsc(intake: Intake, tree: dict[str, Any]) -> None:
    target = object_in(tree, "target")
    words = in_ascii(text_in(tree, "text")).split()
    span1, pronoun = (in_ascii(text_in(target, name)) for name in ("span1_text", "span2_text"))
    span1_index = _find_near(words, span1.split(), whole_number_in(target, "span1_index"), str.lower)
    pronoun_index = _find_near(words, pronoun.split(), whole_number_in(target, "span2_index"), str)
    if pronoun_index is None:
        pronoun_index = _separate_pronoun(words, pronoun, target["span2_index"])
    candidates = objects_in(tree, "candidates") if tree.get("candidates") is not None else []
    fields = {
        "text": " ".join(words),
        "span1_index": target["span1_index"] if span1_index is None else span1_index,
        "span1_text": span1,
        "span2_index": pronoun_index,
        "span2_text": pronoun,
        "candidates": tuple(dict.fromkeys(in_ascii(text_in(candidate, "text")) for candidate in candidates)),
    }
    intake.add(fields, intake.class_name(tree.get("label")), index_in(tree))


def _find_near(words: list[str], span: list[str], index: int, normalize: Callable[[str], str]) -> int | None:
    """Where the words of `span` begin: at `index`, or one word before or after it, as some samples need."""
    wanted = [normalize(word) for word in span]
    for start in (index, index - 1, index + 1):
        if start >= 0 and [normalize(word) for word in words[start : start + len(span)]] == wanted:
            return start
    return None


def _separate_pronoun(words: list[str], pronoun: str, index: int) -> int:
    """Cut off what is glued to the pronoun (`him.`, `she'd`), so that it is a word by itself. Changes `words`.

    Returns: its index. Raises: BadLine if it is not at `index` or one word before or after it.
    """
    for candidate in (index, index - 1, index + 1):
        if 0 <= candidate < len(words):
            before, match, after = words[candidate].partition(pronoun)
            if match and not after[:1].isalnum() and not any(map(str.isalnum, before)):
                words[candidate : candidate + 1] = [text for text in (before, pronoun, after) if text]
                return candidate + bool(before)
    raise BadLine(
        f"the pronoun {shown(pronoun)} is not at word {index} of the text or next to it (span2_index counts words "
        "from 0)"
    )


def _multirc(intake: Intake, tree: dict[str, Any]) -> None:
    passage = object_in(tree, "passage")
    text = text_in(passage, "text")
    number = whole_number_in(tree, "idx")
    for question in objects_in(passage, "questions"):
        group = (number, whole_number_in(question, "idx"))
        for answer in objects_in(question, "answers"):
            fields = {
                "passage": text,
                "question": text_in(question, "question"),
                "answer": text_in(answer, "text"),
            }
            index = (*group, whole_number_in(answer, "idx"))
            intake.add(fields, intake.class_name(answer.get("label")), index, group)


def _record(intake: Intake, tree: dict[str, Any]) -> None:
    passage = object_in(tree, "passage")
    text = text_in(passage, "text")
    spans = (_entity_span(text, entity) for entity in objects_in(passage, "entities"))
    spelled: dict[str, str] = {}  # as models read it -> as the file first has it
    for start, end in sorted(spans):
        entity = text[start : end + 1]
        spelled.setdefault(in_ascii(entity), entity)
    for query in objects_in(tree, "qas"):
        sentence = in_ascii(text_in(query, "query"))
        if PLACEHOLDER not in sentence:
            raise BadLine(f"the query {shown(sentence)} has no {PLACEHOLDER}, which marks the answer")
        answers = None
        if query.get("answers") is not None:
            texts = (text_in(answer, "text") for answer in objects_in(query, "answers"))
            answers = tuple(dict.fromkeys(spelled.get(in_ascii(text), text) for text in texts)) or None
        fields = {"passage": in_ascii(text), "query": sentence, "entities": tuple(sorted(spelled.values()))}
        intake.add(fields, answers, whole_number_in(query, "idx"))


def _entity_span(text: str, entity: dict[str, Any]) -> tuple[int, int]:
    """First and last character of an entity: its end is its last character, not the one after it."""
    start, end = whole_number_in(entity, "start"), whole_number_in(entity, "end")
    if not 0 <= start <= end < len(text):
        raise BadLine(
            f"an entity has the characters {start} to {end} (inclusive), but the passage has {len(text)}"
        )
    return start, end


_TASKS: dict[str, Callable[[Intake, dict[str, Any]], None]] = {
    "boolq": _texts(question="question", passage="passage"),
    "cb": _texts(premise="premise", hypothesis="hypothesis"),
    "copa": _copa,
    "multirc": _multirc,
    "record": _record,
    "rte": _texts(premise="premise", hypothesis="hypothesis"),
    "wic": _wic,
    "wsc": _wsc,
    "axb": _texts(premise="sentence1", hypothesis="sentence2"),
    "axg": _texts(premise="premise", hypothesis="hypothesis"),
}
