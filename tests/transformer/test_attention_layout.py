"""The structure found in (doc, ord, grp): which query ranges, of which queries and keys."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data.recipes import RECIPES, collate, make, windows
from support.transformer import mask_rule
from support.transformer.batches import prefix_batch

from data_utils.common.batch_fields import DOC, GRP, OBJECTIVE, ORD, TARGETS, WEIGHTS
from megatron_lite.transformer import batch as host_batch
from megatron_lite.transformer.attention_backends import layout as attention_layout
from megatron_lite.transformer.attention_backends.layout import (
    BLIND,
    CAUSAL,
    FULL,
    MASKED,
    allowed,
    make_document_groups,
    make_layout,
)
from megatron_lite.transformer.batch import Batch


def query_ranges(doc, order, grp=None, square_causal_only=False):
    """Mask type, queries and keys of the query ranges of one row, as indices of the layout; and its batch_index."""
    doc, order = np.array([doc], np.int32), np.array([order], np.int32)
    grp = np.zeros_like(doc) if grp is None else np.array([grp], np.int32)
    layout = make_layout(doc, order, grp)
    found = []
    for group in make_document_groups(layout, square_causal_only=square_causal_only):
        shift = group.start
        for each in group.query_ranges:
            keys = tuple((start + shift, stop + shift) for start, stop in each.keys)
            found.append((each.mask, (each.start + shift, each.stop + shift), keys))
    return found, layout.batch_index.tolist()


def test_bidirectional_and_causal_documents_are_one_range():
    found, rows = query_ranges([0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 1, 2, 0])
    assert found == [(FULL, (0, 3), ((0, 3),)), (CAUSAL, (3, 6), ((3, 6),))]
    assert rows == [0, 1, 2, 3, 4, 5]


def test_prefix_documents_are_two_ranges():
    found, _ = query_ranges([0] * 6, [0, 0, 0, 1, 2, 3])
    assert found == [(FULL, (0, 3), ((0, 3),)), (CAUSAL, (3, 6), ((0, 6),))]


@pytest.mark.parametrize("rows, halves", [(256, False), (257, True), (512, True), (513, False)])
def test_on_cpu_causal_documents_are_cut_where_the_kernel_would_skip_nothing(rows, halves):
    found, _ = query_ranges([0] * rows, list(range(rows)), square_causal_only=True)
    whole, half = (0, rows), rows // 2
    two = [(CAUSAL, (0, half), ((0, half),)), (MASKED, (half, rows), (whole,))]
    assert found == (two if halves else [(CAUSAL, whole, (whole,))])


def test_right_to_left_is_causal_in_another_order():
    found, rows = query_ranges([0] * 4, [3, 2, 1, 0])
    assert found == [(CAUSAL, (0, 4), ((0, 4),))] and rows == [3, 2, 1, 0]


def test_mass_is_two_ranges():
    """Kept and masked tokens see each other; the decoder sees what was kept."""
    found, rows = query_ranges([0] * 7, [0, 0, -1, -1, 0, 1, 2], [1, 1, 1, 1, 1, 0, 0])
    assert rows == [2, 3, 0, 1, 4, 5, 6]
    assert found == [(FULL, (0, 5), ((0, 5),)), (CAUSAL, (5, 7), ((2, 7),))]


def test_two_streams_are_three_ranges():
    """Queries over [A; B[:-1]], A over A, B over [A; B]."""
    found, rows = query_ranges([0] * 8, [0, 0, 2, 1, 3, -1, -2, -3])
    assert rows == [5, 6, 7, 0, 1, 3, 2, 4]
    queries = (CAUSAL, (0, 3), ((3, 7),))
    assert found == [queries, (FULL, (3, 5), ((3, 5),)), (CAUSAL, (5, 8), ((3, 8),))]


def test_two_parts_of_two_streams_need_no_mask():
    found, _ = query_ranges([0] * 10, [0, 0, 1, 2, 3, 3, 4, -1, -2, -4])
    assert {kind for kind, _, _ in found} == {FULL, CAUSAL}


def test_pseudo_masks_have_keys_in_two_ranges():
    """One step of two tokens: its pseudo masks see the context and each other."""
    found, rows = query_ranges([0] * 7, [0, 0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 1, 1])
    assert rows == [5, 6, 0, 1, 2, 3, 4]
    assert found == [(FULL, (0, 2), ((0, 5),)), (FULL, (2, 5), ((2, 5),)), (FULL, (5, 7), ((2, 7),))]
    found, _ = query_ranges([0] * 9, [0, 0, 0, 1, 2, 2, -1, -2, -2], [0] * 6 + [1, 2, 2])
    assert found[1] == (FULL, (1, 3), ((1, 7),))  # the content begins where the last query-stream tokens end


def test_rows_that_see_nothing_have_no_keys():
    found, rows = query_ranges([0, 0, 0], [1, 2, -1])
    assert rows == [2, 0, 1]
    assert found == [(BLIND, (0, 1), ()), (CAUSAL, (1, 3), ((1, 3),))]


def test_documents_in_several_ranges_are_put_together():
    found, rows = query_ranges([0, 1, 0, 1], [0, 0, 0, 0])
    assert rows == [0, 2, 1, 3]
    assert found == [(FULL, (0, 2), ((0, 2),)), (FULL, (2, 4), ((2, 4),))]


def test_rows_of_a_batch_are_separate_documents():
    doc = np.zeros((2, 3), np.int32)
    groups = make_document_groups(make_layout(doc, doc, doc), square_causal_only=False)
    assert [(group.start, group.stop) for group in groups] == [(0, 3), (3, 6)]


def test_short_documents_are_joined_on_cpu():
    doc = np.repeat(np.arange(10), 20)
    found, _ = query_ranges(doc, np.tile([0] * 15 + [1, 2, 3, 4, 5], 10), square_causal_only=True)
    assert [rows for _, rows, _ in found] == [(0, 60), (60, 120), (120, 180), (180, 200)]
    assert all(kind == MASKED and keys == (rows,) for kind, rows, keys in found)


@pytest.mark.parametrize(("context", "target"), [(700, 300), (100, 900), (0, 1000)])
def test_long_causal_parts_are_cut_into_blocks_on_cpu(context, target):
    order = [0] * context + list(range(1, target + 1))
    found, _ = query_ranges([0] * 1000, order, square_causal_only=True)
    if not context:
        assert found == [(CAUSAL, (0, 1000), ((0, 1000),))]
        return
    assert found[0] == (FULL, (0, context), ((0, context),))
    for kind, (start, stop), keys in found[1:]:
        assert kind == MASKED and stop - start <= 256 and keys == ((0, stop),)
    assert [rows[0] for _, rows, _ in found[1:]] == [rows[1] for _, rows, _ in found[:-1]]


def test_layout_keeps_tokens_that_are_in_order():
    layout = make_layout(*np.zeros((3, 2, 4), np.int32))
    assert layout.batch_index.tolist() == list(range(8))
    assert not len(make_layout(*np.full((3, 1, 4), -1, np.int32)).batch_index)


def check_visible_keys(doc, order, grp):
    """The derived structure against the rule, row by row. Returns the number of pairs that may see each other."""
    layout = make_layout(doc, order, grp)
    visible = layout.visible_keys
    exact = np.stack([mask_rule.allowed(*fields) for fields in zip(doc, order, grp, strict=True)])
    assert (allowed(doc, order, grp) == exact).all()
    rows, keys = (layout.batch_index // doc.shape[1], layout.batch_index % doc.shape[1])
    seen = exact[rows, keys][:, keys] & (rows[:, None] == rows)  # in the order of the layout
    assert visible.count.tolist() == seen.sum(1).tolist()
    places = np.arange(len(rows))
    held = (places >= visible.stream_start[:, None]) & (places < visible.stream_stop[:, None])
    held |= (places >= visible.content_start[:, None]) & (places < visible.content_stop[:, None])
    assert not (seen & ~held).any()  # the stretches hold all that is seen, and nothing else where they say so
    assert (seen == held)[visible.is_exact].all()
    return int(exact.sum())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_views_match_the_rule(recipe):
    batch = collate(make(recipe.name, 60, **recipe.config), windows(4, 60, 1))
    pairs = check_visible_keys(*(batch[:, field] for field in (DOC, ORD, GRP)))
    assert Batch(batch).visible_keys == pairs > 0


@given(st.integers(0, 10**6))
def test_views_serve_any_arrays(seed):
    rng = np.random.default_rng(seed)
    shape = (2, int(rng.integers(1, 40)))
    check_visible_keys(
        rng.integers(-1, 3, shape), rng.integers(-5, 6, shape), rng.integers(0, 3, shape) * (seed % 2)
    )


def test_a_view_that_misses_a_key_is_noticed(monkeypatch):
    """The check above fires."""
    doc, whole = np.zeros((1, 3), np.int32), attention_layout._visible_keys
    check_visible_keys(doc, doc, doc)
    monkeypatch.setattr(
        attention_layout,
        "_visible_keys",
        lambda layout: dataclasses.replace(whole(layout), content_stop=whole(layout).content_stop - 1),
    )
    with pytest.raises(AssertionError):
        check_visible_keys(doc, doc, doc)


def test_a_batch_finds_its_structure_once(monkeypatch):
    calls_made = []
    for module, name in ((host_batch, "make_layout"), (attention_layout, "_visible_keys")):
        whole = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *x, whole=whole, name=name: calls_made.append(name) or whole(*x)
        )
    batch = Batch(prefix_batch(0))
    assert batch.tokens and batch.visible_keys
    weighed = batch.with_scaled_weights(np.ones(3, np.float32))
    for square_causal_only in (True, False):
        make_document_groups(weighed.layout, square_causal_only=square_causal_only)
    assert calls_made == ["make_layout", "_visible_keys"]


def test_a_batch_counts_its_losses():
    fields = prefix_batch(0)
    batch = Batch(fields)
    weights = fields[:, WEIGHTS].view(np.float32)
    assert batch.tokens == (fields[:, DOC] >= 0).sum()
    assert batch.loss_tokens == (weights != 0).sum() > 0
    expected = [weights[fields[:, OBJECTIVE] == i].sum() for i in range(4)]
    assert batch.loss_divisors(4).tolist() == expected and expected[0] > 0 and expected[3] == 0


def test_rows_of_padding_add_nothing():
    batch = Batch(prefix_batch(0, rows=2))
    padded = batch.padded(5)
    assert padded.fields.shape == (5, *batch.fields.shape[1:])
    assert (padded.fields[:2] == batch.fields).all() and not padded.fields[2:, [TARGETS, WEIGHTS]].any()
    for fact in ("tokens", "visible_keys", "loss_tokens"):
        assert getattr(padded, fact) == getattr(batch, fact)
    alone = Batch(batch.fields[:0]).padded(2)
    assert (alone.tokens, alone.visible_keys, alone.loss_tokens) == (0, 0, 0)
