"""A run with multi-token prediction is the same in every layout, and after a resume; its rows pack documents."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from support.distributed import run_ranks
from support.training.training import fit, make_trainer
from support.training.whole_weights import compare_weights, placed_weights

from data_utils.common.settings import merge
from megatron_lite.config.sections import ParallelConfig

STEPS = 3
MODEL = {
    "biases": "none", "positions": "rotary", "tie_word_embeddings": False, "mtp_layers": 1,
    "experts": {
        "count": 4, "per_token": 2, "width": 32, "dense_layers": 1, "biased": True, "bias_rate": 0.01,
        "balance_loss": 0.5,
    },
}  # fmt: skip
MEASURES = (
    "loss",
    "loss/causal",
    "loss/mtp",
    "grad_norm",
    "balance_loss",
    "expert_load_highest",
    "expert_bias_range",
)


def run_of(settings, directory, **changes):
    return merge(
        settings,
        {
            "model": MODEL,
            "objectives": {"causal": 1},
            "batch": {"micro_batch_size": 2, "global_batch_size": 16},
            "training": {"steps": STEPS, "precision": "fp32", "eval_interval": STEPS},
            "schedule": {"warmup_steps": 0},
            "run": {"directory": str(directory), "log_interval": 1},
            **changes,
        },
    )


def train(context, settings):
    trainer = make_trainer(context, settings)
    trainer.fit()
    return placed_weights(trainer.engine)


def records(settings, kind="train"):
    lines = (Path(settings["run"]["directory"]) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


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
    ],
    ids=lambda value: str(value),
)
def test_a_run_does_not_depend_on_the_layout(settings, alone, tmp_path, ranks, parallel):
    one = run_of(settings, tmp_path / "one")
    if not alone:
        alone["weights"] = run_ranks(train, 1, one)[0]
        alone["records"] = records(one)
        (validation,) = records(one, "validation")
        assert "loss/mtp" not in validation
    assert len(alone["records"]) == STEPS
    for record in alone["records"]:
        assert record["loss"] == record["loss/causal"] != record["loss/mtp"]
    several = merge(run_of(settings, tmp_path / "several"), {"parallel": parallel})
    weights = run_ranks(train, ranks, several, parallel=ParallelConfig(**parallel))
    for record, expected in zip(records(several), alone["records"], strict=True):
        assert {name: record[name] for name in MEASURES} == pytest.approx(
            {name: expected[name] for name in MEASURES}, rel=1e-5
        )
    compare_weights(weights, alone["weights"])


@pytest.mark.slow
def test_a_resumed_run_is_equal_bit_for_bit(settings, tmp_path):
    (whole,) = run_ranks(fit, 1, run_of(settings, tmp_path / "whole"))
    stopped = run_of(settings, tmp_path / "stopped")
    run_ranks(fit, 1, merge(stopped, {"training": {"stop_after_step": 2}}))
    (resumed,) = run_ranks(fit, 1, stopped)
    assert whole.keys() == resumed.keys() and any(name.startswith("layers.2.projection") for name in whole)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_a_run_may_leave_it_out_or_begin_it_anew(settings, tmp_path):
    """With the weights of a run that has it, or that has not."""
    # Each with a seed of its own: without the weights of another it would begin elsewhere.
    name, seeds = "layers.2.projection.weight", itertools.count(7)

    def begun(directory, start, mtp_layers):
        changes = {
            "training": {"steps": 1, "seed": next(seeds)},
            "model": {"mtp_layers": mtp_layers},
            "checkpoint": {"save_interval": 0},
        }
        if start is not None:
            changes["checkpoint"]["initialize_from"] = str(tmp_path / start)
        return run_ranks(fit, 1, merge(run_of(settings, tmp_path / directory), changes))[0]

    whole = begun("whole", None, 1)
    without = begun("without", "whole", 0)
    again = begun("again", "without", 1)
    assert whole.keys() - without.keys() == {key for key in whole if key.startswith("layers.2.")}
    assert whole.keys() == again.keys() and not torch.equal(whole[name], again[name])
    # The learning rate of a step is 3e-3: both go on from the weights of the run before.
    moved = [
        (one["layers.0.attention.dense.weight"] - other["layers.0.attention.dense.weight"]).abs().max()
        for one, other in ((without, whole), (again, without))
    ]
    assert all(0 < distance < 4e-3 for distance in moved)
