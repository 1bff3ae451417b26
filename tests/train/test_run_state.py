"""Each state of a run's directory, and what a start, `scripts/checkpoints.py` and the report do with it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import sys
from dataclasses import dataclass

import pytest
from support.distributed import run_ranks
from support.project import small_run
from support.training.training import fit, records

from data_utils.common.errors import CheckpointError
from data_utils.common.settings import merge
from megatron_lite.checkpoint.manifest import list_checkpoints
from megatron_lite.config.sections import CheckpointConfig
from megatron_lite.report.run import read_run
from megatron_lite.runtime.run_state import MEANINGS, Condition, Start, read_run_state
from pretrain_glm import require_start
from scripts import checkpoints


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run with checkpoints of steps 1, 2 and 3."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    changes = {"training": {"steps": 3}, "checkpoint": {"save_interval": 1, "keep_last": 0}}
    run_ranks(fit, 1, merge(small_run(corpus, directory), changes))
    return directory


def fit_and_log(context, tree):
    text = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(text))
    fit(context, tree)
    return text.getvalue()


def nothing(run):
    shutil.rmtree(run)


def before_the_first_save(run):
    """Records of a start, as of a run that was ended before it saved."""
    shutil.rmtree(run / "checkpoints")
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"checkpoint"' not in line]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def emptied_before_the_first_save(run):
    before_the_first_save(run)
    (run / "checkpoints").mkdir()


def partial(run):
    emptied_before_the_first_save(run)
    (run / "checkpoints/step_00000001.partial").mkdir()
    (run / "checkpoints/step_00000001.partial/rank_00000.safetensors").write_bytes(b"half")


def replaced(run):
    (run / "checkpoints/step_00000003").rename(run / "checkpoints/step_00000003.replaced")


def cut(run, steps=(3,)):
    for step in steps:
        os.truncate(run / f"checkpoints/step_{step:08d}/rank_00000.safetensors", 100)


def step_directory_is_a_dangling_link(run):
    shutil.rmtree(run / "checkpoints/step_00000003")
    (run / "checkpoints/step_00000003").symlink_to(run / "gone")


def renamed(run):
    (run / "checkpoints/step_00000001").rename(run / "checkpoints/step_00000039")


def emptied(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()


def lost_after_a_restart(run):
    """The save's own record is lost too, for example on a full disk."""
    before_the_first_save(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "start", "step": 3, "restarts": 1}\n')


def dangling(run):
    (run / "checkpoints").rename(run.parent / "scratch")
    (run / "checkpoints").symlink_to(run.parent / "not_mounted/checkpoints")


def circular(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to("checkpoints")


def run_itself_dangling(run):
    run.rename(run.parent / "scratch")
    run.symlink_to(run.parent / "not_mounted")


def linked(run):
    """A link that leads somewhere is as good as a directory."""
    (run / "checkpoints").rename(run.parent / "scratch")
    (run / "checkpoints").symlink_to(run.parent / "scratch")


def file_instead(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("")


def fifo_instead(run):
    shutil.rmtree(run / "checkpoints")
    os.mkfifo(run / "checkpoints")


def run_itself_a_file(run):
    shutil.rmtree(run)
    run.write_text("")


def unreadable(run):
    (run / "checkpoints").chmod(0)


def records_are_a_fifo(run):
    """Nothing waits for a writer that never comes."""
    emptied(run)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")


@dataclass
class Case:
    make: object
    condition: Condition
    continues_from: int = 0  # step
    says: str = ""  # in the refusal, or in the log
    is_run: bool = True  # whether the report can open it


CASES = [
    Case(nothing, Condition.NEVER_SAVED, is_run=False),
    Case(before_the_first_save, Condition.NEVER_SAVED),
    Case(emptied_before_the_first_save, Condition.FIRST_SAVE_FAILED),
    Case(partial, Condition.FIRST_SAVE_FAILED),
    Case(lambda run: None, Condition.SAVED, 3),
    Case(linked, Condition.SAVED, 3),
    Case(replaced, Condition.SAVED, 3),
    Case(cut, Condition.NEWEST_DAMAGED, 2, "has 100 bytes"),
    Case(step_directory_is_a_dangling_link, Condition.NEWEST_DAMAGED, 2, "No such file or directory"),
    Case(
        renamed,
        Condition.MISNAMED,
        3,
        "rename it to step_00000001",
    ),
    Case(lambda run: cut(run, (1, 2, 3)), Condition.NONE_VALID, says="none of the 3 checkpoints in"),
    Case(emptied, Condition.LOST, says="records a save, but"),
    Case(lambda run: shutil.rmtree(run / "checkpoints"), Condition.LOST, says="restore the checkpoints"),
    Case(lost_after_a_restart, Condition.LOST, says="metrics.jsonl away to start at step 0"),
    Case(dangling, Condition.DANGLING, says="not_mounted/checkpoints, which does not exist; mount or create"),
    Case(circular, Condition.DANGLING, says="checkpoints is a link to checkpoints, which"),
    Case(run_itself_dangling, Condition.DANGLING, says="not_mounted, which does not exist", is_run=False),
    Case(file_instead, Condition.NOT_A_DIRECTORY, says="checkpoints is not a directory; move it away"),
    Case(fifo_instead, Condition.NOT_A_DIRECTORY, says="checkpoints is not a directory"),
    Case(run_itself_a_file, Condition.NOT_A_DIRECTORY, says="run is not a directory", is_run=False),
    Case(unreadable, Condition.UNREADABLE, says="Permission denied"),
    Case(records_are_a_fifo, Condition.UNREADABLE, says="metrics.jsonl: not a regular file"),
]


def names(case):
    return f"{case.condition}: {case.make.__name__}".replace(": <lambda>", "")


@pytest.fixture
def prepared(trained, tmp_path, request):
    run = shutil.copytree(trained, tmp_path / "run")
    request.param.make(run)
    yield run, request.param
    with contextlib.suppress(OSError):
        (run / "checkpoints").chmod(0o700)


@contextlib.contextmanager
def as_nobody(case):
    """Root may read everything, so it gives that up."""
    drop = case.make is unreadable and os.geteuid() == 0
    if drop:
        os.seteuid(65534)
    try:
        yield
    finally:
        if drop:
            os.seteuid(0)


def listing(run):
    return {path: path.lstat().st_mtime_ns for path in run.rglob("*")} if run.is_dir() else {}


each_state = pytest.mark.parametrize("prepared", CASES, indirect=True, ids=names)


def test_each_state_is_tried():
    assert {case.condition for case in CASES} == set(Condition) == set(MEANINGS)


@each_state
def test_a_start_does_what_the_table_says(prepared, corpus):
    run, case = prepared
    expected = MEANINGS[case.condition].start
    if expected is Start.REFUSED:
        before = listing(run)
        with as_nobody(case), pytest.raises(CheckpointError) as refused:
            require_start(run, CheckpointConfig())
        assert case.says in str(refused.value) and "\n" not in str(refused.value)
        assert listing(run) == before
        return
    assert require_start(run, CheckpointConfig()).condition == case.condition
    changes = {"training": {"steps": 4}, "checkpoint": {"save_interval": 1, "keep_last": 0}}
    had_records = (run / "metrics.jsonl").exists()
    (log,) = run_ranks(fit_and_log, 1, merge(small_run(corpus, run), changes))
    first = case.continues_from + 1
    written = (run / "metrics.jsonl").read_text()
    assert list(records(run))[-(5 - first) :] == list(range(first, 5)), written
    assert len(list(run.glob("metrics_before_*"))) == (had_records and expected is Start.AT_STEP_0)
    assert (expected is Start.FALLS_BACK) == (case.says != "" and case.says in log)
    assert read_run_state(run).condition == (case.condition if case.make is renamed else Condition.SAVED)


@each_state
def test_rewind_does_what_the_table_says(prepared, monkeypatch, capsys):
    run, case = prepared
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", "rewind", str(run), "2"])
    before = listing(run)
    with as_nobody(case), pytest.raises(SystemExit) as ended:
        checkpoints.command()
    said = capsys.readouterr()
    if MEANINGS[case.condition].rewind:
        assert ended.value.code == 0 and "will resume from step 2" in said.out
        assert read_run_state(run).newest.step == 2 and [
            p.name for p in list_checkpoints(run / "checkpoints")
        ][-1:] == ["step_00000002"]
        return
    assert ended.value.code == 2 and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert case.says in said.err or not case.is_run
    assert listing(run) == before


RUNS = [case for case in CASES if case.is_run]


@pytest.mark.parametrize("prepared", RUNS, indirect=True, ids=names)
def test_list_and_the_report_say_so(prepared, monkeypatch, capsys):
    run, case = prepared
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", "list", str(run)])
    with as_nobody(case), pytest.raises(SystemExit) as ended:
        checkpoints.command()
    err = capsys.readouterr().err
    with as_nobody(case) if case.make is not unreadable else contextlib.nullcontext():
        notes = [note for note in read_run(run).notes if note.startswith("Checkpoints: ")]
    meaning = MEANINGS[case.condition]
    if case.make is unreadable and os.geteuid() == 0:
        return  # root reads it
    assert len(notes) == meaning.note and all(case.condition in note and case.says in note for note in notes)
    assert ended.value.code == (
        1 if meaning.start is Start.FALLS_BACK or case.condition == "none valid" else 2
    ) or (case.condition is Condition.SAVED and ended.value.code == 0)
    assert err.count("\n") == (0 if ended.value.code == 0 else err.count("damaged: ") or 1)
