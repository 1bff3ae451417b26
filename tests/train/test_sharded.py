"""What ZeRO 1 and 2 send and when, that they wait for no device, and how buckets are laid out."""

from __future__ import annotations

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.distributed import run_ranks
from support.training import parity_cases
from support.training.engines import tree
from support.training.fake_ranks import fake_context
from support.transformer.batches import prefix_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from data_utils.common.settings import build
from megatron_lite.config.deepspeed_options import default_bucket_size
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.optim.buckets import ALIGNMENT, Bucket, ParamGroup, assign_buckets
from megatron_lite.parallel import collectives
from megatron_lite.parallel.collectives import Group
from megatron_lite.transformer.batch import Batch
from megatron_lite.transformer.tensor_parallel import is_partial

WORLD, BUCKET = 8, 20_000


class Record:
    """Collectives with their bytes, and gradients as they arise, in order.

    Attributes:
        summed: the tensors of all-reduces, which are held so that no later one gets the memory of an earlier one.
    """

    def __init__(self):
        self.events = []
        self.summed = []

    @contextlib.contextmanager
    def collectives(self):
        originals = {}
        for name, sent in (("reduce_scatter_tensor", 1), ("all_gather_into_tensor", 0), ("all_reduce", 0)):
            originals[name] = getattr(dist, name)

            def call(*args, _name=name, _sent=sent, **options):
                self.events.append((_name, args[_sent].numel() * args[_sent].element_size()))
                if _name == "all_reduce":
                    self.summed.append(args[0])
                return originals[_name](*args, **options)

            setattr(dist, name, call)
        yield self
        for name, original in originals.items():
            setattr(dist, name, original)

    def gradients(self, named):
        for name, parameter in named.items():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: self.events.append(("gradient", name))
            )

    def of(self, kind):
        return [value for name, value in self.events if name == kind]


def engine_on_fake_ranks(context, zero_stage, accumulation, precision, **parallel):
    parallel = {"zero_stage": zero_stage, **parallel}
    fake = fake_context(context, 3, WORLD, ParallelConfig(**parallel))
    settings = tree(
        model={"num_layers": 4},
        training={"precision": precision},
        parallel=parallel,
        batch={"micro_batch_size": 2, "global_batch_size": 2 * accumulation * fake.dp.size},
        deepspeed={"zero_optimization": {"reduce_bucket_size": BUCKET}},
    )
    return make_engine(build(Config, settings), fake, num_losses=3)


def micro_batches(engine, count):
    return [engine.prepared(Batch(prefix_batch(m, rows=2, vocab=500)), m, 0.01) for m in range(count)]


def a_step(context, zero_stage, accumulation, precision):
    """One step of rank 3 of 8: its events, and the elements of all buckets."""
    engine = engine_on_fake_ranks(context, zero_stage, accumulation, precision)
    record = Record()
    record.gradients(engine.named_parameters)
    with record.collectives():
        engine.train_step(micro_batches(engine, accumulation), lr=1e-3)
    return record, sum(bucket.size for bucket in engine._zero.buckets), len(engine._zero.buckets)


@pytest.mark.parametrize(
    "zero_stage, accumulation, precision",
    [
        (1, 1, "bf16"),
        (1, 4, "bf16"),
        (2, 1, "bf16"),
        (2, 4, "bf16"),
        (1, 4, "fp16"),
        (1, 4, "fp32"),
        (2, 2, "fp32"),
    ],
)
def test_a_step_sends_what_a_ring_must(zero_stage, accumulation, precision):
    """Each gradient once in fp32, each weight once in the training precision, and one number for the norm."""
    (result,) = run_ranks(a_step, 1, zero_stage, accumulation, precision)
    record, elements, buckets = result
    rounds = (
        accumulation if zero_stage == 2 else 1
    )  # ZeRO 2 keeps no unreduced gradients between micro-batches
    assert sum(record.of("reduce_scatter_tensor")) == 4 * elements * rounds
    assert sum(record.of("all_gather_into_tensor")) == (4 if precision == "fp32" else 2) * elements
    assert record.of("all_reduce") == [8]
    assert len(record.of("reduce_scatter_tensor")) == buckets * rounds
    assert len(record.of("all_gather_into_tensor")) == buckets > 3


@pytest.mark.each_cpu
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_reductions_start_while_the_last_backward_pass_runs(zero_stage):
    (result,) = run_ranks(a_step, 1, zero_stage, 3, "bf16")
    record, _, buckets = result
    passes = [[]]
    names = len(set(record.of("gradient")))
    for event in record.events:
        if len([e for e in passes[-1] if e[0] == "gradient"]) == names and event[0] == "gradient":
            passes.append([])
        passes[-1].append(event)
    assert len(passes) == 3
    for number, events in enumerate(passes):
        last = max(place for place, (kind, _) in enumerate(events) if kind == "gradient")
        early = [kind for kind, _ in events[:last] if kind == "reduce_scatter_tensor"]
        expected = (
            0 if zero_stage == 1 and number < 2 else buckets - 2
        )  # the embedding's, and that of norms and biases
        assert len(early) >= expected and (expected or not early)


def order_of_a_second_step(context, zero_stage):
    """Forward passes of blocks, and when the weights of which elements were awaited, after a first step."""
    engine = engine_on_fake_ranks(context, zero_stage, 1, "bf16")
    events, gather = [], dist.all_gather_into_tensor

    class Watched:
        def __init__(self, flat):
            self.place = flat.data_ptr(), flat.data_ptr() + flat.nbytes

        def wait(self):
            events.append(("arrived", self.place))

    def watched(flat, *args, **options):
        gather(flat, *args, **options)
        return Watched(flat)

    dist.all_gather_into_tensor = watched
    engine.train_step(micro_batches(engine, 1), lr=1e-3)
    assert not events, "nothing waits for the weights before they are used"
    for number, block in enumerate(engine._model.layers):
        places = [parameter.data_ptr() for parameter in block.parameters()]
        block.register_forward_pre_hook(lambda *_, n=number, p=places: events.append((n, p)))
    engine.train_step(micro_batches(engine, 1), lr=1e-3)
    return events


@pytest.mark.each_cpu
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_the_forward_pass_starts_before_all_weights_have_arrived(zero_stage):
    (events,) = run_ranks(order_of_a_second_step, 1, zero_stage)
    blocks = [place for place, (kind, _) in enumerate(events) if kind != "arrived"]
    assert len(blocks) == 4
    for block in blocks:
        arrived = [span for kind, span in events[:block] if kind == "arrived"]
        for address in events[block][1]:
            assert any(start <= address < stop for start, stop in arrived), "computed with old weights"
    assert any(kind == "arrived" for kind, _ in events[blocks[0] : blocks[-1]])


def waits_of_a_step(context, zero_stage):
    engine = engine_on_fake_ranks(context, zero_stage, 2, "bf16")
    waits = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._local_scalar_dense.default:
                waits.append("item")
            return function(*args, **(kwargs or {}))

    tolist = torch.Tensor.tolist
    torch.Tensor.tolist = lambda self: (waits.append("tolist"), tolist(self))[1]
    batches = [(micro.to(engine.context.device), micro) for micro in micro_batches(engine, 2)]
    waits.clear()
    with Reads():
        engine._begin_step(2, 1e-3)
        for batch, micro in batches:
            engine._engine.backward(engine._engine(batch)[0] * micro.loss_factor, scale_wrt_gas=False)
            engine._engine.step()
        before = list(waits)
        engine._result(None).outcome()
    return before, waits


@pytest.mark.each_cpu
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_step_waits_once_for_its_outcome(zero_stage):
    assert run_ranks(waits_of_a_step, 1, zero_stage) == [([], ["tolist"])]


def sums_of_norms_and_biases(context, zero_stage):
    """Of one step of 4 micro-batches: gradients of partial parameters, how many of them come from a sum over ranks, and
    the bytes of the sums after the last gradient."""
    parallel = {"tensor_parallel_size": 2, "sequence_parallel": True}
    engine = engine_on_fake_ranks(context, zero_stage, 4, "bf16", **parallel)
    record, gradients, sums = Record(), [], []
    record.gradients(engine.named_parameters)
    whole = collectives.all_reduce

    def watched(
        x, *args, **options
    ):  # on CPU it sums a wide copy of half precision, and returns the tensor itself
        sums.append(whole(x, *args, **options))
        return sums[-1]

    collectives.all_reduce = watched
    for parameter in filter(is_partial, engine.named_parameters.values()):
        parameter.register_hook(gradients.append)
    with record.collectives():
        engine.train_step(micro_batches(engine, 4), lr=1e-3)
    collectives.all_reduce = whole
    last = max(place for place, (kind, _) in enumerate(record.events) if kind == "gradient")
    places = {x.data_ptr() for x in (*sums, *record.summed)}
    during = sum(gradient.data_ptr() in places for gradient in gradients)
    return len(gradients), during, [size for kind, size in record.events[last:] if kind == "all_reduce"]


@pytest.mark.each_cpu
def test_gradients_of_norms_and_biases_are_summed_once_a_step():
    """Six tiny sums per layer and micro-batch before: 48 in this step, and 16 of embeddings."""
    ((gradients, during, after),) = run_ranks(sums_of_norms_and_biases, 1, 1)
    assert gradients >= 4 * (4 * 6 + 2) and during == 0
    *partial, norm = after
    # position tables, and norms with biases: this rank's part of fp32 sums over 4 data-parallel ranks
    assert norm == 8 and len(partial) == 3 and sum(partial) < 4 * 3 * BUCKET


def norm_of_ones(context, case):
    """The gradient norm of a step in which the gradient of every element of the whole model is 1.

    Ranks that hold shares of a gradient, which are summed, hold equal shares of it.
    """
    engine = make_engine(case.config(), context, parity_cases.OBJECTIVES)
    optimizer = engine._engine.optimizer
    optimizer.begin(1)
    for parameter, bucket in optimizer.bucket_by_param.items():
        shares = bucket.group.extra_reduce_group
        value = 1.0 if shares is None else 1.0 / shares.size
        optimizer.add_gradient(parameter, torch.full_like(parameter, value))
    optimizer.reduce_gradients()
    optimizer.step()
    return optimizer.outcome().grad_norm


def test_the_norm_counts_each_element_of_the_model_once():
    """Stages share T5's tables of relative positions and, at both ends, the words."""
    (alone,), staged = (
        run_ranks(
            norm_of_ones,
            stages,
            parity_cases.Case(1, stages, 1, variant="t5 with buckets"),
            parallel=ParallelConfig(pipeline_parallel_size=stages),
        )
        for stages in (1, 2)
    )
    assert staged == pytest.approx([alone, alone], rel=1e-6)


# Buckets


@pytest.mark.parametrize("size, dp", [(1, 1), (100, 3), (5000, 2), (10**9, 8)])
def test_buckets_hold_every_parameter_once_and_ranks_own_every_element_once(size, dp):
    generator = np.random.default_rng(0)
    shapes = [tuple(generator.integers(1, 40, generator.integers(1, 3))) for _ in range(30)]
    parameters = [nn.Parameter(torch.randn(*map(int, shape))) for shape in shapes]
    whole = [parameter.detach().clone() for parameter in parameters]
    kinds = [ParamGroup(0.1, True), ParamGroup(0.0, True), ParamGroup(0.0, False)]
    groups = dict(zip(parameters, itertools.cycle(kinds)))
    assigned = assign_buckets(groups, size)
    assert sorted(id(p) for _, bucket in assigned for p in bucket) == sorted(map(id, parameters))
    owned = {id(parameter): torch.zeros(parameter.numel()) for parameter in parameters}
    for rank in range(dp):
        for group, members in assigned:
            assert {groups[p] for p in members} == {group}
            assert len(members) == 1 or sum(p.numel() for p in members) <= size
            bucket = Bucket(members, group, Group(None, rank, dp, tuple(range(dp))), offload=False)
            assert bucket.size % (dp * ALIGNMENT) == 0
            for parameter in members:
                assert parameter.data_ptr() % (ALIGNMENT * 4) == bucket.weights.data_ptr() % (ALIGNMENT * 4)
                owned_range = bucket.owned_range(parameter)
                if owned_range is not None:
                    start, positions = owned_range
                    weights = bucket.master_shard[positions]
                    owned[id(parameter)][start : start + len(weights)] += 1
                    assert torch.equal(weights, parameter.detach().flatten()[start : start + len(weights)])
    assert all((count == 1).all() for count in owned.values())
    assert all(torch.equal(p.detach(), before) for p, before in zip(parameters, whole, strict=True))


def test_buckets_are_ordered_by_when_they_are_complete():
    parameters = [nn.Parameter(torch.zeros(10)) for _ in range(6)]
    often, once = ParamGroup(0.1, True), ParamGroup(0.0, True)
    groups = dict(zip(parameters, [once, often, often, often, often, once], strict=True))
    number = {parameter: place for place, parameter in enumerate(parameters)}
    order = [[number[p] for p in members] for _, members in assign_buckets(groups, 20)]
    assert order == [[1, 2], [3, 4], [0, 5]]


def test_buckets_grow_with_the_number_of_ranks():
    assert default_bucket_size(8) == 40_000_000 and default_bucket_size(1024) == 1_024_000_000
    assert math.isclose(default_bucket_size(1024) / 1024, 1e6)


def gradients_over_an_unused_layer(context):
    """A parameter that no loss reaches counts as a gradient of zero, and does not hold up the others."""
    engine = make_engine(
        build(Config, tree(batch={"micro_batch_size": 4}, parallel={"zero_stage": 1})), context, num_losses=3
    )
    unused = engine.model.layers[1].mlp
    unused.forward = lambda hidden, *_, **__: torch.zeros_like(hidden)
    before = {name: p.detach().clone() for name, p in engine.named_parameters.items()}
    result = engine.train_step(micro_batches(engine, 1), lr=1e-3)
    changed = {name for name, p in engine.named_parameters.items() if not torch.equal(p, before[name])}
    return result.skipped, math.isfinite(result.grad_norm), sorted(set(before) - changed)


def test_a_parameter_without_a_gradient_is_left_alone():
    for skipped, finite, unchanged in run_ranks(gradients_over_an_unused_layer, 2):
        # weight decay changes matrices without a gradient, too
        assert (skipped, finite) == (False, True)
        assert unchanged == [
            "layers.1.mlp.dense_4h_to_h.bias",
            "layers.1.mlp.dense_h_to_4h.bias",
            "layers.1.post_attention_layernorm.bias",
            "layers.1.post_attention_layernorm.weight",
        ]
