"""docs/changes.md shows how to add a model option; the change is applied to a copy here and used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.documented_changes import apply, diff_in, sections
from support.project import copied_project

from data_utils.common.settings import merge

OPTION, TITLE = "layer_scale", "Adding a model option"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = copied_project(tmp_path / "project")
    apply(diff_in(sections()[TITLE]), directory, TITLE)
    return directory


def command(project: Path, *arguments: str) -> str:
    variables = {**os.environ, "NUMBA_DISABLE_JIT": "1"}  # compiling takes longer than so few samples
    done = subprocess.run(
        [sys.executable, "pretrain_glm.py", *arguments],
        cwd=project, env=variables, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(project: Path, settings: dict, value: bool) -> tuple[int, list[float]]:
    """The number of parameters and the losses of two steps."""
    run = project / f"run-{value}"
    changed = {"model": {OPTION: value}, "training": {"steps": 2}, "schedule": {"warmup_steps": 1}}
    (project / "option.yaml").write_text(
        yaml.safe_dump(merge(settings, {**changed, "run": {"directory": str(run)}}))
    )
    printed = command(project, "--config", "option.yaml")
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    return int(re.search(r"([\d,]+) parameters", printed)[1].replace(",", "")), losses


@pytest.mark.slow
def test_the_option_of_the_page_works(project, settings):
    assert re.search(rf"model\.{OPTION} \(bool, default false\)\n +\S+", command(project, "--help", "model"))
    count, losses = train(project, settings, True)
    default_count, default_losses = train(project, settings, False)
    model = settings["model"]
    assert count - default_count == model["num_layers"] * 2 * model["hidden_size"]
    assert len(losses) == len(default_losses) == 2
    assert all(one != other for one, other in zip(losses, default_losses, strict=True))
