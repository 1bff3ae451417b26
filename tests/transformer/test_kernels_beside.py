"""The bisect of fused kernels, in Triton's interpreter: all are right, and one that is not is named."""

from __future__ import annotations

import pytest
import torch
from support.transformer.attention import EmulatedKernel
from support.transformer.kernels import interpreted_kernels

from benchmarks import kernels
from data_utils.common.errors import ConfigError
from megatron_lite.transformer.kernels import cross_entropy, fused, rule_attention
from megatron_lite.transformer.kernels import qkv_heads as heads

SIZES = (11, 128, 300)


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_kernels():
        yield


def found():
    return kernels.bisect(torch.device("cpu"), *SIZES)


@pytest.mark.slow
def test_every_kernel_equals_torch():
    every = found()
    assert not [one for one in every if one.differs]
    names = (*vars(fused), *vars(cross_entropy), *vars(rule_attention), *vars(heads))
    operators = {name.removesuffix("_kernel") for name in names if name.endswith("_kernel")}
    assert {one.name.split()[0] for one in every} == operators


def test_the_first_that_differs_is_named(monkeypatch):
    right = fused.activate_backward_kernel
    monkeypatch.setattr(
        fused, "activate_backward_kernel", lambda *given: (1.05 * right(*given)[0], right(*given)[1])
    )
    every = found()
    assert [one.name for one in every if one.differs] == ["activate_backward gelu_tanh"] == [every[-1].name]


@pytest.fixture
def attention(monkeypatch):
    """The implementations' kernels, written out; fa3's package does not work."""

    def use(name):
        if name == "fa3":
            raise ConfigError("training.attention is fa3, whose package is broken")

    monkeypatch.setattr(kernels, "use_attention", use)
    monkeypatch.setattr(kernels, "varlen_kernel", lambda dtype: EmulatedKernel)
    return lambda names: list(kernels.bisect_attention(names, torch.device("cpu"), 24, 128))


def test_each_implementation_of_attention_has_a_line(attention, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "DOCUMENT", 8)
    found = {one.name: one for one in attention(["fa2", "fa3", "fa4"])}
    assert list(found) == [f"{kernel} {name}" for name in ("fa2", "fa3", "fa4") for kernel in DIRECTIONS]
    assert [name for name, one in found.items() if one.differs] == ["attention fa3", "attention_backward fa3"]
    assert "whose package is broken" in capsys.readouterr().err
    assert found["attention fa4"].measured_us is None


DIRECTIONS = ("attention", "attention_backward")


@pytest.mark.parametrize("direction", [0, 1])
def test_a_wrong_implementation_of_attention_is_named(attention, monkeypatch, direction):
    class Wrong:
        @staticmethod
        def forward(*given):
            out, state = EmulatedKernel.forward(*given)
            return (1.1 if direction == 0 else 1.0) * out, state

        @staticmethod
        def backward(grad, q, k, v, out, state, *rest):
            right, _ = EmulatedKernel.forward(q, k, v, *rest)
            found = EmulatedKernel.backward(grad, q, k, v, right, state, *rest)
            return [(1.1 if direction == 1 else 1.0) * gradient for gradient in found]

    monkeypatch.setattr(kernels, "varlen_kernel", lambda dtype: Wrong)
    assert [one.differs for one in attention(["fa2"])] == [direction == 0, direction == 1]


def test_a_machine_has_what_runs_and_is_installed():
    assert kernels.implementations((9, 0)) == ["fa2", "torch"] and kernels.implementations((7, 0)) == [
        "torch"
    ]


MODULES = fused, cross_entropy, rule_attention, heads
# Arguments that decide a size themselves, or of which only the type counts.
FREE = {"finish_sums": (0, 1), "join_pair": (7,)}


@pytest.fixture
def launched(monkeypatch):
    """Each operator, and the arguments with which the bisect calls it, by form."""
    calls = {}
    for module in MODULES:
        for name, operator in list(vars(module).items()):
            if name.endswith("_kernel"):

                def noted(*given, name=name, operator=operator):
                    form = name.removesuffix("_kernel"), tuple(x is None for x in given)
                    calls.setdefault(form, (operator, given))
                    return operator(*given)

                monkeypatch.setattr(module, name, noted)
    for case in kernels.cases(torch.device("cpu"), *SIZES):
        case.ours()
    assert {name for name, _ in calls} == {
        name.removesuffix("_kernel")
        for module in MODULES
        for name in vars(module)
        if name.endswith("_kernel")
    }
    return {f"{name} {i}": call for i, ((name, _), call) in enumerate(calls.items())}


def changed(given, number, change):
    return [change(x) if i == number else x for i, x in enumerate(given)]


@pytest.mark.slow
def test_every_kernel_refuses_gaps_and_other_sizes(launched):
    """Before it is launched: its addresses would be wrong."""
    for form, (operator, given) in launched.items():
        name = form.split()[0]
        free = range(len(given)) if name.startswith("rule_attention") else FREE.get(name, ())
        for number, tensor in enumerate(given):
            if not isinstance(tensor, torch.Tensor) or tensor.numel() < 2:
                continue
            print(form, number, tuple(tensor.shape))  # the last one is at fault
            if not (name == "finish_sums" and number == 1):
                gaps = changed(given, number, lambda x: torch.stack([x, x], -1)[..., 0])
                with pytest.raises(ValueError, match="needs contiguous tensors"):
                    operator(*gaps)
            if number not in free:
                with pytest.raises(ValueError, match="a kernel takes"):
                    operator(*changed(given, number, lambda x: x[..., :-1].contiguous()))


@pytest.mark.slow
def test_every_kernel_does_nothing_without_rows(launched):
    tokens = SIZES[0]

    def emptied(x):
        if isinstance(x, torch.Tensor):
            for axis, size in enumerate(x.shape):
                if size == tokens or (axis == 0 and size in (tokens // 2, tokens - tokens // 2)):
                    x = x.narrow(axis, 0, 0)
            return x.contiguous()
        return 0 if type(x) is int and x == tokens else x

    for form, (operator, given) in launched.items():
        if not form.startswith(("rule_attention", "finish_sums")):  # their own tests have none
            results = operator(*map(emptied, given))
            for result in results if isinstance(results, tuple) else () if results is None else (results,):
                assert not result.numel(), form
