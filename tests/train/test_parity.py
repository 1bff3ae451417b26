"""Every layout equals one process (support/parity.py): the reduced cases always, the whole matrix behind `-m slow`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support import parity
from support.distributed import run_ranks
from support.parity import Case, by_layout, outcomes_of
from support.selection import slow_but
from support.training import parity_cases

from data_utils.common.errors import ConfigError
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.engine.parameter_groups import GroupRules
from megatron_lite.engine.plain import make_engine
from megatron_lite.transformer.tensor_parallel import TensorParallel


def failures(cases):
    return [
        line for chosen in by_layout(cases).values() for o in outcomes_of(chosen) for line in o.failures()
    ]


@pytest.mark.parametrize("layout", by_layout(parity_cases.reduced()))
def test_layouts_equal_one_process(layout):
    assert failures(by_layout(parity_cases.reduced())[layout]) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", by_layout(parity_cases.matrix()))
def test_every_combination_equals_one_process(layout):
    assert failures(by_layout(parity_cases.matrix())[layout]) == []


@pytest.mark.slow
@pytest.mark.each_cpu
def test_half_precision_equals_one_process():
    assert failures(parity_cases.HALF) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "OFFLOAD",
        "DROPOUT",
        "OPTIONS",
        "POSITIONS",
        "HEAD_NORMS",
        "LOCAL",
        "MODERN_GLM",
        "DISENTANGLED",
        "LOSS_ROWS",
        "OPTIMIZERS",
        "PARTS",
        "SHARED_BY_STAGES",
        "WITH_MEMORY",
        "MUP",
        "LORA",
        "EXPERTS",
        "FURTHER_TOKENS",
    ],
)
def test_further_cases_equal_one_process(name):
    assert failures(getattr(parity_cases, name)) == []


@pytest.mark.parametrize("layout", slow_but(["1x1x2"], by_layout(parity_cases.FEW)))
def test_some_further_cases_equal_one_process(layout):
    assert failures(by_layout(parity_cases.FEW)[layout]) == []


def test_the_matrix_is_complete():
    """Each layout of up to eight ranks has every combination of the settings that it allows, once."""
    found = Counter(
        (
            (case.tensor, case.pipeline, case.data),
            *(case.zero_stage, case.sequence_parallel, case.recompute, case.accumulation),
        )
        for case in parity_cases.matrix()
    )
    expected = {
        combination
        for sizes in itertools.product((1, 2, 4, 8), repeat=3)
        if math.prod(sizes) <= 8
        for combination in itertools.product(
            [sizes],
            (1, 2, 3) if sizes[1] == 1 else (1,),
            (False, True) if sizes[0] > 1 else (False,),
            ("none", "selective", "full"),
            (1, 4),
        )
    }
    assert found.keys() == expected and set(found.values()) == {1}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layouts", "3x1x1"], "--layouts 3x1x1 is not known"),
        (["--output", "absent/page.md"], "does not exist"),
    ],
)
def test_the_command_refuses_at_once_what_it_cannot_do(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parity.main(arguments)


def test_micro_batches_and_ranks_have_unequal_numbers_of_loss_tokens():
    for step in range(parity_cases.STEPS):
        samples = parity_cases.samples_of(step)
        counts = (samples[:, 4] != 0).sum(-1).reshape(8, 4)
        assert len(set(counts.flatten())) > 3 and len(set(counts.sum(0))) > 1 and len(set(counts.sum(1))) > 1


def without(name):
    """A fault: the tensor-parallel layers lack one of their collectives."""

    def run(context, case, record):
        setattr(TensorParallel, name, lambda self, x, *_: x)
        return parity.run_case(context, case, record)

    return run


def with_a_factor(context, case, record):
    """A fault: one rank's gradients are a thousandth too large."""
    micro_batch = parity.micro_batch

    def scaled(*sizes):
        batch, factor = micro_batch(*sizes)
        return batch, factor * (1.001 if context.rank == 1 else 1.0)

    parity.micro_batch = scaled
    return parity.run_case(context, case, record)


def with_the_whole_norm_on_each_rank(context, case, record):
    """A fault: parameters do not say that they are split, so that the gradient norm counts rank 0's parts only."""
    group = GroupRules.group
    GroupRules.group = lambda self, name, parameter: replace(
        group(self, name, parameter), in_grad_norm=context.tp.rank == 0
    )
    return parity.run_case(context, case, record)


@pytest.mark.parametrize(
    "fault, case, kind",
    [
        (without("mark_replicated"), Case(2, 1, 1, 2, True), "gradients"),
        pytest.param(without("replicated"), Case(2, 1, 1, 3, True), "gradients", marks=pytest.mark.slow),
        (with_a_factor, Case(1, 1, 2), "gradients"),
        (with_the_whole_norm_on_each_rank, Case(2, 1, 1), "norm"),
    ],
    ids=["no sum of the norms' gradients", "nor at ZeRO 3", "factor", "norm of one rank"],
)
def test_a_fault_is_seen(fault, case, kind):
    """The comparison can fail, and far beyond the tolerance."""
    parallel = ParallelConfig(tensor_parallel_size=case.tensor)
    record = parity.reference_of(case)
    outcomes = run_ranks(fault, case.ranks, case, record, parallel=parallel)
    assert max(outcome.largest[kind] for outcome in outcomes) > 20 * parity_cases.TOLERANCES["fp32"][kind]


@pytest.mark.parametrize(
    "expected, got, difference",
    [(1e-9, -2e-9, 0.0), (1e-9, 2e-7, 199.0), (1e-9, math.nan, math.inf), (2e-7, 2.002e-7, 1e-3)],
    ids=["rounding", "a gradient for none", "no number", "a small gradient"],
)
def test_only_a_gradient_that_is_rounding_may_be_another(expected, got, difference):
    outcome, expected = parity.Outcome(Case()), torch.tensor([expected])
    outcome.add("gradients", "weight", torch.tensor([got]), expected, expected, rounding=1e-7)
    assert outcome.largest["gradients"] == pytest.approx(difference, rel=0.01)


def weights_after_training(context, case):
    engine = make_engine(case.config(), context, parity_cases.OBJECTIVES)
    for step in range(2):
        engine.train_step(parity.micro_batches_of(case, engine, context, step), parity_cases.LR)
    return {name: parameter.detach().clone() for name, parameter in engine.named_parameters.items()}


def stages_of_zero(context, case):
    """Weights that ZeRO 2 or offloading make other than ZeRO 1 does."""
    others = [
        replace(case, zero_stage=2),
        replace(case, offload=True),
        replace(case, zero_stage=2, offload=True),
    ]
    first, *rest = [weights_after_training(context, c) for c in [case, *others]]

    def differ(one, other):
        # CPU matmuls may round the last bit by the address of their operands, which the stages lay out differently, and
        # so a weight may be rounded to the next number of half precision.
        return (one - other).float().norm() > 1e-3 * one.float().norm()

    return [name for name in first if any(differ(first[name], other[name]) for other in rest)]


@pytest.mark.parametrize(
    "cpu, precision",
    [
        ("no half precision", "bf16"),
        pytest.param("AVX512-BF16", "bf16", marks=pytest.mark.slow),
        pytest.param("AMX with fp16", "fp16", marks=pytest.mark.slow),
    ],
    indirect=["cpu"],
)
def test_stages_of_zero_agree_in_half_precision(cpu, precision):
    """Gradients are summed over ranks in fp32; if they were summed in bf16, weights would differ by 1 %."""
    assert run_ranks(stages_of_zero, 2, Case(1, 1, 2, 1, accumulation=4, precision=precision)) == [[], []]


def recomputed_both_ways(context, case):
    results = [
        weights_after_training(context, replace(case, recompute=r)) for r in ("none", "selective", "full")
    ]
    return [
        name
        for name in results[0]
        if not all(torch.equal(results[0][name], other[name]) for other in results[1:])
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 1, 2, True, dropout=0.1, attention_dropout=0.1),
        Case(2, 2, 1, 1, dropout=0.1, attention_dropout=0.1),
    ],
    ids=str,
)
def test_recomputation_repeats_dropout_bit_for_bit(case):
    """In tensor-parallel regions too, where every rank draws its own masks."""
    parallel = ParallelConfig(tensor_parallel_size=case.tensor, pipeline_parallel_size=case.pipeline)
    assert run_ranks(recomputed_both_ways, case.ranks, case, parallel=parallel) == [[]] * case.ranks
