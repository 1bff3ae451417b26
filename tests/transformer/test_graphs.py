"""A CUDA graph's needs: shapes, memory and numbers of the host that every batch of a length has."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import replace

import pytest
import torch
from support.data.recipes import RECIPES, collate, make, windows
from support.transformer.attention import CPU, attend, draw, recipe_arrays, reference_attention
from support.transformer.graphs import by_torch, capture
from support.transformer.kernels import interpreted_kernels

from data_utils.common.errors import ConfigError
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.tree import load_config
from megatron_lite.optim.buckets import Bucket, ParamGroup
from megatron_lite.parallel.collectives import SINGLE
from megatron_lite.transformer import cuda_graphs as graphs
from megatron_lite.transformer.attention_backends.layout import make_layout
from megatron_lite.transformer.attention_backends.plan import plan_attention
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.init import initialize_parameters
from megatron_lite.transformer.micro_batch import prepare
from megatron_lite.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    accumulate_in_backward,
)
from megatron_lite.transformer.transformer import Transformer

FIXED = ("t5", "roberta", "causal")  # GLM's pair of calls, a full one, a causal one


def fixed_plan(name, seed, length=256):
    arrays = recipe_arrays(RECIPES[name], 60, 4, seed)
    return arrays, plan_attention(make_layout(*arrays), CPU, "varlen", length).with_fixed_shapes(
        arrays[0].shape[1]
    )


@pytest.mark.parametrize("name", FIXED)
def test_plans_of_fixed_shapes_equal_softmax_over_the_rule(name, emulated_kernel):
    """Rows that a call leaves out are not a number in it: none may reach a result."""
    shapes: dict[str, set[str]] = {}  # by the numbers of sequences
    for seed in (4, 6):
        arrays, plan = fixed_plan(name, seed)
        assert plan.has_fixed_shapes and len(plan.order) == 256
        *qkv, grad = draw((*arrays[0].shape, 2, 8), torch.float32)
        qkv = [x.requires_grad_() for x in qkv]
        with interpreted_kernels():
            ours, expected = attend(plan, qkv), reference_attention(arrays, *qkv)
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
            gradients = (torch.autograd.grad(out, qkv, grad) for out in (ours, expected))
            for mine, theirs in zip(*gradients, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
        launches = [
            replace(launch, gathered=0, gathered_index=0, cu_seqlens_q=0, cu_seqlens_k=0)
            for launch in plan.launches
        ]
        counts = str([len(launch.cu_seqlens_q) for launch in plan.launches])
        shapes.setdefault(counts, set()).add(str(([array.shape for array in plan.arrays()], launches)))
    assert len(shapes) < 3 and {len(found) for found in shapes.values()} == {1}


@pytest.mark.parametrize("name", ["xlnet", "mass"])
def test_plans_that_cannot_be_fixed_stay(name):
    """Tokens that see nothing; keys of both calls gathered."""
    _, plan = fixed_plan(name, 1)
    assert not plan.has_fixed_shapes


CONFIG = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=3000, max_position=64,
    embedding_dropout=0.0, attention_dropout=0.0, output_dropout=0.3,
)  # fmt: skip
LENGTH = 128


class Trained:
    """A model whose blocks give their gradients to a bucket, with CUDA graphs or without."""

    def __init__(self, model, has_graphs):
        self.model, self.has_graphs = model, has_graphs
        self.bucket = Bucket(list(model.layers.parameters()), ParamGroup(0.0, True), SINGLE, offload=False)
        self.write_weight_grad, self.count_weight_grad = (
            self.bucket.write_weight_grad,
            self.bucket.count_weight_grad,
        )
        for layer in model.modules():
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                accumulate_in_backward(
                    layer.weight, functools.partial(self.bucket.accumulate_weight_grad, layer.weight)
                )
        self.graphs = graphs.BlockGraphs(self) if has_graphs else None
        for block in model.layers:
            block.accumulate_gradients(self.take)
            if has_graphs:
                block.fused = self.graphs.add_to(block.fused)
        model.layers[-1].mlp.dense_4h_to_h.bias.register_post_accumulate_grad_hook(
            lambda parameter: self.bucket.add_gradient(parameter)
        )
        self.buffer = torch.empty(1 << 14, dtype=torch.int32)

    def take(self, parameter, gradient):
        parameter.grad = gradient
        self.bucket.add_gradient(parameter)

    def is_accumulated(self, parameter):
        return parameter in self.bucket.accumulated

    def step(self, inputs):
        """Losses and gradients of a step of these micro-batches."""
        self.bucket.begin_accumulation(len(inputs))
        self.model.zero_grad(set_to_none=True)
        losses = []
        for micro_batch in inputs:
            loss, _ = self.model(micro_batch.to(CPU, self.buffer if self.has_graphs else None))
            loss.backward()
            losses.append(loss.detach().clone())
        rest = [p.grad.clone() for p in self.model.embedding.parameters()]
        return [*losses, self.bucket.finish_accumulation().clone(), *rest]


def batches(objective, count, config):
    made = make(objective, 40)
    return [
        prepare(
            Batch(collate(made, windows(2, 40, seed=seed))), CPU, config, dropout_seed=seed, kernel="varlen",
            multiple=LENGTH, has_graphs=True,
        )
        for seed in range(count)
    ]  # fmt: skip


@pytest.fixture
def steps(monkeypatch):
    """objective -> results of steps of two micro-batches with graphs and without, and the shapes that have graphs."""
    by_torch(monkeypatch)
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def run(objective, count=3, **options):
        config = replace(CONFIG, **options)
        model = Transformer(config, num_losses=6)
        initialize_parameters(model.named_parameters(), config, seed=1)
        found, inputs = [], batches(objective, 2 * count, config)
        for has_graphs in (True, False):
            trained = Trained(copy.deepcopy(model), has_graphs)
            found.append([trained.step(inputs[i : i + 2]) for i in range(0, len(inputs), 2)])
            if has_graphs:
                blocks = [block.fused.run.__self__ for block in trained.model.layers]
        return *found, blocks

    return run


@pytest.mark.parametrize(
    ("objective", "positions"),
    [
        ("blank_infilling", "learned_blocks"),
        pytest.param("masked_lm", "learned_blocks", marks=pytest.mark.slow),
        ("blank_infilling", "rotary"),
    ],
)
def test_blocks_as_graphs_equal_blocks_without(steps, objective, positions):
    """To the last bit, though a graph repeats the numbers and the memory of the batch that it was captured with."""
    ours, theirs, blocks = steps(objective, positions=positions)
    assert all(len(block.passes) >= 1 for block in blocks)
    # The memory that they keep, as it is estimated: the first block returns no gradient of x.
    kept = {id(result): result for pair in blocks[0].graphs.results.values() for result in pair}
    hidden = LENGTH * CONFIG.hidden_size * len(blocks[0].passes)
    assert sum(result.numel() for result in kept.values()) == (graphs.RESULTS * len(blocks) - 2) * hidden
    for mine, other in zip(ours, theirs, strict=True):
        for found, expected in zip(mine, other, strict=True):
            assert expected.isfinite().all() and torch.equal(found, expected)


@pytest.mark.parametrize("what", ["inputs are not copied", "sums begin twice", "angles stay"])
def test_what_is_stale_is_found(steps, monkeypatch, what):
    if what == "angles stay":
        with_fixed_angles = graphs.BlockGraphs.with_fixed_angles

        def stale(self, transform):
            self.copied_cos = transform.cos if self.angles else None
            return with_fixed_angles(self, transform)

        monkeypatch.setattr(graphs.BlockGraphs, "with_fixed_angles", stale)
    elif what == "sums begin twice":
        monkeypatch.setattr(Trained, "is_accumulated", lambda self, parameter: False)
    else:

        def run(graph, inputs):
            graph.replay()
            return tuple(None if result is None else result.detach() for result in graph.results)

        monkeypatch.setattr(graphs._Graph, "run", run)
    ours, theirs, _ = steps("blank_infilling", positions="rotary")
    assert not all(map(torch.equal, ours[-1], theirs[-1]))


def test_batches_elsewhere_or_of_more_shapes_run_without_graphs(steps, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_SHAPES", 0)
    ours, theirs, blocks = steps("blank_infilling")
    assert not any(block.passes for block in blocks)
    assert all(map(torch.equal, ours[-1], theirs[-1]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["parallel.pipeline_parallel_size=2"],
            "pipeline_parallel_size is 2",
        ),
        (["parallel.zero_stage=2"], "parallel.zero_stage is 2"),
        (["training.recompute=full"], "training.recompute is full"),
        (["training.precision=fp32"], "training.precision is fp32; set it to bf16 or fp16"),
        (["model.embedding_norm=true"], "the model has options"),
    ],
)
def test_graphs_are_refused_where_they_are_not_safe(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        load_config(["configs/glm-large.yaml"], ["training.cuda_graphs=true", *settings])
    assert "\n" not in str(refused.value)
