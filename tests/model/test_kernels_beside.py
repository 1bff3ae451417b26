"""The bisect of fused kernels, in Triton's interpreter: all are right, and one that is not is named."""

from __future__ import annotations

import pytest
import torch
from support.kernels import interpreted_kernels

from benchmarks import kernels
from megatron_lite.model.kernels import cross_entropy, fused, heads, rule_attention
from megatron_lite.profile.gpus import GPUS

H100, SIZES = GPUS["h100"], (11, 128, 300)


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_kernels():
        yield


def found():
    return kernels.bisect(torch.device("cpu"), *SIZES, H100)


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
