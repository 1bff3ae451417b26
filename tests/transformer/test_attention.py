"""Every plan computes softmax over the rule, forward and backward, for every objective."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.recipes import RECIPES
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
from support.transformer.kernels import interpreted_kernels

from megatron_lite.transformer.attention_backends import cpu_groups, cpu_kernels, cpu_plan
from megatron_lite.transformer.attention_backends import layout as attention_layout
from megatron_lite.transformer.attention_backends.blocks import BlockPlan
from megatron_lite.transformer.attention_backends.cpu_groups import LongGroup, PaddedGroups
from megatron_lite.transformer.attention_backends.cpu_kernels import CPU_KERNELS, choose_cpu_kernel
from megatron_lite.transformer.attention_backends.cpu_plan import CpuPlan
from megatron_lite.transformer.attention_backends.dense import DensePlan
from megatron_lite.transformer.attention_backends.layout import make_layout
from megatron_lite.transformer.attention_backends.plan import plan_attention
from megatron_lite.transformer.attention_backends.varlen import VarlenAttention, VarlenPlan
from megatron_lite.transformer.kernels.fused import join_pair_kernel

WITHOUT_MASKS = {name: recipe for name, recipe in RECIPES.items() if recipe.name != "unilmv2"}
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
    ours, expected = attend(plan, qkv), reference_attention(arrays, *qkv)
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    gradients = (torch.autograd.grad(out, qkv, grad) for out in (ours, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    blind = ~mask_of(arrays).any(-1)
    assert not ours[blind].any()
    return blind


@pytest.fixture(params=["sizes of the code", "tiny sizes"])
def block_sizes(request, monkeypatch):
    """With tiny sizes, short rows go through every mask type."""
    if request.param == "tiny sizes":
        for name, value in (
            ("BLOCK_QUERIES", 7),
            ("KERNEL_KEYS", 12),
            ("JOINED_TOKENS", 10),
            ("LEAST_FULL_QUERIES", 4),
        ):
            monkeypatch.setattr(attention_layout, name, value)


@EACH
def test_cpu_plans_equal_softmax_over_the_rule(recipe, block_sizes):
    for seed, sequence_length in ((1, 40), (2, 150)):
        arrays = recipe_arrays(recipe, sequence_length, 4, seed)
        plan = plan_attention(make_layout(*arrays), CPU)
        assert isinstance(plan, CpuPlan)
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
def test_cpu_plans_serve_any_arrays(seed):
    arrays = random_arrays(seed)
    assert_equals_reference(arrays, plan_attention(make_layout(*arrays), CPU))


@EACH
def test_the_dense_plan_equals_softmax_over_the_rule(recipe):
    arrays = recipe_arrays(recipe, 40, 3, 3)
    assert_equals_reference(arrays, plan_attention(make_layout(*arrays), CPU, "dense"))


@pytest.mark.parametrize("recipe", WITHOUT_MASKS.values(), ids=WITHOUT_MASKS)
def test_two_launches_for_cuda_equal_softmax_over_the_rule(recipe, emulated_kernel):
    """The kernel is written out here; its queries and keys are the product's."""
    for seed, multiple in ((4, 1), (5, 64)):
        arrays = recipe_arrays(recipe, 60, 4, seed)
        plan = plan_attention(make_layout(*arrays), CPU, "varlen", multiple)
        assert_equals_reference(arrays, plan)
        assert len(plan.launches) <= 2 and len(plan.order) % multiple == 0


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_gradients_of_a_pair_of_launches_join_in_one_kernel_as_step_by_step(name):
    """The kernel against the operations that serve any calls."""
    recipe = RECIPES[name]
    arrays = recipe_arrays(recipe, 30, 2, 4)
    plan = plan_attention(make_layout(*arrays), torch.device("cuda"), multiple=32)
    assert plan.is_pair
    plan.on_device([torch.from_numpy(x) for x in plan.arrays()], CPU)
    qkv = draw((plan.length, 3, 2, 8), torch.float32, 1)[0]
    generator = torch.Generator().manual_seed(1)
    grads = []
    for launch in plan.launches:
        keys = launch.gathered if launch.keys is None else range(plan.length)[launch.keys]
        counts = (launch.queries.stop - launch.queries.start, len(keys), len(keys))
        grads.append(tuple(torch.randn(count, 2, 8, generator=generator) for count in counts))
    (expected,) = VarlenAttention(plan, 0.0)._summed_grads([qkv], grads)
    gathered_index = plan.launches[1].gathered_index
    with interpreted_kernels():
        ours, sums = join_pair_kernel(*grads[0], *grads[1], plan.launches[0].keys.start, gathered_index, None)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    torch.testing.assert_close(sums.sum(0), expected.sum(0).flatten(), rtol=0, atol=1e-5)


@EACH
def test_two_launches_compute_exactly_the_pairs_of_the_rule(recipe):
    """Each pair that may be seen once, no other: also a proof that no call is made for nothing."""
    arrays = recipe_arrays(recipe, 200, 4, 6)
    plan = plan_attention(make_layout(*arrays), torch.device("cuda"))
    if recipe.name == "unilmv2":
        assert isinstance(plan, BlockPlan)
        return
    assert isinstance(plan, VarlenPlan)
    tokens = arrays[0].size
    rows = np.where(plan.order < 0, tokens, plan.order)  # all padding is one more token
    pairs = np.zeros((tokens + 1, tokens + 1), int)
    for launch in plan.launches:
        queries, keys = rows[launch.queries], rows[launch.gathered if launch.keys is None else launch.keys]
        for (q, q_stop), (k, k_stop) in zip(
            itertools.pairwise(launch.cu_seqlens_q), itertools.pairwise(launch.cu_seqlens_k), strict=True
        ):
            shape = (q_stop - q, k_stop - k)
            seen = np.tril(np.ones(shape, int), shape[1] - shape[0]) if launch.causal else np.ones(shape, int)
            np.add.at(pairs, np.ix_(queries[q:q_stop], keys[k:k_stop]), seen)
    mask = mask_of(arrays).numpy()
    expected = np.zeros((tokens, tokens), int)
    for row, length in enumerate([mask.shape[1]] * len(mask)):
        here = slice(row * length, (row + 1) * length)
        expected[here, here] = mask[row]
    np.testing.assert_array_equal(pairs[:tokens, :tokens], expected)
    assert not pairs[tokens, :tokens].any() and not pairs[:tokens, tokens].any()


@EACH
def test_padding_does_not_change_what_tokens_see(recipe):
    arrays = recipe_arrays(recipe, 100, 3, 6)
    *qkv, _ = draw((*arrays[0].shape, 2, 8))
    outs = [
        attend(plan_attention(make_layout(*arrays), CPU, multiple=multiple), qkv) for multiple in (1, 128)
    ]
    assert (outs[0] == outs[1]).all()


@pytest.mark.each_cpu
@pytest.mark.parametrize("kernel", ["cpu", "dense"])
@EACH
def test_half_precision_stays_close_to_fp64(recipe, kernel):
    arrays = recipe_arrays(recipe, 100, 2, 7)
    *qkv, grad = draw((*arrays[0].shape, 2, 8), torch.bfloat16)
    qkv = [x.requires_grad_() for x in qkv]
    exact = [x.detach().double().requires_grad_() for x in qkv]
    ours, expected = (
        attend(plan_attention(make_layout(*arrays), CPU, kernel), qkv),
        reference_attention(arrays, *exact),
    )
    assert ours.dtype == torch.bfloat16
    # bf16 keeps 8 bits: inputs are exact, the output is rounded (2^-9 relative), native kernels round weights too.
    torch.testing.assert_close(ours.double(), expected, rtol=2e-2, atol=2e-2)
    gradients = (torch.autograd.grad(ours, qkv, grad), torch.autograd.grad(expected, exact, grad.double()))
    for mine, theirs in zip(*gradients, strict=True):
        # Against the largest gradient: sums over many rows of terms with 2^-9 each.
        assert (mine.double() - theirs).abs().max() <= 2e-2 * theirs.abs().max()


@EACH
def test_dropout_of_weights_matches_the_formula(recipe):
    """The calls of the CPU and the dense plan drop the same weights, as softmax over the rule written out does."""
    arrays = recipe_arrays(recipe, 60, 3, 3)
    *qkv, grad = draw((*arrays[0].shape, 2, 8))
    qkv = [x.requires_grad_() for x in qkv]
    dropout = dropout_of(arrays, 0.3)
    keys = dropout.keys.view(arrays[0].shape)
    stays = torch.stack([dropout.keep(row, row, 2) for row in keys])
    scores = torch.einsum("bqhd,bkhd->bhqk", *qkv[:2]) / 8**0.5
    weights = scores.masked_fill(~mask_of(arrays)[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights * stays / 0.7, qkv[2])
    for kernel in ("cpu", "dense"):
        plan = plan_attention(make_layout(*arrays), CPU, kernel, multiple=1 if kernel == "dense" else 32)
        ours = attend(plan, qkv, dropout_of(arrays, 0.3, plan=plan))
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
        gradients = (torch.autograd.grad(x, qkv, grad, retain_graph=True) for x in (ours, expected))
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    other = dropout_of(arrays, 0.3, seed=1, plan=plan)
    assert (attend(plan, qkv, other) != ours).any()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_batch_of_padding_gives_zeros(dropout):
    arrays = (np.full((2, 5), -1, np.int32), *np.zeros((2, 2, 5), np.int32))
    for kernel in ("auto", "dense"):
        plan = plan_attention(make_layout(*arrays), CPU, kernel, multiple=10)
        qkv = torch.stack(draw((10, 2, 8), count=3), dim=1)
        out = plan.on_device([torch.from_numpy(array) for array in plan.arrays()], CPU).attend(
            0, [qkv], dropout_of(arrays, dropout, plan=plan) if dropout else None
        )
        assert out.shape == (10, 2, 8) and not out.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("kind", ["full", "causal", "bias"])
def test_each_kernel_of_the_cpu_computes_softmax(name, kind, dtype):
    """Output and gradients; the plans' own tests reach those kernels only that this CPU takes."""
    q, k, v, grad = (x.requires_grad_() for x in draw((2, 3, 9, 8), dtype))
    bias = None
    if kind != "full":
        bias = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)
    kernel, given = CPU_KERNELS[name], None if kind != "bias" else bias.to(dtype)
    with torch.no_grad():
        out, state = kernel.forward(q, k, v, kind == "causal", given)
        ours = out, *kernel.backward(grad, q, k, v, out, state, kind == "causal", given)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(-1, -2) / 8**0.5
    expected = (scores if bias is None else scores + bias).softmax(-1) @ exact[2]
    gradients = torch.autograd.grad(expected, exact, grad.double())
    # bf16 keeps 8 bits, see test_half_precision_stays_close_to_fp64; the fused kernel's fp64 exponential has 1e-9.
    tolerance = 1e-7 if dtype == torch.float64 else 2e-2
    for mine, theirs in zip(ours, (expected, *gradients), strict=True):
        assert (mine.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize(
    "dtype, queries, keys, is_full, expected",
    [
        (torch.float32, 136, 136, True, "flash"),
        (torch.float64, 2048, 2048, True, "flash"),
        (torch.bfloat16, 136, 136, True, "flash fp32"),
        (torch.bfloat16, 512, 512, True, "plain"),
        (torch.bfloat16, 512, 512, False, "flash fp32"),
        (torch.bfloat16, 256, 2048, False, "flash fp32"),
        (torch.float16, 2048, 2048, True, "flash"),
        (torch.bfloat16, 256, 4096, False, "flash"),
    ],
)
def test_the_kernel_of_the_cpu_follows_from_type_and_size(dtype, queries, keys, is_full, expected):
    assert choose_cpu_kernel(dtype, queries, keys, is_full=is_full) == expected


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_plans_take_each_kernel_for_long_documents(name, monkeypatch):
    """As on a CPU that multiplies bf16 natively, where the choice is made."""
    taken = []
    monkeypatch.setattr(cpu_plan, "SHORT_PRODUCTS", 0)
    monkeypatch.setattr(cpu_kernels, "widens", lambda x: False)
    monkeypatch.setattr(cpu_groups, "choose_cpu_kernel", lambda *args, **options: taken.append(name) or name)
    arrays = recipe_arrays(RECIPES["t5"], 600, 1, 5)
    assert_equals_reference(arrays, plan_attention(make_layout(*arrays), CPU), tolerance=1e-7)
    *qkv, _ = draw((*arrays[0].shape, 2, 8), torch.bfloat16)
    out = attend(plan_attention(make_layout(*arrays), CPU), qkv)
    exact = reference_attention(arrays, *(x.double() for x in qkv))
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    assert taken


@EACH
def test_groups_of_short_documents_equal_launches_for_each(recipe, monkeypatch):
    """Many short documents of every length, in groups and each by itself."""
    arrays = recipe_arrays(recipe, 100, 12, 3)
    qkv = torch.stack(draw((arrays[0].size, 2, 8), count=3), dim=1).requires_grad_()
    grad = draw((arrays[0].size, 2, 8), count=1)[0]
    results = []
    for products in (cpu_plan.SHORT_PRODUCTS, 0):
        monkeypatch.setattr(cpu_plan, "SHORT_PRODUCTS", products)
        plan = plan_attention(make_layout(*arrays), CPU, multiple=arrays[0].size)
        out = plan.attend(0, [qkv], None)
        results.append((out, *torch.autograd.grad(out, qkv, grad)))
        launches = {type(launch) for launch in plan.launches_of(16)}
        assert launches == {PaddedGroups if products else LongGroup}
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_a_group_hides_tokens_that_no_query_sees():
    """A query stream that sees all content: one call without a mask, on fewer keys than there are tokens."""
    doc, order = np.zeros((2, 2, 100), np.int32)
    order[:, :30] = -1
    arrays = doc, order, np.zeros_like(doc)
    plan = plan_attention(make_layout(*arrays), CPU)
    assert {each.keys for group in plan.groups for each in group.query_ranges} == {((30, 100),)}
    assert_equals_reference(arrays, plan)


def test_equal_documents_share_a_launch_without_a_mask():
    for recipe, is_causal in (("causal", True), ("masked_lm", False)):
        doc = np.zeros((5, 70), np.int32)
        order = np.tile(np.arange(70, dtype=np.int32), (5, 1)) if is_causal else np.zeros((5, 70), np.int32)
        plan = plan_attention(make_layout(doc, order, np.zeros_like(doc)), CPU)
        (launch,) = plan.launches_of(16)
        assert launch._queries.index.shape == (5, 70), recipe
        assert (launch._mask_type == attention_layout.CAUSAL) == is_causal
        assert launch.mask(plan._visibility, torch.float64)[0] is None
        assert_equals_reference((doc, order, np.zeros_like(doc)), plan)


@EACH
def test_memory_grows_linearly_with_the_row_length(recipe):
    """No range has more than BLOCK_QUERIES queries and a mask, and what a plan holds is a few numbers per token."""
    sizes = []
    for sequence_length in (480, 1920):
        arrays = recipe_arrays(recipe, sequence_length, 1, 8)
        plan = plan_attention(make_layout(*arrays), CPU)
        ranges = [each for group in plan.groups for each in group.query_ranges]
        masked = [each.stop - each.start for each in ranges if each.mask == attention_layout.MASKED]
        assert max(masked, default=0) <= attention_layout.BLOCK_QUERIES
        tensors = [x for x in vars(plan).values() if isinstance(x, torch.Tensor)]
        sizes.append(sum(x.numel() for x in tensors) / (plan.order >= 0).sum())
    assert sizes[0] == sizes[1] <= 5


def test_plans_save_no_masks_for_the_backward_pass():
    """Beside q, k, v and the output, a number for each row and head."""
    arrays = recipe_arrays(RECIPES["unilmv2"], 600, 1, 9)
    layout = make_layout(*arrays)
    qkv = torch.stack(draw((len(layout.batch_index), 2, 8), count=3), dim=1).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        plan = plan_attention(layout, CPU)
        plan.on_device([], CPU).attend(0, [qkv], None)
    tokens = len(layout.batch_index)
    assert sum(saved) <= 4 * tokens * 2 * 8 + tokens * 2


def test_the_plan_is_the_reference_only_when_asked():
    arrays = recipe_arrays(RECIPES["bert"], 40, 2, 1)
    assert isinstance(plan_attention(make_layout(*arrays), CPU, "dense"), DensePlan)
    assert isinstance(plan_attention(make_layout(*arrays), CPU), CpuPlan)
