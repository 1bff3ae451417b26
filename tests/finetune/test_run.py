"""Fine-tuning runs: every kind learns, layouts and resumed runs equal one process, results say what was measured."""

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.commands import assert_refused, forked
from support.distributed import run_ranks
from support.selection import slow_but
from support.tasks.tasks import task_of, votes, write_lines, write_task
from support.training.whole_weights import load_weights

from data_utils.common.errors import CheckpointError, ConfigError, ExitStatus
from data_utils.common.settings import build, merge, parse_override
from data_utils.tasks.metrics.metrics_by_task import compared_by
from megatron_lite.checkpoint import write as write_module
from megatron_lite.checkpoint.manifest import checkpoint_step, list_checkpoints
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.finetune import run as run_module
from megatron_lite.finetune.evaluation import EvaluationResult
from megatron_lite.finetune.run import finetune, guess_loss, warn_of_export, warn_of_little_progress
from megatron_lite.finetune.setup import check_output
from megatron_lite.hf.published.heads import transformers_class_name
from megatron_lite.hf.published.systems import SYSTEMS_BY_NAME
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.telemetry.records import read_metrics

CLOZE = {
    "kind": "cloze",
    "template": "{text} It was [MASK] .",
    "verbalizers": {"0": "bad", "1": "good"},
}


def run(context, files, output, *overrides):
    return finetune(task_of(files, output, *overrides), output, context)


def learn(files, output, *overrides, world=1, **parallel):
    settings = [f"parallel.{name}={value}" for name, value in parallel.items()]
    statuses = run_ranks(
        run, world, files, output, *overrides, *settings, parallel=ParallelConfig(**parallel)
    )
    return statuses[0]


def results(output):
    return json.loads((output / "results.json").read_text())


def scores(output, seed=1234):
    records = read_metrics(output / f"seed_{seed}")
    return [(r["step"], r["accuracy"]) for r in records if r["kind"] == "scores"]


def last_weights(directory: Path):
    return load_weights(read_checkpoint(list_checkpoints(directory)[-1]))


KINDS = ["classification", "cloze", "classification by a model of text pairs"]


@pytest.mark.parametrize("kind", slow_but(KINDS[:2], KINDS))
def test_a_task_is_learnt_from_initial_weights(tmp_path, kind):
    files = write_task(tmp_path / "task", **(CLOZE if kind == "cloze" else {}))
    lengths = [f"contrastive.{side}_length=32" for side in ("query", "document")]
    options = ["objectives={contrastive: 1}", *lengths] if "pairs" in kind else []
    assert learn(files, tmp_path / "out", "finetune.epochs=12", *options) is ExitStatus.FINISHED
    found = results(tmp_path / "out")
    (of_file,) = found["files"].values()
    assert of_file["mean"]["accuracy"] > 0.9 and of_file["samples"] == 32
    (seed,) = found["seeds"]
    best = max(accuracy for _, accuracy in scores(tmp_path / "out"))
    assert seed["best_step"] == next(step for step, accuracy in scores(tmp_path / "out") if accuracy == best)
    assert checkpoint_step(list_checkpoints(tmp_path / "out/seed_1234/best")[-1]) == seed["best_step"]
    lines = (tmp_path / "out/seed_1234/predictions/votes.jsonl").read_text().splitlines()
    right = [
        json.loads(line)["label"] == sample["label"] for line, sample in zip(lines, votes(1, 32), strict=True)
    ]
    assert sum(right) / 32 == of_file["mean"]["accuracy"]


LAYOUTS = [
    (2, {"tensor_parallel_size": 2}),
    (2, {"zero_stage": 1}),
    (2, {"zero_stage": 2}),
    (2, {"zero_stage": 3}),
]


@pytest.mark.parametrize("layouts", [LAYOUTS[3:], pytest.param(LAYOUTS[:3], marks=pytest.mark.slow)])
def test_layouts_and_a_resumed_run_equal_one_process(tmp_path, layouts):
    """Two epochs of 64 samples with dropout. fp32: only the order of sums differs."""
    files = write_task(tmp_path / "task", **CLOZE)
    common = ["finetune.epochs=2", "model.output_dropout=0.1", "batch.micro_batch_size=4"]
    learn(files, tmp_path / "one", *common)
    expected = last_weights(tmp_path / "one/seed_1234/checkpoints")
    for number, (world, parallel) in enumerate(layouts):
        output = tmp_path / str(number)
        learn(files, output, *common, world=world, **parallel)
        assert scores(output) == scores(tmp_path / "one"), parallel
        for name, weight in last_weights(output / "seed_1234/checkpoints").items():
            torch.testing.assert_close(
                weight, expected[name], rtol=1e-4, atol=2e-5, msg=f"{parallel}: {name}"
            )
    cut = [*common, "training.steps=6", "schedule.warmup_steps=1", "training.eval_interval=2"]
    learn(files, tmp_path / "cut", *cut)
    whole = last_weights(tmp_path / "cut/seed_1234/checkpoints")
    stopped = learn(files, tmp_path / "resumed", *cut, "training.stop_after_step=3")
    assert stopped is ExitStatus.FINISHED
    assert not (tmp_path / "resumed/results.json").exists()
    learn(files, tmp_path / "resumed", *cut)
    assert scores(tmp_path / "resumed") == scores(tmp_path / "cut")
    for name, weight in last_weights(tmp_path / "resumed/seed_1234/checkpoints").items():
        assert torch.equal(weight, whole[name]), name


@pytest.mark.slow
def test_ranks_that_split_experts_equal_one_process(tmp_path):
    """Also where one has no sample to train on or to evaluate any more."""
    files = write_task(tmp_path / "task", train=61, **CLOZE)
    write_lines(tmp_path / "task/validation.jsonl", votes(1, 25))
    experts = "model.experts={count: 4, per_token: 2, width: 16, biased: true, bias_rate: 0.01}"
    common = ["finetune.epochs=2", "batch.micro_batch_size=4", "model.biases=none", experts]
    learn(files, tmp_path / "one", *common)
    learn(files, tmp_path / "two", *common, world=2, expert_parallel_size=2)
    assert scores(tmp_path / "two") == scores(tmp_path / "one")
    one, two = (last_weights(tmp_path / f"{name}/seed_1234/checkpoints") for name in ("one", "two"))
    for name, weight in two.items():
        torch.testing.assert_close(weight, one[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("ended", [8, 12])
def test_an_evaluation_that_was_lost_is_made_up_for(tmp_path, ended):
    """The run was ended between a save and its evaluation; `ended` 12 is the last step."""
    files = write_task(tmp_path / "task")
    options = ["finetune.epochs=3", "optimizer.lr=1e-3"]
    learn(files, tmp_path / "whole", *options)
    output, run = tmp_path / "cut", tmp_path / "cut/seed_1234"
    learn(files, output, *options, f"training.stop_after_step={ended}")
    records = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in records if not ('"scores"' in line and f'"step": {ended},' in line)]
    assert len(kept) == len(records) - 1
    (run / "metrics.jsonl").write_text("".join(kept))
    for path in [*run.glob(f"best/step_{ended:08}"), *output.glob("**/results.json")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    learn(files, output, *options)
    assert scores(output) == scores(tmp_path / "whole")
    assert results(output)["files"] == results(tmp_path / "whole")["files"]


def rewind(run, step):
    assert forked("scripts/checkpoints.py", "rewind", str(run), str(step)).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True])
def test_the_best_checkpoint_is_of_the_branch_that_goes_on(tmp_path, is_done):
    """A run learns and is rewound to where it knew nothing; the next start learns nothing. Its results must say so."""
    files, output = write_task(tmp_path / "task"), tmp_path / "out"
    options = ["finetune.epochs=6", "training.eval_interval=4", "checkpoint.keep_last=0"]
    learn(files, output, *options, *([] if is_done else ["training.stop_after_step=23"]))
    run = output / "seed_1234"
    (best,) = list_checkpoints(run / "best")
    assert checkpoint_step(best) > 4 and max(accuracy for _, accuracy in scores(output)) > 0.9
    rewind(run, 4)
    assert not list_checkpoints(run / "best") and not (run / "results.json").exists()
    (aside,) = (run / "checkpoints").glob("rewound_*")
    assert [path.name for path in (aside / "best").iterdir()] == [best.name]  # nothing is deleted
    assert (aside / "results.json").exists() is is_done
    slower = [*options, "optimizer.lr=1e-12", "checkpoint.accept_changed_data=true"]
    learn(files, output, *slower, "training.stop_after_step=8")
    assert not (output / "results.json").exists()
    learn(files, output, *slower)
    live = dict(scores(output))
    (seed,) = results(output)["seeds"]
    (of_file,) = seed["files"].values()
    assert of_file["metrics"]["accuracy"] == max(live.values()) == live[seed["best_step"]] < 0.9
    assert seed["best_step"] == 4  # the first of equal ones
    assert [checkpoint_step(path) for path in list_checkpoints(run / "best")] == [4]


@pytest.mark.slow
def test_a_best_checkpoint_that_lacks_or_is_another_branchs_is_chosen_again(tmp_path):
    """As after a rewind by a former version, which left `best` alone."""
    files, output = write_task(tmp_path / "task"), tmp_path / "out"
    options = ["finetune.epochs=6", "training.eval_interval=4", "checkpoint.keep_last=0"]
    learn(files, output, *options, "training.stop_after_step=16")
    run = output / "seed_1234"
    before, (best,) = dict(scores(output)), list_checkpoints(run / "best")
    shutil.move(best, run / "best/step_00000023")  # of a step that the run has not
    learn(files, output, *options, "training.stop_after_step=17")
    assert list_checkpoints(run / "best") == [best] and before[checkpoint_step(best)] == max(before.values())
    shutil.rmtree(best)
    shutil.copytree(run / "checkpoints/step_00000004", best)
    (best / "manifest.json").write_bytes(b"another branch")
    learn(files, output, *options)
    assert read_checkpoint(list_checkpoints(run / "best")[0]).step == results(output)["seeds"][0]["best_step"]


def with_failing_saves(context, files, output, steps, *overrides):
    """The disk is full while the checkpoints of these steps are written."""
    write = write_module.write_manifest

    def refuse(directory, manifest):
        if manifest["step"] in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
        write(directory, manifest)

    write_module.write_manifest = refuse
    return run(context, files, output, *overrides)


def test_training_continues_where_the_best_checkpoint_was_not_saved(tmp_path):
    files, output = write_task(tmp_path / "task"), tmp_path / "out"
    options = ["finetune.epochs=3", "training.eval_interval=4", "optimizer.lr=1e-12"]
    statuses = run_ranks(with_failing_saves, 1, files, output, (4,), *options)
    assert statuses == [ExitStatus.FINISHED]
    assert results(output)["seeds"][0]["best_step"] == 8  # the first that was saved, of equal ones


def test_seeds_are_runs_and_done_ones_are_not_repeated(tmp_path):
    files = write_task(tmp_path / "task", train=32)
    output = tmp_path / "out"
    options = ["finetune.seeds=[1, 2]", "finetune.epochs=2"]
    learn(files, output, *options)
    found = results(output)
    assert [seed["seed"] for seed in found["seeds"]] == [1, 2]
    values = [next(iter(seed["files"].values()))["metrics"]["accuracy"] for seed in found["seeds"]]
    (of_file,) = found["files"].values()
    assert of_file["mean"]["accuracy"] == pytest.approx(sum(values) / 2)
    assert of_file["deviation"]["accuracy"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    before = [(output / f"seed_{seed}/results.json").stat().st_mtime_ns for seed in (1, 2)]
    heads = [
        last_weights(output / f"seed_{seed}/checkpoints")["heads.task.classifier.weight"] for seed in (1, 2)
    ]
    assert not torch.equal(*heads)
    check_output(output, task_of(files, output, *options).config)
    with pytest.raises(
        ConfigError, match=r"seed_1 was finished with other settings \(finetune\.epochs was 2 and is 3\)"
    ):
        check_output(output, task_of(files, output, "finetune.epochs=3").config)
    (output / "seed_2/results.json").unlink()
    learn(files, output, *options)
    assert (output / "seed_1/results.json").stat().st_mtime_ns == before[0]
    assert (output / "seed_2/results.json").exists()


def test_each_seed_draws_its_own_samples(tmp_path):
    files = write_task(tmp_path / "task")
    task = task_of(files, tmp_path / "out", "task.train_samples=10")
    drawn = [[record.index for record in task.seeded(seed).train] for seed in (1, 2, 1)]
    assert len(drawn[0]) == len(task.train) == 10 and drawn[0] == drawn[2] != drawn[1]
    assert task_of(files, tmp_path / "out").seeded(2).train == task_of(files, tmp_path / "out").train


@pytest.mark.slow
def test_training_ends_when_no_better_score_comes(tmp_path, caplog):
    """Labels that say nothing: scores of a tiny learning rate stay as they are, which a warning tells."""
    files, hardly = write_task(tmp_path / "task", train=32), "so the task votes was hardly learnt"
    options = ["finetune.patience=2", "optimizer.lr=1e-12", "finetune.epochs=9", "run.log_interval=1"]
    learn(files, tmp_path / "out", *options, "training.eval_fillings=4")
    assert [step for step, _ in scores(tmp_path / "out")] == [2, 4, 6]
    (found,) = results(tmp_path / "out")["seeds"]
    assert (found["best_step"], found["steps"]) == (2, 6)  # as many as were taken, not as were planned
    (of_file,) = results(tmp_path / "out")["files"].values()
    assert of_file["deviation"] == {"accuracy": None}  # of one seed
    task = task_of(files, tmp_path / "out", *options)
    warn_of_little_progress(task, tmp_path / "out/seed_1234")
    (said,) = [record.message for record in caplog.records if hardly in record.message]
    assert "optimizer.lr is 1e-12): raise it: small models need 0.0001 to 3e-3" in said
    shares = [sum(record.label == label for record in task.train) / 32 for label in ("0", "1")]
    assert guess_loss(task) == pytest.approx(-sum(share * math.log(share) for share in shares))
    caplog.clear()
    learn(files, tmp_path / "learnt", "finetune.epochs=12", "run.log_interval=1")
    warn_of_little_progress(task, tmp_path / "learnt/seed_1234")
    assert not caplog.records


def said_by_finetune(context, files, output, *overrides):
    """The warnings of a whole run."""
    found: list[str] = []
    run_module.log.handle = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    run(context, files, output, *overrides)
    return [message for message in found if "hardly learnt" in message]


@pytest.mark.slow
def test_scores_that_hardly_move_are_reported_with_the_likely_causes(tmp_path):
    """A run that does not learn gets one warning; one that learns gets none."""
    files = write_task(tmp_path / "task")
    still = ["optimizer.lr=1e-12", "finetune.epochs=3", "run.log_interval=1"]
    ((message,),) = run_ranks(said_by_finetune, 1, files, tmp_path / "still", *still)
    (share,) = {sum(line["label"] == label for line in votes(1, 32)) / 32 for label in "1"}
    assert (
        "a guess that reads none of the 32 validation samples scores "
        f"{max(share, 1 - share):.4f}, so the task votes was" in message
    )
    for cause in (
        "the final training loss is",
        "optimizer.lr is 1e-12",
        "3 now, 12 steps",
        "init_words_std",
    ):
        assert cause in message
    assert run_ranks(said_by_finetune, 1, files, tmp_path / "learnt", "finetune.epochs=12") == [[]]


def score_of(task, directory, score):
    """What a run of this best accuracy or correlation is told; its training loss has fallen."""
    directory.mkdir(parents=True)
    lines = [{"kind": "train", "step": step, "loss": loss} for step, loss in enumerate((3.0, 0.2), start=1)]
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps({"time": 0, **line}) + "\n" for line in lines)
    )
    evaluations = run_module._TaskEvaluations(task, ParallelContext.alone())
    metrics = compared_by(task.settings, None)
    results = {path: EvaluationResult({metrics.names[0]: score}, [], [], 0) for path in task.validation}
    return evaluations.little_learnt(metrics, results)


RECALL = ["task.kind=seq2seq", "task.target_length=4", "task.reader=synthetic",
    "task.train=recall:pairs=2,samples=64,seed=1",
    "task.validation=['recall:pairs=2,samples=100,seed=2']", "task.labels=[]"]  # fmt: skip


@pytest.mark.parametrize(
    "options, score, expected",
    [
        (RECALL, 0.54, "the best score is 0.5400 of a possible 1.0000"),
        (RECALL, 0.95, None),
        (
            [],
            0.6,
            "the best score is 0.6000, and a guess that reads none of the 32 validation samples scores 0.5",
        ),
        ([], 0.8, None),
        (["task.metrics=[matthews]"], 0.1, "samples scores 0.0000"),
        (["task.metrics=[matthews]"], 0.4, None),
    ],
)
def test_scores_are_compared_with_what_is_known_without_learning(tmp_path, caplog, options, score, expected):
    """The training loss has fallen here, so that it says nothing."""
    task = task_of(write_task(tmp_path / "task"), tmp_path / "out", *options)
    warn_of_little_progress(task, tmp_path / "run", score_of(task, tmp_path / "run", score))
    assert [expected in record.message for record in caplog.records] == [True] * (expected is not None)


@pytest.mark.slow
def test_fine_tuning_begins_with_a_checkpoint_of_another_task(tmp_path):
    """The body is taken over; a head of other classes is new."""
    files = write_task(tmp_path / "first", **CLOZE)
    learn(files, tmp_path / "out", "finetune.epochs=1")
    start = tmp_path / "out/seed_1234"
    labels = [{**line, "label": str(i % 3)} for i, line in enumerate(votes(0, 32))]
    train = write_lines(tmp_path / "three.jsonl", labels)
    heads = write_task(tmp_path / "second")
    options = [f"task.train={train}", f"task.validation=['{train}']", "task.labels=['0', '1', '2']"]
    options += [f"checkpoint.initialize_from={start}", "finetune.epochs=1", "optimizer.lr=1e-12"]
    learn(heads, tmp_path / "new", *options, "optimizer.weight_decay=0")
    body, then = last_weights(start / "checkpoints"), last_weights(tmp_path / "new/seed_1234/checkpoints")
    assert {name for name in then if name not in body} == {
        "heads.task.classifier.weight",
        "heads.task.classifier.bias",
    }
    for name in body:
        torch.testing.assert_close(then[name], body[name], rtol=0, atol=1e-9)


def test_unused_heads_stay_as_they_are(tmp_path):
    """A task's loss does not read the head that predicts tokens: no gradient, no weight decay."""
    files = write_task(tmp_path / "task", train=32)
    options = ["model.head_transform=true", "model.head_bias=true", "optimizer.weight_decay=0.5"]
    learn(files, tmp_path / "out", *options, "finetune.epochs=1", "training.stop_after_step=1")
    first = last_weights(tmp_path / "out/seed_1234/checkpoints")
    learn(files, tmp_path / "out", *options, "finetune.epochs=1")
    then = last_weights(tmp_path / "out/seed_1234/checkpoints")
    idle = [name for name in then if name.startswith("heads.") and not name.startswith("heads.task.")]
    assert len(idle) == 5
    assert all(torch.equal(first[name], then[name]) for name in idle)
    assert not torch.equal(first["heads.task.classifier.weight"], then["heads.task.classifier.weight"])


BAD = {
    "best of another task": (["finetune.best=f1"], "finetune.best is f1, but the task measures accuracy"),
    "no task": (["task=null"], "no task given"),
    "steps of too few": (["task.train_samples=1000"], "task.train_samples is 1000, but .* has 64 samples"),
    "one label": (["task.labels=['0']"], "label|labels"),
    "long": (
        ["task.sequence_length=60"],
        r"needs positions up to 59, but model\.max_position is 48; set it to 48 or less\.$",
    ),
    "unknown metric": (["task.metrics=[acuracy]"], "unknown metric"),
    "a metric of numbers": (["task.metrics=[pearson]"], "names pearson, but this task .* predicts classes"),
    "a metric of spans": (["task.metrics=[entity_f1]"], "names entity_f1, but this task .* predicts classes"),
    "stages": (["parallel.pipeline_parallel_size=2"], "pipeline_parallel_size is 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_refused_in_one_line(tmp_path, name):
    overrides, message = BAD[name]
    files = write_task(tmp_path / "task")
    with pytest.raises(Exception, match=message) as error:
        task_of(files, tmp_path / "out", *overrides)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_overrides_win_over_the_task_and_the_task_over_the_model(tmp_path):
    files = write_task(tmp_path / "task")
    assert task_of(files, tmp_path / "out").config.training.steps == 8 * 64 // 16
    assert task_of(files, tmp_path / "out", "training.steps=7").config.training.steps == 7
    assert task_of(files, tmp_path / "out", "training.stop_after_step=9").config.training.steps == 32
    assert task_of(files, tmp_path / "out", "optimizer.lr=0.5").config.optimizer.lr == 0.5
    assert parse_override("a.b=1") == {"a": {"b": 1}}


def test_pretraining_refuses_a_task(tmp_path):
    """It would train on something else."""
    model, task = write_task(tmp_path / "task")
    result = forked("pretrain_glm.py", "--config", model, "--config", task)
    assert_refused(result, "the configuration has the task votes, which pretraining would leave out")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"system": "roberta"}, "RobertaForSequenceClassification"),
        ({"system": "xlnet"}, "XLNetForSequenceClassification"),
        ({"system": "roberta", "task_head": {"pooler": True}}, None),
        ({"system": "bert", "sentence_classes": 2}, None),
        ({"system": "gpt2"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_head_that_cannot_be_exported_is_named_before_it_is_trained(options, name, caplog):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 97}
    head = {"task_head": {"type": "classes", "classes": 3}}
    model = build(ModelConfig, merge({**sizes, **head}, options))
    warn_of_export(model)
    if name is None:
        assert not caplog.records
        return
    (record,) = caplog.records
    assert (
        f"{name} has a layer" in record.getMessage() and "model.task_head.pooler=true" in record.getMessage()
    )
    with pytest.raises(CheckpointError, match=r"tune with model\.task_head\.pooler=true"):
        transformers_class_name(SYSTEMS_BY_NAME[model.system], model)
