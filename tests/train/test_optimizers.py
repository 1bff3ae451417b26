"""The optimizers other than AdamW: each equals its reference, in every layout, and continues from its checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.optim._muon
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from support import parity
from support.distributed import run_ranks
from support.parity import Case, Outcome, compare_weights, run_step
from support.training import parity_cases
from support.training.parity_cases import with_optimizer
from support.training.stub_engine import StubEngine
from support.transformer.optimizers import ALL, Ours, Plain, blocks, decays, fused, newton_schulz
from torch import nn

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import build
from megatron_lite.checkpoint.fragments import Fragment
from megatron_lite.checkpoint.read import load_checkpoint
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.config.sections import OptimizerConfig, ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.engine.plain import make_engine
from megatron_lite.optim.buckets import ParamGroup
from megatron_lite.optim.muon import assign_owners, is_orthogonalized, multiply_adds, orthogonal
from megatron_lite.optim.sharded import ShardedOptimizer
from megatron_lite.parallel.collectives import SINGLE
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.callbacks.gradient_norms import GradientNorms
from megatron_lite.train.resume import require_same_optimizer
from megatron_lite.transformer.loss import sum_losses
from megatron_lite.transformer.tensor_parallel import Partition

WEIGHTS = [[0.5, -0.25, 0.125], [1.0, 0.75, -0.5]]
FIRST = [[0.1, -0.2, 0.3], [-0.4, 0.5, -0.6]]
SECOND = [[0.02, 0.04, -0.06], [0.08, -0.10, 0.12]]
LAMB = {"kind": "lamb", "beta2": 0.999, "weight_decay": 0.01}
STABLE = {"kind": "stable_adamw", "beta2": 0.99, "weight_decay": 0.01}
# Settings, learning rates, gradients; weights after them. Those of timm's LAMB, transformers' Adafactor, torch's Muon
# and optimi's StableAdamW.
GOLDEN = [
    (LAMB, 0.01, (FIRST, SECOND), (0.485632, -0.238688, 0.113693, 1.011259, 0.738665, -0.488676)),
    (
        {**LAMB, "bias_correction": True}, 0.01, (FIRST, SECOND),
        (0.485602, -0.238681, 0.113701, 1.011115, 0.738599, -0.488640),
    ),
    (
        {"kind": "adafactor", "weight_decay": 0.0}, 0.01, (FIRST, SECOND),
        (0.495206, -0.246029, 0.120218, 1.004423, 0.745767, -0.495922),
    ),
    (
        {"kind": "muon", "weight_decay": 0.1}, 0.02, (FIRST, SECOND),
        (0.495764, -0.252110, 0.118143, 0.999429, 0.739491, -0.493396),
    ),
    (STABLE, 0.01, (FIRST, SECOND), (0.481854, -0.234830, 0.109855, 1.014920, 0.734730, -0.484780)),
    (STABLE, 0.01, (SECOND, FIRST), (0.483705, -0.255640, 0.130662, 0.994144, 0.755554, -0.505597)),
]  # fmt: skip
NAME = "layers.0.dense.weight"


@pytest.mark.parametrize("settings, lr, gradients, expected", GOLDEN, ids=lambda value: str(value)[:30])
def test_two_steps_by_hand(settings, lr, gradients, expected):
    norm = {"final_layernorm.weight": torch.zeros(2)}
    named = {name: nn.Parameter(values) for name, values in {NAME: torch.tensor(WEIGHTS), **norm}.items()}
    ours = Ours(named, build(OptimizerConfig, settings))
    for gradient in gradients:
        ours.step({NAME: torch.tensor(gradient), **norm}, lr)
    assert ours.weights()[NAME].flatten().tolist() == pytest.approx(expected, abs=1e-6)


def problem():
    """Parameters of unlike shapes and sizes."""
    torch.manual_seed(3)
    made = {
        "embedding.word_embeddings.weight": torch.randn(11, 6),
        "layers.0.attention.query_key_value.weight": torch.cat([torch.randn(8, 6), torch.randn(8, 6) * 9]),
        "layers.0.attention.query_key_value.bias": torch.randn(16),
        "layers.0.mlp.weight": torch.randn(5, 16) * 0.1,
        "final_layernorm.weight": torch.ones(6),
    }
    named = {name: nn.Parameter(values) for name, values in made.items()}
    for name in made:
        if "query_key_value" in name:
            fused(named[name], (2, 1, 1))
    return named


def gradients_of(named, step):
    """Gradients of a quadratic function of the weights, with noise; now and then many times as large."""
    generator = torch.Generator().manual_seed(step)
    factor = 30.0 if step % 7 == 6 else 1.0
    return {
        name: factor * (weights.detach() + 0.5 * torch.randn(weights.shape, generator=generator))
        for name, weights in named.items()
    }


def of_the_library(kind, named, settings):
    """torch's or transformers' class on each block of the parameters."""
    parts = {
        (name, block): nn.Parameter(values.detach().clone())
        for name, parameter in named.items()
        for block, values in enumerate(blocks(parameter, parameter))
    }
    groups = [
        {"params": [p], "weight_decay": settings.weight_decay if decays(name) else 0.0, "name": name}
        for (name, _), p in parts.items()
    ]
    if kind == "adafactor":
        from transformers.optimization import Adafactor

        return parts, [Adafactor(groups, lr=0.0, scale_parameter=True, relative_step=False)]
    served = [g for g in groups if is_orthogonalized(g["name"], g["params"][0])]
    others = [g for g in groups if not is_orthogonalized(g["name"], g["params"][0])]
    betas = (settings.beta1, settings.beta2)
    return parts, [
        torch.optim.Muon(served, lr=0.0, momentum=settings.momentum, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.0, betas=betas, eps=settings.eps),
    ]


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_fifty_steps_match_the_library(kind, monkeypatch):
    # torch iterates in bf16 always; in an fp32 run ours does in fp32.
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", lambda u, *_: newton_schulz(u))
    settings = build(OptimizerConfig, {"kind": kind, "weight_decay": 0.1})
    named = problem()
    parts, optimizers = of_the_library(kind, named, settings)
    ours = Ours(named, settings)
    for step in range(50):
        lr = 0.02 / (1 + step) ** 0.5
        gradients = gradients_of(ours.weights(), step)
        ours.step(gradients, lr)
        for (name, block), part in parts.items():
            part.grad = list(blocks(named[name], gradients[name]))[block].clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
    for (name, block), part in parts.items():
        mine = list(blocks(named[name], ours.weights()[name]))[block]
        # fp32, 50 steps of up to 0.02 on weights of about 1: rounding of 6e-8 each.
        assert torch.allclose(mine, part.detach(), rtol=1e-6, atol=1e-6), (name, block)


@pytest.mark.parametrize("kind", ALL)
def test_fifty_steps_match_whole_tensors(kind):
    settings = build(OptimizerConfig, {"kind": kind, "weight_decay": 0.1})
    ours, named = Ours(problem(), settings), problem()
    plain = Plain(named, settings)
    for step in range(50):
        gradients = gradients_of(ours.weights(), step)
        ours.step(gradients, 0.01)
        for name, parameter in named.items():
            parameter.grad = gradients[name].clone()
        plain.step(0.01)
    for name, mine in ours.weights().items():
        assert torch.allclose(mine, named[name].detach(), rtol=1e-6, atol=1e-6), name


# Sums of millions of numbers: fp32 gets them right on small tensors only. Numbers of one magnitude: every rounding of a
# sum goes the same way.

MAGNITUDE, COUNT, LARGE = 0.0187, 10_000_000, (50_000, 40)
EXACT = float(torch.tensor(MAGNITUDE)) * math.sqrt(COUNT)


def clipped_gradient():
    """The norm, and that of the step, which clipping makes 1."""
    parameter = nn.Parameter(torch.zeros(COUNT))
    zero = ShardedOptimizer(
        {parameter: ParamGroup(0.0, True)}, ParallelContext.alone(), stage=1, bucket_size=1, clip_grad_norm=1.0,
        communication_type=torch.float32, loss_scaler=LossScaler(1.0),
        make_optimizer=lambda groups, _: torch.optim.SGD(groups, lr=1.0),
    )  # fmt: skip
    zero.begin(1)
    zero.add_gradient(parameter, torch.full((COUNT,), MAGNITUDE))
    zero.reduce_gradients()
    zero.step()
    zero.wait_for_weights()
    return (zero.outcome().grad_norm, EXACT), (parameter.detach().double().square().sum().sqrt().item(), 1.0)


def norms_of_layers():
    tree = {"model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 8},
            "batch": {"micro_batch_size": 1}, "training": {"steps": 1}}  # fmt: skip
    norms = GradientNorms(build(Config, tree), ParallelContext.alone())
    fragment = Fragment("layers.0.mlp.dense_h_to_4h.weight", (COUNT,), Partition(), SINGLE, 0, {}, False)
    norms.add(fragment, torch.full((COUNT,), MAGNITUDE))
    return ((norms.norms(1.0)["layers.0"], EXACT),)


def losses_of_an_objective():
    losses = torch.full((1_000_000, 1), math.log(32_000))
    positions = SimpleNamespace(objectives=torch.zeros(len(losses), dtype=torch.int32))
    batch = SimpleNamespace(
        weights=torch.ones(len(losses)), targets=torch.zeros(len(losses), dtype=torch.int32), loss_positions=positions
    )  # fmt: skip
    embedding = SimpleNamespace(parallel=SimpleNamespace(group=SINGLE), first=0, local_vocab=2)
    # Two words: the other's logit makes the loss of the first ln(32,000).
    logits = torch.cat([torch.zeros_like(losses), torch.log(losses.exp() - 1)], dim=1)
    exact = torch.logsumexp(logits.double(), 1).sum().item()
    _, sums = sum_losses((logits, torch.zeros(0, 2)), batch, embedding, 1, 0.0, 0.0)
    return (sums[0, 0].item(), exact), (sums[0, 1].item(), len(losses))


def signs(seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, LARGE, generator=generator).float() - 0.5) * MAGNITUDE


def step_of(kind):
    """The length of a step along that of the reference in fp64."""
    settings, weights, gradient = (
        build(OptimizerConfig, {"kind": kind, "weight_decay": 0.1}),
        signs(2),
        signs(1),
    )
    # Muon gives vectors to AdamW, which needs one.
    ours = Ours(
        {NAME: nn.Parameter(weights), "final_layernorm.weight": nn.Parameter(torch.ones(2))}, settings
    )
    ours.step({NAME: gradient}, 0.5)
    theirs = nn.Parameter(weights.double())
    theirs.grad = gradient.double()
    Plain({NAME: theirs}, settings).step(0.5)
    step, expected = ours.weights()[NAME].double() - weights, theirs.detach() - weights
    return ((step.flatten().dot(expected.flatten()).item(), expected.square().sum().item()),)


@pytest.mark.parametrize(
    "compared",
    [clipped_gradient, norms_of_layers, losses_of_an_objective, *(partial(step_of, kind) for kind in ALL)],
    ids=["clipped", "layers", "losses", *ALL],
)
def test_sums_over_millions_of_numbers_are_those_in_fp64(compared):
    for found, exact in compared():
        # 2e-6 by the fp32 products of Muon; the others are exact to 1e-7.
        assert found == pytest.approx(exact, rel=5e-6)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("before", [0, 2], ids=["first", "later"])
def test_a_skipped_step_changes_nothing(kind, before):
    ours = Ours(problem(), build(OptimizerConfig, {"kind": kind}))
    for step in range(before):
        ours.step(gradients_of(ours.weights(), step), 0.01)
    state = ours.state()
    bad = gradients_of(ours.weights(), 9)
    for values in bad.values():
        values[0], values[-1] = float("inf"), float("nan")
    ours.step(bad, 0.01, found_inf=1.0)
    assert all(torch.equal(*pair) for pair in zip(state, ours.state(), strict=True))
    ours.step(gradients_of(ours.weights(), 3), 0.01)
    assert all(values.isfinite().all() for values in ours.state())


@pytest.mark.parametrize("kind", ALL)
def test_a_frozen_parameter_and_its_state_stay_as_they_are(kind):
    """Others take the steps that they would take with it."""
    settings = build(OptimizerConfig, {"kind": kind})
    frozen, other = "layers.0.mlp.weight", "layers.0.attention.query_key_value.weight"
    both, alone = Ours(problem(), settings), Ours(problem(), settings)
    for number in range(3):
        gradients = gradients_of(both.weights(), number)
        both.step({name: g for name, g in gradients.items() if number == 0 or name != frozen}, 0.01)
        alone.step(gradients, 0.01)
        if number == 0:
            before = both.weights()[frozen]
    assert torch.equal(both.weights()[frozen], before) and not torch.equal(alone.weights()[frozen], before)
    assert torch.equal(both.weights()[other], alone.weights()[other])
    counts = [float(both.optimizer.state[bucket.master_shard]["step"]) for bucket in both.buckets]
    assert counts == [1.0 if name == frozen else 3.0 for name in both.named]


@pytest.mark.parametrize("shape", [(6, 6), (48, 64), (96, 24)])
def test_the_iteration_in_bf16_matches_torch(shape):
    u = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    theirs = torch.optim._muon._zeropower_via_newtonschulz(u, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonal([u.bfloat16()])[0], theirs)
    singular = torch.linalg.svdvals(orthogonal([u])[0])
    assert singular.min() > 0.3 and singular.max() < 1.3


def test_owners_of_matrices_share_the_work():
    shapes = {number: ((96, 24), (96, 32), (24, 96), (24, 24))[number % 4] for number in range(40)}
    owner = assign_owners(shapes, 4)
    work = [sum(multiply_adds(shapes[n]) for n in shapes if owner[n] == rank) for rank in range(4)]
    assert max(work) < 1.1 * sum(work) / 4
    assert assign_owners(shapes, 1) == dict.fromkeys(shapes, 0)


# Layouts and checkpoints


def state_of(engine):
    """The elements of this rank that a checkpoint holds: no rows of padding."""
    return {
        (fragment.name, kind, owned.slice): values[
            owned.start - fragment.start : owned.stop - fragment.start
        ].clone()
        for fragment in engine.fragments()
        for kind, values in fragment.tensors.items()
        for owned in fragment.ranges()
    }


def train_and_go_on(context, cases, records, directory):
    """Compare the steps with one process; save before the last one, load into a new engine, and repeat it.

    Returns: what differs too much; whether the repeated step gave the same state bit for bit.
    """
    failures, equal = [], []
    for case, record in zip(cases, records, strict=True):
        outcome, path = Outcome(case), directory / case.optimizer
        engine = make_engine(case.config(), context, case.num_losses)
        for step in range(case.steps):
            if step == case.steps - 1:
                saved = save_checkpoint(path, step, engine, {}, context)
            run_step(context, engine, case, step, record, outcome)
        compare_weights(outcome, step, engine, record.weights)
        failures += outcome.failures()
        again = make_engine(case.config(), context, case.num_losses)
        load_checkpoint(read_checkpoint(saved), again, context)
        run_step(context, again, case, case.steps - 1, record, Outcome(case))
        states = state_of(engine), state_of(again)
        equal.append(
            states[0].keys() == states[1].keys()
            and all(torch.equal(states[0][k], states[1][k]) for k in states[0])
        )
    return failures, equal


def go_on(context, cases, records, directory):
    """The last step of each case, from the checkpoint of another layout: what differs too much from one process."""
    failures = []
    for case, record in zip(cases, records, strict=True):
        outcome = Outcome(case)
        engine = make_engine(case.config(), context, case.num_losses)
        (path,) = (directory / case.optimizer).iterdir()
        load_checkpoint(read_checkpoint(path), engine, context)
        run_step(context, engine, case, case.steps - 1, record, outcome)
        compare_weights(outcome, case.steps - 1, engine, record.weights)
        failures += outcome.failures()
    return failures


def run(function, cases, *args):
    case = cases[0]
    parallel = ParallelConfig(tensor_parallel_size=case.tensor, pipeline_parallel_size=case.pipeline)
    return run_ranks(
        function, case.ranks, cases, [parity.reference_of(c) for c in cases], *args, parallel=parallel
    )


def test_a_layout_equals_one_process_and_continues_in_any(tmp_path):
    cases = [with_optimizer(kind, Case(2, 1, 2, 2, True)) for kind in ALL]
    for failures, equal in run(train_and_go_on, cases, tmp_path):
        assert failures == [] and equal == [True] * len(ALL)
    alone = [with_optimizer(kind, Case()) for kind in ALL]
    assert run(go_on, alone, tmp_path) == [[]]


@pytest.mark.slow
def test_with_mup_a_layout_equals_one_process(tmp_path):
    cases = [Case(2, 1, 2, 2, True, variant="muP", optimizer=kind) for kind in ALL]
    for failures, equal in run(train_and_go_on, cases, tmp_path):
        assert failures == [] and equal == [True] * len(ALL)
    alone = [replace(case, tensor=1, data=1, zero_stage=1, sequence_parallel=False) for case in cases]
    assert run(go_on, alone, tmp_path) == [[]]


SLOW = [case for case in parity_cases.reduced() if case.zero_stage < 3]


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_layouts_equal_one_process(case, tmp_path):
    for failures, equal in run(train_and_go_on, [with_optimizer(kind, case) for kind in ALL], tmp_path):
        assert failures == [] and equal == [True] * len(ALL)


def test_another_optimizer_does_not_take_up_the_state(tmp_path):
    """Unless nothing has been trained, as in an import."""
    engine = StubEngine()
    engine.train(3)
    trained = read_checkpoint(save_checkpoint(tmp_path, 3, engine, {}, ParallelContext.alone()))
    config = with_optimizer("muon", Case()).config()
    with pytest.raises(
        CheckpointError, match=r"optimizer.kind is muon, but .* holds the state of adamw; set"
    ):
        require_same_optimizer(config, trained)
    require_same_optimizer(Case().config(), trained)
    require_same_optimizer(config, replace(trained, optimizer={**trained.optimizer, "adam_step": 0.0}))
