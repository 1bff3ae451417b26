"""Predictions from a model's answers, and the references that metrics compare them with.

The answers of a sample are an array. Choices: [groups, 2], the log probability of each group's targets, and 1 if every
target is the likeliest token. Other kinds: outputs of the task's head, one row for each group (classes, values) or for
each predicted token of the groups (tags, spans).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from data_utils.tasks.base import TaskRecord, TaskSample
from data_utils.tasks.metrics.metrics_by_task import task_metrics
from data_utils.tasks.templates.cloze import Cloze
from data_utils.tasks.templates.heads_input import Spans
from data_utils.tasks.templates.render import Renderer


def prediction(renderer: Renderer, record: TaskRecord, sample: TaskSample, answers: np.ndarray) -> Any:
    """The prediction, of the type of `TaskRecord.label`: a class, the number of a choice, a number,
    a list of tags or classes, a text.
    """
    kind = renderer.task_type
    if isinstance(kind, Cloze):
        return _of_choices(kind, record, sample, answers)
    if renderer.head == "classes":
        return renderer.labels[int(answers[0].argmax())]
    if renderer.head == "sets":
        return [label for label, score in zip(renderer.labels, answers[0], strict=True) if score > 0]
    if renderer.head == "values":
        return float(answers[0, 0])
    if renderer.head == "tags":
        return [renderer.labels[tag] for tag in answers.argmax(axis=1)]
    assert isinstance(kind, Spans)
    return _best_span(kind, record, sample, answers)


def choice_scores(sample: TaskSample, answers: np.ndarray) -> np.ndarray:
    """The score of each choice, [groups]."""
    return answers[:, 0] / np.array([group.divisor for group in sample.target_groups])


def probabilities(
    renderer: Renderer, sample: TaskSample, answers: np.ndarray
) -> dict[str, float] | list[float] | None:
    """The softmax over the scores of the classes, by their names, or of the choices; None of other kinds.

    Of sets the probability of each class by itself.
    """
    kind = renderer.task_type
    if renderer.head == "sets":
        found = (1 / (1 + np.exp(-answers[0]))).round(4)
        return dict(zip(renderer.labels, found.tolist(), strict=True))
    if isinstance(kind, Cloze):
        if kind.task in ("wsc", "record"):
            return None
        scores, names = choice_scores(sample, answers), kind.labels if kind.words else ()
    elif renderer.head == "classes":
        scores, names = answers[0], renderer.labels
    else:
        return None
    powers = np.exp(scores - scores.max())
    found = [round(float(share), 4) for share in powers / powers.sum()]  # batches change the seventh place
    return dict(zip(names, found, strict=True)) if names else found


def _of_choices(kind: Cloze, record: TaskRecord, sample: TaskSample, answers: np.ndarray) -> Any:
    best = int(choice_scores(sample, answers).argmax())  # of equal scores the first
    if kind.words:
        return kind.labels[best]
    if kind.task == "wsc":  # the first choice is the span that is asked about
        alone = len(sample.target_groups) == 1
        return "true" if (answers[0, 1] if alone else best == 0) else "false"
    return kind.choices(record)[best] if kind.task == "record" else best


def _best_span(kind: Spans, record: TaskRecord, sample: TaskSample, answers: np.ndarray) -> str:
    """The text whose first and last token have the highest sum of scores, "" where CLS has a higher one.

    Only tasks with questions that have no answer compare with CLS: its lowest sum in all windows counts (SQuAD 2.0).
    """
    config = kind.inputs.config
    lengths = [len(group.positions) for group in sample.target_groups]
    spans, none = [], []
    for number, outputs in enumerate(np.split(answers, np.cumsum(lengths)[:-1])):
        first, last = outputs[1:, 0], outputs[1:, 1]
        sums = first[:, None] + last[None, :]
        length = np.arange(len(first))[None, :] - np.arange(len(first))[:, None]
        sums[(length < 0) | (length >= config.answer_length)] = -np.inf
        if sums.size:
            place = int(sums.argmax())
            spans.append((float(sums.flat[place]), number, *divmod(place, len(first))))
        none.append(float(outputs[0].sum()))
    may_be_empty = any(name.endswith("_v2") for name in task_metrics(config).names)
    if not spans or (may_be_empty and min(none) > max(spans)[0]):
        return ""
    _, number, begin, end = max(spans, key=lambda span: span[0])
    return kind.answer_text(record, number, begin + 1, end + 1)


def references(records: Sequence[TaskRecord]) -> list[Any]:
    """The labels of records, to compare predictions with; a list holds several right answers."""
    return [list(record.label) if isinstance(record.label, tuple) else record.label for record in records]


def positive_label(renderer: Renderer) -> Any:
    """The class that F1 counts: `task.positive`, else the second of two, as in MRPC, QQP and MultiRC."""
    given = renderer.inputs.config.positive
    if renderer.prediction_type != "classes":
        return given and int(given)  # of choices; no other answers have an F1 of one class
    return given or renderer.labels[-1]
