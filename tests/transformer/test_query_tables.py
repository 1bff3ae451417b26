"""XLNet's scores by kernels with a table of queries, in Triton's interpreter, against the same written out in fp64.

Tolerance: fp32 sums in another order, 3e-6 of the largest element; fp16 rounds to 11 bits.
"""

import copy
import logging
from unittest import mock

import numpy as np
import pytest
import torch
from support.data.recipes import RECIPES, collate, make, windows
from support.transformer.attention import CPU, draw, dropout_of, mask_of, recipe_arrays
from support.transformer.kernels import interpreted_kernels

from data_utils.common.batch_fields import DOC, GRP, ID_FIELDS, ORD, POSITION_IDS, SEGMENT_IDS
from data_utils.common.settings import build
from data_utils.objectives import LOSS_NAMES
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.attention_backends import blocks, tables
from megatron_lite.transformer.attention_backends.blocks import BlockPlan
from megatron_lite.transformer.attention_backends.dense import DensePlan
from megatron_lite.transformer.attention_backends.layout import make_layout
from megatron_lite.transformer.attention_backends.plan import dense_reason, kernel_of, plan_attention
from megatron_lite.transformer.attention_backends.tables import (
    MOST_SEGMENTS,
    segment_columns,
    segment_slots,
    vector_count,
)
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.kernels import fused, rule_attention, triton_attention
from megatron_lite.transformer.micro_batch import MicroBatch
from megatron_lite.transformer.position_bias import Distances, DistanceScores
from megatron_lite.transformer.tensor_parallel import TensorParallel
from megatron_lite.transformer.transformer import Transformer

FIELDS = (DOC, ORD, GRP, POSITION_IDS, SEGMENT_IDS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 64 tokens, in tiles of 16."""
    for module in (rule_attention, triton_attention, blocks):
        monkeypatch.setattr(module, "BLOCK", 64)
    with interpreted_kernels():
        yield


def config_of(heads=2, size=12, **options):
    sizes = {"num_layers": 1, "hidden_size": heads * size, "num_attention_heads": heads, "vocab_size": 3000}
    none = {"embedding_dropout": 0, "attention_dropout": 0, "output_dropout": 0, "activation_dropout": 0}
    return build(ModelConfig, {"system": "xlnet", **sizes, **none, "final_dropout": 0, **options})


def scores_of(config, dtype):
    """The learned terms of a layer, whose every parameter counts."""
    made, generator = DistanceScores(config, TensorParallel()), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return made.to(dtype)


def written_out(arrays, qkv, of, width, dropout):
    """[T, 3, H, D] and the parameters -> [T, H, D], pair by pair, in the batch's order."""
    position, segment = (torch.from_numpy(field).flatten() for field in arrays[3:])
    query, key, value = qkv.unbind(1)
    apart = (position[:, None] - position[None]).double()  # query less key
    steps = 10000.0 ** (torch.arange(0, width, 2).double() / width)
    angles = apart[..., None] / steps
    sinusoids = torch.cat([angles.sin(), angles.cos()], -1)
    vectors = torch.einsum("qkw,hdw->qkhd", sinusoids, of["weight"].view(*query.shape[1:], width))
    differ = (segment[:, None] != segment[None]).long()
    of_segments = torch.einsum("qhd,hsd->hqs", query + of["segment_query"], of["segment_keys"])
    scores = torch.einsum("qhd,khd->hqk", query + of["content_query"], key)
    scores = scores + torch.einsum("qhd,qkhd->hqk", query + of["position_query"], vectors)
    scores = scores + of_segments.gather(2, differ.expand(len(of_segments), -1, -1))
    mask = torch.block_diag(*mask_of(arrays[:3]).float()).bool()
    scores = (scores * query.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    if dropout is not None:
        weights = weights * dropout.keep(dropout.keys, dropout.keys, len(weights)) / (1 - dropout.p)
    return torch.einsum("hqk,khd->qhd", weights, value)


def by_kernels(arrays, qkv, terms, config, p):
    """The same by the kernels of a plan."""
    plan = plan_attention(make_layout(*arrays[:4]), CPU, "query tables", multiple=24)
    assert isinstance(plan, BlockPlan)
    order = torch.from_numpy(plan.order)
    plan.on_device([torch.from_numpy(x) for x in plan.arrays()], CPU)
    padded = torch.where(order[:, None, None, None] >= 0, qkv[order.clamp(min=0)], 3.0)
    ids = torch.zeros(len(ID_FIELDS), len(order), dtype=torch.int32)
    for field, values in zip((POSITION_IDS, SEGMENT_IDS), arrays[3:], strict=True):
        taken = torch.from_numpy(values).flatten()[order.clamp(min=0)]
        ids[ID_FIELDS.index(field)] = torch.where(order >= 0, taken, 0)
    operands, bias = terms.biased(padded, Distances.of(config, ids, plan, None))
    dropout = dropout_of(arrays[:3], p, seed=5, plan=plan) if p else None
    out = plan.attend(0, [operands], dropout, bias)
    return torch.zeros_like(qkv[:, 0]).index_copy(0, order[order >= 0], out[order >= 0])


def compare(arrays, size, dtype, p, tolerance):
    config = config_of(size=size)
    tokens, heads, width = arrays[0].size, 2, 2 * size
    qkv, grad = (draw(s, dtype, 1)[0] for s in ((tokens, 3, heads, size), (tokens, heads, size)))
    terms, dropout = scores_of(config, dtype), dropout_of(arrays[:3], p, seed=5) if p else None
    mine, named = qkv.requires_grad_(), dict(terms.named_parameters())
    ours = by_kernels(arrays, mine, terms, config, p)
    ours = [ours, *torch.autograd.grad(ours, (mine, *named.values()), grad)]
    wide = [x.detach().double().requires_grad_() for x in (qkv, *named.values())]
    theirs = written_out(arrays, wide[0], dict(zip(named, wide[1:], strict=True)), width, dropout)
    theirs = [theirs, *torch.autograd.grad(theirs, wide, grad.double())]
    for name, own, other in zip(("output", "qkv", *named), ours, theirs, strict=True):
        assert own.dtype == dtype and other.any()
        gap = ((own.double() - other).abs().max() / other.abs().max().clamp(min=1.0)).item()
        print(f"{name:16} {gap:.1e}")
        assert gap <= tolerance, name
    assert not ours[0][~mask_of(arrays[:3]).any(-1).flatten()].any()  # tokens that see nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "length", "size", "p"),
    [
        ("xlnet", 61, 12, 0.0),
        ("xlnet with memory", 41, 8, 0.3),
        ("xlnet, one text", 47, 20, 0.3),
        ("xlnet", 90, 16, 0.0),
        ("bert", 50, 12, 0.3),
        ("unilm", 50, 12, 0.0),
    ],
)
def test_every_gradient(name, length, size, p):
    """Two streams, packed documents, padding and three segments; an odd head size; every parameter of the terms."""
    arrays = recipe_arrays(RECIPES[name], length, 2, 1, FIELDS)
    if name == "xlnet":
        assert {0, 1, 2} == set(arrays[4].flatten().tolist()) and (arrays[0] < 0).any()
        assert (arrays[1] < 0).any() and arrays[0].max() > 0
    compare(arrays, size, torch.float32, p, 3e-6)


@pytest.mark.slow
def test_half_precision():
    compare(recipe_arrays(RECIPES["xlnet"], 23, 1, 2, FIELDS), 16, torch.float16, 0.0, 8e-3)


def test_no_tokens():
    nothing = np.full((1, 8), -1, np.int32)
    arrays = (nothing, *[nothing * 0] * 4)
    config = config_of()
    qkv, terms = torch.ones(8, 3, 2, 12, requires_grad=True), scores_of(config, torch.float32)
    out = by_kernels(arrays, qkv, terms, config, 0.0)
    out.sum().backward()
    assert not out.any() and not any(parameter.grad.any() for parameter in terms.parameters())


def test_each_difference_names_a_distance_and_whether_segments_differ():
    longest = 5
    places, segments = segment_slots(longest, CPU), torch.arange(MOST_SEGMENTS + 3, dtype=torch.int32)
    for apart in range(-longest, longest + 1):
        columns = torch.zeros(5, len(segments), dtype=torch.int32)
        columns[4] = max(0, apart)
        of_queries = segment_columns(columns, segments, longest)[4]
        columns[4] = max(0, -apart)
        of_keys = segment_columns(columns, segments, longest)[4]
        found = places[(of_keys[None] - of_queries[:, None]) + len(places) // 2]
        known = segments.clamp(max=MOST_SEGMENTS - 1)
        differ = known[None] != known[:, None]
        assert torch.equal(found, (apart + longest + vector_count(longest) * differ).int())


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.slow)])
def test_a_model_equals_its_dense_reference(recompute):
    """XLNet with memories, dropout of attention and of sinusoids: loss and every gradient, in fp64 written out."""
    config = config_of(2, 8, attention_dropout=0.2, embedding_dropout=0.1, init_std=0.3)
    model = Transformer(config, recompute=recompute, num_losses=len(LOSS_NAMES), has_memory=True)
    initialize_parameters(model.named_parameters(), config, 3)
    wide = copy.deepcopy(model).double()
    fields = collate(make("xlnet", 37, memory_length=4), windows(1, 37, 4))
    for each, kernel in ((model, "query tables"), (wide, "dense")):
        given = MicroBatch.from_batch(Batch(fields), CPU, config, dropout_seed=3, kernel=kernel, multiple=8)
        assert isinstance(given.plan, DensePlan if kernel == "dense" else BlockPlan)
        with mock.patch.object(fused, "DEVICES", ("cuda",) if kernel == "dense" else ("cuda", "cpu")):
            each.loss = each(given)[0]
            each.loss.backward()
    torch.testing.assert_close(model.loss.double(), wide.loss.double(), rtol=1e-5, atol=0)
    others = dict(wide.named_parameters())
    for name, parameter in model.named_parameters():
        gap = (parameter.grad.double() - others[name].grad).abs().max()
        assert gap <= 1e-5 * max(1.0, others[name].grad.abs().max()), name
    assert all(p.grad.any() for name, p in model.named_parameters() if ".relative." in name)


def test_what_the_kernel_cannot_take_is_dense_and_said_once(caplog):
    """Keys of one position; positions beyond the row. Queries that no token sees may share one with a key."""
    tables._warn_slow.cache_clear()
    repeated = recipe_arrays(RECIPES["unilmv2"], 40, 2, 1, FIELDS[:4])
    streams = recipe_arrays(RECIPES["xlnet"], 40, 2, 1, FIELDS[:4])
    far = (*streams[:3], streams[3] + streams[3].shape[1])
    with caplog.at_level(logging.WARNING):
        for arrays in (repeated, repeated, far):
            assert isinstance(plan_attention(make_layout(*arrays), CPU, "query tables"), DensePlan)
        assert isinstance(plan_attention(make_layout(*streams), CPU, "query tables"), BlockPlan)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "a document has two tokens of one position",
        "a row has more distances than a table",
    ]


def test_cuda_reads_tables_and_says_where_it_computes_all_pairs():
    config, device = config_of(), torch.device("cuda")
    assert kernel_of(config, device) == "query tables" and dense_reason(config, device) is None
    fused.choose_kernels("torch")
    try:
        assert kernel_of(config, device) == "dense"
        assert "model.relative is xlnet" in dense_reason(config, device)
    finally:
        fused.choose_kernels("fused")
