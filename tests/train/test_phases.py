"""Runs in phases: the planned batches at every step and in every layout, bit for bit across stops; edited plans."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.distributed import run_ranks
from support.training.training import fit, make_trainer, records

from data_utils.common.settings import build, merge
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.config.tree import Config
from megatron_lite.runtime.changes import differences
from megatron_lite.telemetry.records import read_metrics

BOTH = {
    "objectives": {"blank_infilling": 1, "masked_lm": 1},
    "model": {"max_position": 66, "positions": "rotary", "init_std": 0.2},
}
PHASES = [
    {"steps": 2, "weights": {"corpus_train": 1}, "batch": {"global_batch_size": 4}},
    {"steps": 2, "batch": {"ramp": {"start": 4, "by": 4, "samples": 4}}, "rotary_base": 20},
    {"objectives": {"masked_lm": 1}, "masked_lm": {"masked_ratio": 0.4}, "weights": {"corpus_validation": 1}},
]
SIZES = [4, 4, 4, 8, 8, 8]


@pytest.fixture
def phased(corpus, settings):
    train = [{"prefix": str(corpus / f"corpus_{name}")} for name in ("train", "validation")]
    settings = merge(settings, {"data": {"train": train}, "phases": PHASES, **BOTH})
    return merge(settings, {"training": {"loss_normalization": "mean_of_means"}})


def directory_of(tree, path):
    return merge(tree, {"run": {"directory": str(path)}})


def completed(tree):
    """The configuration of a start, with the size of its vocabulary."""
    config = build(Config, tree)
    return config.with_vocab_size(load_tokenizer(config.tokenizer).vocab_size)


def state_at_end(tree):
    checkpoints = Path(tree["run"]["directory"]) / "checkpoints"
    return read_checkpoint(list_checkpoints(checkpoints)[-1]).trainer_state()


def history(tree):
    return [(entry["step"], entry["event"]) for entry in state_at_end(tree).events["history"]]


def read(context, tree):
    """The samples of each step, as they were asked for, and what corpora they are of."""
    trainer = make_trainer(context, tree)
    loader, samples = trainer.train_data, []
    batch = loader.batch
    loader.batch = lambda indices: samples.append(indices.tolist()) or batch(indices)
    trainer.fit()
    boundaries = [mixture.start.first_sample for mixture in loader.mixtures[1:]]
    every = np.sort(np.concatenate(samples))
    parts = zip(loader.mixtures, np.split(every, np.searchsorted(every, boundaries)), strict=True)
    return samples, [mixture.locate(part) for mixture, part in parts]


def test_a_run_in_phases_resumes_bit_for_bit(phased, tmp_path):
    whole = run_ranks(fit, 2, phased)
    parts = directory_of(phased, tmp_path / "parts")
    for stop in (2, 3):
        run_ranks(fit, 2, merge(parts, {"training": {"stop_after_step": stop}}))
    resumed = run_ranks(fit, 2, parts)
    assert all(torch.equal(weight, resumed[0][name]) for name, weight in whole[0].items())
    assert state_at_end(phased).consumed_samples == state_at_end(parts).consumed_samples == sum(SIZES)
    events = history(phased)
    assert events == history(parts)
    assert [(step, event.split(":")[1]) for step, event in events] == [
        (1, " phase 1"),
        (3, " phase 2"),
        (3, " phase 1"),
        (5, " phase 3"),
        (5, " phase 2"),
    ]


def test_each_step_reads_the_samples_of_its_phase(phased):
    ((samples, located),) = run_ranks(read, 1, phased)
    assert [sample for batch in samples for sample in batch] == list(range(sum(SIZES)))
    assert [len(batch) for batch in samples] == [2] * 18
    corpora = [set(corpora.tolist()) for corpora, _, _ in located]
    assert corpora[0] == {0} and corpora[2] == {1}
    for number in (0, 1):
        windows = [windows[corpora == number] for corpora, _, windows in located]
        windows = np.concatenate(windows)
        assert len(np.unique(windows)) == len(windows)
    (record, *_) = [records(phased["run"]["directory"])[6]]
    assert "loss/masked" in record and not any("short" in name for name in record)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        pytest.param(2, {"zero_stage": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"zero_stage": 3}, marks=pytest.mark.slow),
        (2, {"pipeline_parallel_size": 2}),
    ],
)
def test_batches_change_in_every_layout(phased, tmp_path, ranks, parallel):
    """Lengths of rows too, between phases and in evaluations."""
    phased = merge(phased, {"training": {"eval_interval": 5}})
    lengths = [each.row_length for each in build(Config, phased).phase_plan.configs]
    assert lengths[1] > lengths[2]
    run_ranks(fit, 1, phased)
    other = merge(directory_of(phased, tmp_path / "other"), {"parallel": parallel})
    run_ranks(fit, ranks, other, parallel=ParallelConfig(**parallel))
    expected, found = (records(tree["run"]["directory"]) for tree in (phased, other))
    assert found.keys() == expected.keys() == set(range(1, 7))
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-4), step
    expected, found = (records(tree["run"]["directory"], "validation") for tree in (phased, other))
    assert found[5] == pytest.approx(expected[5], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("region", [0, 128])
def test_the_length_changes_and_a_run_resumes_bit_for_bit(settings, tmp_path, region):
    lengths = [{"steps": 2, "sequence_length": 32}, {"steps": 2}, {"sequence_length": 40}]
    settings = merge(settings, {"phases": lengths, "data": {"region": region}})
    whole = run_ranks(fit, 2, settings)
    parts = directory_of(settings, tmp_path / "parts")
    run_ranks(fit, 2, merge(parts, {"training": {"stop_after_step": 3}}))
    resumed = run_ranks(fit, 2, parts)
    assert all(torch.equal(weight, resumed[0][name]) for name, weight in whole[0].items())
    state = state_at_end(settings)
    shorter = [{"steps": 2, "sequence_length": 34}, *lengths[1:]]
    for change, words in (
        ({"data": {"region": 64}}, f"data.region: {region} -> 64"),
        ({"phases": shorter}, "phases[0]: data.sequence_length: 32 -> 34"),
    ):
        found = [each.text for each in differences(completed(merge(settings, change)), state)]
        assert found == [words]


def test_one_phase_is_a_run_without_phases(settings, tmp_path):
    alone = run_ranks(fit, 1, settings)[0]
    one = run_ranks(fit, 1, merge(directory_of(settings, tmp_path / "one"), {"phases": [{"steps": 6}]}))[0]
    assert all(torch.equal(weight, one[name]) for name, weight in alone.items())


def test_loss_weights_and_the_embeddings_gradient_change_with_the_phase(settings, tmp_path):
    """A phase from step 4 on does what a run with its settings does there, and nothing before."""
    per = {"training": {"loss_normalization": "per_objective"}}
    settings = merge(settings, per)
    plain = run_ranks(fit, 1, settings)[0]
    assert plain
    changed = [{"steps": 3}, {"loss_weights": {"token": 0.0, "sentence": 3.0}}]
    for number, phases in enumerate((changed, [{"steps": 3}, {"embedding_gradient_shrink": 0.1}])):
        other = merge(directory_of(settings, tmp_path / str(number)), {"phases": phases})
        weights = run_ranks(fit, 1, other)[0]
        before, after = (records(tree["run"]["directory"]) for tree in (settings, other))
        assert [before[step] for step in (1, 2, 3)] == [after[step] for step in (1, 2, 3)]
        assert not all(torch.equal(weights[name], plain[name]) for name in plain)


# Edits of the plan


def test_later_phases_may_change_and_earlier_ones_may_not(phased, tmp_path):
    run_ranks(fit, 1, merge(phased, {"training": {"stop_after_step": 3}}))
    state = state_at_end(phased)

    def edited(phases, **settings):
        return completed(merge(phased, {"phases": phases, **settings}))

    first, second, third = PHASES
    good = [
        PHASES,
        [first, {**second, "steps": 3}, third],  # the present phase ends later
        [first, {**second, "steps": 3}, {"weights": {"corpus_train": 1}}],
        [first, {**second, "steps": 1 + 1}, {"steps": 1, "batch": {"global_batch_size": 16}}, third],
    ]
    for phases in good:
        assert not differences(edited(phases), state)
    bad = [
        ([{**first, "steps": 1}, second, third], "phases[1] begins after step 2 -> 1"),
        (
            [{**first, "weights": {"corpus_validation": 1}}, second, third],
            "weights of data.train: {corpus_train: 1, corpus_validation: 0}; "
            "{corpus_train: 1, corpus_validation: 1} -> {corpus_train: 0, ",
        ),
        ([first, {**first, "steps": 1}, third], "phases[1]: batch.global_batch_size: 8 -> 4"),
        (
            [{**first, "batch": {"global_batch_size": 8}}, second, third],
            "samples used or skipped by step 3: 12 -> 20",
        ),
        (
            [{**first, "objectives": {"masked_lm": 1}}, second, third],
            "phases[0]: objectives.blank_infilling: 0.5 -> None",
        ),
        (
            [first, {**second, "masked_lm": {"masked_ratio": 0.3}}, third],
            "phases[1]: masked_lm.masked_ratio: 0.15 -> 0.3",
        ),
        (
            [{**first, "embedding_gradient_shrink": 0.1}, second, third],
            "phases[0]: model.embedding_gradient_shrink: 1.0 -> 0.1",
        ),
        ([first, {**second, "rotary_base": 30}, third], "phases[1]: model.rotary_base: 20.0 -> 30.0"),
        ([first, {**second, "lr": 1.0}, third], "phases[1]: optimizer.lr: "),
        ([{**first, "skip_samples": 4}, second, third], "samples used or skipped by step 3: 12 -> 16"),
        ([first], "phases begun by step 3: 2 -> 1"),
    ]
    for phases, words in bad:
        phases = [{**phases[0], "steps": 6}] if len(phases) == 1 else phases
        assert any(each.text.startswith(words) for each in differences(edited(phases), state)), words
    weighted = {**phased["training"], "loss_normalization": "per_objective"}
    other = edited([first, {**second, "loss_weights": {"masked": 2}}, third], training=weighted)
    found = [each.text for each in differences(other, state)]
    assert "phases[1]: training.loss_weights.masked: None -> 2" in found
    swapped = phased["data"]["train"][::-1]
    other = edited([first, second, third], data={**phased["data"], "train": swapped})
    assert any(each.text.startswith("data.train[0]: ") for each in differences(other, state))


def test_a_batch_of_a_past_phase_that_is_accepted_continues_by_the_new_plan(phased, tmp_path):
    """With the samples that were consumed a batch would span the boundary of two phases."""
    run_ranks(fit, 1, merge(phased, {"training": {"stop_after_step": 3}}))
    first, *others = PHASES
    accepted = {"checkpoint": {"accept_changed_data": True}}
    changed = merge(phased, {"phases": [{**first, "batch": {"global_batch_size": 6}}, *others], **accepted})
    run_ranks(read, 1, changed)
    assert state_at_end(changed).consumed_samples == build(Config, changed).phase_plan.consumed(6)
    events = [json.dumps(event) for _, event in history(changed)]
    assert sum("samples used or skipped by step 3: 12 -> 16" in event for event in events) == 1


def test_weights_of_a_run_without_phases_change_by_a_phase(corpus, settings, tmp_path):
    train = [{"prefix": str(corpus / "corpus_train")}]
    settings = merge(settings, {"data": {"train": train}})
    run_ranks(fit, 1, merge(settings, {"training": {"stop_after_step": 3}}))
    appended = [*train, {"prefix": str(corpus / "corpus_validation"), "weight": 0}]
    phases = [{"steps": 4}, {"weights": {"corpus_train": 1, "corpus_validation": 3}}]
    longer = merge(settings, {"data": {"train": appended}, "phases": phases})
    ((samples, located),) = run_ranks(read, 1, longer)
    assert samples[0][0] == 24 and samples[-1][-1] == 47
    corpora = [set(corpora.tolist()) for corpora, _, _ in located]
    assert corpora == [{0}, {0, 1}]
    events = [json.dumps(event) for _, event in history(longer)]
    assert sum("changed for later steps: phases" in event for event in events) == 1
    assert (
        sum("changed for later steps: data.train[1]: None -> {'prefix': " in event for event in events) == 1
    )


def test_a_decay_branches_off_from_a_checkpoint(settings, tmp_path):
    """The branch reads what the long run reads, with the same weights and a falling rate; the long run goes on."""
    long = merge(settings, {"training": {"steps": 6}, "checkpoint": {"save_interval": 4}})
    long = merge(directory_of(long, tmp_path / "long"), {"schedule": {"kind": "constant", "warmup_steps": 2}})
    run_ranks(fit, 1, long)
    parts = [
        {"steps": 2, "kind": "linear", "start": 0, "end": 1},
        {"steps": 2, "kind": "constant"},
        {"steps": 3, "kind": "1-sqrt", "end": 0},
    ]
    start = {"initialize_from": str(tmp_path / "long/checkpoints/step_00000004"), "initialize": "all"}
    branch = merge(directory_of(long, tmp_path / "decayed"), {"training": {"steps": 7}, "checkpoint": start})
    run_ranks(fit, 1, merge(branch, {"schedule": {"kind": "cosine", "warmup_steps": 0, "parts": parts}}))
    before, after = (records(tmp_path / name, "train") for name in ("long", "decayed"))
    assert list(after) == [5, 6, 7] and after[5]["loss"] == before[5]["loss"]
    rate = settings["optimizer"]["lr"]
    falling = [rate * (1 - (n / 3) ** 0.5) for n in (1, 2, 3)]
    rates = [r["lr"] for r in read_metrics(tmp_path / "decayed") if r["kind"] == "train"]
    assert rates == pytest.approx(falling, abs=1e-12)
