"""The changes that docs/changes.md shows as diffs without line numbers, and how they reach a copy of the project."""

from __future__ import annotations

import re
from pathlib import Path

from support.project import ROOT

Changes = dict[str, list[tuple[str, str]]]  # file -> what stands there, once, and what replaces it


def sections() -> dict[str, str]:
    """Title -> text of each section of the page."""
    page = (ROOT / "docs/changes.md").read_text(encoding="utf-8")
    title, *rest = re.split(r"^## (.*)\n", page, flags=re.M)
    assert title
    return dict(zip(rest[::2], rest[1::2], strict=True))


def changes_in(section: str) -> Changes:
    """What the diff of a section says; {} where there is none."""
    diff = re.search(r"```diff\n(.*?)```", section, re.S)
    changes: Changes = {}
    for part in re.split(r"^--- ", diff[1] if diff else "", flags=re.M)[1:]:
        name, *hunks = re.split(r"^@@.*\n", part, flags=re.M)
        changes[name.strip()] = [(_side(hunk, " -"), _side(hunk, " +")) for hunk in hunks]
    return changes


def _side(hunk: str, marks: str) -> str:
    """The lines that stand in the file before (" -") or after (" +") the change; an empty line may lack its blank."""
    return "".join(
        (line[1:] or "\n") for line in hunk.splitlines(keepends=True) if (line.strip("\n") or " ")[0] in marks
    )


def apply(changes: Changes, project: Path, title: str) -> None:
    """Write the changed files. Raises AssertionError that names what the page has and a file has not just once."""
    for name, replacements in changes.items():
        file = project / name
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        for old, new in replacements:
            count = text.count(old) if old else 0
            is_new = not old and not file.exists()
            assert is_new or count == 1, (
                f'docs/changes.md, "{title}": {name} has these lines {count} times, not once:\n{old or new}'
            )
            text = text.replace(old, new) if old else new
        file.write_text(text, encoding="utf-8")
