"""Objectives of other packages: known without an import, imported when chosen; what is wrong with one is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.configs import tiny
from support.project import ROOT, copied_project, small_run

from data_utils.common.errors import ConfigError
from data_utils.common.losses import Loss
from data_utils.common.settings import merge
from data_utils.objectives.declared import Declared
from data_utils.objectives.registry import Objectives
from megatron_lite.checkpoint.verify import find_manifest
from megatron_lite.runtime.rank_agreement import facts

CAUSAL = (ROOT / "data_utils/objectives/causal.py").read_text()
OWN = [Declared("some", (Loss("a", 0),), "here", "Some")]


def source(name: str, number: int, loss: str = "") -> str:
    """The file of an objective that trains as `causal` does."""
    made = CAUSAL
    for old, new in (
        ("CausalConfig", "OwnConfig"),
        ("class Causal(", "class Own("),
        ('name = "causal"', f'name = "{name}"'),
        ('Loss("causal", 3)', f'Loss("{loss or name}", {number})'),
        ("@register\n", "@register  # found with a comment\n"),
    ):
        assert old in made, old
        made = made.replace(old, new)
    return made


def install(root: Path, package: str, text: str, entry: str) -> None:
    """What an installer leaves: a package and its metadata."""
    (root / package).mkdir(parents=True)
    (root / package / "__init__.py").write_text(
        "raise ImportError('imported too early')\n" * text.count("EARLY")
    )
    (root / package / "objective.py").write_text(text)
    metadata = root / f"{package}-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text(f"[megatron_lite.objectives]\n{entry}\n")


def registered(monkeypatch, root: Path) -> Objectives:
    monkeypatch.syspath_prepend(str(root))
    return Objectives(OWN, with_packages=True)


def test_an_objective_of_a_package_is_known_without_an_import(tmp_path, monkeypatch):
    install(tmp_path, "own_pack_a", source("of_package", 50), "of_package = own_pack_a.objective:Own")
    made = registered(monkeypatch, tmp_path)
    assert list(made) == ["some", "of_package"] and made.own == ("some",)
    assert not [name for name in sys.modules if name.startswith("own_pack_a")]
    assert not made.is_loaded("of_package") and made.package("of_package") == "own_pack_a 1.2"
    assert [loss.name for loss in made.losses][::50] == ["a", "of_package"] and len(made.losses) == 51
    assert made["of_package"].name == "of_package" and made.is_loaded("of_package")


BROKEN = {  # file, entry point -> what is said
    "syntax": ("class Own(:\n", "x = {}.objective:Own", r":1: .*correct the file"),
    "no such class": (source("x", 50), "x = {}.objective:Other", "has no class Other"),
    "another name": (source("y", 50), "x = {}.objective:Own", "class has the name 'y'"),
    "a number of ours": (source("x", 47), "x = {}.objective:Own", r"numbers \[47\]; .* from 48 to 63"),
    "no file": (source("x", 50), "x = {}.absent:Own", "absent has no Python source file"),
    "no class in the entry": (source("x", 50), "x = {}.objective", "must have the form lower_case_name"),
    "a name that is no key": (source("X.y", 50), "X.y = {}.objective:Own", "must have the form lower_case_name"),
    "a name of ours": (source("some", 50), "some = {}.objective:Own", "the same name some"),
    "a loss of ours": (source("x", 50, "a"), "x = {}.objective:Own", "the same loss a"),
    "import": (source("x", 50) + "# EARLY", "x = {}.objective:Own", r"cannot be imported .*too early"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_package_is_said_to_those_who_choose_it(tmp_path, monkeypatch, case):
    text, entry, message = BROKEN[case]
    package = f"own_broken_{list(BROKEN).index(case)}"
    install(tmp_path, package, text, entry.format(package))
    made = registered(monkeypatch, tmp_path)
    name = entry.partition(" =")[0]
    assert name in made and "some" in made
    with pytest.raises(ConfigError, match=message) as error:
        made[name]
    assert package in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("second", "claim"), [(source("x", 51), "name x"), (source("y", 50), "number of a loss 50")]
)
def test_two_packages_with_one_claim_are_both_named(tmp_path, monkeypatch, second, claim):
    install(tmp_path, "own_first", source("x", 50), "x = own_first.objective:Own")
    name = "y" if 'name = "y"' in second else "x"
    install(tmp_path, "own_second", second, f"{name} = own_second.objective:Own")
    made = registered(monkeypatch, tmp_path)
    for either in {"x", name}:
        with pytest.raises(ConfigError, match=f"claim the same {claim}; uninstall or change one") as error:
            made[either]
        assert "own_first 1.2" in str(error.value) and "own_second 1.2" in str(error.value)


def run(*arguments: object, path: Path | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables["NUMBA_DISABLE_JIT"] = "1"  # compiling takes longer than so few samples
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)


def test_a_package_trains_and_its_absence_is_one_line(tmp_path, corpus):
    """In help, in a run, in its checkpoint; and when it is asked to write without the package."""
    packages, directory = tmp_path / "packages", tmp_path / "run"
    install(packages, "own_pack", source("of_package", 48), "of_package = own_pack.objective:Own")
    settings = small_run(corpus, directory)
    del settings["blank_infilling"], settings["data"]["validation"]
    short = {"objectives": {"of_package": 1}, "training": {"steps": 2}, "schedule": {"warmup_steps": 1}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(merge(settings, short)))
    assert "of_package" in run("pretrain_glm.py", "--help", path=packages).stdout
    trained = run("pretrain_glm.py", "--config", file, path=packages)
    assert trained.returncode == 0 and "step 2/2" in trained.stdout, trained.stderr
    assert find_manifest(directory).trainer_state().program["packages"] == {"of_package": "own_pack 1.2"}
    for command in (
        ("pretrain_glm.py", "--config", file, "training.steps=3"),
        ("scripts/generate.py", "--checkpoint", directory, "--text", "word1"),
    ):
        refused = run(*command)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
        assert "of_package" in refused.stderr and "package" in refused.stderr
    assert "own_pack 1.2" in refused.stderr  # a checkpoint names it


def test_ranks_compare_the_versions_of_packages(monkeypatch):
    name = "the package of blank_infilling"
    assert name not in facts(tiny(), "cpu")
    monkeypatch.setattr(Objectives, "package", lambda self, name: "own_pack 1.2")
    assert facts(tiny(), "cpu")[name] == "own_pack 1.2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\n@register  # comment\nclass Own(RowObjective)\n    pass\n", r"own.py:4: "),
        pytest.param(
            source("own", 3), "the losses causal (3) and own (3) have the same number", marks=pytest.mark.slow
        ),
    ],
)
def test_a_mistake_in_a_file_of_ours_is_one_line_everywhere(tmp_path, text, message):
    project = copied_project(tmp_path / "project")
    (project / "data_utils/objectives/own.py").write_text(text)
    done = run("pretrain_glm.py", "--help", cwd=project)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr
