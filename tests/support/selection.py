"""Which of the collected tests a pytest runs: its share beside other pytests, and slow ones that the commit chooses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ONE_OF = 20  # slow tests: how many a seed chooses among


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection of tests")
    group.addoption(
        "--share", metavar="DIRECTORY", type=Path,
        help="run the tests together with another pytest of this option: files of tests are taken there, each once",
    )  # fmt: skip
    group.addoption(
        "--some-slow", metavar="SEED",
        help=f"with -m '': of the slow tests only one in {ONE_OF}, by their names and SEED; none that asks the index",
    )  # fmt: skip


def is_chosen(name: str, seed: str) -> bool:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]) % ONE_OF == 0


def leave_slow_ones(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("some_slow")
    if seed is None:
        return
    left = [
        item
        for item in items
        if item.get_closest_marker("slow")
        and (item.get_closest_marker("index") or not is_chosen(item.nodeid, seed))
    ]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in set(left)]


def shared(items: list[pytest.Item], directory: Path) -> Iterator[pytest.Item]:
    """The items of files that no other pytest has taken: one goes from the first file, the other from the last.

    So both end together, and each has most of its files from the same folders, whose fixtures it makes once.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = list(files)
    if not _take(directory / "the first file"):
        order.reverse()
    for file in order:
        if not _take(directory / hashlib.sha256(bytes(file)).hexdigest()):
            return
        yield from files[file]


def _take(directory: Path) -> bool:
    """Whether it is this process's: only one of several can make the directory."""
    try:
        directory.mkdir()
    except FileExistsError:
        return False
    return True


def run_share(session: pytest.Session) -> bool | None:
    """pytest's own loop over the tests (`_pytest.main.pytest_runtestloop`) for this pytest's share. None: no share."""
    directory = session.config.getoption("share")
    if directory is None or session.config.option.collectonly or session.testsfailed:
        return None
    mine = shared(session.items, directory)
    item = next(mine, None)
    while item is not None:
        following = next(mine, None)  # fixtures that it does not need end with this test
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def slow_but(quick: Iterable[Any], cases: Iterable[Any], *, of_several_names: bool = False) -> list[Any]:
    """Parameters of which only the quick ones run without `-m slow`. Raises AssertionError if one is not a case.

    Args: of_several_names: a case is a tuple of their values.
    """
    quick, cases = list(quick), list(cases)
    assert all(case in cases for case in quick)
    return [
        case
        if case in quick
        else pytest.param(*(case if of_several_names else [case]), marks=pytest.mark.slow)
        for case in cases
    ]
