"""Local layers: every plan computes softmax over the rule within the window, for every objective."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.recipes import RECIPES, Recipe
from support.transformer import mask_rule
from support.transformer.attention import (
    CPU,
    attend,
    draw,
    dropout_of,
    mask_of,
    random_arrays,
    recipe_arrays,
    reference_attention,
)
from support.transformer.batches import prefix_batch
from support.transformer.kernels import interpreted_kernels

from data_utils.common.batch_fields import DOC, GRP, ORD, POSITION_IDS
from data_utils.common.errors import ConfigError
from data_utils.common.settings import build
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends import blocks
from megatron_lite.transformer.attention_backends import layout as attention_layout
from megatron_lite.transformer.attention_backends import window as windows
from megatron_lite.transformer.attention_backends.blocks import BlockPlan, block_lists
from megatron_lite.transformer.attention_backends.cpu_plan import CpuPlan
from megatron_lite.transformer.attention_backends.layout import MASKED, make_document_groups, make_layout
from megatron_lite.transformer.attention_backends.plan import plan_layers
from megatron_lite.transformer.attention_backends.varlen import VarlenPlan
from megatron_lite.transformer.attention_backends.window import (
    LayeredPlan,
    count_window_keys,
    window_groups,
)
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.kernels import rule_attention, triton_attention

EACH = pytest.mark.parametrize("recipe", [*RECIPES, "blank_infilling"])
FIELDS = (DOC, ORD, GRP, POSITION_IDS)
CUDA = torch.device("cuda")
# Their positions begin again, or differ from the order: CUDA's kernel has no window for them.
SEVERAL_STRETCHES = {"blank_infilling", "t5", "ul2", "bart", "mass", "unilmv2"} | {
    x for x in RECIPES if "xlnet" in x
}


def local_arrays(name, sequence_length, rows, seed):
    recipe = RECIPES.get(name) or Recipe(name, None, None)  # blank infilling has tests of its own
    return recipe_arrays(recipe, sequence_length, rows, seed, FIELDS)


def small_model(**options):
    sizes = {"num_layers": 7, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    return build(ModelConfig, sizes | options, "model.")


def random_places(seed):
    arrays = random_arrays(seed)
    return *arrays, np.random.default_rng(seed + 1).integers(0, 12, arrays[0].shape).astype(np.int32)


def written_out(arrays, window):
    """The rule and the window, independent of the product: bool [B, S, S]."""
    position = arrays[3].astype(int)
    whole = np.stack([mask_rule.allowed(*(x[row] for x in arrays[:3])) for row in range(len(position))])
    return whole & (np.abs(position[:, :, None] - position[:, None]) <= window)


@given(st.integers(0, 10**6), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_the_rule_within_a_window_is_the_one_written_out(seed, window):
    arrays = random_places(seed)
    expected = written_out(arrays, window)
    np.testing.assert_array_equal(mask_of(arrays, window).numpy(), expected)
    layout = make_layout(*arrays)
    assert count_window_keys(layout, window).tolist() == expected.sum(2).ravel()[layout.batch_index].tolist()


@EACH
@pytest.mark.parametrize("window", [1, 9])
def test_the_keys_within_a_window_are_counted(recipe, window, monkeypatch):
    monkeypatch.setattr(windows, "BLOCK_QUERIES", 32)
    arrays = local_arrays(recipe, 100, 3, 2)
    layout = make_layout(*arrays)
    assert (
        count_window_keys(layout, window).tolist()
        == written_out(arrays, window).sum(2).ravel()[layout.batch_index].tolist()
    )


def assert_equals_reference(arrays, plan, window, tolerance=1e-10):
    """Layers 0 and 3 see all, layers 1 and 2 what is near. fp64: only the order of summation differs."""
    *qkv, grad = draw((*arrays[0].shape, 2, 8))
    qkv = [x.requires_grad_() for x in qkv]
    for layer, own_window in ((0, 0), (1, window), (2, window), (3, 0)):
        expected, ours = reference_attention(arrays, *qkv, own_window), attend(plan, qkv, layer=layer)
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
        gradients = (torch.autograd.grad(out, qkv, grad) for out in (ours, expected))
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        assert not ours[~mask_of(arrays, own_window).any(-1)].any()


@pytest.fixture(params=["sizes of the code", "tiny sizes"])
def block_sizes(request, monkeypatch):
    """With tiny sizes, short rows go through every mask type, and no groups are computed together."""
    if request.param == "tiny sizes":
        for name, value in (("BLOCK_QUERIES", 7), ("JOINED_TOKENS", 10), ("LEAST_FULL_QUERIES", 2)):
            for module in (attention_layout, windows):
                monkeypatch.setattr(module, name, value, raising=False)
        monkeypatch.setattr("megatron_lite.transformer.attention_backends.cpu_plan.SHORT_PRODUCTS", 0)


@EACH
def test_calls_of_local_layers_equal_softmax_over_the_rule(recipe, block_sizes):
    for seed, sequence_length, window in ((1, 40, 3), (2, 150, 12)):
        arrays = local_arrays(recipe, sequence_length, 3, seed)
        plan = plan_layers(make_layout(*arrays), CPU, "auto", 1, window, 3)
        assert isinstance(plan, LayeredPlan) and isinstance(plan.local_plan, CpuPlan)
        assert_equals_reference(arrays, plan, window)


@given(st.integers(0, 10**6), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_calls_of_local_layers_serve_any_arrays(seed, window):
    arrays = random_places(seed)
    assert_equals_reference(arrays, plan_layers(make_layout(*arrays), CPU, "auto", 1, window, 3), window)


@EACH
def test_the_dense_plan_of_local_layers_equals_softmax_over_the_rule(recipe):
    arrays = local_arrays(recipe, 40, 2, 3)
    assert_equals_reference(arrays, plan_layers(make_layout(*arrays), CPU, "dense", 1, 4, 3), 4)


@EACH
def test_dropout_of_local_layers_matches_the_formula(recipe):
    """The calls of the CPU and the dense plan drop the same weights."""
    arrays = local_arrays(recipe, 60, 2, 3)
    *qkv, _ = draw((*arrays[0].shape, 2, 8))
    outs = []
    for kernel in ("cpu", "dense"):
        plan = plan_layers(make_layout(*arrays), CPU, kernel, 1, 5, 3)
        outs.append(attend(plan, qkv, dropout_of(arrays, 0.3, plan=plan), layer=1))
    torch.testing.assert_close(*outs, rtol=1e-10, atol=1e-10)


@EACH
def test_kernels_of_cuda_compute_exactly_the_pairs_of_the_window(recipe, emulated_kernel):
    """Two calls a layer with a window where a place is a position, else FlexAttention with the rule: never another."""
    for seed, window in ((4, 2), (5, 11)):
        arrays = local_arrays(recipe, 90, 3, seed)
        plan = plan_layers(make_layout(*arrays), CUDA, "auto", 64, window, 3)
        assert isinstance(plan, LayeredPlan) and len(plan.order) % 64 == 0
        kind = type(plan.global_plan)
        assert type(plan.local_plan) is kind
        if recipe != "unilm":  # its documents from right to left have falling positions
            assert kind is (BlockPlan if recipe in SEVERAL_STRETCHES else VarlenPlan)
        if kind is VarlenPlan:
            assert len(plan.local_plan.launches) <= 2
            assert_equals_reference(arrays, plan, window)
            continue
        assert (plan.local_plan.order == plan.global_plan.order).all()
        seen = written_out(arrays, window).reshape(-1, arrays[0].shape[1])
        rows, width = make_layout(*arrays).batch_index, arrays[0].shape[1]
        same = rows[:, None] // width == rows // width
        check_lists(make_layout(*arrays), window, same & seen[rows][:, rows % width])


def check_lists(layout, window, seen, block=4):
    """Blocks that are left out hold no pair, full ones hold no other. Args: seen: bool [T, T] in the layout's order."""
    blocks = -(-len(layout.batch_index) // block)
    whole = np.zeros((blocks * block,) * 2, bool)
    whole[: len(seen), : len(seen)] = seen
    tiles = whole.reshape(blocks, block, blocks, block).swapaxes(1, 2)
    lists = block_lists(layout, blocks, block, window)
    partial, full = np.zeros((2, blocks, blocks), bool)
    for query in range(blocks):
        partial[query, lists.partial[query, : lists.partial_counts[query]]] = True
        full[query, lists.full[query, : lists.full_counts[query]]] = True
    assert not (tiles.any((2, 3)) & ~partial & ~full).any() and (tiles.all((2, 3)) | ~full).all()
    return int((partial | full).sum()), int(tiles.any((2, 3)).sum())


def test_lists_of_a_long_document_leave_out_what_is_far():
    doc = np.zeros((1, 400), np.int32)
    layout = make_layout(doc, doc, doc, np.arange(400)[None])
    listed, needed = check_lists(layout, 20, written_out((doc, doc, doc, np.arange(400)[None]), 20)[0])
    assert listed == needed < 100 * 100 / 5


@pytest.mark.parametrize("name", ["blank_infilling", pytest.param("xlnet", marks=pytest.mark.slow)])
def test_kernels_of_local_layers_equal_softmax_over_the_rule(name, monkeypatch):
    """In Triton's interpreter, on small blocks; fp32 sums in another order: 2e-6 of the largest element."""
    for module in (rule_attention, triton_attention, blocks):
        monkeypatch.setattr(module, "BLOCK", 64)
    arrays = local_arrays(name, 40, 2, 1)
    *qkv, grad = draw((*arrays[0].shape, 2, 8), torch.float32)
    plan = plan_layers(make_layout(*arrays), CPU, "blocks", 8, 6, 3)
    for layer, window in ((0, 0), (1, 6)):
        inputs, wide = (
            [x.to(dtype).requires_grad_() for x in qkv] for dtype in (torch.float32, torch.float64)
        )
        with interpreted_kernels():
            ours = attend(plan, inputs, layer=layer)
            found = torch.autograd.grad(ours, inputs, grad)
        expected = reference_attention(arrays, *wide, window)
        pairs = zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True)
        for mine, other in ((ours, expected), *pairs):
            assert (mine - other).abs().max() <= 2e-6 * max(1.0, other.abs().max())


def pairs_computed(groups):
    return sum(
        (each.stop - each.start) * sum(stop - start for start, stop in each.keys)
        for group in groups
        for each in group.query_ranges
    )


def test_memory_and_work_of_local_layers_grow_with_the_length():
    """Blocks of 256 queries with at most 384 keys: 21 times fewer pairs than all, at 8,192 tokens."""
    found = {}
    for tokens in (2048, 8192):
        zeros = np.zeros((1, tokens), np.int32)
        layout = make_layout(zeros, zeros, zeros, np.arange(tokens)[None])
        groups = window_groups(layout, make_document_groups(layout, square_causal_only=True), 64)
        for each in itertools.chain(*(group.query_ranges for group in groups)):
            assert each.mask == MASKED and each.stop - each.start <= 256
            ((start, stop),) = each.keys
            assert (start, stop) == (max(0, each.start - 64), min(tokens, each.stop + 64))
        found[tokens] = pairs_computed(groups)
        assert count_window_keys(layout, 64).sum() == 129 * tokens - 64 * 65
    assert found[8192] < 4.14 * found[2048] and 21 < 8192**2 / found[8192] < 22


def test_short_documents_keep_their_calls():
    doc = np.repeat(np.arange(3), 65)[None].astype(np.int32)
    position = np.tile(np.arange(65), 3)[None]
    layout = make_layout(doc, doc * 0, doc * 0, position)
    groups = make_document_groups(layout, square_causal_only=True)
    assert window_groups(layout, groups, 64) == groups
    assert window_groups(layout, groups, 63) != groups


def test_flops_count_what_local_layers_see():
    batch = Batch(prefix_batch(0))
    arrays = [batch.fields[:, field] for field in FIELDS]
    whole, near = (int(mask_of(arrays, window).sum()) for window in (0, 7))
    assert near < whole == batch.visible_keys == batch.layer_keys(small_model())
    model = small_model(attention_window=7, global_every=3)  # layers 0, 3 and 6 are global
    assert batch.layer_keys(model) == pytest.approx((3 * whole + 4 * near) / 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention_window": 4}, "model.attention_window is 4 with model.global_every 1; local"),
        ({"global_every": 3}, "model.attention_window is 0 with model.global_every 3; local"),
        ({"rotary_base_local": 1e4}, "model.rotary_base_local is 10000.0"),
        ({"attention_window": 4, "global_every": 2, "relative": "buckets"}, "model.relative is buckets with"),
        ({"attention_window": 4, "global_every": 2, "decoder_layers": 1}, "model.attention_window is 4 with model.dec"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused_in_one_line(options, words):
    with pytest.raises(ConfigError) as error:
        small_model(**options)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_cuda_has_no_window_in_fp32():
    doc = np.zeros((1, 20), np.int32)
    plan = plan_layers(make_layout(doc, doc, doc, np.arange(20)[None]), CUDA, "auto", 1, 4, 3)
    assert plan.local_plan.launches[0].window == 4 and plan.global_plan.launches[0].window == 0
    qkv = draw((1, 20, 2, 8), torch.float32, 3)
    with pytest.raises(ConfigError, match=r"attention_window is 4, .* training\.precision to bf16"):
        attend(plan, qkv, layer=1)
