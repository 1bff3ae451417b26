"""Predictions from a model's outputs, and the references that metrics compare them with.

The outputs for a sample are an array. Choices: [groups, 2], the log probability of each group's targets, and 1 if every
target is the likeliest token. Other heads: [groups, size] (classes, sets, values), or [positions of all groups, size]
(tags, spans).
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


def prediction(renderer: Renderer, record: TaskRecord, sample: TaskSample, outputs: np.ndarray) -> Any:
    """The prediction, of the type of `TaskRecord.label`: a class, the number of a choice, a number,
    a list of tags or classes, a text.
    """
    task_type = renderer.task_type
    if isinstance(task_type, Cloze):
        return _best_choice(task_type, record, sample, outputs)
    if renderer.head == "classes":
        return renderer.labels[int(outputs[0].argmax())]
    if renderer.head == "sets":
        return [label for label, score in zip(renderer.labels, outputs[0], strict=True) if score > 0]
    if renderer.head == "values":
        return float(outputs[0, 0])
    if renderer.head == "tags":
        return [renderer.labels[tag] for tag in outputs.argmax(axis=1)]
    assert isinstance(task_type, Spans)
    return _best_span(task_type, record, sample, outputs)


def choice_scores(sample: TaskSample, outputs: np.ndarray) -> np.ndarray:
    """The score of each choice, [groups]."""
    return outputs[:, 0] / np.array([group.divisor for group in sample.target_groups])


def probabilities(
    renderer: Renderer, sample: TaskSample, outputs: np.ndarray
) -> dict[str, float] | list[float] | None:
    """The softmax over the scores of the classes, by their names, or of the choices; None of other kinds.

    Of sets the probability of each class by itself.
    """
    task_type = renderer.task_type
    if renderer.head == "sets":
        independent = (1 / (1 + np.exp(-outputs[0]))).round(4)
        return dict(zip(renderer.labels, independent.tolist(), strict=True))
    if isinstance(task_type, Cloze):
        if task_type.task in ("wsc", "record"):
            return None
        scores, names = choice_scores(sample, outputs), task_type.labels if task_type.words else ()
    elif renderer.head == "classes":
        scores, names = outputs[0], renderer.labels
    else:
        return None
    powers = np.exp(scores - scores.max())
    # Rounded, because the other samples of a batch change the seventh digit.
    softmax = [round(float(share), 4) for share in powers / powers.sum()]
    return dict(zip(names, softmax, strict=True)) if names else softmax


def _best_choice(task_type: Cloze, record: TaskRecord, sample: TaskSample, outputs: np.ndarray) -> Any:
    best = int(choice_scores(sample, outputs).argmax())  # of equal scores the first
    if task_type.words:
        return task_type.labels[best]
    if task_type.task == "wsc":  # the first choice is the span that is asked about
        has_one_choice = len(sample.target_groups) == 1
        return "true" if (outputs[0, 1] if has_one_choice else best == 0) else "false"
    return task_type.choices(record)[best] if task_type.task == "record" else best


def _best_span(task_type: Spans, record: TaskRecord, sample: TaskSample, outputs: np.ndarray) -> str:
    """The text whose first and last token have the highest sum of scores, "" where CLS has a higher one.

    Only tasks with questions that have no answer compare with CLS: its lowest sum in all windows counts (SQuAD 2.0).
    """
    config = task_type.inputs.config
    lengths = [len(group.positions) for group in sample.target_groups]
    best_spans = []  # of each window: score, number of the window, first and last token
    cls_scores = []
    for number, window in enumerate(np.split(outputs, np.cumsum(lengths)[:-1])):
        first, last = window[1:, 0], window[1:, 1]
        sums = first[:, None] + last[None, :]
        length = np.arange(len(first))[None, :] - np.arange(len(first))[:, None]
        sums[(length < 0) | (length >= config.answer_length)] = -np.inf
        if sums.size:
            index = int(sums.argmax())
            best_spans.append((float(sums.flat[index]), number, *divmod(index, len(first))))
        cls_scores.append(float(window[0].sum()))
    may_be_empty = any(name.endswith("_v2") for name in task_metrics(config).names)
    if not best_spans or (may_be_empty and min(cls_scores) > max(best_spans)[0]):
        return ""
    _, number, begin, end = max(best_spans, key=lambda span: span[0])
    return task_type.answer_text(record, number, begin + 1, end + 1)


def references(records: Sequence[TaskRecord]) -> list[Any]:
    """The labels of records, to compare predictions with; a list holds several right answers."""
    return [list(record.label) if isinstance(record.label, tuple) else record.label for record in records]


def positive_label(renderer: Renderer) -> Any:
    """The class that F1 counts: `task.positive`, else the second of two, as in MRPC, QQP and MultiRC."""
    positive = renderer.inputs.config.positive
    if renderer.prediction_type != "classes":
        return positive and int(positive)  # of choices; no other predictions have an F1 of one class
    return positive or renderer.labels[-1]
