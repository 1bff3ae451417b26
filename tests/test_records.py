"""Records name commits of this history, with their dates."""

import re

import pytest
from support.project import ROOT
from support.records import git

PAGES = [
    *sorted((ROOT / "docs/records").glob("*.md")),
    *(
        ROOT / name
        for name in ("docs/laptop.md", "docs/learning.md", "docs/lm_eval.md", "benchmarks/README.md")
    ),
]
OTHER_PROJECTS = {"7d2aeda8"}  # Megatron-LM
HASH = r"(?<![\w#/@.,-])(?:(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,10}|\d{7}(?= \(20))(?:-dirty)?\b"


def hashes(text):
    return [found for found in re.findall(HASH, text) if found not in OTHER_PROJECTS]


@pytest.fixture(scope="module")
def history():
    """The hash of each commit that this one descends from -> its date."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no clone with the whole history")
    return dict(line.split() for line in git("log", "--format=%H %cs").splitlines())


def date_of(found, history):
    return next((date for commit, date in history.items() if commit.startswith(found)), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commits_of_records_are_ancestors(page, history):
    found = dict.fromkeys(hashes(page.read_text(encoding="utf-8")))
    assert [commit for commit in found if date_of(commit, history) is None] == []


@pytest.mark.parametrize("name", ["parity", "planted_bugs"])
def test_tables_of_records_have_the_dates_of_their_commits(name, history):
    text = (ROOT / f"docs/records/{name}.md").read_text(encoding="utf-8")
    dated = re.findall(rf"({HASH}) \((\S+)\)", text)
    assert len(dated) == len(hashes(text)) > 20
    assert {commit: date_of(commit, history) for commit, _ in dated} == dict(dated)


def test_the_readme_counts_what_the_records_have():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    bugs = (ROOT / "docs/records/planted_bugs.md").read_text(encoding="utf-8")
    layouts = (ROOT / "docs/records/parity.md").read_text(encoding="utf-8")
    (caught,) = re.findall(r"^(\d+ of \d+) bugs are caught", bugs, re.M)
    cases, shipped = (
        sum(map(int, re.findall(r"^(\d+) cases", layouts, re.M))),
        bugs.count("](https://github.com/"),
    )
    assert f"[{caught} planted bugs]" in text and f", {shipped} of them from other" in text
    assert f"| {cases} combinations" in text


def test_commits_that_nobody_can_check_out_are_found(history):
    text = "Commit 623c4c63-dirty; commits 0000beef and 6616166 (2026-11-23), not 12,345,678 nor x#1234567 or 7d2aeda8."
    assert [date_of(found, history) for found in hashes(text)] == [None, None, "2026-11-23"]
