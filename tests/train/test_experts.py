"""A run with experts is the same in every layout: its losses, the loads in its records, and the biases that move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.distributed import run_ranks
from support.training.training import make_trainer
from support.training.whole_weights import compare_weights, placed_weights

from data_utils.common.settings import merge
from megatron_lite.config.sections import ParallelConfig

STEPS = 3
EXPERTS = {
    "count": 4, "per_token": 2, "width": 32, "dense_layers": 1, "biased": True, "bias_rate": 0.01, "balance_loss": 0.5,
    "z_loss": 0.1,
}  # fmt: skip
MEASURES = (
    "loss", "grad_norm", "balance_loss", "router_z_loss", "router_entropy", "expert_load_highest",
    "expert_load_lowest", "expert_bias_range",
)  # fmt: skip


def train(context, settings):
    trainer = make_trainer(context, settings)
    trainer.fit()
    return placed_weights(trainer.engine)


def records(settings):
    lines = (Path(settings["run"]["directory"]) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


@pytest.fixture(scope="module")
def alone():
    return {}


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (4, {"pipeline_parallel_size": 2, "expert_parallel_size": 2}),
        pytest.param(
            4, {"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 2}, marks=pytest.mark.slow
        ),
        pytest.param(2, {"expert_parallel_size": 2, "zero_stage": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value),
)
def test_a_run_does_not_depend_on_the_layout(settings, alone, tmp_path, ranks, parallel):
    settings = merge(
        settings,
        {
            "model": {"biases": "none", "experts": EXPERTS},
            "batch": {"micro_batch_size": 2, "global_batch_size": 16},
            "training": {"steps": STEPS, "precision": "fp32"},
            "schedule": {"warmup_steps": 0},
            "run": {"directory": str(tmp_path / "one"), "log_interval": 1},
        },
    )
    if not alone:
        alone["weights"] = run_ranks(train, 1, settings)[0]
        alone["records"] = records(settings)
    expected = alone["records"]
    assert len(expected) == STEPS
    for record in expected:
        assert record["expert_load_lowest"] < 1 < record["expert_load_highest"] < 4
        assert record["balance_loss"] > 0.99 and 0 < record["router_entropy"] < 1.3863
    assert expected[0]["expert_bias_range"] == pytest.approx(0.02)  # some moved up, and some down
    settings = merge(settings, {"parallel": parallel, "run": {"directory": str(tmp_path / "several")}})
    weights = run_ranks(train, ranks, settings, parallel=ParallelConfig(**parallel))
    for record, one in zip(records(settings), expected, strict=True):
        assert {name: record[name] for name in MEASURES} == pytest.approx(
            {name: one[name] for name in MEASURES}, rel=1e-5
        )
    compare_weights(weights, alone["weights"])
