"""Every plan computes softmax over the rule, forward and backward, for every objective."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import mask_rule
from support.attention import CPU, arrays_of, draw, mask_of, random_arrays, recipe_arrays, reference_attention
from support.batches import prefix_batch
from support.recipes import RECIPES

from megatron_lite.model import batch as attention_layout
from megatron_lite.model.attention import CallPlan, DensePlan, plan_attention
from megatron_lite.model.batch import make_layout

EACH = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_the_rule_equals_the_numpy_reference_on_random_arrays(seed):
    arrays = random_arrays(seed)
    for row, ours in enumerate(mask_of(arrays).numpy()):
        np.testing.assert_array_equal(ours, mask_rule.allowed(*(x[row] for x in arrays)))


def assert_equals_reference(arrays, plan, tolerance=1e-10):
    """Output and gradients in fp64: only the order of summation differs."""
    *qkv, grad = draw((*arrays[0].shape, 2, 8))
    qkv = [x.requires_grad_() for x in qkv]
    ours, expected = plan.attend(0, *qkv, 0.0), reference_attention(arrays, *qkv)
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    gradients = (torch.autograd.grad(out, qkv, grad) for out in (ours, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    blind = ~mask_of(arrays).any(-1)
    assert not ours[blind].any()
    return blind


@pytest.fixture(params=["sizes of the code", "tiny sizes"])
def block_sizes(request, monkeypatch):
    """With tiny sizes, short rows go through every kind of call."""
    if request.param == "tiny sizes":
        for name, value in (
            ("BLOCK_ROWS", 7),
            ("KERNEL_KEYS", 12),
            ("JOINED_ROWS", 10),
            ("LEAST_FULL_ROWS", 4),
        ):
            monkeypatch.setattr(attention_layout, name, value)


@EACH
def test_calls_equal_softmax_over_the_rule(recipe, block_sizes):
    for seed, sequence_length in ((1, 40), (2, 150)):
        arrays = recipe_arrays(recipe, sequence_length, 4, seed)
        plan = plan_attention(make_layout(*arrays), CPU)
        assert isinstance(plan, CallPlan)
        assert assert_equals_reference(arrays, plan).any()


@EACH
def test_long_documents_equal_softmax_over_the_rule(recipe):
    """Longer than a block of rows, one document and several."""
    arrays = recipe_arrays(recipe, 600, 2, 5)
    assert_equals_reference(arrays, plan_attention(make_layout(*arrays), CPU))


@pytest.mark.slow
@EACH
def test_many_random_rows_equal_softmax_over_the_rule(recipe, block_sizes):
    for seed in range(100):
        arrays = recipe_arrays(recipe, 20 + 3 * seed, 3, seed)
        assert_equals_reference(arrays, plan_attention(make_layout(*arrays), CPU))


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_calls_serve_any_arrays(seed):
    arrays = random_arrays(seed)
    assert_equals_reference(arrays, plan_attention(make_layout(*arrays), CPU))


@EACH
def test_the_dense_plan_equals_softmax_over_the_rule(recipe):
    arrays = recipe_arrays(recipe, 40, 3, 3)
    assert_equals_reference(arrays, plan_attention(make_layout(*arrays), CPU, "dense"))


@EACH
def test_the_calls_for_cuda_equal_softmax_over_the_rule(recipe):
    """As few calls as the structure allows, under autograd: what CUDA and dropout run."""
    arrays = recipe_arrays(recipe, 60, 4, 4)
    layout = attention_layout.make_layout(*arrays)
    units = attention_layout.make_units(layout, square_causal_only=False)
    rows = torch.from_numpy(layout.rows)

    class UnderAutograd(CallPlan):
        def attend(self, layer, q, k, v, dropout):
            # A probability that drops nothing chooses the path.
            return super().attend(layer, q, k, v, 1e-300)

    assert_equals_reference(arrays, UnderAutograd(layout, units, rows, CPU))


@EACH
def test_laid_out_plans_compute_the_same_without_padding(recipe):
    arrays = recipe_arrays(recipe, 100, 3, 6)
    q, k, v, _ = draw((*arrays[0].shape, 2, 8))
    plan = plan_attention(make_layout(*arrays), CPU)
    rows = torch.from_numpy(plan.layout.rows)
    whole = plan.attend(0, q, k, v, 0.0)
    alone = plan.laid_out().attend(0, *(x.flatten(0, 1)[rows][None] for x in (q, k, v)), 0.0)
    assert (alone[0] == whole.flatten(0, 1)[rows]).all()
    assert len(rows) < arrays[0].size


@pytest.mark.parametrize("kernel", ["calls", "dense"])
@EACH
def test_half_precision_stays_close_to_fp64(recipe, kernel):
    arrays = recipe_arrays(recipe, 100, 2, 7)
    *qkv, grad = draw((*arrays[0].shape, 2, 8), torch.bfloat16)
    qkv = [x.requires_grad_() for x in qkv]
    exact = [x.detach().double().requires_grad_() for x in qkv]
    ours, expected = (
        plan_attention(make_layout(*arrays), CPU, kernel).attend(0, *qkv, 0.0),
        reference_attention(arrays, *exact),
    )
    assert ours.dtype == torch.bfloat16
    # bf16 keeps 8 bits: inputs are exact, the output is rounded (2^-9 relative), native kernels round weights too.
    torch.testing.assert_close(ours.double(), expected, rtol=2e-2, atol=2e-2)
    gradients = (torch.autograd.grad(ours, qkv, grad), torch.autograd.grad(expected, exact, grad.double()))
    for mine, theirs in zip(*gradients, strict=True):
        # Against the largest gradient: sums over many rows of terms with 2^-9 each.
        assert (mine.double() - theirs).abs().max() <= 2e-2 * theirs.abs().max()


def test_dropout_is_seeded_and_keeps_padding_zero():
    arrays = arrays_of(prefix_batch(seed=3))
    q, k, v, _ = draw((*arrays[0].shape, 2, 8))
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(plan_attention(make_layout(*arrays), CPU).attend(0, q, k, v, 0.5))
    assert (outs[0] == outs[1]).all() and (outs[0] != outs[2]).any()
    assert not outs[0][torch.from_numpy(arrays[0] < 0)].any()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_batch_of_padding_gives_zeros(dropout):
    arrays = (np.full((2, 5), -1, np.int32), *np.zeros((2, 2, 5), np.int32))
    for kernel in ("auto", "dense"):
        out = plan_attention(make_layout(*arrays), CPU, kernel).attend(
            0, *draw((2, 5, 2, 8), count=3), dropout
        )
        assert out.shape == (2, 5, 2, 8) and not out.any()


@EACH
def test_memory_grows_linearly_with_the_row_length(recipe):
    """No call has more than BLOCK_ROWS rows and a mask, and what a plan holds is a few numbers per token."""
    sizes = []
    for sequence_length in (480, 1920):
        arrays = recipe_arrays(recipe, sequence_length, 1, 8)
        plan = plan_attention(make_layout(*arrays), CPU)
        masked = [c for u in plan.units for c in u.calls if c.kind == attention_layout.MASKED]
        rows = max((call.stop - call.start for call in masked), default=0)
        assert rows <= attention_layout.BLOCK_ROWS
        tensors = [x for x in vars(plan).values() if isinstance(x, torch.Tensor)]
        sizes.append(sum(x.numel() for x in tensors) / len(plan.layout.rows))
    assert sizes[0] == sizes[1] <= 5


def test_plans_save_no_masks_for_the_backward_pass():
    """Beside q, k, v and the output, a number for each row and head."""
    arrays = recipe_arrays(RECIPES["unilmv2"], 600, 1, 9)
    q, k, v, _ = (x.requires_grad_() for x in draw((*arrays[0].shape, 2, 8)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        plan = plan_attention(make_layout(*arrays), CPU)
        plan.attend(0, q, k, v, 0.0)
    tokens = len(plan.layout.rows)
    assert sum(saved) <= 4 * tokens * 2 * 8 + tokens * 2


def test_the_plan_is_the_reference_only_when_asked():
    arrays = recipe_arrays(RECIPES["bert"], 40, 2, 1)
    assert isinstance(plan_attention(make_layout(*arrays), CPU, "dense"), DensePlan)
    assert isinstance(plan_attention(make_layout(*arrays), CPU), CallPlan)
