"""Changes that some cloze tasks make to their records before a pattern renders them.

COPA     the word between premise and choice; training sees both orders of the choices
WSC      the pronoun is put between stars; training sees the true samples only, whose first choice is right
ReCoRD   the query is cut at its placeholder; training sees each right entity once, with wrong ones drawn at random
RACE     the question is cut at its blank, or becomes a question with an answer
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Sequence

from data_utils.common.errors import DataError
from data_utils.common.setting_files import shown
from data_utils.tasks.base import TaskRecord
from data_utils.tasks.readers.superglue import in_ascii
from data_utils.tasks.templates.examples import Draws

NEGATIVES = 9  # wrong entities beside the right one in a training sample of ReCoRD
JOINTS = {"cause": " because", "effect": ", so"}


def _copa(record: TaskRecord) -> TaskRecord:
    question = record.fields.get("question")
    if question not in JOINTS:
        raise DataError(
            f"{record.location}: the question of COPA is {shown(question)}; it must be cause or effect."
        )
    return record.with_fields(joint=JOINTS[question])


def _wsc(record: TaskRecord) -> TaskRecord:
    """Stars around the pronoun, whose index may be off by one word; punctuation glued to it stays outside."""
    pronoun, index_text = str(record.needed("span2_text")), str(record.needed("span2_index"))
    if not index_text.isdecimal():
        raise DataError(
            f"{record.location}: span2_index is {shown(index_text)}; it must be the index of a word, from 0."
        )
    index = int(index_text)
    words = record.needed("text").split()
    for candidate in (index, index + 1, index - 1):
        if 0 <= candidate < len(words):
            word = words[candidate]
            match = re.fullmatch(
                rf"([{re.escape(string.punctuation)}]*){re.escape(pronoun)}((?:\W.*)?)", word, re.IGNORECASE
            )
            if match:
                words[candidate] = f"{match[1]}*{word[match.end(1) : match.start(2)]}*{match[2]}"
                return record.with_fields(text=" ".join(words), pronoun=pronoun)
    raise DataError(
        f"{record.location}: the pronoun {shown(pronoun)} is not word {index} (from 0) of the text or next to it; "
        "correct span2_index."
    )


def _record(record: TaskRecord) -> TaskRecord:
    """ReCoRD: the query before and after its placeholder, and the passage without marks of its highlights."""
    query = record.needed("query")
    start, *rest = query.split("@placeholder")
    if len(rest) != 1:
        raise DataError(
            f"{record.location}: the query contains @placeholder {len(rest)} times; it must contain it once."
        )
    passage = re.sub(r"\s*@highlight\s*", "\n- ", record.needed("passage"))
    return record.with_fields(passage=passage, query_start=start, query_end=rest[0].rstrip())


def _race(record: TaskRecord) -> TaskRecord:
    question = record.needed("question")
    start, blank, end = question.partition("_")
    if not blank:
        start, end = f"Question: {question} Answer:", ""
    return record.with_fields(query_start=start, query_end=end.lstrip("_"))


PREPARED: dict[str, Callable[[TaskRecord], TaskRecord]] = {
    "copa": _copa,
    "wsc": _wsc,
    "record": _record,
    "race": _race,
}


def training_records(task: str, records: Sequence[TaskRecord]) -> list[TaskRecord]:
    """The records that training sees. Args: task: its plain name."""
    if task == "copa":
        return [both for record in records for both in (record, _exchanged(record))]
    if task == "wsc":
        return [record for record in records if record.label == "true"]
    if task == "record":
        return [
            record.with_fields(answer=answer)
            for record in records
            for answer in sorted(set(record.label or ()))
        ]
    return list(records)


def _exchanged(record: TaskRecord) -> TaskRecord:
    choices = {"choice1": record.needed("choice2"), "choice2": record.needed("choice1")}
    right = _right_choice(record, 2)
    label = None if right is None else 1 - right
    return dataclasses.replace(record.with_fields(**choices), label=label)


def record_choices(task: str, record: TaskRecord, seed: int, number: int) -> tuple[list[str], int | None]:
    """The texts that may fill the blank of a record, and the number of the right one (None: not known).

    Args: seed, number: of the run and the sample, which decide the wrong entities of a training sample of ReCoRD.
    """
    fields = record.fields
    if task == "wsc":
        right = 0 if record.label == "true" else None  # of a false one it is not known
        return [str(record.needed("span1_text")), *map(str, fields.get("candidates") or ())], right
    if task == "record":
        return _entity_choices(record, seed, number)
    if task == "copa":
        choices = [_as_in_pattern(str(record.needed(name))) for name in ("choice1", "choice2")]
        return choices, _right_choice(record, len(choices))
    listed = fields.get("choices")
    if not isinstance(listed, (list, tuple)) or len(listed) < 2:
        raise DataError(
            f"{record.location}: the sample has fewer than 2 choices and the pattern has no verbalizers; add "
            "choices to the file, or set task.verbalizers."
        )
    return [str(choice) for choice in listed], _right_choice(record, len(listed))


def as_read(task: str, choice: str) -> str:
    """A choice as the model reads it. ReCoRD's stay as the file has them where they are written as predictions."""
    return in_ascii(choice) if task == "record" else choice


def _right_choice(record: TaskRecord, count: int) -> int | None:
    """The number of the right choice. Raises DataError for a label that is no choice."""
    label = record.label
    if label is not None and str(label) not in map(str, range(count)):
        raise DataError(
            f"{record.location}: label {shown(label)} is not one of the {count} choices, counted from 0; correct it."
        )
    return None if label is None else int(label)


def _as_in_pattern(choice: str) -> str:
    choice = choice.strip().rstrip(string.punctuation)
    return choice[:1].lower() + choice[1:]


def _entity_choices(record: TaskRecord, seed: int, number: int) -> tuple[list[str], int | None]:
    """ReCoRD: all entities of the passage; of a training record its answer and wrong ones, drawn at random."""
    entities = sorted({str(entity).strip() for entity in record.needed("entities")})
    right_entities = [answer.strip() for answer in record.label or ()]
    if "answer" in record.fields:
        wrong = [entity for entity in entities if entity not in right_entities]
        drawn = Draws(seed, "entities", number).chosen(len(wrong), NEGATIVES)
        return [record.fields["answer"].strip(), *(wrong[i] for i in drawn)], 0
    right = next((i for i, entity in enumerate(entities) if entity in right_entities), None)
    return entities, right
