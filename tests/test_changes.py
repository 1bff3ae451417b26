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


def used(project: Path, part: str, settings: dict | None = None) -> tuple[dict, str]:
    """Results of use_changes.py, and all that it printed."""
    command = [sys.executable, str(USER), part, str(project), json.dumps(settings)]
    variables = {**os.environ, "NUMBA_DISABLE_JIT": "1"}  # so few samples need no compilation
    done = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


@pytest.fixture(scope="module")
def text(project: Path) -> dict:
    return used(project, "text")[0]


@pytest.fixture(scope="module")
def trained(project: Path, corpus: Path) -> tuple[dict, str]:
    return used(project, "training", small_run(corpus, project / "run"))


@pytest.mark.parametrize("title", SECTIONS)
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


def test_a_metric_is_in_the_log_line_and_in_the_records(trained):
    found, printed = trained
    records = found["training"]["records"]
    assert all(record["samples_per_second"] > 0 for record in records)
    assert len(re.findall(r"step \d/4 .* samples/s", printed)) == len(records) == 4


def test_a_schedule_stays_at_the_peak_and_ends_at_the_floor(trained):
    rates = [record["lr"] for record in trained[0]["training"]["records"]]
    peak = 3e-3
    assert rates == pytest.approx(
        [peak, peak, peak / 10, peak / 10]
    )  # half of the way is before the last fifth


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


def test_a_field_of_checkpoints_continues_after_a_restart_and_may_be_absent(trained):
    found = trained[0]["training"]
    first, resumed, last = found["predicted"]
    assert 0 < first == resumed < last and found["older"] == 0


def test_a_kernel_computes_what_torch_does(trained):
    kernel = trained[0]["kernel"]
    assert kernel["is_kernel"]
    assert max(kernel["differences"]) < 4e-6  # fp32; the largest square is about 10


def test_a_reader_gives_records_and_names_a_bad_line(text):
    assert text["reader"]["records"] == [["a fine film", "good"], ["no plot", "bad"]]
    assert text["reader"]["error"].startswith(":2: the line begins with 'good'; it must be __label__CLASS")


def test_ranks_of_another_launcher_are_read(text):
    assert text["launcher"] == {"place": [5, 8, 1, False], "alone": [0, 1]}


def test_a_type_of_task_makes_samples_and_has_metrics(text):
    expected = {"word": "runs", "class": [1], "answers": "classes", "metrics": ["accuracy", "macro_f1"]}
    assert text["kind of task"] == expected


def test_a_type_of_tokenizer_encodes_and_decodes(text):
    tokenizer = text["tokenizer"]
    assert tokenizer["ids"] == [2, 1, 5, 4, 3, 1, 2, tokenizer["unknown"]]
    assert tokenizer["text"] == "bad cab"


def test_readers_and_tokenizers_load_no_torch(text):
    assert text["is light"]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_diff_whose_context_is_gone_is_named(tool, tmp_path):
    file = tmp_path / "a.py"
    file.write_text("other = 1\n")
    diff = "--- a/a.py\n+++ b/a.py\n@@ -1,1 +1,1 @@\n-old = 1\n+new = 1\n"
    assert diff_in(f"text\n\n```diff\n{diff}```\n") == diff and changed_files(diff) == {"a.py": False}
    with pytest.raises(AssertionError, match=r'(?s)"A norm": .*a\.py'):
        apply(diff, tmp_path, "A norm", tool)
    assert file.read_text() == "other = 1\n"
