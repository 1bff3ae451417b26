"""Block lists against the exact mask; kernels of the rule, in Triton's interpreter, against the reference."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.recipes import RECIPES, collate, make, windows
from support.selection import slow_but
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
from support.transformer.kernels import interpreted_kernels
from support.transformer.mask_rule import allowed

from data_utils.common.errors import ConfigError
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends import blocks as blocks_module
from megatron_lite.transformer.attention_backends.blocks import BlockPlan, block_lists
from megatron_lite.transformer.attention_backends.layout import make_layout
from megatron_lite.transformer.attention_backends.plan import plan_attention
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.kernels import fused
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.transformer import Transformer

EACH = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
# In the interpreter a recipe takes seconds: by default those with each kind of bound, as the others differ in numbers
# that the kernels read. The lists of blocks are compared for all of them.
USUAL = {"causal", "bert", "xlnet with memory"}


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
    here = slice(0, len(layout.batch_index))
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
    whole = blocks_module._pairs_within
    monkeypatch.setattr(
        blocks_module, "_pairs_within", lambda document: tuple(x[1:] for x in whole(document))
    )
    with pytest.raises(AssertionError):
        check_lists(recipe_arrays(RECIPES["bert"], 60, 1, 0), 4)


def test_lists_of_keys_hold_the_pairs_of_those_of_queries():
    layout = make_layout(*recipe_arrays(RECIPES["unilmv2"], 200, 2, 0))
    lists = block_lists(layout, 40, 16)
    of_queries, of_keys = (masks_of_lists(each, 40) for each in (lists, lists.transposed()))
    for queries, keys in zip(of_queries, of_keys, strict=True):
        assert queries.any() and (queries == keys.T).all()


@pytest.fixture
def small_blocks(monkeypatch):
    """Kernels in the interpreter, on blocks of 64 tokens in tiles of 16 or 32: several in few tokens."""
    from megatron_lite.transformer.kernels import rule_attention, triton_attention

    for module in (rule_attention, triton_attention, blocks_module):
        monkeypatch.setattr(module, "BLOCK", 64)
    with interpreted_kernels():
        yield


def gradients_of(function, qkv, grad):
    """Output and the gradients of q, k and v for a gradient of the output."""
    inputs = [x.detach().clone().requires_grad_() for x in qkv]
    out = function(inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def assert_near(ours, theirs, tolerance):
    for mine, other in zip(ours, theirs, strict=True):
        gap = (mine.double() - other.double()).abs().max()
        assert gap <= tolerance * max(1.0, other.abs().max()), gap


@pytest.mark.parametrize("name", slow_but(USUAL, RECIPES))
@pytest.mark.usefixtures("small_blocks")
def test_kernels_equal_softmax_over_the_rule(name):
    """fp32 sums in another order: 2e-6 of the largest element."""
    arrays = recipe_arrays(RECIPES[name], 40, 2, 1)
    *qkv, grad = draw((*arrays[0].shape, 2, 8), torch.float32)
    plan = plan_attention(make_layout(*arrays), CPU, "blocks", multiple=24)
    assert isinstance(plan, BlockPlan)
    ours = gradients_of(lambda inputs: attend(plan, inputs), qkv, grad)
    wide = [x.double() for x in qkv]
    assert_near(ours, gradients_of(lambda inputs: reference_attention(arrays, *inputs), wide, grad), 2e-6)
    assert not ours[0][~mask_of(arrays).any(-1)].any()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", slow_but(["causal"], ["unilmv2", "xlnet", "causal"]))
def test_kernels_drop_the_weights_that_the_dense_plan_drops(name):
    arrays = recipe_arrays(RECIPES[name], 40, 2, 1)
    *qkv, grad = draw((*arrays[0].shape, 2, 8), torch.float32)
    found = []
    for kernel in ("blocks", "dense"):
        plan = plan_attention(make_layout(*arrays), CPU, kernel)
        dropout = dropout_of(arrays, 0.5, plan=plan, heads_first=3)
        found.append(gradients_of(lambda inputs, p=plan, d=dropout: attend(p, inputs, d), qkv, grad))
    assert_near(*found, 2e-6)


@pytest.mark.usefixtures("small_blocks")
def test_kernels_in_half_precision():
    """fp16: weights and results are rounded to 11 bits. The interpreter multiplies no bf16."""
    arrays = recipe_arrays(RECIPES["unilmv2"], 40, 2, 1)
    *qkv, grad = draw((*arrays[0].shape, 2, 24), torch.float16)
    plan = plan_attention(make_layout(*arrays), CPU, "blocks")
    ours = gradients_of(lambda inputs: attend(plan, inputs), qkv, grad)
    assert {x.dtype for x in ours} == {torch.float16}
    wide = [x.double() for x in qkv]
    assert_near(ours, gradients_of(lambda inputs: reference_attention(arrays, *inputs), wide, grad), 2e-3)


@pytest.mark.usefixtures("small_blocks")
def test_no_tokens():
    nothing = np.full((1, 8), -1, np.int32)
    plan = plan_attention(make_layout(nothing, nothing * 0, nothing * 0), CPU, "blocks", multiple=8)
    *qkv, grad = draw((1, 8, 2, 8), torch.float32)
    assert not any(x.any() for x in gradients_of(lambda inputs: attend(plan, inputs), qkv, grad))


@pytest.mark.usefixtures("small_blocks", "emulated_kernel")
@pytest.mark.parametrize("name", ["t5", pytest.param("unilmv2", marks=pytest.mark.slow)])
def test_a_bias_by_distance_and_its_gradient(name):
    """A model whose scores have T5's bias, against the same in fp64 whose attention is written out on the CPU."""
    config = ModelConfig(
        num_layers=1, decoder_layers=int(name == "t5"), hidden_size=32, num_attention_heads=2, vocab_size=3000,
        max_position=64, positions="none", relative="buckets", embedding_dropout=0.0, output_dropout=0.0,
        attention_dropout=0.0 if name == "t5" else 0.2,  # CUDA's own kernels, here emulated, draw other numbers
    )  # fmt: skip
    recipe = RECIPES[name]
    batch = collate(make(recipe.name, 60, **recipe.config), windows(1, 60, 0))
    model = Transformer(config, num_losses=len(LOSS_NAMES))
    initialize_parameters(model.named_parameters(), config, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    wide = copy.deepcopy(model).double()
    for each, kernel in ((model, "blocks"), (wide, "dense")):
        given = MicroBatch.from_batch(Batch(batch), CPU, config, dropout_seed=3, kernel=kernel, multiple=8)
        with mock.patch.object(fused, "DEVICES", ("cuda", "cpu") if kernel == "blocks" else ("cuda",)):
            each.loss = each(given)[0]
            each.loss.backward()
    torch.testing.assert_close(model.loss.double(), wide.loss.double(), rtol=1e-5, atol=0)
    tables = [name for name, _ in model.named_parameters() if "relative" in name]
    assert len(tables) == 1 + (name == "t5")
    others = dict(wide.named_parameters())
    for each, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert_near([parameter.grad], [others[each].grad], 2e-5)
    assert all(others[table].grad.abs().max() > 1e-3 for table in tables)


def test_heads_that_do_not_fit_are_refused():
    arrays = recipe_arrays(RECIPES["causal"], 20, 1, 0)
    plan = plan_attention(make_layout(*arrays), CPU, "blocks")
    with pytest.raises(ConfigError, match=r"heads have 136 features; .* set training.kernels=torch"):
        attend(plan, torch.zeros(3, *arrays[0].shape, 1, 136).unbind(0))
