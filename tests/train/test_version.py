"""A run records which program it was made by, also where there is no git."""

import subprocess
import tomllib

import pytest
from support.project import ROOT

from megatron_lite.telemetry import version
from megatron_lite.telemetry.version import describe, program


def git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", "-C", directory, *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2"\n')
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_a_checkout_has_a_commit_and_says_whether_it_was_changed(checkout):
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout / "new file").write_text("not of the commit")
    assert program(checkout) == {"version": "1.2", "commit": commit, "changed": False}
    (checkout / "pyproject.toml").write_text('[project]\nversion = "1.3"\n')
    assert program(checkout) == {"version": "1.3", "commit": commit, "changed": True}
    assert describe(program(checkout)) == f"1.3, commit {commit} with changes"


def test_this_project_is_found_without_an_installation(monkeypatch):
    monkeypatch.setattr(version.importlib.metadata, "version", lambda name: "of an installation")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert program()["version"] == project["version"]


def test_without_git_the_commit_is_unknown(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert program(checkout) == {"version": "1.2", "commit": None, "changed": None}
    assert describe(program(checkout)) == "1.2, commit unknown"


def test_a_copy_inside_another_repository_has_no_commit(checkout):
    (checkout / "copy").mkdir()
    assert program(checkout / "copy")["commit"] is None


def test_git_that_hangs_is_not_waited_for(checkout, tmp_path, monkeypatch):
    slow = tmp_path / "bin/git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(slow.parent), prepend=":")
    monkeypatch.setattr(version, "GIT_SECONDS", 0.2)
    assert program(checkout)["commit"] is None


def test_the_program_finds_its_own_checkout():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert version.ROOT == ROOT and program()["version"] == declared
