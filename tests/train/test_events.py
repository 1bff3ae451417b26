"""Skipped samples, changed learning rate and embedding gradient: at the right step, recorded, repeatable."""

import json
from pathlib import Path

import pytest
import torch
from support.distributed import run_ranks
from support.training import fit, make_trainer

from data_utils.common.settings import build, merge
from megatron_lite.checkpoint.existing import read_checkpoint
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.config.events import EventLog, EventsConfig


def events(**lists):
    return build(EventsConfig, lists)


@pytest.mark.parametrize(
    ("consumed", "first"),
    [
        (0, 0),  # samples 0 to 7: untouched
        (8, 30),  # 8 to 15 touch 10
        (10, 30),
        (29, 30),
        (30, 30),
        (33, 60),  # 33 to 40 touch 40, and what follows at 50 is skipped as well
        (60, 60),
    ],
)
def test_a_batch_that_touches_skipped_samples_is_not_made(consumed, first):
    skips = [{"first": 50, "end": 60}, {"first": 10, "end": 30}, {"first": 40, "end": 48}]
    assert events(skip_samples=skips).next_sample(consumed, batch_size=8) == first


def test_the_last_change_that_includes_a_step_counts():
    config = events(
        learning_rate=[
            {"from_step": 3, "factor": 0.5},
            {"from_step": 5, "until_step": 6, "value": 7.0},
        ]
    )
    assert [config.learning_rate_at(step, 2.0) for step in range(2, 8)] == [2.0, 1.0, 1.0, 7.0, 7.0, 1.0]
    shrinks = [{"from_step": 3, "value": 0.5}, {"from_step": 5, "value": 0.1}]
    config = events(embedding_gradient_shrink=shrinks)
    assert [config.shrink_at(step, 1.0) for step in (2, 3, 4, 5, 9)] == [1.0, 0.5, 0.5, 0.1, 0.1]


def test_what_begins_and_ends_is_recorded_once_across_restarts():
    config = events(learning_rate=[{"from_step": 2, "until_step": 3, "factor": 0.5}])
    log = EventLog()
    for step in range(1, 6):
        log.now_in_force(step, config.in_force(step))
        log = EventLog.from_state(json.loads(json.dumps(log.state())))
    change = "learning rate x 0.5 from step 2"
    assert log.history == [{"step": 2, "event": f"begins: {change}"}, {"step": 4, "event": f"ends: {change}"}]


CHANGES = {
    "events": {
        "skip_samples": [{"first": 20, "end": 100}],
        "learning_rate": [{"from_step": 4, "factor": 0.5}],
        "embedding_gradient_shrink": [{"from_step": 5, "value": 0.1}],
    }
}


def lines(directory, kind):
    records = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record for record in records if record["kind"] == kind}


def test_a_run_with_events_resumes_bit_for_bit_and_keeps_the_record(settings, tmp_path):
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
            {"step": 3, "event": "samples 16 to 99 are skipped"},
            {"step": 4, "event": "begins: learning rate x 0.5 from step 4"},
            {"step": 5, "event": "begins: embedding gradient x 0.1 from step 5"},
        ]
        assert sorted(lines(directory, "event")) == [3, 4, 5]


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
    settings["run"]["directory"] += "-plain"
    plain = run_ranks(shrink_factors, 1, settings)[0]
    assert [factor for factor, _ in used] == [1.0, 1.0, 1.0, 1.0, 0.1, 0.1]
    assert [factor for factor, _ in plain] == [1.0] * 6
    rates = zip(used, plain, strict=True)
    assert [
        ours == scheduled * (0.5 if step >= 4 else 1.0)
        for step, ((_, ours), (_, scheduled)) in enumerate(rates, 1)
    ] == [True] * 6
