"""Several tasks at once: whose batch a step is, heads that wait for theirs, layouts, a run on one task afterwards."""

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.distributed import run_ranks
from support.tasks.synthetic_tasks import MORE
from support.tasks.tasks import votes, write_lines, write_task
from support.training.whole_weights import load_weights

from data_utils.common.errors import CheckpointError, ConfigError
from data_utils.common.settings import merge
from data_utils.tasks.readers.synthetic import optimum, synthetic_vocabulary
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.checkpoint.verify import read_checkpoint
from megatron_lite.config.sections import ParallelConfig
from megatron_lite.finetune.checkpoints import evaluate
from megatron_lite.finetune.data import MultiTaskData
from megatron_lite.finetune.multi_task import TaskOrder, batches_per_epoch
from megatron_lite.finetune.run import finetune, training_data
from megatron_lite.finetune.setup import load_tree, prepare
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.telemetry.records import read_metrics

assert MORE  # the synthetic task `tags` is in tests/support
KINDS = ("weight", "exp_avg", "exp_avg_sq")
STEP = (
    "training.eval_interval=1",
    "checkpoint.keep_last=100",
    "finetune.epochs=2",
    "optimizer.weight_decay=0.1",
)


def read_yaml(path):
    return yaml.safe_load(Path(path).read_text())


@pytest.fixture
def files(tmp_path):
    """A model, and two tasks: 40 texts with two classes, and 23 with a number."""
    model, classes = write_task(tmp_path / "task", train=40)
    tree = read_yaml(classes)
    lines = [
        write_lines(
            tmp_path / f"values_{seed}.jsonl",
            [{"text": line["text"], "label": line["text"].count("good") / 5} for line in votes(seed, count)],
        )
        for seed, count in ((2, 23), (3, 16))
    ]
    section = {
        **tree["task"],
        "name": "share",
        "kind": "regression",
        "train": lines[0],
        "validation": lines[1:],
    }
    del section["labels"]
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"task": section}))
    return model, classes, str(tmp_path / "values.yaml")


def task_of(files, output, *overrides):
    """The configuration of one file of a task, or of several."""
    chosen = {"tasks": files[1:]} if len(files) > 2 else {}
    tree = load_tree(files[:1], files[1], overrides, **chosen)
    return prepare(merge(tree, {"run": {"directory": str(output)}}))


def run(context, files, output, *overrides):
    return finetune(task_of(files, output, *overrides), output, context)


def learn(files, output, *overrides, world=1, **parallel):
    settings = [f"parallel.{name}={value}" for name, value in parallel.items()]
    run_ranks(run, world, files, output, *overrides, *settings, parallel=ParallelConfig(**parallel))
    return [read_checkpoint(path) for path in list_checkpoints(output / "seed_1234/checkpoints")]


def state(checkpoint, kind):
    """The weights or moments of a checkpoint, by name."""
    slices = [dataclasses.replace(s, state_name="weight") for s in checkpoint.slices if s.state_name == kind]
    return load_weights(dataclasses.replace(checkpoint, slices=tuple(slices)))


def test_each_epoch_has_the_batches_of_each_task_once_and_in_an_order_of_its_own():
    turns = TaskOrder([3, 5, 1], seed=7)
    found = [turns.of(batch) for batch in range(900)]
    for epoch in range(100):
        assert Counter(task for task, _ in found[9 * epoch : 9 * epoch + 9]) == {0: 3, 1: 5, 2: 1}
    for task in range(3):
        numbers = [number for one, number in found if one == task]
        assert numbers == list(range(len(numbers)))
    assert len({tuple(task for task, _ in found[9 * epoch : 9 * epoch + 9]) for epoch in range(100)}) > 50
    assert [TaskOrder([3, 5, 1], seed=7).of(batch) for batch in (899, 4)] == [found[899], found[4]]
    assert [TaskOrder([3, 5, 1], seed=8).of(batch) for batch in range(900)] != found
    assert [TaskOrder([4], seed=7).of(batch) for batch in range(9)] == [(0, batch) for batch in range(9)]


def test_tasks_count_by_size_or_by_a_power_of_it(files, tmp_path):
    config = task_of(files, tmp_path / "out").config  # batches of 16
    assert batches_per_epoch([1600, 401, 16, 1], config) == [100, 26, 1, 1]
    by_root, alike = (
        dataclasses.replace(config, finetune=dataclasses.replace(config.finetune, tasks_alpha=alpha))
        for alpha in (0.5, 0.0)
    )
    assert batches_per_epoch([1600, 400], by_root) == [83, 42]  # 125 by 10 : 5
    assert batches_per_epoch([1600, 400], alike) == [62, 62]
    assert batches_per_epoch([16_000_000, 1], by_root)[1] == 999
    task = task_of(files, tmp_path / "out", "finetune.epochs=3")
    assert task.batches == [3, 2] and task.config.training.steps == 15


def test_one_task_has_the_samples_and_settings_that_it_has_alone(files, tmp_path):
    alone = task_of(files[:2], tmp_path / "out")
    listed = prepare(
        merge(load_tree(files[:1], None, (), tasks=files[1:2]), {"run": {"directory": str(tmp_path / "out")}})
    )
    assert listed.config == alone.config and listed.others == () and listed.config.tasks == ()
    data = training_data(alone)
    several = MultiTaskData([data], TaskOrder([3], 1234), 16)
    for batch in range(12):
        own, expected = (one.batch(np.arange(16) + 16 * batch) for one in (several, data))
        for name in ("fields", "samples"):
            assert np.array_equal(getattr(own, name), getattr(expected, name))
        assert np.array_equal(own.target_groups.targets, expected.target_groups.targets)
        assert np.array_equal(own.loss_divisors(5), expected.loss_divisors(5))


@pytest.mark.slow
def test_heads_without_a_batch_stay_as_they_are_and_layouts_agree(files, tmp_path):
    """Bit for bit: weights, moments and counts of steps, with weight decay. Layouts: only the order of sums differs."""
    expected = None
    layouts = [(1, {}), (2, {"zero_stage": 2}), (2, {"tensor_parallel_size": 2})]
    for number, (world, parallel) in enumerate(layouts):
        saved = learn(files, tmp_path / str(number), *STEP, world=world, **parallel)
        turns = TaskOrder([3, 2], 1234)
        assert [checkpoint.step for checkpoint in saved] == list(range(1, 11))
        for before, after in itertools.pairwise(saved):
            busy = ("votes", "share")[turns.of(after.step - 1)[0]]
            for kind in KINDS:
                one, two = state(before, kind), state(after, kind)
                for name in (name for name in one if name.startswith("heads.task.")):
                    assert torch.equal(one[name], two[name]) == (f".{busy}." not in name), (kind, name)
                name = "layers.0.mlp.dense_h_to_4h.weight"
                assert not torch.equal(one[name], two[name])
        assert set(saved[-1].optimizer["adam_steps"].values()) == {6.0, 4.0}
        last = load_weights(saved[-1])
        expected = expected or last
        for name, weight in last.items():
            torch.testing.assert_close(
                weight, expected[name], rtol=1e-4, atol=2e-5, msg=f"{parallel}: {name}"
            )


@pytest.mark.slow
def test_a_resumed_run_repeats_the_unbroken_one_and_results_match_each_task(files, tmp_path):
    whole = learn(files, tmp_path / "whole", *STEP)
    learn(files, tmp_path / "cut", *STEP, "training.stop_after_step=4")
    assert not list((tmp_path / "cut").glob("**/results.json"))
    resumed = learn(files, tmp_path / "cut", *STEP)
    for kind in KINDS:
        one, two = state(whole[-1], kind), state(resumed[-1], kind)
        assert all(torch.equal(one[name], two[name]) for name in one)
    records = [r for r in read_metrics(tmp_path / "cut/seed_1234") if r["kind"] == "scores"]
    best = max(records, key=lambda r: r["score"])  # the first of those
    assert best["score"] == pytest.approx(
        (best["votes/accuracy"] + (best["share/pearson"] + best["share/spearman"]) / 2) / 2
    )
    for name, metric in (("votes", "accuracy"), ("share", "pearson")):
        found = json.loads((tmp_path / f"cut/tasks/{name}/results.json").read_text())
        (of_file,) = found["files"].values()
        assert found["task"] == name and of_file["mean"][metric] == best[f"{name}/{metric}"]
        assert found["seeds"][0]["best_step"] == best["step"]
        assert list((tmp_path / f"cut/seed_1234/tasks/{name}/predictions").iterdir())


@pytest.mark.slow
def test_a_run_on_one_task_and_an_evaluation_take_the_head_of_that_name(files, tmp_path):
    (*_, saved) = learn(files, tmp_path / "both", *STEP, "training.steps=6")
    before = load_weights(saved)
    for number, name in enumerate(("votes", "share")):
        one = (files[0], files[1 + number])
        given = [f"checkpoint.initialize_from={saved.path}", "optimizer.lr=1e-30", "training.steps=1"]
        (tuned,) = learn(one, tmp_path / name, *given)
        after = load_weights(tuned)
        assert not any(".votes." in key or ".share." in key for key in after)
        for key, weight in after.items():
            assert torch.equal(weight, before[key.replace("heads.task.", f"heads.task.{name}.")]), key
        section = read_yaml(one[1])
        measured = evaluate(saved.path, {"task": section["task"]}, 8, device=torch.device("cpu"))
        alone = evaluate(tuned.path, {}, 8, device=torch.device("cpu"))
        assert [f.metrics for f in measured.files.values()] == [f.metrics for f in alone.files.values()]
    with pytest.raises(
        CheckpointError,
        match=r"has heads of several tasks; tune it on one \(scripts/finetune\.py --task FILE",
    ):
        export_run(saved.path, tmp_path / "export", ExportOptions())
    assert not (tmp_path / "export").exists()
    section["task"]["name"] = "other"
    with pytest.raises(ConfigError, match="was trained on the tasks votes, share; give one of them"):
        evaluate(saved.path, {"task": section["task"]}, 8)


BAD = {
    "two of one name": (
        (),
        {"name": "votes"},
        "tasks has the names 'votes', 'votes'; they must differ",
    ),
    "a name with a dot": ((), {"name": "a.b"}, "of letters, digits, _ and -"),
    "zero 3": (("parallel.zero_stage=3",), {}, "parallel.zero_stage is 3 with several tasks (votes, share)"),
    "language": (("finetune.lm_weight=0.5",), {}, "finetune.lm_weight is 0.5 with several tasks"),
    "a pool": (("model.task_head.pool=concat",), {}, "model.task_head.pool is concat with several tasks"),
    "alpha": (
        ("finetune.tasks_alpha=2",),
        {},
        "finetune.tasks_alpha is 2; it must be at least 0 and at most 1",
    ),
    "no task": (("tasks=[3, {}]",), {}, "tasks has 3; each must be a file with a section task"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(files, tmp_path, case):
    overrides, changes, message = BAD[case]
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(merge(yaml.safe_load(path.read_text()), {"task": changes})))
    with pytest.raises(ConfigError) as error:
        task_of(files, tmp_path / "out", *overrides)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_two_tasks_together_reach_both_optima(tmp_path):
    """Half of the tasks' batches each; 3 standard errors of 400 samples are allowed."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *synthetic_vocabulary()]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    votes_of, tags_of = "noisy_votes:n=5,p=0.7", "tags:"
    model = {
        "model": {
            "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position": 64, "init_std": 0.1,
            "embedding_dropout": 0.0, "attention_dropout": 0.0, "output_dropout": 0.0, "task_head": {"dropout": 0.0},
        },
        "tokenizer": {"kind": "bert_wordpiece", "path": str(tmp_path / "vocab.txt")},
        "data": {"sequence_length": 32},
        "training": {"precision": "fp32"},
        "batch": {"micro_batch_size": 32, "global_batch_size": 32},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0},
        "run": {"log_interval": 1000, "tensorboard": False},
        "finetune": {"epochs": 8},
        "tasks": [
            {
                "name": name, "kind": kind, "reader": "synthetic", "sequence_length": 48,
                "train": f"{spec},samples=600,seed=1".replace(":,", ":"),
                "validation": [f"{spec},samples=400,seed=2".replace(":,", ":")],
            }
            for name, kind, spec in (
                ("noisy_votes", "classification", votes_of), ("tags", "tagging", tags_of)
            )
        ],
    }  # fmt: skip
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(model))
    tree = load_tree([], str(tmp_path / "both.yaml"), [f"run.directory={tmp_path}"])
    run_ranks(_learn_tree, 1, tree, tmp_path / "out")
    for name, spec, metric in (("noisy_votes", votes_of, "accuracy"), ("tags", tags_of, "entity_f1")):
        found = json.loads((tmp_path / f"out/tasks/{name}/results.json").read_text())
        ((best, mean),) = [(optimum(spec)[metric], of["mean"][metric]) for of in found["files"].values()]
        assert abs(mean - best) <= 3 * np.sqrt(max(best * (1 - best), 1 / 400) / 400), (name, mean, best)


def _learn_tree(context: ParallelContext, tree, output):
    return finetune(prepare(tree), output, context)
