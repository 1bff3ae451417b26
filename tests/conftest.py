"""Shared fixtures: a small WordPiece tokenizer, a small corpus, and the configuration of a very small model on it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support import cpu_features, gpus, package_index, remedies, selection
from support.project import small_corpus, small_run

import data_utils.common.entry  # noqa: F401

signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # Ctrl-C is pytest's, whatever entry points are imported
gpus.hide()
remedies.listen()
os.environ.pop("PYTEST_ADDOPTS", None)  # options of this pytest, not of those that tests start

# A busy machine may take its time over one example.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of every kind of tokenizer, each in a directory."""
    from support.data.tokenizer_files import write_all

    root = tmp_path_factory.mktemp("tokenizers")
    write_all(root)
    return root


@pytest.fixture
def cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU that the program believes to run on: its name in `cpu_features.CPUS`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        cpu_features.pretend(monkeypatch, request.param)
        yield request.param
    cpu_features.forget()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("each_cpu"):
        metafunc.fixturenames.append("cpu")
        metafunc.parametrize("cpu", cpu_features.DIFFERENT, indirect=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    return selection.run_share(session)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.leave_slow_ones(config, items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and gpus.count() == 0:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=gpus.NONE))
    for item in items:
        if item.get_closest_marker("index") and not package_index.is_asked():
            item.add_marker(pytest.mark.skip(reason=package_index.SKIPPED))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A test fails if the program advised a setting in it that cannot be pasted."""
    report = yield
    remedies.hear(report.capstdout, report.capstderr, report.caplog)
    wrong = remedies.false_remedies()
    if wrong and report.passed:
        report.outcome, report.longrepr = "failed", "\n".join(["an advised setting is refused:", *wrong])
    return report


def pytest_collection_finish() -> None:
    """Leave the imported modules to no collector: in each forked rank it copied all their pages, 0.4 s of work."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    kinds = (("GPU", gpus.NONE), ("index", package_index.SKIPPED), ("index", package_index.NO_ANSWER))
    for kind, reason in kinds:
        skipped = [r for r in terminalreporter.stats.get("skipped", []) if reason in str(r.longrepr)]
        if skipped:
            terminalreporter.write_line(f"{len(skipped)} {kind} tests skipped: {reason}")


@pytest.fixture
def visible_gpus(monkeypatch: pytest.MonkeyPatch) -> int:
    """Shows the GPUs to the processes that a test starts; their number."""
    gpus.show(monkeypatch)
    return gpus.count()


@pytest.fixture
def settings(corpus: Path, tmp_path: Path) -> dict:
    return small_run(corpus, tmp_path / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A function that gives `tmp_path/disk` a size and mount options."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = []

    def mount(options):
        change = f"{'remount,' if mounted else ''}{options}"
        command = ["mount", "-t", "tmpfs", "-o", change, "tmpfs", str(disk)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
        mounted.append(options)
        return disk

    yield mount
    if mounted:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def emulated_kernel(monkeypatch):
    """Lets a VarlenPlan run on CPU."""
    from support.transformer.attention import EmulatedKernel

    monkeypatch.setattr(
        "megatron_lite.transformer.attention_backends.varlen.varlen_kernel", lambda dtype: EmulatedKernel
    )
    monkeypatch.setattr(EmulatedKernel, "calls", 0)
    return EmulatedKernel
