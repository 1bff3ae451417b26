import mask_rule
import numpy as np
import pytest
import torch
from batches import prefix_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.objectives.base import DOC, GRP, ORD
from megatron_lite.attention import DensePlan, PrefixPlan, allowed, plan_attention, prefix_segments

CPU = torch.device("cpu")


def tensors(batch):
    return tuple(torch.from_numpy(np.ascontiguousarray(batch[:, i])) for i in (DOC, ORD, GRP))


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_the_rule_equals_the_numpy_reference_on_random_arrays(seed):
    rng = np.random.default_rng(seed)
    doc, order, grp = rng.integers(-1, 3, (2, 12)), rng.integers(-5, 6, (2, 12)), rng.integers(0, 3, (2, 12))
    ours = allowed(*(torch.from_numpy(x) for x in (doc, order, grp))).numpy()
    for row in range(2):
        np.testing.assert_array_equal(ours[row], mask_rule.allowed(doc[row], order[row], grp[row]))


def reference_attention(batch, q, k, v):
    """Softmax over the allowed keys in fp64, written out; rows that see nothing give 0."""
    mask = allowed(*tensors(batch))[:, None]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("kernel", ["dense", "prefix"])
@pytest.mark.parametrize("documents", [1, 2, 4])
def test_each_plan_equals_softmax_over_the_rule(kernel, documents):
    batch = prefix_batch(seed=documents, documents=documents)
    rng = torch.Generator().manual_seed(0)
    shape = (*batch.shape[::2], 2, 8)
    qkv = [torch.randn(shape, dtype=torch.float64, generator=rng, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape, dtype=torch.float64, generator=rng)
    plan = plan_attention(batch[:, DOC], batch[:, ORD], batch[:, GRP], CPU, kernel)
    assert isinstance(plan, DensePlan if kernel == "dense" else PrefixPlan)
    ours, expected = plan.attend(0, *qkv, 0.0), reference_attention(batch, *qkv)
    # fp64: only the order of summation differs.
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(
        torch.autograd.grad(ours, qkv, grad), torch.autograd.grad(expected, qkv, grad), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    padding = torch.from_numpy(batch[:, DOC] < 0)
    assert padding.any() and not ours[padding].any()


def test_half_precision_stays_close_to_fp64():
    batch = prefix_batch(seed=3)
    qkv = [
        torch.randn(*batch.shape[::2], 2, 8, generator=torch.Generator().manual_seed(i)).bfloat16()
        for i in range(3)
    ]
    for kernel in ("dense", "prefix"):
        plan = plan_attention(batch[:, DOC], batch[:, ORD], batch[:, GRP], CPU, kernel)
        ours = plan.attend(0, *qkv, 0.0)
        assert ours.dtype == torch.bfloat16
        expected = reference_attention(batch, *(x.double() for x in qkv))
        # bf16 keeps 8 bits: inputs are exact, the output is rounded (2^-9 relative), native kernels round weights too.
        torch.testing.assert_close(ours.double(), expected, rtol=2e-2, atol=2e-2)


def segments(doc, order, grp=None):
    doc, order = np.array([doc], np.int32), np.array([order], np.int32)
    return prefix_segments(doc, order, np.zeros_like(doc) if grp is None else np.array([grp], np.int32))


def test_prefix_structure_is_recognised():
    found = segments([0, 0, 0, 1, 1, -1], [0, 0, 1, 0, 1, 0])
    assert [(s.length, s.context) for s in found] == [(3, 2), (2, 1), (1, -1)]
    assert [(s.length, s.context) for s in segments([0, 0, 0], [1, 2, 3])] == [(3, 0)]  # causal from 1


@pytest.mark.parametrize(
    "arrays",
    [
        ([0, 0, 0], [0, 2, 3]),  # a step is skipped
        ([0, 0, 0], [0, 1, 1]),  # two tokens revealed at once
        ([0, 0, 0], [0, 1, 0]),  # context after a target
        ([0, 0, 0], [0, 1, -1]),  # a ghost
        ([0, 0], [0, 0], [0, 1]),  # a private group
        ([0, 1, 0], [0, 0, 0]),  # a document in two stretches
        ([0, 0], [2, 3]),  # a document that starts late
    ],
)
def test_other_structures_are_left_to_the_dense_plan(arrays):
    assert segments(*arrays) is None


def test_rows_are_separate_documents():
    doc = np.zeros((2, 4), np.int32)
    order = np.array([[0, 0, 1, 2], [0, 1, 2, 3]], np.int32)
    found = prefix_segments(doc, order, np.zeros_like(doc))
    assert [(s.length, s.context) for s in found] == [(4, 2), (4, 1)]
