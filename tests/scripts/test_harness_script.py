"""scripts/harness.py where the package lm_eval is absent, and what it says of wrong arguments."""

import importlib.util
import subprocess
import sys

import pytest
from support.project import ROOT

from scripts import harness as script


@pytest.fixture
def said(monkeypatch, capsys):
    """What the command says of arguments."""

    def ask(*arguments):
        monkeypatch.setattr("sys.argv", ["harness.py", *map(str, arguments)])
        with pytest.raises(SystemExit, match=r"^2$"):
            script.command()
        found = capsys.readouterr().err
        assert found.startswith("error: ") and found.count("\n") == 1
        return found

    return ask


def test_its_absence_is_one_line(said, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "checkpoints").mkdir()
    found = said("--checkpoint", tmp_path, "--tasks", "own", "--include-path", tmp_path)
    assert (
        "needs the package lm_eval, which is not installed; run pip install -r requirements-lm-eval.txt"
        in found
    )
    assert (ROOT / "requirements-lm-eval.txt").exists()


def test_wrong_arguments_are_one_line(said, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    run = ["--checkpoint", tmp_path]
    assert "no tasks given; pass --include-path DIR" in said(*run, "--tasks", "own")
    tasks = ["--tasks", "own", "--include-path"]
    assert "does not exist; pass the directory with the task YAML files" in said(
        *run, *tasks, tmp_path / "no"
    )
    assert "does not exist; give a run" in said("--checkpoint", tmp_path / "no", *tasks, tmp_path)
    for option, value, least in (("--batch", 0, 1), ("--sequence-length", -5, 1), ("--num-fewshot", -1, 0)):
        rule = f"{option} is {value}; it must be at least {least}."
        assert rule in said(*run, *tasks, tmp_path, option, value)
    assert "the following arguments are required: --tasks" in said(*run)


def test_a_script_does_not_hide_a_package(tmp_path):
    """scripts/evaluate.py has the name of a package that lm_eval imports."""
    (tmp_path / "evaluate.py").write_text("print('the package')")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import entry, evaluate"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "scripts")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
    )
    assert done.stdout == "the package\n", done.stderr
