"""Typing and relations of marked mentions, with BERT: the best score is reached, and what cannot be is one line."""

import json

import numpy as np
import pytest
import torch
from support.commands import assert_refused, forked
from support.distributed import run_ranks
from support.hf.own_models import weights_of
from support.tasks.mention_tasks import RELATIONS, TYPES, write_task
from support.tasks.tasks import task_of

from data_utils.common.errors import ConfigError
from data_utils.tasks.metrics.metrics import loose_micro_f1
from megatron_lite.finetune import run as run_module
from megatron_lite.finetune.data import TaskData
from megatron_lite.finetune.run import finetune
from megatron_lite.hf.export import ExportOptions, export_run
from megatron_lite.hf.importing import import_directory
from megatron_lite.inference.open_run import open_run
from megatron_lite.transformer.build import build_model
from megatron_lite.transformer.micro_batch import MicroBatch

CPU = torch.device("cpu")


def learn(context, files, output, *overrides):
    finetune(task_of(files, output, *overrides), output, context)
    (of_file,) = json.loads((output / "results.json").read_text())["files"].values()
    return of_file["mean"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "epochs"), [("typing", 4), ("relation", 7)])
def test_marked_mentions_reach_the_best_score(tmp_path, name, epochs, capfd):
    files = write_task(tmp_path / "task", name)
    (measured,) = run_ranks(learn, 1, files, tmp_path / "out", f"finetune.epochs={epochs}")
    names = (
        ("micro_f1", "accuracy")
        if name == "relation"
        else ("loose_micro_f1", "loose_macro_f1", "strict_accuracy")
    )
    assert measured == dict.fromkeys(names, 1.0)
    lines = (tmp_path / f"out/seed_1234/predictions/{name}.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        if name == "typing":
            assert line["label"] == [each for each in TYPES if line["scores"][each] > 0.5]
        else:
            assert line["label"] == max(RELATIONS, key=line["scores"].__getitem__)
    found = forked("scripts/evaluate.py", "--checkpoint", tmp_path / "out")
    assert found.returncode == 0 and f"{names[0]} 1.0000" in found.stdout


def test_an_export_says_that_labels_are_several_and_its_import_too(tmp_path):
    files = write_task(tmp_path / "task", "typing", train=32)
    run_ranks(learn, 1, files, tmp_path / "out", "finetune.epochs=1")
    assert export_run(tmp_path / "out/seed_1234", tmp_path / "export", ExportOptions()) is not None
    described = json.loads((tmp_path / "export/config.json").read_text())
    assert described["problem_type"] == "multi_label_classification"
    assert [*described["id2label"].values()] == list(TYPES)
    tree = {
        "training": {"steps": 1, "precision": "fp32"},
        "objectives": {"masked_lm": 1},
        "data": {"sequence_length": 28},
    }
    import_directory(tmp_path / "export", tmp_path / "again", tree)
    task = open_run(tmp_path / "again").config.task
    assert task is not None and task.kind == "typing" and task.labels == TYPES
    weights, again = weights_of(tmp_path / "out/seed_1234"), weights_of(tmp_path / "again")
    assert weights.keys() == again.keys() and all(torch.equal(x, again[name]) for name, x in weights.items())


def test_the_loss_of_typing_is_the_mean_of_cross_entropies_of_yes_and_no(tmp_path):
    """Sum over the samples of torch's BCEWithLogitsLoss of each."""
    task = task_of(write_task(tmp_path, "typing", train=16), tmp_path / "out")
    model = build_model(task.config, 60)
    data = TaskData(task.train, task.renderer, 0)
    batch = data.batch(np.arange(7))
    assert batch.loss_divisor == 7 and batch.loss_divisors(60)[-1] == 7
    made = MicroBatch.from_batch(batch, CPU, task.config.model)
    loss, sums = model(made)
    outputs, _ = model(made, predict=True)
    samples = [data.sample(number) for number in range(7)]
    targets = torch.tensor(np.stack([sample.target_groups[0].targets for sample in samples])).float()
    mean = torch.nn.BCEWithLogitsLoss()(outputs, targets)
    assert loss.item() == pytest.approx(7 * mean.item(), rel=1e-5)
    assert sums[-1].tolist() == pytest.approx([loss.item(), 7.0])


BAD = {
    "a mark": (
        ["task.marks={mention: '@'}"],
        "task.marks.mention is '@', which is no token",
    ),
    "a number": (["task.marks={mention: 3}"], "task.marks.mention is 3, which is no token"),
    "a kind": (
        ["task.kind=regression", "task.labels=[]", "task.metrics=[pearson]", "task.marks={where: '#'}"],
        "there is no field 'where'",
    ),
    "another kind": (
        [
            "task.kind=cloze",
            "task.template='{text} [MASK]'",
            "task.marks={head: '#'}",
            "task.metrics=[accuracy]",
        ],
        "task.kind cloze does not use them",
    ),
    "a reader": (
        ["task.reader=glue"],
        "task.reader is glue, but mentions and entities are read from JSON lines",
    ),
    "metrics of labels": (
        ["task.metrics=[accuracy]"],
        "names accuracy, but this task .* predicts label sets",
    ),
    "entity ids": (
        ["task.entity_ids=none.txt"],
        "task.entity_ids .*none.txt: No such file or directory; give",
    ),
    "a class": (["task.negative=person"], "task.negative is 'person' and the metrics are loose_micro_f1"),
    "one label": (["task.labels=[person]"], "label|labels"),
    "texts": (["task.text_fields=[text, label]"], "field 'label' holds|samples of one text"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_refused_in_one_line(tmp_path, name):
    overrides, message = BAD[name]
    files = write_task(tmp_path / "task", "typing", train=8)
    with pytest.raises(Exception, match=message) as error:
        task_of(files, tmp_path / "out", *overrides)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_micro_f1_needs_the_class_that_says_nothing(tmp_path):
    files = write_task(tmp_path / "task", "relation", train=8)
    for value, told in (("null", "None"), ("other", "'other'")):
        with pytest.raises(
            ConfigError, match=rf"task.negative is {told} .*; micro_f1 needs the negative class, one of wrote"
        ):
            task_of(files, tmp_path / "out", f"task.negative={value}")


def test_a_command_refuses_a_bad_line_with_its_place(tmp_path):
    model, task = write_task(tmp_path / "task", "typing", train=4)
    path = tmp_path / "task/train.jsonl"
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join([*lines[:2], lines[2].replace('"mention": [', '"mention": [-'), lines[3]]) + "\n"
    )
    result = forked("scripts/finetune.py", "--config", model, "--task", task, "--output", tmp_path / "out")
    assert_refused(result, "train.jsonl:3: field 'mention' is [-")
    assert not (tmp_path / "out").exists()


def test_a_picture_of_a_sample_names_its_classes(tmp_path):
    model, task = write_task(tmp_path, "typing", train=4)
    shown = forked(
        "scripts/inspect_batch.py", "--config", model, "--task", task, "training.steps=1", "--samples", "0"
    )
    first = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    assert f"scored: group 0, row 0: {' '.join(first['label'])}" in shown.stdout, shown.stdout + shown.stderr


def said(context, files, output, *overrides):
    """The warnings of a run about too little progress."""
    found = []
    run_module.log.handle = lambda record: found.append(record.getMessage())
    finetune(task_of(files, output, *overrides), output, context)
    return [message for message in found if "hardly learnt" in message]


@pytest.mark.slow
def test_the_best_of_the_sets_of_labels_is_what_a_guess_scores(tmp_path):
    files = write_task(tmp_path / "task", "typing")
    still = ["optimizer.lr=1e-12", "finetune.epochs=3", "run.log_interval=1"]
    ((message,),) = run_ranks(said, 1, files, tmp_path / "still", *still)
    (path,) = (tmp_path / "task").rglob("validation.jsonl")
    labels = [json.loads(line)["label"] for line in path.read_text().splitlines()]
    best = max(loose_micro_f1([given] * len(labels), labels) for given in labels)
    assert (
        best > 0.3
        and f"a guess that reads none of the {len(labels)} validation samples scores {best:.4f}" in message
    )
