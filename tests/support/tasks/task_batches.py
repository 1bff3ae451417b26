"""Random samples of tasks, for tests that need no text: unequal numbers of parts, rows and targets."""

from __future__ import annotations

import numpy as np

from data_utils.common.batch_fields import Example
from data_utils.tasks.base import TargetGroup, TaskSample
from data_utils.tasks.templates.collate import collate
from megatron_lite.transformer.task_batch import TaskBatch

VOCAB, CLASSES = 90, 3


def document(rng: np.random.Generator, context: int, span: int) -> Example:
    """A context that is read both ways, then a span from left to right; no loss of its own."""
    length = context + span
    zeros = np.zeros(length, np.int32)
    steps = np.r_[np.zeros(context), np.arange(1, span + 1)].astype(np.int32)
    return Example(
        tokens=rng.integers(0, VOCAB, length).astype(np.int32),
        position_ids=np.r_[np.arange(context), np.full(span, 2)].astype(np.int32),
        block_position_ids=steps,
        targets=zeros,
        weights=np.zeros(length, np.float32),
        doc=zeros,
        ord=steps,
        grp=zeros,
        objective=zeros,
        segment_ids=zeros,
    )


def _rows(*places: int) -> np.ndarray:
    return np.array(places, np.int32)


def sample(head: str, seed: int) -> TaskSample:
    """A pure function of its arguments."""
    rng = np.random.default_rng((seed, 7))
    if head == "choices":
        spans = rng.integers(1, 5, rng.integers(2, 5))
        documents = [document(rng, 9, span) for span in spans]
        parts = [
            TargetGroup(
                i, np.arange(9, 9 + span), rng.integers(0, VOCAB, span).astype(np.int32), divisor=1.0 + i
            )
            for i, span in enumerate(spans)
        ]
        return TaskSample(documents, parts, right=int(rng.integers(len(spans))))
    documents = [document(rng, int(rng.integers(6, 14)), 0)]
    length = len(documents[0].tokens)
    if head == "classes":
        return TaskSample(documents, [TargetGroup(0, _rows(0), _rows(int(rng.integers(CLASSES))))])
    if head == "values":
        return TaskSample(documents, [TargetGroup(0, _rows(0), value=float(rng.normal()))])
    if head == "tags":
        rows = np.flatnonzero(rng.random(length) < 0.5).astype(np.int32)
        return TaskSample(
            documents, [TargetGroup(0, rows, rng.integers(0, CLASSES, len(rows)).astype(np.int32))]
        )
    first = int(rng.integers(1, length - 2))
    return TaskSample(documents, [TargetGroup(0, np.arange(1, length), _rows(first, first + 1))])


def task_batch(head: str, numbers: range, loss: str = "cross_entropy") -> TaskBatch:
    """The samples of these numbers as one micro-batch."""
    samples = [sample(head, number) for number in numbers]
    fields, parts = collate(samples)
    names = [100 * n + i for n, s in zip(numbers, samples, strict=True) for i in range(len(s.documents))]
    return TaskBatch(fields, np.array(names), parts, head, loss)
