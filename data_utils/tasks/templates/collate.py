"""TaskSamples of one micro-batch -> the planes of their documents, and the arrays that say what to score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_utils.common.batch_fields import DOC, FIELDS, PADDING_DOC, Example
from data_utils.common.parts import NO_RIGHT, PartArrays
from data_utils.tasks.base import Part, TaskSample


def collate(samples: Sequence[TaskSample]) -> tuple[np.ndarray, PartArrays]:
    """The documents of the samples, a row for each, and their parts.

    Returns: int32 planes [documents, len(FIELDS), longest]; padding has doc -1 and else zeros.
    """
    examples = [example for sample in samples for example in sample.documents]
    longest = max(len(example.tokens) for example in examples)
    planes = np.zeros((len(examples), len(FIELDS), longest), np.int32)
    planes[:, DOC] = PADDING_DOC
    for row, example in zip(planes, examples, strict=True):
        _write(row, example)
    return planes, _part_arrays(samples, longest)


def _write(row: np.ndarray, example: Example) -> None:
    for plane, name in enumerate(FIELDS):
        values = getattr(example, name)
        row[plane, : len(values)] = values.view(np.int32)


def _part_arrays(samples: Sequence[TaskSample], longest: int) -> PartArrays:
    parts: list[Part] = []
    rows: list[np.ndarray] = []
    first_document = 0
    for sample in samples:
        for part in sample.parts:
            assert 0 <= part.document < len(sample.documents)
            assert len(part.rows) == 0 or part.rows.max() < len(sample.documents[part.document].tokens)
            parts.append(part)
            rows.append(part.rows.astype(np.int64) + (first_document + part.document) * longest)
        first_document += len(sample.documents)
    numbers = np.arange(len(parts))
    none = np.zeros(0, np.int64)
    return PartArrays(
        rows=np.concatenate([none, *rows]),
        targets=np.concatenate([none, *(part.targets for part in parts)]),
        row_part=np.repeat(numbers, [len(part.rows) for part in parts]),
        target_part=np.repeat(numbers, [len(part.targets) for part in parts]),
        sample=np.repeat(np.arange(len(samples)), [len(sample.parts) for sample in samples]),
        value=np.array([part.value for part in parts], np.float32),
        divisor=np.array([part.divisor for part in parts], np.float32),
        right=np.array([NO_RIGHT if sample.right is None else sample.right for sample in samples], np.int64),
    )
