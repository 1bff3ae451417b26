"""Collation: shapes, buffers, and refusal of arrays that do not belong together."""

from __future__ import annotations

import numpy as np
import pytest

from data_utils.common.batch_fields import FIELDS, Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.loader.loader import collate
from data_utils.objectives import LOSS_NAMES, OBJECTIVES, objective_class
from data_utils.objectives.blank_infilling import BlankInfilling, BlankInfillingConfig
from data_utils.tokenizers.special_tokens import SpecialTokens
from data_utils.tokenizers.vocabulary import Vocabulary

SPECIAL = SpecialTokens(
    cls=101, sep=102, mask=103, smask=104, gmask=105, sop=302, eop=303, eos=0, pad=1, unk=100, dblock=99
)
TEXT = np.arange(1000, 1060, dtype=np.int32)


def objective(sequence_length: int = 64) -> BlankInfilling:
    return BlankInfilling(BlankInfillingConfig(), Vocabulary(SPECIAL, 3000), 3, sequence_length)


class Copies:
    """The least an objective can be: collation must not need more than base.Objective."""

    row_length = 8
    sequence_length = 8

    def fill(self, batch, tokens, chunk_lengths, chunks_per_sample, sample_indices) -> None:
        batch[:] = sample_indices[:, None, None]


def test_shape_and_dtype():
    made = objective()
    batch = collate(made, TEXT, [30, 30], [1, 1], [0, 1])
    assert batch.shape == (2, len(FIELDS), made.row_length) and batch.dtype == np.int32
    assert made.row_length % 8 == 0
    rows = [Example.from_fields(row) for row in batch]
    assert all(row.weights.dtype == np.float32 and set(row.weights) == {0.0, 1.0} for row in rows)
    assert all(set(row.objective) == {LOSS_NAMES.index("token")} for row in rows)


def test_an_example_gives_back_its_documents():
    row = Example.from_fields(collate(objective(), TEXT[:40], [10, 30], [2], [0])[0])
    first, second = row.documents()
    assert set(first.doc) == {0} and set(second.doc) == {1}
    assert len(first.tokens) + len(second.tokens) + (row.doc == -1).sum() == len(row.tokens)
    assert (first.weights == row.weights[row.doc == 0]).all()


def test_a_buffer_is_reused_and_leaves_no_trace_of_its_content():
    made = objective()
    fresh = collate(made, TEXT, [30, 30], [1, 1], [0, 1])
    buffer = np.full_like(fresh, 77)
    assert collate(made, TEXT, [30, 30], [1, 1], [0, 1], out=buffer) is buffer
    assert (buffer == fresh).all()


def test_samples_without_chunks_are_padding():
    batch = collate(objective(), TEXT[:0], [], [0, 0], [4, 5])
    for row in batch:
        example = Example.from_fields(row)
        assert (example.tokens == SPECIAL.pad).all() and (example.doc == -1).all()
        assert not example.weights.any() and example.documents() == []


def test_any_objective_will_do():
    batch = collate(Copies(), TEXT, [60], [1], [9])
    assert batch.shape == (1, len(FIELDS), 8) and (batch == 9).all()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((TEXT, [30, 31], [1, 1], [0, 1]), "61 for 60 tokens"),
        ((TEXT, [70, -10], [1, 1], [0, 1]), ">= 0"),
        ((TEXT, [30, 30], [1, 2], [0, 1]), "3 for 2 chunks"),
        ((TEXT, [30, 30], [3, -1], [0, 1]), ">= 0"),
        ((TEXT, [30, 30], [1, 1], [0]), "1 sample indices for 2"),
        ((TEXT, [30, 30], [1, 1], [0, -1]), "index >= 0"),
    ],
)
def test_arrays_that_do_not_belong_together(arguments, part):
    with pytest.raises(DataError, match=part):
        collate(objective(), *arguments)


def test_a_sample_that_is_too_long_is_named():
    with pytest.raises(DataError, match=r"sample 12 has 1 chunks with 60 tokens.*sequence_length 32"):
        collate(objective(32), np.concatenate([TEXT[:20], TEXT]), [20, 60], [1, 1], [11, 12])


def test_too_many_documents_are_named():
    """Two-token documents fit only 10 to a window of 64: without the reserve they would need 165 tokens."""
    with pytest.raises(DataError, match="sample 5 has 33 chunks"):
        collate(objective(64), np.tile(TEXT[:1], 33), [1] * 33, [33], [5])


@pytest.mark.parametrize("bad", ["shape", "dtype", "layout"])
def test_a_wrong_buffer_is_refused(bad):
    made = objective()
    shape = (1, len(FIELDS), made.row_length)
    buffers = {
        "shape": np.empty((2, *shape[1:]), np.int32),
        "dtype": np.empty(shape, np.int64),
        "layout": np.empty(shape[::-1], np.int32).T,
    }
    with pytest.raises(DataError, match="batch buffer"):
        collate(made, TEXT, [60], [1], [0], out=buffers[bad])


def test_registry():
    assert objective_class("blank_infilling") is BlankInfilling
    with pytest.raises(ConfigError, match="blank_infilling"):
        objective_class("blank_infiling")
    assert all(name.isidentifier() for name in OBJECTIVES)
