"""Every change that docs/changes.md shows, applied to one copy of the project and used there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.documented_changes import TOOLS, apply, changed_files, diff_in, sections
from support.project import ROOT, copied_project, small_run

SECTIONS = sections()
USER = ROOT / "tests/support/use_changes.py"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = copied_project(tmp_path_factory.mktemp("changes") / "project")
    for title, section in SECTIONS.items():
        if diff := diff_in(section):
            apply(diff, directory, title, "git apply", "-C1")  # two changes stand side by side
    return directory


@pytest.fixture(scope="module")
def trained(project: Path, corpus: Path) -> tuple[dict, str]:
    """Results of use_changes.py, and all that it printed."""
    settings = json.dumps(small_run(corpus, project / "run"))
    command = [sys.executable, str(USER), str(project), settings]
    variables = {**os.environ, "NUMBA_DISABLE_JIT": "1"}  # so few samples need no compilation
    done = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.parametrize("title", [title for title in SECTIONS if title != "Other changes"])
def test_a_change_names_its_files(title):
    changes = changed_files(diff_in(SECTIONS[title]))
    files = re.search(r"^\nFiles: (.*?)\n\n", SECTIONS[title], re.S)[1]
    new = sum(changes.values())
    assert new == files.count("a new one") * bool(changes)
    assert set(re.findall(r"`([\w/.]+\.py)`", files)) == {
        name for name, is_new in changes.items() if not is_new
    }
    assert changes or "(own_objective.md)" in files  # the page that has the file


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("title", [title for title, section in SECTIONS.items() if diff_in(section)])
def test_a_diff_is_read_by_the_tools_as_it_stands(title, tool, tmp_path):
    """Alone, against the files as they are: context and counts of lines fit, and a new file is new."""
    if shutil.which(TOOLS[tool][0]) is None:
        pytest.skip(f"{TOOLS[tool][0]} is not installed")
    diff = diff_in(SECTIONS[title])
    for name, is_new in changed_files(diff).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        assert (ROOT / name).exists() != is_new
        if not is_new:
            shutil.copy2(ROOT / name, tmp_path / name)
    apply(diff, tmp_path, title, tool)
    for name, is_new in changed_files(diff).items():
        assert is_new or (tmp_path / name).read_bytes() != (ROOT / name).read_bytes()
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == {
        *changed_files(diff)
    }


@pytest.mark.slow
def test_a_metric_is_in_the_log_line_and_in_the_records(trained):
    found, printed = trained
    records = found["training"]["records"]
    assert all(record["samples_per_second"] > 0 for record in records)
    assert len(re.findall(r"step \d/4 .* samples/s", printed)) == len(records) == 4


def test_a_norm_has_its_parameters_and_trains(trained):
    found = trained[0]["training"]
    assert "layers.0.input_layernorm.alpha" in found["parameters"]
    losses = [record["loss"] for record in found["records"]]
    assert losses[-1] < losses[0]


def test_an_optimizer_is_the_one_of_its_paper(trained):
    found = trained[0]["optimizer"]
    assert found["ours"] == pytest.approx(found["paper's"], abs=1e-6)
    assert found["unchanged by infinite gradients"]


def test_an_optimizer_has_its_state_in_checkpoints_and_in_the_dry_run(trained):
    assert trained[0]["training"]["kinds"] == ["exp_avg", "weight"]
    assert trained[0]["optimizer"]["bytes"] == pytest.approx(8.0, abs=0.05)


def test_an_optimizer_refuses_what_it_does_not_read(trained):
    assert trained[0]["optimizer"]["error"].startswith("optimizer.eps is 0.01, but optimizer.kind lion")


def test_a_published_system_is_imported_with_its_proof_and_exported(trained):
    found = trained[0]["published system"]
    assert found["equal"] and "argmax agreement 100.00%" in found["proof"]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_diff_whose_context_is_gone_is_named(tool, tmp_path):
    file = tmp_path / "a.py"
    file.write_text("other = 1\n")
    diff = "--- a/a.py\n+++ b/a.py\n@@ -1,1 +1,1 @@\n-old = 1\n+new = 1\n"
    assert diff_in(f"text\n\n```diff\n{diff}```\n") == diff and changed_files(diff) == {"a.py": False}
    with pytest.raises(AssertionError, match=r'(?s)"A norm": .*a\.py'):
        apply(diff, tmp_path, "A norm", tool)
    assert file.read_text() == "other = 1\n"
