#!/usr/bin/env python3
"""The proof of the tests: plants one bug at a time in a copy of the project and runs the tests that should catch it.

    python tests/support/planted.py --output docs/records/planted_bugs.md   # every bug
    python tests/support/planted.py --only "weight decay on norms"  # one of them; with --output, its row alone changes

A bug is an exact replacement in one file (support/plants/). First the chosen tests must pass in the copy as it is: a
test that fails anyway catches nothing. A bug counts as caught if one of its tests then fails, those that are marked
slow among them. A text that does not occur exactly once, a test that is not there and a copy that cannot be imported
are errors: such a bug would seem caught by anything.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_utils.common.errors import ConfigError, run_command
from support.plants.plants import PLANTS, Plant
from support.project import ROOT, copied_project
from support.records import commit_of_record

LIMIT_SECONDS = 900.0  # for the tests of one bug; tests with ranks have shorter limits
_TREES = ("tests", "scripts", "configs", "benchmarks", "docs")
_FILES = ("pyproject.toml", "README.md")
_BROKEN = re.compile(r"^E\s+(NameError|ImportError|ModuleNotFoundError|SyntaxError|IndentationError)", re.M)
_FAILED = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.M)


class PlantError(Exception):
    """The bug cannot be planted, or its tests say nothing."""


@dataclass(frozen=True)
class Result:
    plant: Plant
    caught_by: str | None  # the test that failed first
    seconds: float
    problem: str = ""  # why it says nothing


def copied_tree(directory: Path) -> Path:
    """A copy of the program with its tests, and with what numba has compiled already."""
    copied_project(directory)
    for name in _TREES:
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("*.tmp*"))
    for name in _FILES:
        shutil.copy2(ROOT / name, directory)
    return directory


def planted_text(plant: Plant, text: str) -> str:
    """The text of the plant's file with the bug. Raises PlantError unless what it replaces occurs once."""
    count = text.count(plant.old)
    if count != 1:
        raise PlantError(
            f"{plant.name}: {plant.file} has the text to be replaced {count} times:\n{plant.old}"
        )
    return text.replace(plant.old, plant.new)


@contextlib.contextmanager
def planted(plant: Plant, project: Path) -> Iterator[None]:
    """The bug is in the project within the context. Afterwards its file is as old as before: numba looks at that."""
    path = project / plant.file
    before, times = path.read_bytes(), path.stat()
    path.write_text(planted_text(plant, before.decode("utf-8")), encoding="utf-8")
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def run_tests(project: Path, tests: Sequence[str], seconds: float = LIMIT_SECONDS) -> tuple[int, str]:
    """Exit status and output of pytest, which has these seconds."""
    command = [sys.executable, "-m", "pytest", "-m", "", "-x", "-p", "no:cacheprovider", "--tb=short", *tests]
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_ADDOPTS")
    }
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}  # names of tests are not cut
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=seconds
    )
    return done.returncode, done.stdout + done.stderr


def require_clean(project: Path, plants: Sequence[Plant]) -> None:
    """Raise PlantError unless the tests of all bugs pass without any."""
    tests = list(dict.fromkeys(test for plant in plants for test in plant.tests))
    status, output = run_tests(project, tests, LIMIT_SECONDS * len(plants))
    if status:
        raise PlantError(f"tests fail without a bug:\n{_end(output)}")


def try_plant(plant: Plant, project: Path) -> Result:
    started = time.perf_counter()
    with planted(plant, project):
        status, output = run_tests(project, plant.tests)
    seconds = time.perf_counter() - started
    if status == 0:
        return Result(plant, None, seconds)
    failed = _FAILED.search(output)
    if status != 1 or failed is None or _BROKEN.search(output):
        raise PlantError(
            f"{plant.name}: its tests did not fail, but pytest ended with {status}:\n{_end(output)}"
        )
    return Result(plant, failed[1], seconds)


def _end(output: str) -> str:
    return "\n".join(output.splitlines()[-40:])


def results_of(plants: Sequence[Plant]) -> Iterator[Result]:
    """One after another, in one copy."""
    with tempfile.TemporaryDirectory(prefix="planted_") as directory:
        project = copied_tree(Path(directory) / "project")
        require_clean(project, plants)
        for plant in plants:
            started = time.perf_counter()
            try:
                yield try_plant(plant, project)
            except (PlantError, subprocess.TimeoutExpired) as error:
                yield Result(plant, None, time.perf_counter() - started, str(error))


# The table

INTRODUCTION = """# Planted bugs

Written by `python tests/support/planted.py --output docs/records/planted_bugs.md`.
`python -m pytest -m '' tests/test_planted.py` runs the same.

Each bug is put alone into a copy of the project, as a replacement of a few words, and the tests that should catch it
are run, also those of them that are marked slow: all pass without it, and one must fail with it.
{caught} of {count} bugs are caught. A row has the commit, its date, and the time of its tests on a busy machine.

Some of these bugs were in releases or main branches of other projects, where they silently trained worse models;
the column names the report. `tests/support/plants/plants.py` has the exact text of each.
"""


def row(result: Result, commit: str) -> str:
    """A line of the table."""
    plant = result.plant
    shipped = ""
    if plant.shipped:
        repository, number = plant.shipped.split("#")
        shipped = f"[{plant.shipped}](https://github.com/{repository}/issues/{number})"
    caught = "**not caught**" if result.caught_by is None else f"yes, by {_name(result.caught_by)}"
    return f"| {plant.name} | `{plant.file}` | {shipped} | {caught} | {commit} | {result.seconds:.0f} |"


def _name(test: str) -> str:
    """`file` and function of a test; parameters have characters that a table cannot hold."""
    file, function = test.split("[")[0].split("::")
    return f"`{function}` in `{file}`"


def rows_of(text: str) -> dict[str, str]:
    """The lines of a page's table by the names of their bugs."""
    return {line.split("|")[1].strip(): line for line in text.splitlines() if "| `" in line}


def page(rows: Mapping[str, str]) -> str:
    """The whole of docs/records/planted_bugs.md. Args: rows: by name; those of bugs that are no more are left out."""
    lines = [rows[plant.name] for plant in PLANTS if plant.name in rows]
    caught = sum(line.split("|")[4].strip().startswith("yes, by") for line in lines)
    introduction = INTRODUCTION.format(caught=caught, count=len(lines))
    head = ["", "| bug | planted in | shipped | caught | commit | seconds |", "|---|---|---|---|---|---|"]
    return "\n".join([introduction.rstrip("\n"), *head, *lines]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="BUG", help="only these (default: all)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the page there, not to the terminal"
    )
    options = parser.parse_args(arguments)
    known = {plant.name: plant for plant in PLANTS}
    for name in options.only or []:
        if name not in known:
            raise ConfigError(f"--only {name} is not known; choose from {', '.join(known)}.")
    if options.output is not None and not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: its directory does not exist; create it.")
    chosen = [known[name] for name in options.only] if options.only else PLANTS
    commit, missed, rows = commit_of_record() if options.output else "", 0, {}
    if options.only and options.output is not None and options.output.exists():
        rows = rows_of(options.output.read_text(encoding="utf-8"))
    for result in results_of(chosen):
        missed += result.caught_by is None
        rows[result.plant.name] = row(result, commit)
        print(rows[result.plant.name], result.problem, file=sys.stderr, flush=True)
    if options.output is None:
        print(page(rows))
    else:
        options.output.write_text(page(rows), encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    run_command(main)
