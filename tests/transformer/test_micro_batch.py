"""Micro-batches: one buffer of named arrays, and few lengths where each new length costs a kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.data.recipes import RECIPES, collate, make, windows
from support.systems import electra, entity_models
from support.tasks.task_batches import task_batch

from megatron_lite.config.model import ModelConfig
from megatron_lite.models.ernie_thu.batch import EntityTaskBatch, NoVectors
from megatron_lite.transformer import lengths
from megatron_lite.transformer.attention_backends.plan import plan_attention
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.length_table import length_table
from megatron_lite.transformer.lengths import LENGTHS, few_lengths
from megatron_lite.transformer.micro_batch import prepare
from megatron_lite.transformer.named_buffer import NamedBuffer

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


def test_named_arrays_come_back_from_one_buffer_of_int32():
    arrays = {
        "ids": np.arange(6, dtype=np.int64).reshape(2, 3),
        "weights": np.array([0.5, -0.0, np.inf]),
        "flags": np.array([True, False]),
        "none": np.zeros((0, 4), np.float32),
    }
    sent = NamedBuffer.pack(arrays, pin=False).to(CPU, into=torch.empty(99, dtype=torch.int32))
    assert sent.data.dtype == torch.int32 and len(sent.data) == 11
    tensors = sent.tensors()
    assert list(tensors) == list(arrays)
    for name, array in arrays.items():
        is_float = array.dtype.kind == "f"
        assert tensors[name].dtype == (torch.float32 if is_float else torch.int32)
        assert tensors[name].shape == array.shape and np.array_equal(tensors[name].numpy(), array)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from tensors_in(getattr(value, each.name))


BATCHES = {
    "classes": lambda: task_batch("classes", range(5)),
    "choices": lambda: task_batch("choices", range(5)),
    "entities of a task": lambda: EntityTaskBatch(task_batch("tags", range(5)), NoVectors(8)),
    "entities": lambda: entity_models.batch_of(3),
    "electra": lambda: electra.batch_of(3),
}


@pytest.mark.parametrize("name", BATCHES)
def test_what_tasks_and_models_add_travels_in_the_one_copy(name):
    host = prepare(BATCHES[name](), CPU, WIDE, dropout_seed=3)
    sent = host.to(CPU, torch.empty(2 * len(host.buffer.data), dtype=torch.int32))
    first, end = sent.buffer.data.data_ptr(), sent.buffer.data.data_ptr() + sent.buffer.data.nbytes
    tensors_of = {
        field.name: list(tensors_in(getattr(sent, field.name))) for field in dataclasses.fields(sent)
    }
    assert tensors_of["extra_inputs"] and tensors_of["dropout"] and tensors_of["loss_positions"]
    for tensor in (x for name, tensors in tensors_of.items() if name != "plan" for x in tensors if x.numel()):
        assert first <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end
