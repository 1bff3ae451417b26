"""scripts/finetune.py as users start it: alone on a directory of transformers, and by the launcher on two processes."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.commands import assert_refused, forked
from support.distributed import free_port
from support.hf.published import random_model
from support.project import ROOT
from support.tasks.tasks import WORDS, write_lines, write_task

from data_utils.common.settings import build
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.by_name import read_records
from megatron_lite.finetune.checkpoints import evaluate

ENTRY = "scripts/finetune.py"


def accuracy(output):
    (of_file,) = json.loads((output / "results.json").read_text())["files"].values()
    return of_file["mean"]["accuracy"]


def test_a_published_directory_is_imported_tuned_and_measured(tmp_path):
    """BERT: it says nothing of training, and its objective is given."""
    original = tmp_path / "bert"
    original.mkdir()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (original / "vocab.txt").write_text("\n".join(names) + "\n")
    random_model("bert", std=0.05, vocab_size=len(names)).save_pretrained(original)
    _, task = write_task(tmp_path / "task", train=32)
    settings = [
        "objectives={masked_lm: 1}",
        "data.sequence_length=64",
        "training.precision=fp32",
        "finetune.epochs=1",
    ]
    command = ["--checkpoint", str(original), "--task", task, "--output", str(tmp_path / "out"), *settings]
    done = forked(ENTRY, *command)
    assert done.returncode == 0, done.stderr
    best = tmp_path / "out/seed_1234/best"
    assert accuracy(tmp_path / "out") == next(iter(evaluate(best, {}, 4).files.values())).metrics["accuracy"]
    pattern = {"template": "{text} It was [MASK] .", "verbalizers": {"0": "bad", "1": "good"}}
    section = {**yaml.safe_load(Path(task).read_text())["task"], "kind": "cloze", **pattern}
    tree = {"task": section, "objectives": {"masked_lm": 1}, "data": {"sequence_length": 64}}
    (untuned,) = evaluate(original, tree, 4).files.values()
    assert len(untuned.predictions) == 32 and 0 <= untuned.metrics["accuracy"] <= 1

    # The same call has nothing left to do; with other weights its seeds are not those of this call.
    again = forked(ENTRY, *command)
    assert again.returncode == 0, again.stderr
    words = f"{tmp_path / 'out'} began with other weights ({original}, now {best}/step_"
    assert_refused(forked(ENTRY, *command, "--checkpoint", str(best)), words)
    random_model("bert", std=0.06, vocab_size=len(names)).save_pretrained(original)
    assert_refused(forked(ENTRY, *command), f"began with other weights ({original}, now {original})")


def test_tables_without_labels_in_the_settings_are_learnt_and_predicted(tmp_path):
    """The classes are the training file's. The start says what is cut and missing, the end what is not learnt."""
    model, task = write_task(tmp_path / "task", train=32, labels=[], sequence_length=8)
    section = yaml.safe_load(Path(task).read_text())["task"]
    tables = {name: tmp_path / f"{name}.csv" for name in ("train", "validation", "new")}
    text, long = 'a "good", film', "good bad good bad good bad good"
    for path, labels in zip(tables.values(), (["10", "9", "x"] * 8, ["9", "10"] * 8, [""] * 3), strict=True):
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["id", "text", "label"])
            rows.writerows(
                [n, f"{long}\nfilm" if n % 4 == 0 else text, label] for n, label in enumerate(labels)
            )
    files = {"train": str(tables["train"]), "validation": [str(tables["validation"])]}
    numbers = [{"text": text, "label": n % 7} for n in range(24)]
    value = {
        **section,
        "name": "share",
        "kind": "regression",
        "train": write_lines(tmp_path / "n.jsonl", numbers),
    }
    value["validation"] = [value["train"]]
    both = [tmp_path / "votes.yaml", tmp_path / "share.yaml"]
    for path, tree in zip(both, ({**section, **files}, value), strict=True):
        path.write_text(yaml.safe_dump({"task": tree}))
    options = ["--config", model, "finetune.epochs=2", "optimizer.lr=1e-9", "run.log_interval=1"]
    done = forked(ENTRY, *options, "--output", tmp_path / "out", "--tasks", *both)
    assert done.returncode == 0, done.stderr
    assert (
        "task votes, cut to fit task.sequence_length 8: 24 training samples, 25.0% of them cut; "
        f"{tables['validation']} 16, 25.0% cut" in done.stdout
    )
    assert (
        f"task votes: {tables['validation']} has no sample of x, of which the score says nothing"
        in done.stdout
    )
    for name in ("votes", "share"):
        assert f"so the task {name} was hardly learnt" in done.stdout
    assert "guessing by frequency has 1.0986" in done.stdout  # log 3, of three classes
    seed = tmp_path / "out/seed_1234"
    (found,) = json.loads((tmp_path / "out/tasks/votes/results.json").read_text())["seeds"]
    assert found["train_cut"] == 0.25 and found["settings"]["task"]["labels"] == ["10", "9", "x"]
    predict = ["--predict", tables["new"], "--predictions", tmp_path / "p"]
    done = forked("scripts/evaluate.py", "--checkpoint", seed, "--task", both[0], *predict)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "p/votes.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and all(list(line["scores"]) == ["10", "9", "x"] for line in lines)
    assert all(sum(line["scores"].values()) == pytest.approx(1.0, abs=1e-3) for line in lines)
    read = read_records(
        build(TaskConfig, {**section, **files, "labels": ["10", "9", "x"]}), tables["train"], labelled=True
    )
    assert [record.fields["text"] for record in read[:2]] == [f"{long}\nfilm", text]
    for row, told in (
        ("3,b", "new.csv:2: the row has 2 fields, but the first row has 3"),
        ('3,"a" b,9', "not a valid table"),
    ):
        tables["new"].write_text(f"id,text,label\n{row}\n")
        assert_refused(forked("scripts/evaluate.py", "--checkpoint", seed, "--task", both[0], *predict), told)


@pytest.mark.slow
def test_seeds_of_other_weights_are_not_taken_for_those_of_a_call(tmp_path):
    """Results, and seeds that were interrupted, are of the checkpoint that the first call named."""
    model, task = write_task(tmp_path / "task", train=8)
    first = ["--config", model, "--task", task, "finetune.epochs=1"]
    done = forked(ENTRY, *first, "--output", str(tmp_path / "a"))
    assert done.returncode == 0, done.stderr
    start, output = tmp_path / "a/seed_1234/best", tmp_path / "out"
    other = tmp_path / "other"
    shutil.copytree(start, other / start.name)  # the same weights in another place
    seeds = ["--task", task, "--output", str(output), "finetune.epochs=1"]
    done = forked(ENTRY, "--checkpoint", str(start), *seeds, "finetune.seeds=[1]")
    assert done.returncode == 0, done.stderr
    done = forked(ENTRY, "--checkpoint", str(other / start.name), *seeds, "finetune.seeds=[1,2]")
    assert done.returncode == 0, done.stderr
    (output / "seed_2/results.json").unlink()  # as if it were interrupted
    done = forked(ENTRY, "--config", model, *seeds, "finetune.seeds=[1,2]")
    assert_refused(done, f"{output} began with other weights ({start}/step_")
    done = forked(ENTRY, "--checkpoint", str(start), *seeds, "finetune.seeds=[1,2]")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.launcher
def test_the_launcher_gives_the_scores_of_one_process(tmp_path):
    model, task = write_task(tmp_path / "task", train=32)
    command = ["--config", model, "--task", task, "finetune.epochs=2"]
    done = forked(ENTRY, *command, "--output", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    launcher = Path(sys.executable).with_name("deepspeed")
    started = [launcher, "--master_port", free_port(), "--num_gpus", 2, ROOT / ENTRY]
    done = subprocess.run(
        [str(word) for word in (*started, *command, "--output", tmp_path / "two")],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert accuracy(tmp_path / "two") == accuracy(tmp_path / "one")
    predictions = [
        (tmp_path / name / "seed_1234/predictions/votes.jsonl").read_text() for name in ("one", "two")
    ]
    assert predictions[0] == predictions[1]


def test_a_command_without_a_model_or_a_task_is_refused(tmp_path):
    model, task = write_task(tmp_path / "task", train=8)
    output = ["--output", str(tmp_path / "out")]
    assert_refused(
        forked(ENTRY, "--task", task, *output), "no model given; pass --checkpoint RUN, or --config FILE"
    )
    assert_refused(forked(ENTRY, "--config", model, *output), "no task given; pass --task FILE")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_joint", [False, True])
def test_wrong_settings_of_all_files_are_named_with_file_and_line(tmp_path, is_joint):
    (tmp_path / "model.yaml").write_text("model:\n  num_layers: x\ntraining: {precision: fp33}\n")
    (tmp_path / "a.yaml").write_text("task:\n  name: a\n  kind: clasification\n")
    (tmp_path / "b.yaml").write_text("task:\n  name: b\n  kind: tagging\n  traim: file\n")
    tasks = ["--tasks", "a.yaml", "b.yaml"] if is_joint else ["--task", "a.yaml"]
    command = [
        sys.executable,
        ROOT / "scripts/finetune.py",
        "--config",
        "model.yaml",
        *tasks,
        "--output",
        "out",
    ]
    done = subprocess.run([*command, "finetune.epochs=0"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    first = "tasks[0]" if is_joint else "task"
    wanted = {
        "model.yaml:2: model.num_layers", "model.yaml:3: training.precision", f"a.yaml:3: {first}.kind",
        f"{first}.reader is required", "model.hidden_size is required", " finetune.epochs is 0",
    }  # fmt: skip
    wanted |= {"b.yaml:4: unknown setting tasks[1].traim"} if is_joint else set()
    assert {text for text in wanted if text not in done.stderr} == set(), done.stderr
    assert done.stderr.count("clasification") == 1
