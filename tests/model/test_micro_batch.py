"""Batches of a shape have few lengths where each new length costs a kernel."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support.recipes import RECIPES, collate, make, windows

from megatron_lite.config.model import ModelConfig
from megatron_lite.model import lengths
from megatron_lite.model.attention_backends.plan import plan_attention
from megatron_lite.model.batch import Batch
from megatron_lite.model.length_table import length_table
from megatron_lite.model.lengths import LENGTHS, few_lengths

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
        multiple = few_lengths(batch.fields[:, 0].size, CUDA, torch.bfloat16)
        plan = plan_attention(batch.layout, CPU, multiple=multiple)
        shapes.add(len(plan.order))
        tokens.add(batch.tokens)
        assert 0 <= len(plan.order) - batch.tokens < multiple
    assert len(tokens) > 20 and len(shapes) <= 8


WIDE = ModelConfig(num_layers=1, hidden_size=1024, num_attention_heads=16, vocab_size=512)


@pytest.mark.parametrize("processors", [132, 108])
def test_lengths_of_a_gpu_end_with_full_waves(processors):
    """Between them are about as many tokens as a hundredth of the work takes, with CUDA graphs three."""
    places, full = 16 * 568, 2 * processors // 4 * 128  # two waves, where 1024 columns are four tiles
    table = length_table(places, WIDE, processors)
    assert full in table and table[-1] == places and len(table) <= 3 * LENGTHS
    assert (table % 64 == 0).all() and np.diff(table).max() <= places / 40
    few = length_table(places, WIDE, processors, has_graphs=True)
    assert full in few and LENGTHS / 2 < len(few) <= LENGTHS


def test_lengths_of_a_gpu_are_divided_by_the_ranks_that_share_them():
    half = dataclasses.replace(WIDE, hidden_size=768, num_attention_heads=12)
    for ranks in (1, 3, 4):
        for places in (1, 64, 999, 9088):
            table = length_table(places, half, 132, ranks)
            assert (table % ranks == 0).all() and places <= table[-1] < places + 64 * ranks
