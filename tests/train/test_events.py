"""Phases that skip samples, and change rate and embedding gradient: at the right step, recorded, repeatable."""

import json
from pathlib import Path

import pytest
import torch
from support.distributed import run_ranks
from support.training.training import fit, make_trainer

from data_utils.common.settings import merge
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.train.event_log import EventLog


def test_what_begins_and_ends_is_recorded_once_across_restarts():
    log = EventLog()
    for step in range(1, 6):
        log.now_in_force(step, ["phase 1"] if 2 <= step <= 3 else [])
        log = EventLog.from_state(json.loads(json.dumps(log.state())))
    assert log.history == [{"step": 2, "event": "begins: phase 1"}, {"step": 4, "event": "ends: phase 1"}]


RATE = 2e-3
CHANGES = {
    "optimizer": {"lr": RATE},
    "phases": [
        {"steps": 2},
        {"steps": 1, "skip_samples": 84},
        {"steps": 1, "lr": RATE / 2},
        {"lr": RATE / 2, "embedding_gradient_shrink": 0.1},
    ],
}


def lines(directory, kind):
    records = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record for record in records if record["kind"] == kind}


@pytest.mark.slow
def test_a_run_with_changes_resumes_bit_for_bit_and_keeps_the_record(settings, tmp_path):
    settings = merge(settings, CHANGES)
    whole = run_ranks(fit, 2, settings)
    parts = merge(settings, {"run": {"directory": str(tmp_path / "parts")}})
    run_ranks(fit, 2, merge(parts, {"training": {"stop_after_step": 4}}))
    resumed = run_ranks(fit, 2, parts)
    assert all(torch.equal(weight, resumed[0][name]) for name, weight in whole[0].items())
    for directory in (tmp_path / "run", tmp_path / "parts"):
        train = lines(directory, "train")
        assert [train[step]["consumed_samples"] for step in range(1, 7)] == [8, 16, 108, 116, 124, 132]
        newest = read_checkpoint(list_checkpoints(directory / "checkpoints")[-1])
        assert newest.state["events"]["history"] == [
            {"step": 1, "event": "begins: phase 1: as the run"},
            {"step": 3, "event": "begins: phase 2: skip_samples 84"},
            {"step": 3, "event": "ends: phase 1: as the run"},
            {"step": 4, "event": "begins: phase 3: lr 0.001"},
            {"step": 4, "event": "ends: phase 2: skip_samples 84"},
            {"step": 5, "event": "begins: phase 4: lr 0.001, embedding_gradient_shrink 0.1"},
            {"step": 5, "event": "ends: phase 3: lr 0.001"},
        ]
        assert sorted(lines(directory, "event")) == [1, 3, 4, 5]


def shrink_factors(context, tree):
    """The factor that the embedding uses in each step, and the learning rates."""
    trainer = make_trainer(context, tree)
    used, train_step = [], trainer.engine.train_step

    def record(micro_batches, lr):
        used.append((trainer.engine.model.embedding.gradient_shrink, lr))
        return train_step(micro_batches, lr)

    trainer.engine.train_step = record
    trainer.fit()
    return used


def test_the_changes_reach_model_and_optimizer(settings):
    used = run_ranks(shrink_factors, 1, merge(settings, CHANGES))[0]
    settings = merge(settings, {"optimizer": {"lr": RATE}})
    settings["run"]["directory"] += "-plain"
    plain = run_ranks(shrink_factors, 1, settings)[0]
    assert [factor for factor, _ in used] == [1.0, 1.0, 1.0, 1.0, 0.1, 0.1]
    assert [factor for factor, _ in plain] == [1.0] * 6
    rates = zip(used, plain, strict=True)
    assert [
        ours == scheduled * (0.5 if step >= 4 else 1.0)
        for step, ((_, ours), (_, scheduled)) in enumerate(rates, 1)
    ] == [True] * 6
