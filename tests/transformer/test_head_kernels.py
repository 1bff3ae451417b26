"""The kernels of heads, through Triton's interpreter, against the definitions in fp64, and against the code for CPUs.

Tolerances are those of test_kernels.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from support.selection import slow_but
from support.transformer.kernels import interpreted_kernels

from data_utils.common.batch_fields import ID_FIELDS
from megatron_lite.config.model import ModelConfig
from megatron_lite.transformer.kernels import fused
from megatron_lite.transformer.kernels import qkv_heads as heads
from megatron_lite.transformer.kernels.qkv_heads import HeadTransform
from megatron_lite.transformer.norms import HeadNorms
from megatron_lite.transformer.rope import Rotary, prepare_qkv
from megatron_lite.transformer.tensor_parallel import TensorParallel

# Tokens, heads of queries, of keys, size of a head, features that are turned, whether heads are normed, factor
FORMS = {
    "all features": (11, 3, 3, 8, 8, False, 1.0),
    "a part, shared keys": (7, 4, 2, 10, 6, True, 0.5),
    "one token, one key": (1, 6, 1, 64, 32, True, 1.0),
    "more rows than a program has": (211, 3, 3, 6, 2, False, 1.0),
    "norms alone, few programs": (211, 4, 1, 12, 0, True, 1.0),
    "a factor alone": (9, 2, 2, 16, 0, False, 0.25),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles_of(tokens, turned):
    angles = 3 * draw(tokens, 1, turned // 2, seed=5)
    return (angles.cos(), angles.sin()) if turned else (None, None)


def case(name, dtype=torch.float32):
    """Heads, the transform, and how many heads of queries."""
    tokens, queries, keys, size, turned, normed, factor = FORMS[name]
    scales = [draw(size, seed=seed, dtype=dtype) if normed else None for seed in (1, 2)]
    transform = HeadTransform(*angles_of(tokens, turned), *scales, 1e-5, keys, factor)
    return draw(tokens, queries + 2 * keys, size, dtype=dtype), transform, queries


def defined(x, transform):
    """Results of the operators by their definition: [T, H + 2 K, D] -> [T, 3, H, D]."""
    keys, queries = transform.key_heads, x.shape[1] - 2 * transform.key_heads
    parts = list(x.split([queries, keys, keys], dim=1))
    for i, scale in enumerate((transform.query_scale, transform.key_scale)):
        if scale is not None:
            parts[i] = F.rms_norm(parts[i], scale.shape, scale, transform.epsilon)
        if transform.cos is not None:
            turned = 2 * transform.cos.shape[-1]
            pairs = torch.view_as_complex(parts[i][..., :turned].unflatten(-1, (-1, 2)).contiguous())
            turn = torch.complex(transform.cos.double(), transform.sin.double())
            parts[i] = torch.cat([torch.view_as_real(pairs * turn).flatten(-2), parts[i][..., turned:]], -1)
    repeated = [part.repeat_interleave(queries // part.shape[1], 1) for part in parts]
    return torch.stack([repeated[0] * transform.factor, *repeated[1:]], dim=1)


def wide(x, transform):
    """The same in fp64, to be differentiated: the heads, the transform, and what learns."""
    x = x.double().requires_grad_()
    scales = [scale if scale is None else scale.double().requires_grad_() for scale in transform[2:4]]
    learnt = [x, *(scale for scale in scales if scale is not None)]
    return x, transform._replace(query_scale=scales[0], key_scale=scales[1]), learnt


def assert_close(mine, other, dtype=torch.float32):
    assert mine.dtype == dtype and mine.shape == other.shape
    scale = max(1.0, other.abs().max().item()) if other.numel() else 1.0
    atol = scale * (2e-6 if dtype == torch.float32 else 2**-7)
    torch.testing.assert_close(mine.double(), other.double(), rtol=0, atol=atol)


@pytest.fixture(autouse=True)
def kernels():
    with interpreted_kernels():
        yield


@DTYPES
@pytest.mark.parametrize("name", FORMS)
def test_operands_and_their_gradients(monkeypatch, name, dtype):
    monkeypatch.setattr(heads, "_PROGRAMS", 3)
    x, transform, _ = case(name, dtype)
    scales = [None if scale is None else scale.requires_grad_() for scale in transform[2:4]]
    out = heads.ExpandHeads.apply(x.requires_grad_(), *scales, transform)
    x_wide, transform_wide, learnt = wide(x.detach(), transform)
    expected = defined(x_wide, transform_wide)
    assert_close(out, expected, dtype)
    grad = draw(*out.shape, seed=3, dtype=dtype)
    found = torch.autograd.grad(out, [x, *(scale for scale in scales if scale is not None)], grad)
    for mine, other in zip(found, torch.autograd.grad(expected, learnt, grad.double()), strict=True):
        assert_close(mine, other, dtype)


@pytest.mark.parametrize(("queries", "first_key", "keys"), [(9, 0, 11), (11, 2, 7), (0, 0, 3)])
@pytest.mark.parametrize("name", slow_but(["all features"], ["all features", "a factor alone"]))
def test_gradients_as_attention_leaves_them(name, queries, first_key, keys):
    """Gradients of some queries and of a slice of the keys; the others have none."""
    x, transform, count = case(name)
    tokens, _, size = x.shape
    queries, keys = min(queries, tokens), min(keys, tokens - first_key)
    parts = [draw(rows, count, size, seed=seed) for seed, rows in enumerate((queries, keys, keys))]
    whole = torch.zeros(tokens, 3, count, size, dtype=torch.float64)
    whole[:queries, 0] = parts[0]
    for part in (1, 2):
        whole[first_key : first_key + keys, part] = parts[part]
    found, sums = heads.gather_heads_kernel(*parts, first_key, None, *transform, tokens)
    x, transform, learnt = wide(x, transform)
    (expected,) = torch.autograd.grad(defined(x, transform), learnt, whole)
    assert_close(found, expected)
    assert not len(sums)


@DTYPES
def test_turns_in_place_and_back(dtype):
    x, transform, _ = case("more rows than a program has", dtype)
    packed = x.clone().view(len(x), 3, 3, -1)
    heads.rotate_heads_kernel(packed, transform.cos, transform.sin, False)
    assert_close(packed, defined(x.double(), transform), dtype)
    assert torch.equal(packed[:, 2], x[:, 6:]), "values stay"
    heads.rotate_heads_kernel(packed, transform.cos, transform.sin, True)
    assert_close(packed.flatten(1, 2), x.double(), dtype)


CONFIG = ModelConfig(
    num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=10, positions="rotary", rotary_base=100.0,
)  # fmt: skip


@pytest.mark.parametrize(
    "options",
    slow_but(
        [{"query_key_norm": True, "num_key_value_heads": 1}],
        [
            {}, {"rotary_share": 0.5}, {"block_positions": "halves", "num_key_value_heads": 2},
            {"query_key_norm": True, "num_key_value_heads": 1}, {"positions": "none", "unscaled_scores": True},
            {"block_positions": "added", "rotary_scaling": (8.0, 1.0, 4.0, 16.0)},
        ],
    ),
    ids=lambda options: ", ".join(options) or "plain",
)  # fmt: skip
def test_a_model_computes_the_same_with_and_without_kernels(monkeypatch, options):
    config = dataclasses.replace(CONFIG, **options)
    ids = torch.zeros(len(ID_FIELDS), 6, dtype=torch.int32)
    ids[0], ids[1] = torch.tensor([0, 3, 5, 9, 9, 9]), torch.tensor([0, 0, 0, 1, 2, 3])
    rotary = Rotary.of(config, ids) if config.positions == "rotary" else None
    norms = HeadNorms(config, TensorParallel()) if config.query_key_norm else None
    for i, parameter in enumerate([] if norms is None else norms.parameters()):
        parameter.data = draw(8, seed=i)
    x = draw(6, 4 + 2 * config.key_value_heads, 8).requires_grad_()
    learnt = [x, *([] if norms is None else norms.parameters())]

    def run():
        out = prepare_qkv(x, config.key_value_heads, rotary, norms, config.query_factor)
        return [out, *torch.autograd.grad(out, learnt, draw(*out.shape, seed=4))]

    ours = run()
    monkeypatch.setattr(fused, "DEVICES", ())
    for mine, other in zip(ours, run(), strict=True):
        assert_close(mine, other)


def test_no_rows():
    for name in FORMS:
        x, transform, count = case(name)
        none = transform._replace(
            **{key: None if transform.cos is None else transform.cos[:0] for key in ("cos", "sin")}
        )
        x = x[:0].requires_grad_()
        scales = [None if scale is None else scale.requires_grad_() for scale in transform[2:4]]
        out = heads.ExpandHeads.apply(x, *scales, none)
        assert out.shape == (0, 3, count, x.shape[2])
        learnt = [x, *(scale for scale in scales if scale is not None)]
        for gradient, tensor in zip(torch.autograd.grad(out.sum(), learnt), learnt, strict=True):
            assert gradient.shape == tensor.shape and gradient.eq(0).all()
        if transform.cos is not None:
            heads.rotate_heads_kernel(out.detach(), none.cos, none.sin, False)


def test_heads_with_gaps_are_refused():
    x, transform, _ = case("all features")
    packed = x.view(11, 3, 3, 8)
    gaps = x.transpose(0, 1).contiguous().transpose(0, 1)
    for call in (
        lambda: heads.expand_heads_kernel(gaps, *transform),
        lambda: heads.rotate_heads_kernel(gaps.view(11, 3, 3, 8), transform.cos, transform.sin, False),
        lambda: heads.gather_heads_kernel(packed[:, 0], packed[:, 1], packed[:, 2], 0, None, *transform, 11),
    ):
        with pytest.raises(ValueError, match="needs contiguous tensors"):
            call()
