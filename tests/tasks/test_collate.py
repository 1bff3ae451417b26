"""Samples -> planes and parts: every row and target is found again at the place that the arrays name."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.common.batch_fields import FIELDS, TOKENS, WEIGHTS, Example
from data_utils.common.parts import NO_RIGHT
from data_utils.tasks.base import Part, TaskSample
from data_utils.tasks.templates.collate import collate


def example(first: int, length: int) -> Example:
    """Each plane has other numbers, so that exchanged ones are noticed."""
    planes = {
        name: np.arange(first, first + length, dtype=np.int32) + 1000 * number
        for number, name in enumerate(FIELDS)
    }
    planes["weights"] = np.linspace(0.5, 1.0, length, dtype=np.float32)
    return Example(**planes | {"doc": np.zeros(length, np.int32)})


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_documents_become_rows_and_parts_flat_arrays():
    choices = TaskSample(
        [example(10, 3), example(20, 5)],
        [Part(0, array(1, 2), array(7, 8), divisor=2.0), Part(1, array(2, 3, 4), array(7, 9, 8), value=1.5)],
        right=1,
    )
    tagged = TaskSample([example(30, 4)], [Part(0, array(1, 3))])
    planes, parts = collate([choices, tagged])
    assert planes.dtype == np.int32 and planes.shape == (3, len(FIELDS), 5)
    assert planes[:, TOKENS].tolist() == [[10, 11, 12, 0, 0], [20, 21, 22, 23, 24], [30, 31, 32, 33, 0]]
    assert planes[:, FIELDS.index("doc")].tolist() == [[0, 0, 0, -1, -1], [0] * 5, [0, 0, 0, 0, -1]]
    assert planes[0, WEIGHTS].view(np.float32).tolist() == [0.5, 0.75, 1.0, 0.0, 0.0]
    assert parts.rows.tolist() == [1, 2, 7, 8, 9, 11, 13]
    assert parts.row_part.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert parts.targets.tolist() == [7, 8, 7, 9, 8] and parts.target_part.tolist() == [0, 0, 1, 1, 1]
    assert parts.sample.tolist() == [0, 0, 1] and parts.right.tolist() == [1, NO_RIGHT]
    assert parts.divisor.tolist() == [2.0, 1.0, 1.0] and parts.value.tolist() == [0.0, 1.5, 0.0]


def test_samples_without_parts_have_empty_arrays():
    planes, parts = collate([TaskSample([example(0, 2)]), TaskSample([example(9, 1)])])
    assert planes.shape[0] == 2 and parts.right.tolist() == [NO_RIGHT, NO_RIGHT]
    for field in dataclasses.fields(parts):
        values = getattr(parts, field.name)
        assert len(values) == (2 if field.name == "right" else 0)
        assert values.dtype == (np.float32 if field.name in ("value", "divisor") else np.int64)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5))
def test_every_row_is_found_in_the_planes(lengths):
    samples = []
    for number, documents in enumerate(lengths):
        made = [example(1000 * number + 100 * i, length) for i, length in enumerate(documents)]
        parts = [Part(i, np.arange(length, dtype=np.int32)) for i, length in enumerate(documents)]
        samples.append(TaskSample(made, parts[::-1]))
    planes, parts = collate(samples)
    expected = [e.tokens for sample in samples for e in sample.documents[::-1]]
    assert (planes[:, TOKENS].reshape(-1)[parts.rows] == np.concatenate(expected)).all()
    assert len(np.unique(parts.rows)) == len(parts.rows) == sum(map(sum, lengths))
