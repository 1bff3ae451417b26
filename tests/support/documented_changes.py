"""The changes that docs/changes.md shows as unified diffs, and how they reach a copy of the project.

Run as a program it writes the page's diffs again, with the line numbers and the context of today's files, where
`patch` still applies them, with fuzz.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.project import ROOT

PAGE = ROOT / "docs/changes.md"
TOOLS = {"git apply": ("git", "apply", "--whitespace=error"), "patch -p1": ("patch", "-p1", "--fuzz=0")}


def sections() -> dict[str, str]:
    """Title -> text of each section of the page."""
    title, *rest = re.split(r"^## (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert title
    return dict(zip(rest[::2], rest[1::2], strict=True))


def diff_in(section: str) -> str:
    """The unified diff of a section as it stands there; "" where there is none."""
    found = re.search(r"^```diff\n(.*?)^```$", section, re.S | re.M)
    return found[1] if found else ""


def changed_files(diff: str) -> dict[str, bool]:
    """Each file that a diff changes -> whether it is a new one."""
    headers = re.findall(r"^--- (\S+)\n\+\+\+ b/(\S+)\n", diff, re.M)
    return {name: before == "/dev/null" for before, name in headers}


def apply(diff: str, project: Path, title: str, tool: str = "git apply", *options: str) -> None:
    """Apply a diff of the page to a copy of the project. Raises: AssertionError that names the section and the file."""
    done = _run([*TOOLS[tool], *options], project, diff)
    assert done.returncode == 0, f'docs/changes.md, "{title}": {done.stdout}{done.stderr}'


def _run(command: list[str], directory: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "GIT_CEILING_DIRECTORIES": str(directory.parent)}  # no repository above it
    return subprocess.run(command, cwd=directory, env=variables, input=given, capture_output=True, text=True)


def _written_again(diff: str, directory: Path, title: str) -> str:
    """The diff of what `patch` makes of the project's files."""
    before, after = directory / "a", directory / "b"
    for name, is_new in changed_files(diff).items():
        for copy in (before, after):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if not is_new:
                shutil.copy2(ROOT / name, copy / name)
    apply(diff, after, title, "patch -p1", "--fuzz=3", "--no-backup-if-mismatch")
    text = ""
    for name in changed_files(diff):
        command = ["git", "diff", "--no-index", "--no-prefix", f"a/{name}", f"b/{name}"]
        if not (before / name).exists():
            command[-2] = "/dev/null"
        text += re.sub(
            r"^(diff --git|index|new file mode) .*\n", "", _run(command, directory).stdout, flags=re.M
        )
    return re.sub(r"^ $", "", text, flags=re.M)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for title, section in sections().items():
        if diff := diff_in(section):
            with tempfile.TemporaryDirectory() as directory:
                page = page.replace(diff, _written_again(diff, Path(directory), title))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
