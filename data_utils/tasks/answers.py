"""What a model's answers say of a record, and what it is compared with.

Answers of a sample are arrays [n, m]: of choices [parts, 2], the log probability of the targets of each part and
whether none of them has a likelier token; else the outputs of the task's head, a row for each part (classes, values) or
for each row of the parts (tags, spans).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from data_utils.tasks.base import Record, TaskSample
from data_utils.tasks.cloze import Cloze
from data_utils.tasks.render import Renderer


def prediction(renderer: Renderer, record: Record, sample: TaskSample, answers: np.ndarray) -> Any:
    """In the types of `Record.label`: the name of a class, the number of a choice, a number, a list of tags, a text."""
    kind = renderer.kind
    if isinstance(kind, Cloze):
        return _of_choices(kind, record, sample, answers)
    if renderer.head == "classes":
        return renderer.labels[int(answers[0].argmax())]
    if renderer.head == "values":
        return float(answers[0, 0])
    if renderer.head == "tags":
        return [renderer.labels[tag] for tag in answers.argmax(axis=1)]
    return kind.predict(record, sample, answers)  # type: ignore[attr-defined]


def choice_scores(sample: TaskSample, answers: np.ndarray) -> np.ndarray:
    """The score of each choice, [parts]."""
    return answers[:, 0] / np.array([part.divisor for part in sample.parts])


def _of_choices(kind: Cloze, record: Record, sample: TaskSample, answers: np.ndarray) -> Any:
    best = int(choice_scores(sample, answers).argmax())  # of equal scores the first
    if kind.words:
        return kind.labels[best]
    if kind.task == "wsc":  # the first choice is the span that is asked about
        alone = len(sample.parts) == 1
        return "true" if (answers[0, 1] if alone else best == 0) else "false"
    return kind.choices(record)[best] if kind.task == "record" else best


def references(records: Sequence[Record]) -> list[Any]:
    """What predictions are compared with: labels, of which lists are several right ones."""
    return [list(record.label) if isinstance(record.label, tuple) else record.label for record in records]


def positive_label(labels: Sequence[str]) -> str:
    """The class that F1 counts: the second of two, as in MRPC, QQP and MultiRC."""
    return labels[1] if len(labels) > 1 else "1"
