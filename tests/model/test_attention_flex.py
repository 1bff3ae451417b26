"""Block lists against the exact mask, and FlexAttention's plain form against the reference."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import (
    CPU,
    attend,
    draw,
    dropout_of,
    mask_of,
    random_arrays,
    recipe_arrays,
    reference_attention,
)
from support.mask_rule import allowed
from support.recipes import RECIPES
from torch._dynamo.testing import CompileCounter

from megatron_lite.model.attention import flex
from megatron_lite.model.attention.flex import FlexPlan, block_lists
from megatron_lite.model.attention.layout import LENGTHS, make_layout
from megatron_lite.model.attention.plan import plan_attention

EACH = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def masks_of_lists(lists, blocks):
    """Which pairs of blocks are partial, and which full: two bool [blocks, blocks]."""
    found = []
    for counts, entries in ((lists.partial_counts, lists.partial), (lists.full_counts, lists.full)):
        mask = np.zeros((blocks, blocks), bool)
        for query in range(blocks):
            listed = entries[query, : counts[query]]
            assert len(set(listed.tolist())) == len(listed)
            mask[query, listed] = True
        found.append(mask)
    return found


def check_lists(arrays, block):
    """Every allowed pair lies in a listed block, full blocks are full. Returns needed and listed blocks."""
    layout = make_layout(*arrays)
    tokens = arrays[0].size
    blocks = -(-tokens // block)
    partial, full = masks_of_lists(block_lists(layout, blocks, block), blocks)
    assert not (partial & full).any()
    exact = np.zeros((blocks * block, blocks * block), bool)
    order = np.where(layout.key_time < 2**31, layout.key_time, -layout.query_bound - 1)
    here = slice(0, len(layout.rows))
    exact[here, here] = allowed(layout.document, order, layout.grp)
    tiles = exact.reshape(blocks, block, blocks, block).swapaxes(1, 2)
    needed, complete = tiles.any((2, 3)), tiles.all((2, 3))
    assert (needed <= (partial | full)).all()
    assert (full <= complete).all()
    return needed.sum(), (partial | full).sum(), complete.sum(), full.sum()


@EACH
@pytest.mark.parametrize("block", [4, 16])
def test_block_lists_hold_every_allowed_pair(recipe, block):
    needed, listed, complete, full = np.sum(
        [check_lists(recipe_arrays(recipe, 200, 2, seed), block) for seed in range(5)], axis=0
    )
    # The bounds come from ranges and not from pairs, so some blocks are listed or masked without need.
    assert listed <= 1.15 * needed
    assert full >= 0.9 * complete


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_block_lists_serve_any_arrays(seed):
    check_lists(random_arrays(seed), 4)


def test_a_block_list_that_lacks_a_block_is_noticed(monkeypatch):
    """The check above fires."""
    import megatron_lite.model.attention.flex as module

    whole = module._pairs_within
    monkeypatch.setattr(module, "_pairs_within", lambda document: tuple(x[1:] for x in whole(document)))
    with pytest.raises(AssertionError):
        check_lists(recipe_arrays(RECIPES["bert"], 60, 1, 0), 4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@EACH
def test_flex_attention_equals_softmax_over_the_rule(recipe):
    """Forward only, in its plain form: there is no backward pass on CPU. The plain form computes every pair."""
    arrays = recipe_arrays(recipe, 60, 2, 1)
    q, k, v, _ = draw((*arrays[0].shape, 2, 8))
    plan = plan_attention(make_layout(*arrays), CPU, "flex", multiple=128)
    assert isinstance(plan, FlexPlan)
    with torch.no_grad():
        ours = attend(plan, (q, k, v))
    # fp64, but FlexAttention's plain form may hold sums of exponentials in fp32.
    torch.testing.assert_close(ours, reference_attention(arrays, q, k, v), rtol=1e-6, atol=1e-6)
    assert not ours[~mask_of(arrays).any(-1)].any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@EACH
def test_flex_attention_drops_the_weights_that_the_dense_plan_drops(recipe):
    arrays = recipe_arrays(recipe, 60, 2, 1)
    *qkv, _ = draw((*arrays[0].shape, 2, 8))
    outs = []
    for kernel in ("flex", "dense"):
        plan = plan_attention(make_layout(*arrays), CPU, kernel)
        with torch.no_grad():
            outs.append(attend(plan, qkv, dropout_of(arrays, 0.5, plan=plan, heads_first=3)))
    torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)  # as above


@pytest.mark.slow
def test_compiled_flex_attention_skips_blocks_and_equals_the_reference():
    """Compiled for the CPU (half a minute), where blocks that are not listed are not computed."""
    arrays = recipe_arrays(RECIPES["unilmv2"], 300, 2, 1)
    q, k, v, _ = draw((*arrays[0].shape, 2, 16), torch.float32)
    plan = FlexPlan(make_layout(*arrays), 640)
    with torch.no_grad():
        ours = attend(plan, (q, k, v))
    # fp32: a few units in the last place of sums over 400 keys.
    torch.testing.assert_close(ours, reference_attention(arrays, q, k, v), rtol=1e-4, atol=1e-5)


def test_every_padded_length_is_compiled_and_none_falls_back():
    """From the eighth graph on torch would compute all pairs, without a word; a graph too many is an error here."""
    counter = CompileCounter()
    kernel = flex._kernel(True, counter)
    try:
        with torch.no_grad():
            for length in range(1, 10):
                kernel(*torch.ones(3, 1, 1, 16 * length, 8))
            assert counter.frame_count == 9
            kernel(*torch.ones(3, 1, 1, 16, 8))
            assert counter.frame_count == 9
            assert flex._GRAPHS >= 2 * LENGTHS > 9
            with (
                mock.patch.object(flex, "_GRAPHS", 2),
                pytest.raises(Exception, match=r"recompile_limit|fullgraph"),
            ):
                few = flex._kernel.__wrapped__(True, counter)
                for length in range(10, 13):
                    few(*torch.ones(3, 1, 1, 16 * length, 8))
    finally:
        flex._kernel.cache_clear()
        torch.compiler.reset()
