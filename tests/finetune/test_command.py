"""scripts/finetune.py as users start it: alone on a directory of transformers, and by the launcher on two processes."""

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
from support.project import ROOT
from support.published import random_model
from support.tasks import WORDS, write_task

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
    (output / "begins_with.json").unlink()  # of an earlier version
    done = forked(ENTRY, "--checkpoint", str(start), *seeds, "finetune.seeds=[1,2]")
    assert done.returncode == 0 and not (output / "begins_with.json").exists()


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
