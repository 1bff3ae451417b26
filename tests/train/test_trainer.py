"""The loop on a real small corpus: exact resume, evaluation, records, skips."""

import json
import logging
import shutil
import signal
from pathlib import Path

import pytest
import torch
from support.data.stores import serving
from support.distributed import run_ranks
from support.project import small_run
from support.training.training import fit, make_trainer, records
from support.training.whole_weights import load_weights, placed_weights

from data_utils.common.errors import DataError, DeviceMemoryError, TrainingError
from data_utils.common.settings import merge
from megatron_lite.checkpoint.manifest import list_checkpoints, write_manifest
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.checkpoint.write import rewind
from megatron_lite.config.tree import load_config
from megatron_lite.engine.engine import memory_advice
from megatron_lite.train.resume import config_changes


def warnings_of_fit(context, tree):
    said = []
    log = logging.getLogger("megatron_lite.train.resume")
    log.handle = lambda record: said.append(record.getMessage())
    fit(context, tree)
    return said


BERT = {
    "objectives": {"masked_lm": 1},
    "masked_lm": {"next_sentence": True},
    "model": {"sentence_classes": 2, "segments": 2, "max_position": 66},
    "training": {
        "loss_normalization": "per_objective",
        "loss_weights": {"next_sentence": 3},
        "steps": 3,
        "eval_interval": 3,
    },
}


def test_each_loss_is_a_mean_of_its_own_in_any_layout(settings, tmp_path):
    """BERT: the total is the mean over masked tokens and three times that over labels, for one rank and for two."""
    for ranks in (1, 2):
        run = {"run": {"directory": str(tmp_path / str(ranks))}}
        run_ranks(fit, ranks, merge(merge(settings, BERT), run))
    for kind in ("train", "validation"):
        one, two = (records(tmp_path / ranks, kind) for ranks in "12")
        assert one.keys() == two.keys() and one
        for step, losses in one.items():
            total = losses["loss/masked"] + 3 * losses["loss/next_sentence"]
            assert losses["loss"] == pytest.approx(total, rel=1e-6)
            assert losses["loss/next_sentence"] < 2  # two classes, not a vocabulary
            losses.pop("perplexity", None)
            for name, loss in losses.items():
                assert loss == pytest.approx(two[step][name], rel=1e-4)  # weights differ by rounding


@pytest.mark.slow
def test_corpora_are_read_from_a_local_copy(settings, tmp_path):
    """The samples are the same, from a store too; two ranks make each copy once, before the first step."""
    here = merge(settings, {"training": {"steps": 3}})
    there = merge(here, {"data": {"local_directory": str(tmp_path / "scratch")}})
    there = merge(there, {"run": {"directory": str(tmp_path / "local")}})
    [corpus] = here["data"]["train"]
    files = {
        f"/{suffix}": Path(f"{corpus['prefix']}.{suffix}").read_bytes() for suffix in ("bin", "idx", "json")
    }
    with serving({f"/corpus.{path[1:]}": content for path, content in files.items()}) as server:
        stored = merge(there, {"data": {"train": [{**corpus, "prefix": f"{server.url}/corpus"}]}})
        for tree in (here, stored):
            run_ranks(fit, 2, tree)
    assert records(tmp_path / "run") == records(tmp_path / "local")
    assert len(list((tmp_path / "scratch").glob("*.bin"))) == 2


def fit_until_the_evaluation(context, tree):
    """The process is ended between the save and the evaluation of a step."""
    trainer = make_trainer(context, tree)

    def end():
        raise ZeroDivisionError

    trainer.evaluate = end
    with pytest.raises(ZeroDivisionError):
        trainer.fit()


@pytest.mark.slow
def test_a_validation_is_made_up_for(settings, tmp_path):
    changes = {"training": {"steps": 4, "eval_interval": 2}, "checkpoint": {"save_interval": 2}}
    settings = merge(settings, changes)
    run_ranks(fit_until_the_evaluation, 2, settings)
    assert records(tmp_path / "run", "checkpoint").keys() == {2} and not records(
        tmp_path / "run", "validation"
    )
    run_ranks(fit, 2, settings)
    run_ranks(fit, 2, settings)  # nothing is done twice
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in lines if record["kind"] == "validation"] == [2, 4]
    whole = merge(settings, {"run": {"directory": str(tmp_path / "whole")}})
    run_ranks(fit, 2, whole)
    assert records(tmp_path / "run", "validation") == records(tmp_path / "whole", "validation")


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(settings, tmp_path):
    dropout = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "output_dropout": 0.1}
    settings = merge(settings, {"model": dropout, "training": {"eval_interval": 2}})
    whole = run_ranks(fit, 2, settings)
    parts = merge(settings, {"run": {"directory": str(tmp_path / "parts")}})
    run_ranks(fit, 2, merge(parts, {"training": {"stop_after_step": 3}}))
    assert sorted(records(tmp_path / "parts")) == [1, 2, 3]
    resumed = run_ranks(fit, 2, parts)
    for name, weight in whole[0].items():
        assert torch.equal(weight, resumed[0][name]) and torch.equal(weight, resumed[1][name])
    newest = list_checkpoints(tmp_path / "parts/checkpoints")[-1]
    assert read_checkpoint(newest).state["restarts"] == 1
    for kind in ("train", "validation"):
        assert records(tmp_path / "run", kind) == records(tmp_path / "parts", kind)
    assert sorted(records(tmp_path / "run", "validation")) == [2, 4, 6]


@pytest.mark.slow
def test_the_program_is_recorded_and_a_change_is_said(settings, tmp_path, monkeypatch):
    for number, stop in ((1, 1), (1, 2), (2, 3)):
        new = {"version": str(number), "commit": "abc", "changed": False}
        monkeypatch.setattr("megatron_lite.telemetry.version.program", lambda packages=(), new=new: new)
        said, _ = run_ranks(warnings_of_fit, 2, merge(settings, {"training": {"stop_after_step": stop}}))
        assert read_checkpoint(list_checkpoints(tmp_path / "run/checkpoints")[-1]).state["program"] == new
        resolved = (tmp_path / "run/config.yaml").read_text()
        assert resolved.startswith(f"# megatron-lite-glm {number}, commit abc\n")
        change = "changed since the checkpoint: the program: 1, commit abc -> 2, commit abc"
        assert said.count(change) == (number == 2)
    load_config([tmp_path / "run/config.yaml"])
    newest = list_checkpoints(tmp_path / "run/checkpoints")[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["state"]["program"] = {}  # as of an import, which no training program wrote
    write_manifest(newest, manifest)
    said, _ = run_ranks(warnings_of_fit, 2, merge(settings, {"training": {"stop_after_step": 4}}))
    assert not [line for line in said if "the program" in line]


def test_a_run_without_a_checkpoint_begins_new_records_and_keeps_the_old(settings, tmp_path):
    """As after a kill before its first save: nothing is lost, and steps are not in one file twice."""
    run_ranks(fit, 1, merge(settings, {"training": {"stop_after_step": 4}}))
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "run/checkpoints")
    before = b"".join(line for line in before.splitlines(True) if b'"checkpoint"' not in line)  # of a save
    (tmp_path / "run/metrics.jsonl").write_bytes(before)
    run_ranks(fit, 1, merge(settings, {"training": {"stop_after_step": 2}}))
    assert sorted(records(tmp_path / "run")) == [1, 2]
    (kept,) = (tmp_path / "run").glob("metrics_before_*.jsonl")
    assert kept.read_bytes() == before
    run_ranks(fit, 1, merge(settings, {"training": {"stop_after_step": 3}}))
    assert sorted(records(tmp_path / "run")) == [1, 2, 3]  # a run that continues goes on in its file


def test_accepted_changes_of_the_samples_are_events_of_the_run(settings, tmp_path):
    run_ranks(fit, 1, merge(settings, {"training": {"stop_after_step": 1}}))
    changes = {"training": {"stop_after_step": 2}, "data": {"sequence_length": 48}, "optimizer": {"lr": 1e-3}}
    changes["blank_infilling"] = {"token_prob": 0.25}
    with pytest.raises(
        AssertionError, match=r"token_prob: 0.5 -> 0.25; data.sequence_length: 64 -> 48; optimizer"
    ):
        run_ranks(fit, 1, merge(settings, changes))
    run_ranks(fit, 1, merge(settings, {**changes, "checkpoint": {"accept_changed_data": True}}))
    state = read_checkpoint(list_checkpoints(tmp_path / "run/checkpoints")[-1]).trainer_state()
    why = "changed from the checkpoint's: "
    *samples, rate = [entry["event"] for entry in state.events["history"]]
    assert samples[0] == why + "blank_infilling.token_prob: 0.5 -> 0.25" and len(samples) == 3
    assert "learning rate of step 2 is 0.001" in rate


def test_another_number_of_ranks_sees_the_same_samples(settings, tmp_path):
    """Loss per step and per objective, and the evaluation, do not depend on the layout; nor does dropout."""
    settings = merge(settings, {"model": {"output_dropout": 0.1}})
    run_ranks(fit, 1, settings)
    other = merge(settings, {"run": {"directory": str(tmp_path / "four")}, "parallel": {"zero_stage": 2}})
    run_ranks(fit, 4, merge(other, {"batch": {"micro_batch_size": 1}}))
    for kind in ("train", "validation"):
        ours, theirs = records(tmp_path / "four", kind), records(tmp_path / "run", kind)
        assert ours.keys() == theirs.keys() and ours
        for step, values in theirs.items():
            assert ours[step] == pytest.approx(values, rel=1e-5)  # fp32, sums in another order, six steps
    losses = records(tmp_path / "run")
    assert losses[6]["loss"] < losses[1]["loss"]
    assert {"loss", "loss/token", "loss/document"} <= losses[1].keys()


def request_stop_on_one_rank(context, tree):
    trainer = make_trainer(context, tree)
    step = trainer.train_step

    def train_step():
        if context.rank == 1 and trainer.progress.step == 1:
            signal.raise_signal(signal.SIGUSR1)
        return step()

    trainer.train_step = train_step
    trainer.fit()
    return trainer.progress.step


def poison(context, tree):
    trainer = make_trainer(context, tree)
    trainer.loss_normalizer._loss_factor = lambda *_: float("nan")
    # No step has changed the weights: a lower rate or an earlier checkpoint would not help.
    with pytest.raises(
        TrainingError, match=r"not finite in 3 consecutive steps.* weights\. No step has changed the"
    ):
        trainer.fit()
    return trainer.progress.step, trainer.results.skipped_steps


def test_a_signal_on_one_rank_stops_all_after_the_step_and_saves(settings):
    assert run_ranks(request_stop_on_one_rank, 2, settings) == [2, 2]
    assert [p.name for p in (Path(settings["run"]["directory"]) / "checkpoints").iterdir()] == [
        "step_00000002"
    ]


def lack_memory(context, tree):
    trainer = make_trainer(context, tree)

    def train_step(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 80 GiB")

    trainer.engine.train_step = train_step
    with pytest.raises(DeviceMemoryError) as caught, memory_advice(trainer.config):
        trainer.fit()
    return str(caught.value), caught.value.only_here


def test_a_lack_of_memory_is_one_line_with_advice(settings):
    ((message, only_here),) = run_ranks(lack_memory, 1, settings)
    assert only_here and "\n" not in message
    assert "Tried to allocate 2.00 GiB. GPU 0 has 80 GiB ... Lower batch.micro_batch_size (2), set" in message


def lack_a_sample(context, tree):
    trainer = make_trainer(context, tree)

    def batch(samples):
        raise DataError("document 3 is cut off.")

    trainer.train_data.batch = batch
    with pytest.raises(DataError) as caught:
        trainer.fit()
    return caught.value.only_here


def test_what_is_wrong_with_one_ranks_samples_it_reports(settings):
    assert run_ranks(lack_a_sample, 1, settings) == [True]


def test_non_finite_steps_are_bounded(settings):
    settings = merge(settings, {"training": {"max_nonfinite_steps": 3}})
    assert run_ranks(poison, 1, settings) == [(3, 3)]


def test_a_damaged_newest_checkpoint_costs_only_its_steps(settings, tmp_path):
    settings = merge(settings, {"checkpoint": {"save_interval": 2}})
    run_ranks(fit, 1, settings)
    before = records(tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step_00000006"
    (newest / "rank_00000.safetensors").write_bytes(b"damaged")
    (tmp_path / "run/metrics.jsonl").unlink()
    run_ranks(fit, 1, settings)
    after = records(tmp_path / "run")
    assert after == {step: before[step] for step in (5, 6)}


def test_resume_never_refuses_a_directory_with_a_checkpoint(settings):
    run_ranks(fit, 1, merge(settings, {"training": {"stop_after_step": 1}}))
    with pytest.raises(AssertionError, match="already holds a checkpoint of step 1"):
        run_ranks(fit, 1, merge(settings, {"checkpoint": {"resume": "never"}}))


def test_background_saves_hold_what_saves_in_the_foreground_hold(settings, tmp_path):
    settings = merge(settings, {"checkpoint": {"save_interval": 2}})
    run_ranks(fit, 2, settings)
    background = {"checkpoint": {"asynchronous": True}, "run": {"directory": str(tmp_path / "background")}}
    run_ranks(fit, 2, merge(settings, background))
    saved = [list_checkpoints(tmp_path / name / "checkpoints") for name in ("run", "background")]
    for ours, theirs in zip(*saved, strict=True):
        assert ours.name == theirs.name
        for file in ours.glob("*.safetensors"):
            assert file.read_bytes() == (theirs / file.name).read_bytes()
    assert [path.name[-1] for path in saved[0]] == ["2", "4", "6"]


def start(context, tree):
    """Where a run begins, before its first step: progress, owned weights, largest Adam moment."""
    trainer = make_trainer(context, tree)
    moments = [
        t.abs().max().item()
        for f in trainer.engine.fragments()
        for k, t in f.tensors.items()
        if k != "weight"
    ]
    return (
        (trainer.progress.step, trainer.progress.consumed_samples, trainer.progress.restarts),
        placed_weights(trainer.engine),
        max(moments),
    )


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A run of 4 steps with checkpoints at 2 and 4."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    stop = {"checkpoint": {"save_interval": 2}, "training": {"stop_after_step": 4}}
    run_ranks(fit, 2, merge(small_run(corpus, directory), stop))
    return directory


def from_checkpoint(path, what="weights"):
    return {"checkpoint": {"initialize_from": str(path), "initialize": what}}


def check_weights(results, checkpoint_path):
    for name, weight in load_weights(read_checkpoint(checkpoint_path)).items():
        seen = torch.zeros(weight.shape, dtype=torch.bool).view(len(weight), -1)
        for _, weights, _ in results:
            if name in weights:
                owned = ~weights[name].isnan()
                assert torch.equal(weights[name][owned], weight.view(owned.shape)[owned])
                seen |= owned
        assert seen.all()


@pytest.mark.parametrize(
    "place, step",
    [pytest.param("", 4, marks=pytest.mark.slow), ("checkpoints", 4), ("checkpoints/step_00000002", 2)],
)
def test_a_run_begins_with_the_weights_of_another(settings, finished, place, step):
    other_layout = {"parallel": {"zero_stage": 2}, "batch": {"micro_batch_size": 1}}
    tree = merge(settings, {**other_layout, **from_checkpoint(finished / place)})
    results = run_ranks(start, 4, tree)
    for progress, _, moment in results:
        assert progress == (0, 0, 0) and moment == 0.0
    check_weights(results, finished / f"checkpoints/step_{step:08d}")


def test_a_branch_continues_another_run_bit_for_bit(settings, finished, tmp_path):
    expected = run_ranks(fit, 2, merge(settings, {"run": {"directory": str(tmp_path / "whole")}}))
    branch = run_ranks(
        fit, 2, merge(settings, from_checkpoint(finished / "checkpoints/step_00000002", "all"))
    )
    for name, weight in expected[0].items():
        assert torch.equal(weight, branch[0][name])
    assert sorted(records(tmp_path / "run")) == [3, 4, 5, 6]
    newest = read_checkpoint(list_checkpoints(tmp_path / "run/checkpoints")[-1])
    assert newest.state["restarts"] == 0  # a branch is another run


def test_the_runs_own_checkpoints_win(settings, finished):
    tree = merge(settings, from_checkpoint(finished))
    run_ranks(fit, 1, merge(tree, {"training": {"stop_after_step": 1}}))
    ((progress, _, moment),) = run_ranks(start, 1, tree)
    assert progress == (1, 8, 1) and moment > 0


@pytest.mark.parametrize(
    "place, change, message",
    [
        ("absent", {}, "absent does not exist; give a run directory or one of its"),
        ("finished", {"model": {"hidden_size": 64}}, r"another model: .*\) there and .*\) here; use the"),
        ("finished/checkpoints/step_00000009", {}, "step_00000009 does not exist; give one: "),
    ],
)
def test_what_a_run_cannot_begin_with_is_refused(settings, finished, place, change, message):
    tree = merge(settings, {**change, **from_checkpoint(finished.parent / place)})
    with pytest.raises(AssertionError, match=message):
        run_ranks(start, 2, tree)


@pytest.mark.slow
def test_a_run_goes_back_to_an_older_checkpoint_and_records_it_once(settings, tmp_path):
    """A rewind is in the events of all later checkpoints, wherever the run was interrupted meanwhile."""
    settings = merge(settings, {"checkpoint": {"save_interval": 1, "keep_last": 0}})
    run_ranks(fit, 1, settings)
    once = records(tmp_path / "run")
    directory = tmp_path / "run/checkpoints"
    first = rewind(directory.parent, 2)
    run_ranks(fit, 2, merge(settings, {"training": {"stop_after_step": 3}}))
    second = rewind(directory.parent, 1)
    skip = {"phases": [{"steps": 1}, {"skip_samples": 1}]}
    for stop in (1, 2, 6):  # the first stops before it has saved
        run_ranks(fit, 2, merge(settings, {"training": {"stop_after_step": stop}, **skip}))
    newest = read_checkpoint(list_checkpoints(directory)[-1])
    went_back = [e for e in newest.state["events"]["history"] if "went back" in e["event"]]
    assert went_back == [
        {"step": 1, "event": f"went back from step 6, whose checkpoint is in {first.name}"},
        {"step": 1, "event": f"went back from step 3, whose checkpoint is in {second.name}"},
    ]
    assert newest.step == 6 and newest.state["consumed_samples"] == 9 + 5 * 8
    again = records(tmp_path / "run")
    assert again[1] == once[1] and again[2] != once[2]


def test_mean_of_means_weighs_micro_batches_equally(settings, tmp_path):
    shutil.rmtree(settings["run"]["directory"], ignore_errors=True)
    means = merge(
        settings,
        {"training": {"loss_normalization": "mean_of_means", "steps": 1}, "schedule": {"warmup_steps": 0}},
    )
    tokens = merge(
        means,
        {"training": {"loss_normalization": "global_tokens"}, "run": {"directory": str(tmp_path / "b")}},
    )
    a, b = run_ranks(fit, 1, means)[0], run_ranks(fit, 1, tokens)[0]
    assert any(not torch.equal(a[name], b[name]) for name in a)
    assert records(means["run"]["directory"]) == records(
        tmp_path / "b"
    )  # the reported loss is the token mean in both


def test_config_changes_are_named():
    before = {"a": {"b": 1, "c": [1]}, "d": None}
    assert config_changes(before, {"a": {"b": 2, "c": [1]}, "d": 3}) == ["a.b: 1 -> 2", "d: None -> 3"]
