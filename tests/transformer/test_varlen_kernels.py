"""What the kernels of CUDA are given, by each implementation of attention, on a CPU: torch's own functions and its
adapters of FlashAttention 3 and 4 run, above packages that compute attention sequence by sequence."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import _fa3, _fa4, current_flash_attention_impl
from torch.profiler import ProfilerActivity, profile

from data_utils.common.errors import ConfigError
from megatron_lite.config.attention import LaunchType
from megatron_lite.transformer.attention_backends.varlen import VarlenLaunch
from megatron_lite.transformer.kernels import varlen_kernels
from megatron_lite.transformer.kernels.varlen_kernels import (
    attention_in_use,
    try_attention,
    use_attention,
    varlen_kernel,
)

QUERIES, KEYS = [0, 3, 3, 8], [0, 5, 5, 13]  # where sequences begin and end; the second one is empty
# The package of FlashAttention 3: operators whose arguments have these types, in this order.
FORWARD = ["Tensor"] * 3 + ["Tensor?"] * 9 + ["int?"] * 2 + ["Tensor?"] * 9
FORWARD += ["float?", "bool", "int", "int", "int", "float", "bool", "Tensor?", "int", "bool?", "int"]
BACKWARD = (
    ["Tensor"] * 6 + ["Tensor?"] * 7 + ["int?"] * 2 + ["float?", "bool", "int", "int", "float", "bool", "int"]
)


def define(name, types, results):
    if not hasattr(torch.ops.flash_attn_3, name):
        arguments = ", ".join(f"{kind} argument_{number}" for number, kind in enumerate(types))
        torch.library.define(f"flash_attn_3::{name}", f"({arguments}) -> ({', '.join(['Tensor'] * results)})")
        torch.library.impl(f"flash_attn_3::{name}", "CPU", lambda *given: KERNELS[f"fa3 {name}"](*given))


def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, left, right):
    """The output, and the log of the sum of exponentials [H, Q], written out; no key outside of the window is seen."""
    outs, sums = [], []
    pairs = zip(
        itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True
    )
    for (first, stop), (first_key, stop_key) in pairs:
        scores = torch.einsum("qhd,khd->hqk", q[first:stop], k[first_key:stop_key]) / q.shape[-1] ** 0.5
        # Distance from a query to a key; the last of both are aligned.
        queries = torch.arange(stop - first)[:, None] + (stop_key - first_key) - (stop - first)
        distance = torch.arange(stop_key - first_key)[None] - queries
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        hidden |= (distance > 0) if causal else False
        hidden |= (distance < -left) if left >= 0 else False
        hidden |= (distance > right) if right >= 0 else False
        scores = scores.masked_fill(hidden, float("-inf"))
        sums.append(scores.logsumexp(-1))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[first_key:stop_key]))
    return torch.cat(outs), torch.cat(sums, 1)


def gradients(grad, q, k, v, cu_seqlens_q, cu_seqlens_k, causal, left, right):
    """Of q, k and v. In a thread of its own: below torch's operators there is no autograd."""
    rest = cu_seqlens_q, cu_seqlens_k, causal, left, right

    def differentiate():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*inputs, *rest)[0], inputs, grad)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(differentiate).result()


def check_saved(out, log_sums, *rest):
    """A backward pass gets the output and the sums of its forward pass."""
    torch.testing.assert_close((out, log_sums), attend(*rest))


def longest(*ends):
    return [int(each.diff().max()) for each in ends]


class Fa2:
    """The operators of torch that its CUDA library has."""

    @staticmethod
    def into(out, q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, p, causal, debug, **given):
        assert (max_q, max_k, p, debug) == (*longest(cu_seqlens_q, cu_seqlens_k), 0.0, False)
        found, sums = attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, causal, given["window_size_left"], given["window_size_right"]
        )
        out.copy_(found)
        return sums

    @staticmethod
    def backward(
        grad, q, k, v, out, sums, cu_seqlens_q, cu_seqlens_k, max_q, max_k, p, causal, state, unused, **given
    ):
        assert (
            (max_q, max_k, p) == (*longest(cu_seqlens_q, cu_seqlens_k), 0.0)
            and state.dtype == torch.uint64
            and state.shape == (2,)
        )
        rest = cu_seqlens_q, cu_seqlens_k, causal, given["window_size_left"], given["window_size_right"]
        check_saved(out, sums, q, k, v, *rest)
        return gradients(grad, q, k, v, *rest)


def fa3_forward(q, k, v, *rest):
    out, cu_seqlens_q, cu_seqlens_k = rest[3:6]
    found, sums = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, *rest[21:24])
    out.copy_(found)
    return out, sums, sums.new_empty(0), sums.new_empty(0)


def fa3_backward(grad, q, k, v, out, sums, *rest):
    ends = rest[3:5]
    check_saved(out, sums, q, k, v, *ends, *rest[10:13])
    for to, gradient in zip(rest[:3], gradients(grad, q, k, v, *ends, *rest[10:13]), strict=True):
        to.copy_(gradient)
    return (sums.new_empty(0),) * 5


def fa4_sides(given):
    sides = given["window_size_left"], given["window_size_right"]
    return given["causal"], *(-1 if side is None else side for side in sides)


def fa4_forward(q, k, v, *, out, cu_seqlens_q, cu_seqlens_k, **given):
    found, sums = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, *fa4_sides(given))
    return out.copy_(found), sums


def fa4_backward(q, k, v, out, grad, sums, *, cu_seqlens_q, cu_seqlens_k, **given):
    rest = cu_seqlens_q, cu_seqlens_k, *fa4_sides(given)
    check_saved(out, sums, q, k, v, *rest)
    return gradients(grad, q, k, v, *rest)


KERNELS = {"fa3 fwd": fa3_forward, "fa3 bwd": fa3_backward}


@pytest.fixture
def implementation(request, monkeypatch):
    """An implementation in use, with its package; torch's operators of CUDA lead to it on a CPU as well."""
    name = request.param
    define("fwd", FORWARD, 4)
    define("bwd", BACKWARD, 5)
    interface = SimpleNamespace(_flash_attn_fwd=fa4_forward, _flash_attn_bwd=fa4_backward)
    for path, module in (
        ("flash_attn_interface", SimpleNamespace()),
        ("flash_attn.cute.interface", interface),
    ):
        monkeypatch.setitem(sys.modules, path, module)
    for path in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, path, SimpleNamespace(__path__=[]))
    # They ask for CUDA, its types and its GPU.
    monkeypatch.setattr(_fa3, "_fa3_forward_support_error", lambda *_: None)
    monkeypatch.setattr(_fa3, "_fa3_backward_support_error", lambda *_: None)
    monkeypatch.setattr(_fa4, "_fa4_forward_support_error", lambda *_: None)
    monkeypatch.setattr(_fa4, "_fa4_backward_support_error", lambda *_: None)
    _fa4._fa4_import_module.cache_clear()
    use_attention(name)
    operators = {
        "fa2": (Fa2.into, Fa2.backward),
        "fa3": (_fa3._fa3_flash_attention_forward_no_dropout_inplace_impl, _fa3._fa3_flash_attention_backward_impl),
        "fa4": (_fa4._fa4_flash_attention_forward_no_dropout_inplace_impl, _fa4._fa4_flash_attention_backward_impl),
    }  # fmt: skip
    with torch.library._scoped_library("aten", "IMPL") as library:
        forward, backward = operators[name]
        library.impl("_flash_attention_forward_no_dropout_inplace", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield name
    use_attention("fa2")


def launch_of(causal, window):
    ends = [torch.tensor(each, dtype=torch.int32) for each in (QUERIES, KEYS)]
    return VarlenLaunch(causal, slice(0, 8), slice(0, 13), [], [], *ends, 5, 8, window)


EVERY = pytest.mark.parametrize("implementation", ["fa2", "fa3", "fa4"], indirect=True)


@EVERY
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (False, 2), (True, 2)])
def test_every_implementation_computes_the_same_attention(implementation, causal, window):
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(13, 3, 2, 8, dtype=torch.float64, generator=generator)
    q, k, v = packed[:8, 0], packed[:, 1], packed[:, 2]  # not contiguous, as in a step
    grad = torch.randn(8, 2, 8, dtype=torch.float64, generator=generator)
    launch = launch_of(causal, window)
    sides = (window or -1), (0 if causal else window or -1)
    expected, _ = attend(q, k, v, launch.cu_seqlens_q, launch.cu_seqlens_k, causal, *sides)
    kernel = varlen_kernel(torch.bfloat16)
    out, state = kernel.forward(q, k, v, launch, 0.0)
    torch.testing.assert_close(out, expected)
    found = kernel.backward(grad, q, k, v, out, state, launch, 0.0)
    torch.testing.assert_close(
        tuple(found), gradients(grad, q, k, v, launch.cu_seqlens_q, launch.cu_seqlens_k, causal, *sides)
    )


@pytest.mark.parametrize("implementation", ["fa3", "fa4"], indirect=True)
def test_torchs_functions_launch_nothing_besides_the_kernel(implementation, monkeypatch):
    """No tensor is filled or copied in either direction, so a layer has as many launches as with FlashAttention 2."""
    q, k, v = (torch.zeros(length, 2, 8) for length in (8, 13, 13))
    sums, gradient = torch.zeros(2, 8), (torch.zeros(8, 2, 8), torch.zeros(13, 2, 8), torch.zeros(13, 2, 8))
    empty = torch.zeros(0)
    monkeypatch.setitem(KERNELS, "fa3 fwd", lambda *given: (given[6], sums, empty, empty))
    monkeypatch.setitem(KERNELS, "fa3 bwd", lambda *_: (empty,) * 5)
    monkeypatch.setattr(
        sys.modules["flash_attn.cute.interface"], "_flash_attn_fwd", lambda *_, **given: (given["out"], sums)
    )
    monkeypatch.setattr(
        sys.modules["flash_attn.cute.interface"], "_flash_attn_bwd", lambda *_, **__: gradient
    )
    launch = launch_of(True, 0)
    kernel = varlen_kernel(torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        out, state = kernel.forward(q, k, v, launch, 0.0)
        kernel.backward(out, q, k, v, out, state, launch, 0.0)
    names = {event.key for event in profiled.key_averages()}
    assert "torch_attn::_varlen_attn_out" in names
    works = ("fill", "zero", "copy", "clone", "contiguous", "ones", "cat")
    assert [name for name in names if name.startswith("aten::") and any(work in name for work in works)] == []


@EVERY
def test_a_start_tries_every_type_of_launch(implementation, monkeypatch):
    """Each head size and window, causal and not; the first that fails is named."""
    launched = []

    class Kernel(varlen_kernels._Flash):
        @staticmethod
        def forward(q, k, v, launch, dropout):
            launched.append((q.shape[-1], len(q) < len(k), launch.causal, launch.window))
            return varlen_kernels._Flash.forward(q, k, v, launch, dropout)

    monkeypatch.setattr(varlen_kernels, "varlen_kernel", lambda dtype: Kernel)
    types = [LaunchType(8, 0, 0.0), LaunchType(16, 0, 0.0), LaunchType(16, 3, 0.0)]
    try_attention(torch.device("cpu"), torch.float64, types)
    sizes = [(8, True, 0), (16, True, 0), (16, False, 3)]
    assert launched == [
        (size, longer, causal, window) for size, longer, window in sizes for causal in (False, True)
    ]
    # As from version 4.0.0b19, which torch 2.13 does not know; and a kernel that is not built for this GPU.
    interface = sys.modules["flash_attn.cute.interface"]
    monkeypatch.setattr(
        interface, "_flash_attn_fwd", lambda *given, **more: (*fa4_forward(*given, **more), None, None)
    )
    monkeypatch.setitem(KERNELS, "fa3 bwd", lambda *_: 1 / 0)
    if implementation == "fa2":
        monkeypatch.setattr(varlen_kernels, "_flash_backward", broken)
    found = "which" if implementation == "fa2" else "whose package .*"
    with pytest.raises(
        ConfigError, match=rf"{implementation}, {found} does not work here \(heads of 8: .+\); "
    ):
        try_attention(torch.device("cpu"), torch.float64, types)


def test_a_package_that_does_not_work_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace())
    monkeypatch.setattr(varlen_kernels, "activate_flash_attention_impl", broken)
    with pytest.raises(
        ConfigError,
        match=r"fa3, whose package flash_attn_3 .*undefined symbol.*set training\.attention to fa2",
    ):
        use_attention("fa3")
    assert attention_in_use() == "fa2" and current_flash_attention_impl() is None


def broken(name):
    raise ImportError(f"{name}: undefined symbol\nin a library")


def test_the_memory_efficient_kernel_serves_fp32_and_by_choice():
    flash = varlen_kernel(torch.bfloat16)
    try:
        use_attention("torch")
        assert varlen_kernel(torch.bfloat16) is varlen_kernel(torch.float32) is not flash
    finally:
        use_attention("fa2")
