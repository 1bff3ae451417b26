"""The tests catch bugs: every planted one still applies, and a test fails with it (support/planted.py)."""

from __future__ import annotations

import functools
import re

import pytest
from support import planted
from support.plants.plants import PLANTS, Plant
from support.project import ROOT

from data_utils.common.errors import ConfigError


@pytest.fixture(scope="module")
def collected(request):
    """A file -> the ids of its tests with their parameters, as pytest collects them. Nothing runs."""

    @functools.cache
    def of_file(file):
        module = pytest.Module.from_parent(request.session, path=ROOT / file)
        return {item.nodeid for item in request.session.genitems(module)}

    return of_file


def absent(tests, collected):
    """Those of the tests that are not there. Files are imported only for names with parameters."""
    missing = []
    for test in tests:
        file, _, function = test.split("[")[0].partition("::")
        source = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else None
        there = source is not None and (not function or f"\ndef {function}(" in source)
        if not there or ("[" in test and test not in collected(file)):
            missing.append(test)
    return missing


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_bug_still_applies(plant, collected):
    """Its text occurs once, and its tests exist."""
    text = (ROOT / plant.file).read_text(encoding="utf-8")
    assert planted.planted_text(plant, text) != text
    assert absent(plant.tests, collected) == []
    assert re.fullmatch(r"([\w.-]+/[\w.-]+#\d+)?", plant.shipped)


def test_a_misspelt_test_is_absent(collected):
    """In its file, its function or its parameters."""
    name = "tests/test_planted.py::test_a_bug_that_proves_nothing_is_an_error"
    right = ["tests/test_planted.py", name, f"{name}[change1-times]"]
    assert absent(right, collected) == []
    wrong = ["tests/test_plant.py", name.replace("planted", "plant"), name[:-1], f"{name}[change1-time]"]
    assert absent([*right, *wrong], collected) == wrong


def test_the_page_lists_every_bug_as_caught():
    """After a change of the bugs: python tests/support/planted.py --output docs/records/planted_bugs.md"""
    page = (ROOT / "docs/records/planted_bugs.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if "| `" in line]
    assert [row[1:3] for row in rows] == [[plant.name, f"`{plant.file}`"] for plant in PLANTS]
    assert all(row[4].startswith("yes, by `test_") for row in rows)


SMALL = Plant("sums are differences", "sums.py", "a + b", "a - b", ("test_sums.py",))
TESTS = """import sums

def test_one():
    assert sums.sum_of(1, 2) == 3

def test_zero():
    assert sums.sum_of(1, 0) == 1
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "sums.py").write_text("def sum_of(a, b):\n    return a + b\n")
    (tmp_path / "test_sums.py").write_text(TESTS)
    return tmp_path


def test_a_bug_is_caught_or_not_and_leaves_nothing(project):
    """By the test that notices it; the file is as before, with its time, which numba's cache depends on."""
    before = (project / "sums.py").stat()
    assert planted.try_plant(SMALL, project).caught_by == "test_sums.py::test_one"
    blind = Plant(**{**vars(SMALL), "tests": ("test_sums.py::test_zero",)})
    assert planted.try_plant(blind, project).caught_by is None
    after = (project / "sums.py").stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
    assert "a + b" in (project / "sums.py").read_text()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"old": "a * b"}, "has the text to be replaced 0 times"),
        ({"old": "a"}, "times"),
        pytest.param({"new": "a - c"}, "did not fail", marks=pytest.mark.slow),
        pytest.param({"new": "a -"}, "did not fail", marks=pytest.mark.slow),
        pytest.param({"tests": ("test_sums.py::test_absent",)}, "did not fail", marks=pytest.mark.slow),
    ],
)
def test_a_bug_that_proves_nothing_is_an_error(project, change, message):
    """Its text is not there, the copy cannot be imported, or the test does not exist."""
    with pytest.raises(planted.PlantError, match=message):
        planted.try_plant(Plant(**{**vars(SMALL), **change}), project)


def test_one_bug_changes_its_row_alone(monkeypatch, tmp_path):
    """The rows keep the order of the bugs, each with the commit at which it ran."""
    first, second, third = PLANTS[:3]
    monkeypatch.setattr(planted, "commit_of_record", lambda: "new")
    monkeypatch.setattr(planted, "results_of", lambda plants: [planted.Result(plants[0], None, 1.0)])
    rows = {
        plant.name: planted.row(planted.Result(plant, "a.py::test_it", 1.0), "old")
        for plant in (third, first)
    }
    path = tmp_path / "page.md"
    path.write_text(planted.page(rows | {"gone": "| gone | `a.py` |  | yes, by `test_it` | old | 1 |"}))
    assert planted.main(["--only", second.name, "--output", str(path)]) == 1
    found = planted.rows_of(path.read_text())
    assert list(found) == [first.name, second.name, third.name]
    assert found.items() > rows.items() and "| **not caught** | new |" in found[second.name]
    assert "2 of 3 bugs" in path.read_text()


def test_tests_that_fail_anyway_catch_nothing(project):
    (project / "test_sums.py").write_text("def test_one():\n    assert False\n")
    with pytest.raises(planted.PlantError, match="tests fail without a bug"):
        planted.require_clean(project, [SMALL])


def test_the_command_refuses_at_once_what_it_cannot_do():
    with pytest.raises(ConfigError, match="--only a bug is not known"):
        planted.main(["--only", "a bug"])
    with pytest.raises(ConfigError, match="does not exist"):
        planted.main(["--output", "absent/page.md"])


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project for all bugs, one after another."""
    return planted.copied_tree(tmp_path_factory.mktemp("planted") / "project")


@pytest.mark.slow
@pytest.mark.parametrize("name", [plant.name for plant in PLANTS])
def test_a_bug_is_caught(copy, name):
    """Its tests pass without it, and one fails with it."""
    (plant,) = (plant for plant in PLANTS if plant.name == name)
    planted.require_clean(copy, [plant])
    assert planted.try_plant(plant, copy).caught_by is not None
