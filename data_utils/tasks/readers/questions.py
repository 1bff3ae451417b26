"""Questions with answers in a text: SQuAD's JSON, and its questions as lines of JSON.

An answer's position counts characters (Python's, one for each code point), and the text must have the answer there.

Source: Rajpurkar et al., arXiv:1606.05250 and arXiv:1806.03822, and their files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_utils.common.errors import DataError
from data_utils.common.setting_files import shown
from data_utils.corpus.json_records import UnusableRecord, parse_json_object
from data_utils.tasks.readers.files import (
    BadLine,
    Intake,
    TaskRecords,
    index_in,
    numbered_lines,
    objects_in,
    plain_name,
    text_in,
    whole_number_in,
)


def read_squad(intake: Intake) -> TaskRecords:
    """The questions of a file of SQuAD 1.1 or 2.0, in its order. Raises DataError."""
    data = b"\n".join(line for _, line in numbered_lines(Path(intake.path)))
    try:
        tree = parse_json_object(data)
        articles = objects_in(tree, "data")
    except (BadLine, UnusableRecord) as problem:
        raise DataError(
            f"{intake.path}: {problem}; task.reader squad needs one JSON object with articles in 'data'."
        ) from None
    for i, article in enumerate(articles):
        with intake.at(f"data[{i}]"):
            paragraphs = objects_in(article, "paragraphs")
            _read_paragraphs(intake, paragraphs, f"data[{i}]")
    return intake.finish()


def _read_paragraphs(intake: Intake, paragraphs: list[dict[str, Any]], article: str) -> None:
    for i, paragraph in enumerate(paragraphs):
        location = f"{article}.paragraphs[{i}]"
        with intake.at(location):
            context = text_in(paragraph, "context")
            for j, question in enumerate(objects_in(paragraph, "qas")):
                with intake.at(f"{location}.qas[{j}]"):
                    add_question(intake, question, context, "id")


def add_question(intake: Intake, tree: dict[str, Any], context: str, index: str) -> None:
    """One question. Its label is the answers' texts: () where the text has no answer, None where nothing is said.

    The label of squad_questions is the question, and questions without an answer are no samples.
    """
    answers: list[tuple[str, int]] = []
    has_answers = tree.get("answers") is not None
    for answer in objects_in(tree, "answers") if has_answers else ():
        text, start = text_in(answer, "text"), whole_number_in(answer, "answer_start")
        if start < 0 or not text or not context.startswith(text, start):
            text_there = context[start : start + len(text)] if start >= 0 else ""
            raise BadLine(
                f"the answer {shown(text)} is not at character {start} (answer_start) of the text, which has "
                f"{shown(text_there)} there"
            )
        answers.append((text, start))
    is_impossible = tree.get("is_impossible", False)
    if not isinstance(is_impossible, bool) or (is_impossible and answers):
        raise BadLine(
            f"field 'is_impossible' is {shown(is_impossible)} with {len(answers)} answers; it must be true exactly "
            "if there are none"
        )
    fields = {"question": text_in(tree, "question"), "context": context, "answers": tuple(answers)}
    label: Any = tuple(text for text, _ in answers) if answers or is_impossible else None
    if plain_name(intake.config.name) == "squadquestions":
        if is_impossible:
            return  # there is no answer to write a question for
        label = fields["question"]
    intake.add(fields, label, index_in(tree, index))
