"""The three plans of encoder and decoder compute softmax over the rule, restricted to pairs of parts."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.data.recipes import RECIPES
from support.transformer.attention import CPU, dropout_of, mask_of, random_arrays, recipe_arrays

from megatron_lite.transformer.attention_backends.cpu_groups import LongGroup, PaddedGroups
from megatron_lite.transformer.attention_backends.cpu_plan import CpuPlan
from megatron_lite.transformer.attention_backends.cross_attention import constant_length, plan_encoder_decoder
from megatron_lite.transformer.attention_backends.layout import make_layout
from megatron_lite.transformer.attention_backends.varlen import VarlenPlan
from megatron_lite.transformer.kernels.dropout import salts

NAMES = ("t5", "bart", "mass", "prefix_lm")
EACH = pytest.mark.parametrize("name", NAMES)
HEADS, SIZE = 2, 8


def arrays_of(name, sequence_length=60, rows=4, seed=4):
    return recipe_arrays(RECIPES[name], sequence_length, rows, seed)


class Written:
    """Attention written out on the tokens of a batch [B, S], for each pair of parts."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.is_target = torch.from_numpy((arrays[1] > 0) & (arrays[0] >= 0))
        self.mask = mask_of(arrays)

    def attend(self, q, k, v, of_target, keys_of_target, dropout=None):
        """[B, S, H, D]; rows of the other part and those that see nothing give 0."""
        rows = self.is_target if of_target else ~self.is_target
        keys = self.is_target if keys_of_target else ~self.is_target
        mask = (self.mask & rows[..., None] & keys[:, None])[:, None]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / SIZE**0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
        if dropout is not None:
            token_keys = dropout.keys.view(self.mask.shape[:2])
            stays = torch.stack([dropout.keep(row, row, HEADS) for row in token_keys])
            weights = weights * stays / (1 - dropout.p)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def in_batch_order(out, order, shape):
    """[T, H, D] in the order of a plan -> [B, S, H, D]."""
    order = torch.from_numpy(order)
    whole = out.new_zeros(shape[0] * shape[1], *out.shape[1:])
    return whole.index_copy(0, order[order >= 0], out[order >= 0]).view(*shape, *out.shape[1:])


def ordered(x, order):
    """[B, S, H, D] -> [T, H, D]; padding takes values that would be seen in the output."""
    order = torch.from_numpy(order)
    return torch.where((order >= 0)[:, None, None], x.flatten(0, 1)[order.clamp(min=0)], 3.0)


def orders(plan):
    return plan.order[: plan.lengths[0]], plan.order[plan.lengths[0] :]


def sent(plan):
    return plan.on_device([torch.from_numpy(np.ascontiguousarray(x)) for x in plan.arrays()], CPU)


def three(plan, inputs, shape, dropouts=(None, None, None)):
    """Outputs of encoder, decoder and cross-attention for q, k, v of each, in the order of the batch."""
    plan = sent(plan)
    encoder, decoder = orders(plan)
    outs = []
    for part, order, qkv, dropout in (
        (plan.encoder, encoder, inputs[0], dropouts[0]),
        (plan.decoder, decoder, inputs[1], dropouts[1]),
    ):
        packed = torch.stack([ordered(x, order) for x in qkv], dim=1)
        outs.append(in_batch_order(part.attend(0, [packed], dropout), order, shape))
    q, k, v = inputs[2]
    key_value = torch.stack([ordered(x, encoder) for x in (k, v)], dim=1)
    out = plan.cross.attend(0, [ordered(q, decoder)[:, None], key_value], dropouts[2])
    assert out.shape == (plan.lengths[1], HEADS, SIZE)
    return [*outs, in_batch_order(out, decoder, shape)]


def draw(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda: torch.randn(*shape, HEADS, SIZE, dtype=torch.float64, generator=generator)  # noqa: E731
    inputs = [[make().requires_grad_() for _ in range(3)] for _ in range(3)]
    return inputs, [make() for _ in range(3)]


def assert_equals_the_rule(arrays, plan, dropout=False, tolerance=1e-10):
    shape = arrays[0].shape
    written = Written(arrays)
    inputs, grads = draw(shape)
    dropouts = [None, None, None]
    in_order: list = [None, None, None]
    if dropout:
        dropouts = [dropout_of(arrays, 0.3)] * 3
        whole = dropout_of(arrays, 0.3, plan=plan)
        encoder, decoder = orders(plan)
        in_order = [_with_keys(whole, arrays, order) for order in (encoder, decoder)] + [whole]
    expected = [
        written.attend(*inputs[0], False, False, dropouts[0]),
        written.attend(*inputs[1], True, True, dropouts[1]),
        written.attend(*inputs[2], True, False, dropouts[2]),
    ]
    is_target = written.is_target[..., None, None]
    ours = three(plan, inputs, shape, in_order)
    # The dense plan has a place for every token in both parts.
    ours = [ours[0] * ~is_target, ours[1] * is_target, ours[2] * is_target]
    for mine, theirs, qkv, grad in zip(ours, expected, inputs, grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        gradients = (torch.autograd.grad(x, qkv, grad) for x in (mine, theirs))
        for ours_of, theirs_of in zip(*gradients, strict=True):
            torch.testing.assert_close(ours_of, theirs_of, rtol=tolerance, atol=tolerance)
    return expected


def _with_keys(dropout, arrays, order):
    places = dropout_of(arrays, dropout.p).keys
    return replace(dropout, parent=replace(dropout.parent, keys=places[order]))


@EACH
@pytest.mark.parametrize("products", [None, 0])
def test_calls_on_cpu_equal_the_rule(name, products, monkeypatch):
    """In groups of short documents, and each document by itself."""
    if products is not None:
        monkeypatch.setattr("megatron_lite.transformer.attention_backends.cpu_plan.SHORT_PRODUCTS", products)
    for seed, sequence_length in ((1, 40), (2, 150)):
        arrays = arrays_of(name, sequence_length, seed=seed)
        plan = plan_encoder_decoder(make_layout(*arrays), CPU, multiple=16)
        assert isinstance(plan.cross, CpuPlan)
        expected = assert_equals_the_rule(arrays, plan)
        assert all(out.any() for out in expected)
        launches = {type(launch) for launch in plan.cross.launches_of(HEADS * SIZE)}
        assert launches == {PaddedGroups if products is None else LongGroup}


@EACH
def test_long_documents_equal_the_rule(name):
    arrays = arrays_of(name, 900, 1, 5)
    assert_equals_the_rule(arrays, plan_encoder_decoder(make_layout(*arrays), CPU))


@EACH
@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_dropout_of_weights_matches_the_formula(name, kernel):
    arrays = arrays_of(name)
    multiple = 32 if kernel == "cpu" else 1
    assert_equals_the_rule(
        arrays, plan_encoder_decoder(make_layout(*arrays), CPU, kernel, multiple), dropout=True
    )


@EACH
def test_the_dense_plans_equal_the_rule(name):
    arrays = arrays_of(name)
    assert_equals_the_rule(arrays, plan_encoder_decoder(make_layout(*arrays), CPU, "dense"))


@EACH
def test_calls_for_cuda_equal_the_rule(name, emulated_kernel):
    """The kernel is written out in the test; its place, queries and keys are the product's."""
    for seed, multiple in ((4, 1), (5, 64)):
        arrays = arrays_of(name, seed=seed)
        plan = plan_encoder_decoder(make_layout(*arrays), CPU, "varlen", multiple)
        assert_equals_the_rule(arrays, plan)
        assert all(length % multiple == 0 for length in plan.lengths)


@EACH
def test_on_cuda_each_part_is_a_call_without_a_mask(name):
    """A full one, a causal one, a rectangle for each document. Targets of one token are the causal call's own kind."""
    arrays = arrays_of(name, 200, 4, 6)
    plan = plan_encoder_decoder(make_layout(*arrays), torch.device("cuda"), multiple=64)
    assert isinstance(plan.encoder, VarlenPlan) and isinstance(plan.decoder, VarlenPlan)
    assert [launch.causal for launch in plan.encoder.launches] == [False]
    assert any(launch.causal for launch in plan.decoder.launches) and len(plan.decoder.launches) <= 2
    assert isinstance(plan.cross, VarlenPlan) and not len(plan.cross.zeroed)
    document, decoder = make_layout(*arrays).document, orders(plan)[1]
    with_targets = len(np.unique(document[make_layout(*arrays).is_target]))
    assert len(plan.cross.launches[0].cu_seqlens_q) - 1 == with_targets
    assert plan.cross.launches[0].cu_seqlens_q[-1] == len(decoder)


def test_mass_hides_the_fragment_from_the_decoder():
    """Four tokens, of which two are the fragment, and two targets."""
    doc = np.zeros((1, 6), np.int32)
    order = np.array([[0, -1, -1, 0, 1, 2]], np.int32)
    grp = np.array([[1, 1, 1, 1, 0, 0]], np.int32)
    plan = plan_encoder_decoder(make_layout(doc, order, grp), CPU)
    assert orders(plan)[0].tolist() == [1, 2, 0, 3] and orders(plan)[1].tolist() == [4, 5]
    (found,) = plan.cross.groups
    assert (found.start, found.stop, found.keys) == (0, 2, (2, 4))


@given(st.integers(0, 10**6))
def test_cross_calls_serve_any_contexts_and_targets(seed):
    """Documents in several stretches, contexts without targets, and targets without a context, which see nothing."""
    doc, order, _ = random_arrays(seed)
    arrays = doc, order.clip(min=0), np.zeros_like(doc)
    assert_equals_the_rule(arrays, plan_encoder_decoder(make_layout(*arrays), CPU))


def test_targets_without_a_context_give_zeros_on_cuda(emulated_kernel):
    doc = np.array([[0, 0, 0, 1, 1, 2, 2, -1]], np.int32)
    order = np.array([[0, 1, 2, 1, 2, 0, 1, 0]], np.int32)
    arrays = doc, order, np.zeros_like(doc)
    plan = plan_encoder_decoder(make_layout(*arrays), CPU, "varlen", 8)
    assert orders(plan)[1][plan.cross.zeroed].tolist() == [3, 4]
    assert_equals_the_rule(arrays, plan)


@pytest.mark.parametrize("kernel", ["cpu", "dense", "varlen"])
@pytest.mark.parametrize("which", ["padding", "contexts", "targets"])
def test_a_part_may_be_empty(kernel, which, emulated_kernel):
    doc = np.full((2, 5), -1 if which == "padding" else 0, np.int32)
    order = np.tile(np.arange(1, 6, dtype=np.int32), (2, 1)) if which == "targets" else np.zeros_like(doc)
    arrays = doc, order, np.zeros_like(doc)
    assert_equals_the_rule(arrays, plan_encoder_decoder(make_layout(*arrays), CPU, kernel))


@EACH
def test_all_batches_of_a_shape_may_have_one_length(name):
    """As pipeline stages send them: the parts vary, their sum does not."""
    parts = set()
    for seed, multiple in itertools.product(range(4), (1, 8)):
        arrays = arrays_of(name, 60, 2, seed)
        length = constant_length(arrays[0].size, multiple)
        plan = plan_encoder_decoder(make_layout(*arrays), CPU, multiple=multiple, length=length)
        assert len(plan.order) == sum(plan.lengths) == length
        parts.add(plan.lengths)
    assert len(parts) > 1
    for fill in (-1, 0):
        doc = np.full((2, 5), fill, np.int32)
        for order in (np.zeros_like(doc), np.ones_like(doc)):
            layout = make_layout(doc, order, np.zeros_like(doc))
            plan = plan_encoder_decoder(layout, CPU, multiple=4, length=constant_length(10, 4))
            assert min(plan.lengths) >= 1 and sum(plan.lengths) == 16 and plan.lengths[0] % 4 == 0


def test_cross_attention_drops_by_the_salt_of_its_layer():
    """Another layer drops other weights."""
    arrays = arrays_of("t5")
    plan = plan_encoder_decoder(make_layout(*arrays), CPU)
    (_, _, (q, k, v)), _ = draw(arrays[0].shape)
    whole = dropout_of(arrays, 0.3, plan=plan)
    parent = replace(whole.parent, salts=torch.from_numpy(salts(2)))
    encoder, decoder = orders(plan)
    key_value = torch.stack([ordered(x, encoder) for x in (k, v)], dim=1)
    outs = [
        plan.cross.attend(layer, [ordered(q, decoder)[:, None], key_value], parent.attention(0.3, layer))
        for layer in (0, 1)
    ]
    assert (outs[0] != outs[1]).any()
