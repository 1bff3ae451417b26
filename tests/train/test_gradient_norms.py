"""Gradient norms of single layers: the same in every layout as from whole gradients in one process."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support import parity
from support.distributed import run_ranks
from support.parity import Case
from support.training import parity_cases
from support.training.training import fit

from data_utils.common.settings import merge
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.engine.plain import make_engine
from megatron_lite.train.callbacks.gradient_norms import GradientNorms, layer_names

LAYERS = ("embedding.", "layers.", "final_layernorm")


def norms_of_a_step(context, case):
    engine = make_engine(case.config(), context, parity_cases.OBJECTIVES)
    layers = GradientNorms(case.config(), context)
    with engine.observed_gradients(layers.add):
        result = engine.train_step(parity.micro_batches_of(case, engine, context, 0), parity_cases.LR)
    unobserved = engine.train_step(parity.micro_batches_of(case, engine, context, 1), parity_cases.LR)
    assert not unobserved.skipped
    return layers.norms(engine.clip_divisor(result.grad_norm)), result.grad_norm


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 1, 1, True),
        pytest.param(Case(1, 1, 2, 3), marks=pytest.mark.slow),
        pytest.param(Case(2, 1, 2, 2, accumulation=4), marks=pytest.mark.slow),
        pytest.param(Case(1, 2, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_finds_the_norms_of_one_process(case):
    gradients = parity.reference_of(case).gradients[0]
    parallel = ParallelConfig(tensor_parallel_size=case.tensor, pipeline_parallel_size=case.pipeline)
    for norms, grad_norm in run_ranks(norms_of_a_step, case.ranks, case, parallel=parallel):
        assert list(norms) == layer_names(case.config())
        for layer, norm in norms.items():
            squares = [
                g.double().square().sum() for name, g in gradients.items() if name.startswith(f"{layer}.")
            ]
            # fp32 gradients of another order of sums: 1e-6.
            assert squares and norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-5)
        assert grad_norm == pytest.approx(math.hypot(*norms.values()), rel=1e-5)


def test_the_trainer_records_them_at_their_interval(settings, tmp_path):
    run_ranks(fit, 1, merge(settings, {"training": {"gradient_norm_interval": 4, "steps": 9}}))
    lines = [json.loads(line) for line in (Path(tmp_path) / "run/metrics.jsonl").read_text().splitlines()]
    records = {line["step"]: line for line in lines if line["kind"] == "gradient_norms"}
    assert sorted(records) == [4, 8]
    norms = {line["step"]: line["grad_norm"] for line in lines if line["kind"] == "train"}
    for step, record in records.items():
        layers = [value for name, value in record.items() if name.startswith(LAYERS)]
        assert len(layers) == 6  # three tables, two blocks, the final LayerNorm
        assert math.hypot(*layers) == pytest.approx(norms[step], rel=1e-5)
