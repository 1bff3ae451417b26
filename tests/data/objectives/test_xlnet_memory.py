"""XLNet's memory in training: the first tokens of a chunk, and then the row that the rest has without it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.recipes import collate, make, many, text_of

from data_utils.common.batch_fields import FIELDS, Example

MEMORY, REST = 12, 30


def without_memory(example: Example, memory: int) -> dict[str, np.ndarray]:
    """The fields of what follows the memory, counted as if it were not there."""
    fields = {name: getattr(example, name)[memory:] for name in FIELDS}
    return fields | {
        "position_ids": fields["position_ids"] - memory,
        "ord": fields["ord"] - np.sign(fields["ord"] + 0.5).astype(np.int32),
    }


def test_a_golden_row():
    """One text in two orders. Order: 0 the memory; 1 what is no target of the first half, and so on as without it."""
    row = make("xlnet", 16, memory_length=4, tokens_per_target=3, two_texts=False).example(
        text_of(12, False), 3
    )
    assert row.tokens.tolist() == [*range(1000, 1012), 102, 101, 103, 103]
    assert row.block_position_ids.tolist() == [1] * 4 + [0] * 12
    assert row.position_ids[:14].tolist() == list(range(14))
    first, second = row.position_ids[14:].tolist()
    assert 4 <= first < 8 <= second < 12
    assert row.targets.tolist() == [0] * 14 + [1000 + first, 1000 + second]
    assert row.weights.tolist() == [0.0] * 14 + [1.0] * 2
    assert row.segment_ids.tolist() == [0] * 13 + [2, 0, 0]
    ranks = np.array([0] * 4 + [1] * 4 + [3] * 4)
    ranks[first] = 2
    assert (np.delete(row.ord[:12], second) == np.delete(ranks, second)).all()
    assert sorted(row.ord[[second, 12, 13]].tolist()) == [4, 5, 6]
    assert row.ord[14:].tolist() == [-2, -row.ord[second]]
    assert (row.doc == 0).all() and (row.grp == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 60),
    memory=st.integers(1, 30),
    per_target=st.integers(1, 7),
    orders=st.integers(1, 3),
    two_texts=st.booleans(),
    sample=st.integers(0, 2**40),
)
def test_the_rest_is_the_row_that_it_is_without_a_memory(
    length, memory, per_target, orders, two_texts, sample
):
    """So targets, orders and texts have the statistics of that row."""
    text = text_of(length, bool(sample % 2))
    options = {"tokens_per_target": per_target, "orders": orders, "two_texts": two_texts}
    actual = make("xlnet", 60, memory_length=memory, **options).example(text, sample)
    kept = memory if length >= 2 * memory else 0
    expected = make("xlnet", 60, **options).example(text[kept:], sample)
    if not kept:
        assert all((getattr(actual, name) == getattr(expected, name)).all() for name in FIELDS)
        return
    assert (actual.tokens[:kept] == text[:kept]).all()
    assert (actual.position_ids[:kept] == np.arange(kept)).all()
    assert (actual.block_position_ids == (np.arange(len(actual.tokens)) < kept)).all()
    for name in ("targets", "weights", "doc", "ord", "grp", "segment_ids"):
        assert not getattr(actual, name)[:kept].any(), name
    for name, field in without_memory(actual, kept).items():
        assert (field == getattr(expected, name)).all(), name


def test_texts_that_are_exchanged_leave_memories_where_they_are():
    made = make("xlnet", 120, memory_length=MEMORY)
    long, short = text_of(MEMORY + REST, False), text_of(2 * MEMORY - 1, True, 1500)
    other = text_of(2 * MEMORY, False, 2000)
    foreign = 0
    for fields in collate(made, [[long, short, other]] * 200):
        documents = Example.from_fields(fields).documents()
        for chunk, document, memory in zip((long, short, other), documents, (MEMORY, 0, MEMORY), strict=True):
            assert document.block_position_ids.sum() == memory
            assert (document.tokens[: memory + 1] == chunk[: memory + 1]).all()
            content = document.tokens[document.ord >= 0]
            foreign += not np.isin(content[content >= 1000], chunk).all()
    assert foreign > 100


def test_a_memory_predicts_nothing_and_half_of_a_text_is_trained():
    examples = many(make("xlnet", 60, memory_length=30, tokens_per_target=6), text_of(60, False), 50)
    assert {int(example.weights.sum()) for example in examples} == {5}
    assert all(example.position_ids[example.weights > 0].min() >= 30 for example in examples)


def test_a_memory_is_read_as_if_the_text_ended_there():
    """Its tokens have order 0, which sees order 0 only."""
    for example in many(make("xlnet", 40, memory_length=5), text_of(30), 20):
        assert (example.ord[:5] == 0).all() and (example.ord[5:] != 0).all()
