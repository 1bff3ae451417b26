"""Attention with two tables of scores, in Triton's interpreter, against the same written out in fp64.

Tolerance: fp32 sums in another order, 2e-6 of the largest element; fp16 rounds to 11 bits.
"""

import copy
import logging
from unittest import mock

import numpy as np
import pytest
import torch
from support.data.recipes import RECIPES
from support.hf.small_deberta import packed, small_model
from support.transformer.attention import CPU, draw, dropout_of, mask_of, recipe_arrays
from support.transformer.kernels import interpreted_kernels

from data_utils.common.batch_fields import DOC, GRP, ORD, POSITION_IDS
from megatron_lite.transformer.attention_backends import blocks, tables
from megatron_lite.transformer.attention_backends.blocks import BlockPlan
from megatron_lite.transformer.attention_backends.dense import DensePlan
from megatron_lite.transformer.attention_backends.layout import make_layout
from megatron_lite.transformer.attention_backends.plan import plan_attention
from megatron_lite.transformer.attention_backends.tables import TableBias
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.kernels import fused, rule_attention, triton_attention
from megatron_lite.transformer.kernels.rule_attention import MOST_VECTORS, SUMMED, table_slots
from megatron_lite.transformer.micro_batch import MicroBatch

HEADS, ROWS = 2, 6


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 64 tokens, in tiles of 16."""
    for module in (rule_attention, triton_attention, blocks):
        monkeypatch.setattr(module, "BLOCK", 64)
    with interpreted_kernels():
        yield


def written_out(arrays, qkv, vectors, rows, dropout=None):
    """[T, 3, H, D], [2, N, H, D], and the row of each distance, key less query -> [T, H, D], in the batch's order."""
    fields, position = arrays[:3], torch.from_numpy(arrays[3]).flatten().long()
    mask = torch.block_diag(*mask_of(fields).float()).bool()
    query, key, value = qkv.permute(1, 2, 0, 3)
    row = rows[(position[None] - position[:, None]) + len(rows) // 2]
    scores = query @ key.mT
    scores = scores + torch.einsum("hqd,qkhd->hqk", query, vectors[0][row])
    scores = (scores + torch.einsum("hkd,qkhd->hqk", key, vectors[1][row])) * qkv.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    if dropout is not None:
        weights = weights * dropout.keep(dropout.keys, dropout.keys, HEADS) / (1 - dropout.p)
    return (weights @ value).transpose(0, 1)


def by_kernels(arrays, qkv, vectors, rows, dropout=None):
    """The same by the kernels of a plan."""
    plan = plan_attention(make_layout(*arrays), CPU, "tables", multiple=24)
    assert isinstance(plan, BlockPlan)
    order = torch.from_numpy(plan.order)
    plan.on_device([torch.from_numpy(x) for x in plan.arrays()], CPU)
    padded = torch.where(order[:, None, None, None] >= 0, qkv[order.clamp(min=0)], 3.0)
    if dropout is not None:
        dropout = dropout_of(arrays[:3], dropout.p, seed=5, plan=plan)
    out = plan.attend(0, [padded], dropout, TableBias(vectors, table_slots(rows)))
    return torch.zeros_like(qkv[:, 0]).index_copy(0, order[order >= 0], out[order >= 0])


def compare(arrays, size, dtype, p, tolerance, rows):
    tokens = arrays[0].size
    qkv, grad, vectors = (
        draw(shape, dtype, 1)[0].requires_grad_()
        for shape in ((tokens, 3, HEADS, size), (tokens, HEADS, size), (2, ROWS, HEADS, size))
    )
    dropout = dropout_of(arrays[:3], p, seed=5) if p else None
    ours = by_kernels(arrays, qkv, vectors, rows, dropout)
    ours = [ours, *torch.autograd.grad(ours, (qkv, vectors), grad)]
    wide = [x.detach().double().requires_grad_() for x in (qkv, vectors)]
    theirs = written_out(arrays, *wide, rows, dropout)
    theirs = [theirs, *torch.autograd.grad(theirs, wide, grad.double())]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - other).abs().max() <= tolerance * max(1.0, other.abs().max())
    assert not ours[0][~mask_of(arrays[:3]).any(-1).flatten()].any()  # tokens that see nothing


def rows_of(length, kind):
    """The row of each distance from -length on: few share one, and their gradients have turns, or very many do."""
    distance = torch.arange(-length, length + 1)
    rows = (distance + length) // 14 if kind == "few share" else (distance + 3).clamp(0, ROWS - 1)
    turns = table_slots(rows) // MOST_VECTORS
    assert rows.max() < ROWS and (turns == SUMMED).any() == (kind == "most share") and turns.any()
    return rows


@pytest.mark.parametrize(
    ("name", "kind", "p"),
    [
        ("unilm", "few share", 0.3),
        ("causal", "most share", 0.3),
        pytest.param("bert", "few share", 0.0, marks=pytest.mark.slow),
        pytest.param("bert", "most share", 0.3, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_every_table(name, kind, p):
    """Packed documents and padding; queries, keys, values and both kinds of vectors; an odd head size."""
    arrays = recipe_arrays(RECIPES[name], 31, 2, 1, (DOC, ORD, GRP, POSITION_IDS))
    compare(arrays, 12, torch.float32, p, 2e-6, rows_of(arrays[0].shape[1], kind))


def test_half_precision():
    arrays = recipe_arrays(RECIPES["bert"], 23, 1, 2, (DOC, ORD, GRP, POSITION_IDS))
    compare(arrays, 16, torch.float16, 0.0, 4e-3, rows_of(arrays[0].shape[1], "few share"))


def test_no_tokens():
    nothing = np.full((1, 8), -1, np.int32)
    plan = plan_attention(make_layout(nothing, nothing * 0, nothing * 0), CPU, "tables", multiple=8)
    plan.on_device([torch.from_numpy(x) for x in plan.arrays()], CPU)
    qkv, vectors = draw((8, 3, 2, 8), torch.float32, 1)[0], torch.ones(2, ROWS, 2, 8, requires_grad=True)
    out = plan.attend(0, [qkv], None, TableBias(vectors, table_slots(rows_of(8, "few share"))))
    out.sum().backward()
    assert not out.any() and not vectors.grad.any()


def test_tables_with_gaps_are_refused():
    qkv, columns = torch.zeros(8, 3, 2, 8), torch.zeros(5, 8, dtype=torch.int32)
    lists = [torch.zeros(shape, dtype=torch.int32) for shape in ((1,), (1, 1), (1,), (1, 1))]
    table = torch.zeros(2, ROWS, 8).mT
    with pytest.raises(ValueError, match="needs contiguous tensors"):
        rule_attention.rule_attention_kernel(
            qkv,
            columns,
            lists,
            None,
            table_slots(rows_of(8, "few share")),
            [table, table],
            None,
            None,
            0.0,
            0,
            0,
        )


def test_places_name_a_turn_for_each_distance_of_a_row():
    rows = torch.tensor([2, 2, 2, 0, 1, 1, *[3] * 40])
    found = table_slots(rows)
    assert torch.equal(found % MOST_VECTORS, rows.int())
    turns = (found // MOST_VECTORS).tolist()
    assert turns == [1, 2, 3, 0, 1, 2, *[SUMMED] * 40]


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_equals_its_dense_reference(own):
    """DeBERTa with dropout of attention: loss and every gradient, in fp64 written out on the CPU."""
    model = small_model(
        position_projections=own,
        output_dropout=0.0,
        attention_dropout=0.2,
        num_layers=1,
        num_attention_heads=2,
    )
    wide = copy.deepcopy(model).double()
    fields = np.concatenate([packed([7, 23, 5], 40), packed([33], 40)])
    for each, kernel in ((model, "tables"), (wide, "dense")):
        given = MicroBatch.from_batch(
            Batch(fields), CPU, model.config, dropout_seed=3, kernel=kernel, multiple=8
        )
        assert isinstance(given.plan, BlockPlan if kernel == "tables" else DensePlan)
        with mock.patch.object(fused, "DEVICES", ("cuda", "cpu") if kernel == "tables" else ("cuda",)):
            each.loss = each(given)[0]
            each.loss.backward()
    torch.testing.assert_close(model.loss.double(), wide.loss.double(), rtol=1e-5, atol=0)
    others = dict(wide.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gap = (parameter.grad.double() - others[name].grad).abs().max()
            assert gap <= 1e-5 * max(1.0, others[name].grad.abs().max()), name


def test_documents_that_repeat_a_position_take_the_dense_plan_and_say_so_once(caplog):
    arrays = recipe_arrays(RECIPES["unilmv2"], 40, 2, 1, (DOC, ORD, GRP, POSITION_IDS))
    tables._warn_slow.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert isinstance(plan_attention(make_layout(*arrays), CPU, "tables"), DensePlan)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "a document has two tokens of one position"
    ]
