"""What each command says of every kind of path: what it is, and what to give instead."""

import os
import shutil
import sys

import pytest
from support.commands import assert_refused, forked
from support.selection import slow_but
from support.training.stub_engine import StubEngine

from data_utils.common.errors import CheckpointError
from megatron_lite.checkpoint.read import find_checkpoint
from megatron_lite.checkpoint.resolve_path import (
    PathType,
    best_checkpoints,
    check_output_directory,
    path_type,
)
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.checkpoint.write import save_checkpoint
from megatron_lite.parallel.context import ParallelContext
from scripts import checkpoints

ALONE = ParallelContext.alone()


def write_run(path, *steps, within="checkpoints"):
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").touch()
    for step in steps:
        save_checkpoint(path / within, step, StubEngine(), {"config": {}}, ALONE)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Paths of every type, as the commands write them."""
    root = tmp_path_factory.mktemp("places")
    write_run(root / "runs/base", 10, 20)
    for number, name in enumerate(("tuned/seed_7", "three/seed_1", "three/seed_2", "three/seed_10"), 1):
        write_run(root / name, number, 30)
        save_checkpoint(root / name / "best", number, StubEngine(), {}, ALONE)
    write_run(root / "both", 10)
    write_run(root / "both/seed_3", 10)
    for file in ("export/config.json", "pair/generator/config.json", "latent/latent.json"):
        (root / file).parent.mkdir(parents=True)
        (root / file).write_text("{}")
    (root / "reference").mkdir()
    (root / "reference/mp_rank_00_model_states.pt").touch()
    (root / "adapter").mkdir()
    (root / "adapter/adapter_config.json").touch()
    (root / "empty").mkdir()
    (root / "file").write_text("a sentence\n")
    (root / "damaged/step_00000009").mkdir(parents=True)
    return root


@pytest.fixture
def places(written, tmp_path):
    """A copy of them, which a test may change."""
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


TYPES = {
    "runs/base": PathType.RUN, "runs/base/checkpoints": PathType.CHECKPOINTS, "tuned/seed_7/best": PathType.CHECKPOINTS,
    "runs/base/checkpoints/step_00000010": PathType.CHECKPOINT, "damaged/step_00000009": PathType.CHECKPOINT,
    "tuned": PathType.FINETUNED, "three": PathType.FINETUNED, "tuned/seed_7": PathType.RUN,
    "both": PathType.RUN_AND_FINETUNED,
    "export": PathType.EXPORT, "pair": PathType.EXPORT, "latent": PathType.EXPORT, "reference": PathType.ORIGINAL_GLM,
    "adapter": PathType.ADAPTER,
    "runs": PathType.PARENT, "empty": PathType.OTHER, "file": PathType.FILE, "none": PathType.ABSENT,
}  # fmt: skip


def test_every_type_of_path_is_distinguished(places):
    assert {name: path_type(places / name) for name in TYPES} == TYPES
    assert [path.parent.name for path in best_checkpoints(places / "three")] == [
        "seed_1",
        "seed_2",
        "seed_10",
    ]


def test_one_model_is_found_wherever_there_is_one(places):
    for name, step in (
        ("runs/base", 20),
        ("runs/base/checkpoints/step_00000010", 10),
        ("tuned", 1),  # the best, not the newest
        ("tuned/seed_7", 30),
        ("three/seed_10/best", 4),
    ):
        assert find_manifest(places / name).step == find_checkpoint(places / name, ALONE).step == step, name
    for name, message in (
        ("three", r"is an output of scripts/finetune.py; give one: \S+/seed_1/best, \S+/seed_2/best"),
        ("both", r"is a run that .* give one: \S+/both/checkpoints, \S+/both/seed_3"),
        ("runs", r"holds runs; give one: \S+/runs/base\."),
        (
            "export",
            r"transformers; give a run .*convert_checkpoint.py import --input \S+/export --output RUN",
        ),
        ("reference", r"import-megatron --input \S+/reference"),
        ("adapter", r"import --input \S+/adapter --base RUN_OF_ITS_MODEL --output RUN"),
        ("empty", "holds no run and no checkpoint; give a run directory"),
        ("file", "is not a directory; give a run directory"),
        ("none", "does not exist; give a run directory"),
    ):
        for find in (find_manifest, lambda path: find_checkpoint(path, ALONE)):
            with pytest.raises(CheckpointError, match=message):
                find(places / name)


OF_MODELS = [
    ("scripts/generate.py", "--text", "a", "--checkpoint"),
    ("scripts/try.py",),
    ("scripts/analyze.py", "contextuality", "--input", "file", "--checkpoint"),
    ("scripts/latent.py", "encode", "--input", "file", "--output", "x.npz", "--checkpoint"),
    ("scripts/convert_checkpoint.py", "export", "--output", "out", "--checkpoint"),
]
TAKE_EXPORTS = [
    ("scripts/evaluate.py", "--checkpoint"),
    ("scripts/harness.py", "--tasks", "x", "--checkpoint"),
    ("scripts/finetune.py", "--task", "noisy_votes", "--output", "new", "--checkpoint"),
]
OF_RUNS = [
    ("scripts/report.py",),
    ("scripts/report.py", "--plot"),
    ("scripts/checkpoints.py", "list"),
]


@pytest.mark.parametrize(
    "command",
    slow_but(
        [OF_MODELS[0], OF_MODELS[-1], TAKE_EXPORTS[0], OF_RUNS[0]], [*OF_MODELS, *TAKE_EXPORTS, *OF_RUNS]
    ),
    ids=lambda command: command[0],
)
def test_a_command_says_what_a_path_is_that_it_does_not_take(places, command):
    wrong = {
        "runs": "holds runs; give one: runs/base",
        "empty": "holds no run and no checkpoint; give ",
        "none": "none does not exist; give ",
        "reference": "of the original GLM",
        "adapter": "is an adapter of peft",
    }
    if command not in OF_RUNS:
        again = "convert_checkpoint.py import --input org/name@main --output runs/name`, and then given as runs/name."
        wrong["org/name@main"] = again
    if command not in TAKE_EXPORTS:
        wrong["export"] = "transformers; give "
    if command != TAKE_EXPORTS[0]:
        best = "" if command in OF_RUNS else "/best"
        wrong["three"] = (
            f"is an output of scripts/finetune.py; give one: three/seed_1{best}, three/seed_2{best}"
        )
    for name, message in wrong.items():
        before = sorted(places.iterdir())
        assert_refused(forked(*command, name, cwd=places), message)
        assert sorted(places.iterdir()) == before  # a refused start makes nothing


def test_what_is_ours_needs_no_import(places):
    for name in ("runs/base", "tuned", "runs/base/checkpoints/step_00000010"):
        done = forked("scripts/convert_checkpoint.py", "import", "--input", name, "--output", "x", cwd=places)
        assert_refused(done, "needs no import")


@pytest.mark.parametrize(
    "name", ["runs/base/checkpoints/step_00000010", "runs/base/checkpoints", "runs/base/checkpoints/new",
    "runs/base/checkpoints/step_00000010/a/b", "tuned/seed_7/best/new", "tuned", "export", "link/new"],
)  # fmt: skip
def test_a_run_has_a_directory_that_is_its_alone(places, name):
    os.symlink(places / "runs/base/checkpoints", places / "link")
    with pytest.raises(CheckpointError, match=r"choose a(nother)? directory"):
        check_output_directory(places / name, "run.directory")
    model = ["--config", "configs/tiny.yaml", f"run.directory={places / name}"]
    assert_refused(forked("pretrain_glm.py", *model, "data.train=[{prefix: none}]"), "run.directory")


def test_tuned_runs_have_a_directory_that_is_theirs_alone(places):
    for name in ("runs/base", "both", "runs/base/checkpoints/new", "export"):
        done = forked(
            "scripts/finetune.py", "--config", "tiny", "--task", "noisy_votes", "--output", str(places / name)
        )
        assert_refused(done, "--output")
    for name in ("tuned", "three", "new", "empty"):
        check_output_directory(places / name, "--output", is_tuned=True)
    for name in ("runs/base", "both", "new", "empty", "runs"):
        check_output_directory(places / name, "run.directory")


def test_a_directory_that_may_not_be_read_is_refused(places, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("megatron_lite.checkpoint.resolve_path._classify", refuse)
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", "list", str(places / "runs/base")])
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoints.main()


@pytest.mark.parametrize("config", [True, {"ema": True}, {"ema": {"use": "yes"}}, {"tokenizer": 3}])
def test_a_state_of_another_form_is_one_line(places, config):
    path = save_checkpoint(places / "other/checkpoints", 5, StubEngine(), {"config": config}, ALONE)
    done = forked("scripts/checkpoints.py", "verify", path)
    assert (
        done.returncode == 1
        and done.stderr.count("\n") == 1
        and "manifest.json says state.config" in done.stderr
    )
