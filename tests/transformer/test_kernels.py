"""GPU kernels on CPU tensors, through Triton's interpreter, against torch's own operators in fp64 or fp32.

Tolerances: fp32 sums in another order, and the last bit of exp and erf: 2e-6 of the largest element. bf16 results are
rounded once, 2^-8 relative; torch rounds between its operators as well.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.project import ROOT
from support.selection import slow_but
from support.transformer.kernels import interpreted_kernels

from megatron_lite.config.model import ACTIVATIONS
from megatron_lite.transformer import loss as loss_module
from megatron_lite.transformer.kernels import cross_entropy as cross_entropy_kernels
from megatron_lite.transformer.kernels import fused
from megatron_lite.transformer.kernels import sums as sums_module
from megatron_lite.transformer.kernels.dropout import (
    FeatureDropout,
    drop,
    hash_features,
    is_kept,
    keep_features,
    salts,
    token_keys,
)

# An odd number of tokens, and a width that is no power of two.
TOKENS, WIDTH = 11, 72


@pytest.fixture(autouse=True)
def kernels():
    with interpreted_kernels():
        yield


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def dropout_of(p):
    if not p:
        return None
    keys = torch.from_numpy(token_keys(3, np.arange(1), TOKENS)[0].copy())
    return FeatureDropout(keys, int(salts(3)[1, 2]), p)


def wide(*tensors):
    """Copies in fp64, to compute what is expected."""
    return [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_close(ours, theirs, dtype=torch.float32):
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype and mine.shape == other.shape
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(mine.double(), other.double(), rtol=0, atol=tolerance * scale)


def assert_equal_gradients(ours, theirs, inputs, wide_inputs, dtype=torch.float32):
    """Outputs and the gradients of inputs, for the same random gradients of the outputs."""
    assert_close(ours, theirs, dtype)
    seeds = [draw(*out.shape, seed=10 + i, dtype=dtype).detach() for i, out in enumerate(ours)]
    inputs, wide_inputs = (
        [tensor for tensor in some if tensor is not None] for some in (inputs, wide_inputs)
    )
    found = torch.autograd.grad(ours, inputs, seeds)
    assert_close(found, torch.autograd.grad(theirs, wide_inputs, [seed.double() for seed in seeds]), dtype)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize(
    ("p", "with_bias", "with_hidden"),
    slow_but(
        [(0.3, True, True), (0.0, False, False)],
        itertools.product([0.0, 0.3], [False, True], [False, True]),
        of_several_names=True,
    ),
)
def test_sums(dtype, p, with_bias, with_hidden):
    hidden = draw(TOKENS, WIDTH, dtype=dtype) if with_hidden else None
    x = draw(TOKENS, WIDTH, seed=1, dtype=dtype)
    bias = draw(WIDTH, seed=2, dtype=dtype) if with_bias else None
    inputs = hidden, x, bias
    ours = fused.dropout_add(x, hidden, dropout_of(p), bias)
    hidden, x, bias = others = wide(*inputs)
    theirs = drop(x if bias is None else x + bias, hidden, dropout_of(p))
    assert_equal_gradients([ours], [theirs], inputs, others, dtype)


def layer_norm(x, gain, shift):
    return F.layer_norm(x, gain.shape, gain, shift, 1e-5)


def rms_norm(x, gain, _):
    return F.rms_norm(x, gain.shape, gain, 1e-5)


@DTYPES
@pytest.mark.parametrize(
    ("p", "kind"),
    slow_but(
        [(0.3, "sum with bias"), (0.0, "norm alone")],
        itertools.product([0.0, 0.3], ["norm alone", "sum", "sum with bias"]),
        of_several_names=True,
    ),
)
@pytest.mark.parametrize(
    ("norm", "has_shift"), [(layer_norm, True), (layer_norm, False), (rms_norm, False)],
    ids=["layer norm", "layer norm without bias", "rms norm"],
)  # fmt: skip
def test_sums_and_their_norm(dtype, p, kind, norm, has_shift):
    hidden, gain, shift = (draw(*shape, dtype=dtype) for shape in ((TOKENS, WIDTH), (WIDTH,), (WIDTH,)))
    shift = shift if has_shift else None
    x = None if kind == "norm alone" else draw(TOKENS, WIDTH, seed=1, dtype=dtype)
    bias = draw(WIDTH, seed=2, dtype=dtype) if kind == "sum with bias" else None
    dropout = None if x is None else dropout_of(p)
    inputs = hidden, x, bias, gain, shift
    ours = fused.add_and_normalize(hidden, x, bias, dropout, gain, shift, 1e-5, centered=norm is layer_norm)
    hidden, x, bias, gain, shift = others = wide(*inputs)
    total = hidden if x is None else drop(x if bias is None else x + bias, hidden, dropout)
    stored = total + (ours[0].double() - total).detach()
    theirs = total, norm(stored, gain, shift)
    assert_equal_gradients(ours, theirs, inputs, others, dtype)


@DTYPES
@pytest.mark.parametrize("with_x", [False, True])
def test_a_norm_without_bias(dtype, with_x):
    hidden, gain = draw(TOKENS, WIDTH, dtype=dtype), draw(WIDTH, seed=3, dtype=dtype)
    x = draw(TOKENS, WIDTH, seed=1, dtype=dtype) if with_x else None
    inputs = hidden, x, gain
    ours = fused.add_and_normalize(hidden, x, None, None, gain, None, 1e-5)
    hidden, x, gain = others = wide(*inputs)
    total = hidden if x is None else hidden + x
    assert_equal_gradients(
        ours, (total, F.layer_norm(total, (WIDTH,), gain, None, 1e-5)), inputs, others, dtype
    )


def test_a_norm_whose_sum_nobody_uses():
    inputs = hidden, gain, shift = draw(TOKENS, WIDTH), draw(WIDTH, seed=3), draw(WIDTH, seed=4)
    _, ours = fused.add_and_normalize(hidden, None, None, None, gain, shift, 1e-5)
    hidden, gain, shift = others = wide(*inputs)
    assert_equal_gradients([ours], [F.layer_norm(hidden, (WIDTH,), gain, shift, 1e-5)], inputs, others)


@pytest.mark.parametrize("programs", [1, 4, 7, 11])
def test_more_tokens_than_programs_and_a_wide_row(monkeypatch, programs):
    monkeypatch.setattr(sums_module, "most_programs", lambda width, device: programs)
    tokens, width = 11, 1100
    inputs = hidden, gain, shift = draw(tokens, width), draw(width, seed=3), draw(width, seed=4)
    ours = fused.add_and_normalize(hidden, None, None, None, gain, shift, 1e-5)
    hidden, gain, shift = others = wide(*inputs)
    assert_equal_gradients(ours, (hidden, F.layer_norm(hidden, (width,), gain, shift, 1e-5)), inputs, others)


@pytest.mark.parametrize("p", [0.1, 0.7])
def test_kernels_drop_what_the_cpu_drops(p):
    dropout, ones = dropout_of(p), torch.ones(TOKENS, WIDTH)
    kept = fused.dropout_add(ones, None, dropout) > 0
    assert torch.equal(kept, keep_features(dropout.keys, dropout.salt, WIDTH, p))


def silu(x):
    return x / (1 + (-x).exp())


FORMULAS = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu_erf": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "relu": F.relu, "silu": silu,
}  # fmt: skip


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "with_bias, gated, p",
    [  # with all, and without anything
        pytest.param(with_bias, gated, p, marks=[pytest.mark.slow] * (not with_bias == gated == bool(p)))
        for with_bias in (False, True)
        for gated in (False, True)
        for p in (0.0, 0.3)
    ],
)
def test_activations(dtype, activation, with_bias, gated, p):
    width = 300  # more than a tile has
    shape = (1 + gated) * width
    x, bias = draw(TOKENS, shape, dtype=dtype), draw(shape, seed=1, dtype=dtype) if with_bias else None
    inputs = x, bias
    ours = fused.activated(x, activation, bias=bias, gated=gated, dropout=dropout_of(p))
    x, bias = others = wide(*inputs)
    value = x if bias is None else x + bias
    theirs = FORMULAS[activation](value[:, :width]) * (value[:, width:] if gated else 1)
    if p:
        dropout = dropout_of(p)
        kept = keep_features(dropout.keys, dropout.salt, width, p)
        theirs = torch.where(kept, theirs / (1 - p), 0.0)
    assert_equal_gradients([ours], [theirs], inputs, others, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_large_numbers(activation):
    x = torch.tensor([[-1e4, -60.0, -9.0, 0.0, 9.0, 60.0, 1e4]]).requires_grad_()
    by_torch = {"gelu_tanh": FORMULAS["gelu_tanh"], "gelu_erf": F.gelu, "relu": F.relu, "silu": F.silu}
    ours, theirs = fused.activated(x, activation), by_torch[activation](x)
    torch.testing.assert_close(ours, theirs)
    ours, theirs = (torch.autograd.grad(out.sum(), x)[0] for out in (ours, theirs))
    torch.testing.assert_close(ours, theirs)


@DTYPES
@pytest.mark.parametrize(("first", "valid"), [(0, 4200), (4200, 4100), (8400, 0)])
def test_cross_entropy_of_a_shard(dtype, first, valid):
    rows, columns = 7, 4224  # more than a program reads at once
    logits = (5 * draw(rows, columns).detach()).to(dtype)
    targets = torch.tensor([0, 4199, 4200, 8299, 8300, 9000, 17], dtype=torch.int32)
    grad = torch.rand(rows, generator=torch.Generator().manual_seed(1))
    ours = cross_entropy_kernels.log_sums_kernel(logits, targets, first, valid)
    theirs = loss_module._log_sums_by_torch(logits, targets, first, valid)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    written = logits.clone(), logits.clone()
    cross_entropy_kernels.write_gradient_kernel(written[0], targets, theirs[0], grad, first, valid)
    loss_module._write_gradient_by_torch(written[1], targets, theirs[0], grad, first, valid)
    assert_close(written[:1], written[1:], dtype)


@pytest.mark.parametrize(
    ("first", "second", "keys", "tokens", "first_key"), [(20, 30, 45, 60, 0), (25, 31, 50, 64, 3)]
)
@pytest.mark.parametrize("programs", [7, 1000])
def test_gradients_of_a_pair_of_calls(monkeypatch, first, second, keys, tokens, first_key, programs):
    monkeypatch.setattr(sums_module, "most_programs", lambda width, device: programs)
    generator = torch.Generator().manual_seed(0)
    gathered = torch.randperm(tokens, generator=generator)[:keys]
    place = torch.full((tokens,), -1, dtype=torch.int32)
    place[gathered] = torch.arange(keys, dtype=torch.int32)
    counts = (first, first, first, second, keys, keys)
    dq_0, dk_0, dv_0, dq_1, dk_1, dv_1 = grads = [torch.randn(n, 3, 8, generator=generator) for n in counts]
    expected = torch.zeros(tokens, 3, 3, 8)
    expected[:first, 0] = dq_0
    expected[first : first + second, 0] = dq_1
    for part, (of_slice, of_gathered) in enumerate([(dk_0, dk_1), (dv_0, dv_1)], start=1):
        expected[first_key : first_key + first, part] = of_slice
        expected[gathered, part] += of_gathered
    joined, sums = fused.join_pair_kernel(*grads, first_key, place, None)
    assert torch.equal(joined, expected)
    assert sums.shape == (min(programs, tokens), 3 * 3 * 8)
    assert_close([sums.sum(0)], [expected.double().sum(0).flatten()])


def test_sums_of_several_kernels_are_finished_at_once():
    for widths in ((100,), (64, 3), (300, 64, 1), (40, 128, 65, 200)):
        sums = [
            draw(programs, width).detach() for programs, width in zip((128, 1, 300, 33), widths, strict=False)
        ]
        expected = torch.cat([part.double().sum(0) for part in sums])
        found = fused.finish_sums_kernel(sums, torch.empty(0))
        assert_close([found], [expected])
        assert torch.equal(found, fused.finish_sums_kernel(sums, torch.empty(0)))


def test_programs_follow_the_width_and_the_processors():
    assert [sums_module.sum_programs(width, 132) for width in (256, 768, 1024, 2048, 8192)] == [
        8 * 132, 5 * 132, 4 * 132, 2 * 132, 2 * 132
    ]  # fmt: skip


# Bytes of a thread that spill on an A100, whose kernels keep operands of products in registers.
SPILLS = {80: {"_add_norm_backward": 4, "_query_grads": 28, "_key_grads": 88}, 90: {}, 100: {}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "is_short"),
    [(gpu, is_short) for gpu in (80, 90, 100) for is_short in (True, False)],
)
def test_kernels_compile_for_gpus_and_fit_into_registers(gpu, is_short):
    """A row of up to 8,192 numbers stays in registers; of 12,288 some bytes of each thread do not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "tests/support/compile_kernels.py", str(gpu), *["short"] * is_short],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == (12 + 3 * 3 + 4 if is_short else 3 * 24 + 3 * 3 + 2 * 4)
    assert {name for name, *_ in found} == {
        "_activate", "_activate_backward", "_add_norm", "_add_norm_backward", "_finish_sums", "_join_pair",
        "_log_sums", "_write_gradient", "_attend", "_query_grads", "_key_grads", "_expand", "_gather",
    }  # fmt: skip
    assert [line for line in found if line[-1] > SPILLS[gpu].get(line[0], 0)] == []


@pytest.mark.parametrize("p", slow_but([0.3], [0.0, 0.3]))
@pytest.mark.parametrize("what", ["sum", "sum and norm", "activation", "cross entropy"])
def test_no_rows(what, p):
    """SpanBERT's head in a micro-batch without spans, for example: results without rows, sums over tokens of zero."""
    dropout = None if not p else FeatureDropout(torch.empty(0, dtype=torch.int32), 7, p)
    hidden, x = draw(0, WIDTH), draw(0, WIDTH, seed=1)
    bias, gain, shift = (draw(WIDTH, seed=seed) for seed in (2, 3, 4))
    if what == "sum":
        out, sums = fused.dropout_add(x, hidden, dropout, bias), [bias]
    elif what == "sum and norm":
        _, out = fused.add_and_normalize(hidden, x, bias, dropout, gain, shift, 1e-5)
        sums = [bias, gain, shift]
    elif what == "activation":
        out, sums = fused.activated(x, "silu", bias=bias, gated=True, dropout=dropout), [bias]
    else:
        weight = draw(WIDTH, 40)
        out, sums = loss_module.cross_entropy(x @ weight, torch.empty(0, dtype=torch.int32)), [weight]
    assert len(out) == 0
    found = torch.autograd.grad(out.sum(), [x, *sums])
    assert [gradient.shape for gradient in found] == [tensor.shape for tensor in (x, *sums)]
    assert all(gradient.eq(0).all() for gradient in found)


def test_tensors_with_gaps_are_refused():
    """Their addresses would be computed as if there were none."""
    x = torch.ones(WIDTH, TOKENS).t()
    with pytest.raises(ValueError, match="needs contiguous tensors"):
        fused.dropout_add(torch.ones(TOKENS, WIDTH), x, None, torch.ones(WIDTH))


@pytest.fixture
def without_kernels():
    fused.choose_kernels("torch")
    yield
    fused.choose_kernels("fused")


@pytest.mark.usefixtures("without_kernels")
def test_torch_computes_instead(monkeypatch):
    """`training.kernels=torch`: no kernel runs where each would, results and gradients stay."""

    def planted(*arguments):
        raise AssertionError("a kernel ran")

    for module in (fused, cross_entropy_kernels):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, planted)
    test_sums(torch.float32, 0.3, True, True)
    test_activations(torch.float32, "gelu_tanh", True, True, 0.3)
    logits = draw(5, 40)
    loss_module.cross_entropy(logits * 1, torch.arange(5)).sum().backward()
    expected = torch.softmax(logits.detach(), -1) - F.one_hot(torch.arange(5), 40)
    torch.testing.assert_close(logits.grad, expected, atol=1e-6, rtol=0)
    fused.choose_kernels("fused")
    with pytest.raises(AssertionError, match="a kernel ran"):
        test_activations(torch.float32, "gelu_tanh", True, True, 0.3)


@pytest.mark.parametrize("p", [0.1, 0.7])
def test_torch_drops_what_kernels_drop(p):
    """The formula that a GPU computes with torch's operators, against the compiled one of the CPU."""
    dropout = dropout_of(p)
    formula = is_kept(hash_features(dropout.keys, dropout.salt, WIDTH), p)
    assert torch.equal(formula, keep_features(dropout.keys, dropout.salt, WIDTH, p))
