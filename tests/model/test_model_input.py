"""Batches of a shape have few lengths where each new length costs a kernel."""

from __future__ import annotations

import pytest
import torch
from support.recipes import RECIPES, collate, make, windows

from megatron_lite.model.input import lengths, model_input
from megatron_lite.model.input.batch import Batch
from megatron_lite.model.input.lengths import LENGTHS, few_lengths

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    "device, dtype, native, is_padded",
    [
        (CPU, torch.bfloat16, True, True),
        (CPU, torch.bfloat16, False, False),  # multiplied in fp32, which needs no kernel for each shape
        (CPU, torch.float32, True, False),
        (CUDA, torch.float32, False, True),
        (CUDA, torch.bfloat16, False, True),
    ],
)
def test_lengths_are_few_where_each_costs_a_kernel(monkeypatch, device, dtype, native, is_padded):
    monkeypatch.setattr(lengths, "cpu_has_half_matmul", lambda dtype: native)
    places = 32 * 136
    multiple = few_lengths(places, device, dtype)
    assert (multiple > 1) == is_padded
    if is_padded:
        assert multiple % 64 == 0 and places / multiple <= LENGTHS


def test_varying_batches_have_few_lengths():
    recipe = RECIPES["t5"]
    made = make(recipe.name, 100, **recipe.config)
    shapes, tokens = set(), set()
    for seed in range(60):
        batch = Batch(collate(made, windows(16, 100, seed)))
        multiple = few_lengths(batch.planes[:, 0].size, CUDA, torch.bfloat16)
        plan = model_input.plan_attention(batch.layout, CPU, multiple=multiple)
        shapes.add(len(plan.order))
        tokens.add(batch.tokens)
        assert 0 <= len(plan.order) - batch.tokens < multiple
    assert len(tokens) > 20 and len(shapes) <= 8
