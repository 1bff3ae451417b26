"""A hang names the rank and the place, and ends the process, wherever it is."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.commands import forked
from support.distributed import _FORK, free_port, initialize
from support.project import ROOT
from support.training.training import make_trainer
from support.waiting import HANG_SECONDS, wait_until

from data_utils.common.errors import ExitStatus, RankError
from data_utils.common.settings import merge
from megatron_lite.checkpoint import write as checkpoint_write
from megatron_lite.config.sections import ParallelConfig, TimeoutsConfig
from megatron_lite.parallel.launch import Launch
from megatron_lite.runtime.heartbeats import Heartbeat, read_heartbeats, who_is_behind
from megatron_lite.runtime.watchdog import Section, Watchdog


def watch(trainer):
    """Usual limits, for a machine that may be busy; a test shortens one where it hangs."""
    trainer.watchdog = Watchdog(
        TimeoutsConfig().sections, trainer.directory, trainer.context.rank, trainer.context.world_size, 1
    )
    trainer.watchdog.joined()
    return trainer.watchdog._limits


def never_return():
    threading.Event().wait()


def train_with_a_hang(rank, port, tree):
    """Two ranks train; the second one's data never come at step 3."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    context = initialize(Launch(rank, 2, rank), ParallelConfig(), timeout_seconds=HANG_SECONDS)
    trainer = make_trainer(context, tree)
    limits, read = watch(trainer), trainer.train_data.batch

    def batch(indices):
        return never_return() if rank == 1 and indices[0] >= 2 * 8 else read(indices)

    def train_step():
        if trainer.progress.step == 2:
            limits["step"] = 3
        return step()

    step, trainer.train_step = trainer.train_step, train_step
    trainer.train_data.batch = batch
    trainer.fit()


def test_a_hang_of_one_rank_is_named_by_all_and_ends_all(settings, capfd):
    port = free_port()
    processes = [_FORK.Process(target=train_with_a_hang, args=(rank, port, settings)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG_SECONDS)
        process.kill()
    assert [process.exitcode for process in processes] == [ExitStatus.HUNG] * 2
    printed = capfd.readouterr().err
    for rank, place in ((0, "summing totals of all ranks"), (1, "reading data")):
        assert re.search(rf"\(step, step 3, {place}\) hangs: \d+ s, timeouts.step_seconds is 3\n", printed), (
            printed
        )
        assert f"rank {rank} compares heartbeats: 1 of 2 ranks wait for rank 1 on " in printed
    assert "in never_return" in printed and "in agree" in printed
    beats = read_heartbeats(Path(settings["run"]["directory"]) / "heartbeats")
    assert [(beat.rank, beat.step, beat.place) for beat in beats] == [
        (0, 3, "summing totals of all ranks"),
        (1, 3, "reading data"),
    ]


def train_until_a_rank_is_killed(rank, port, tree):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="3")
    context = initialize(Launch(rank, 3, rank), ParallelConfig(), timeout_seconds=HANG_SECONDS)
    trainer = make_trainer(context, tree)
    watch(trainer)
    with pytest.raises(RankError) as caught, trainer.watchdog.name_dead_ranks():
        trainer.fit()
    trainer.watchdog.enter(Section.EXIT)  # as pretrain_glm.py does
    # One write, as the program's own: `print` would write the line's end apart from the line.
    os.write(1, f"{rank} {caught.value.only_here} {caught.value}\n".encode())
    os._exit(int(caught.value.status))


def test_a_rank_that_is_killed_is_named(settings, capfd):
    port, tree = free_port(), merge(settings, {"training": {"steps": 1_000_000}})
    tree["batch"]["global_batch_size"] = 12
    ranks = [_FORK.Process(target=train_until_a_rank_is_killed, args=(rank, port, tree)) for rank in range(3)]
    for process in ranks:
        process.start()
    heartbeats = Path(settings["run"]["directory"]) / "heartbeats"
    try:
        wait_until(lambda: len(read_heartbeats(heartbeats)) == 3)
        ranks[0].kill()
        for process in ranks:
            process.join(HANG_SECONDS)
    finally:
        for process in ranks:
            process.kill()
    assert [process.exitcode for process in ranks] == [
        -signal.SIGKILL,
        ExitStatus.CRASHED,
        ExitStatus.CRASHED,
    ]
    lines = sorted(line for line in capfd.readouterr().out.splitlines() if "lost the connection" in line)
    assert [line.split()[:2] for line in lines] == [["1", "True"], ["2", "False"]]  # one of them reports it
    assert all(f"rank 0 on {socket.gethostname()} (" in line for line in lines), lines
    assert all(f"process {ranks[0].pid}, has died" in line for line in lines), lines
    assert all(
        re.search(r"rank 0 on \S+ \(step, .*\), last heartbeat \d+ s ago, process", line) for line in lines
    ), lines


def train_while_writing_hangs(tree):
    """The disk never answers the first save, which is made in the background."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1")
    context = initialize(Launch(0, 1, 0), ParallelConfig(), timeout_seconds=HANG_SECONDS)
    trainer = make_trainer(context, tree)
    limits = watch(trainer)

    def write(*arguments):
        limits["checkpoint"] = 3
        never_return()

    checkpoint_write._write_rank = write
    trainer.fit()


def test_a_save_in_the_background_that_hangs_is_named_and_ends_the_run(settings, capfd):
    changes = {"training": {"steps": 1000}, "checkpoint": {"save_interval": 20, "asynchronous": True}}
    process = _FORK.Process(target=train_while_writing_hangs, args=(merge(settings, changes),))
    process.start()
    process.join(HANG_SECONDS)
    process.kill()
    assert process.exitcode == ExitStatus.HUNG
    printed = capfd.readouterr().err
    named = (
        r"\(checkpoint, step \d+, writing step_00000020\) hangs: \d+ s, timeouts.checkpoint_seconds is 3\n"
    )
    assert re.search(named, printed), printed
    assert "in never_return" in printed and "compares" not in printed
    metrics = Path(settings["run"]["directory"], "metrics.jsonl").read_text()
    assert '"step": 21' in metrics  # training went on meanwhile


def start(directory, program, limit=1.0, backstop=30.0):
    """A Python process with a watchdog whose sections may last `limit` seconds, which then runs `program`."""
    head = f"""
import ctypes, os, threading, time
from pathlib import Path
from megatron_lite.runtime import watchdog
from megatron_lite.runtime.watchdog import Section, Watchdog
watchdog.BACKSTOP_SECONDS, watchdog.EXIT_SECONDS, watchdog.COMPARE_SECONDS = {backstop}, 1.0, 0.3
dog = Watchdog({{"setup": {limit}, "step": {limit}}}, Path({str(directory)!r}), 0, 1, 0.5)
dog.joined()
"""
    return subprocess.run(
        [sys.executable, "-c", head + program], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "GLM_STATUS_FILE": str(directory / "status")},
    )  # fmt: skip


def test_set_up_has_a_limit_too_and_the_status_is_reported(tmp_path):
    done = start(tmp_path, "dog.at('opening datasets'); time.sleep(60)")
    assert done.returncode == ExitStatus.HUNG
    assert "(setup, step 0, opening datasets) hangs" in done.stderr
    assert "all 1 ranks are at the same point" in done.stderr
    assert (tmp_path / "status").read_text() == f"{int(ExitStatus.HUNG)}\n"


def test_storage_that_fails_under_a_mapped_file_says_where(tmp_path):
    """A page that is gone: the kernel answers the same for one that the disk cannot read."""
    program = f"""
import mmap
path = Path({str(tmp_path)!r}) / "corpus.bin"
path.write_bytes(bytes(2 * mmap.PAGESIZE))
with path.open("rb") as file:
    tokens = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(path, 0)
def read_tokens():
    return tokens[mmap.PAGESIZE]
read_tokens()
"""
    done = start(tmp_path, program, limit=60)
    assert done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr and "in read_tokens" in done.stderr


@pytest.mark.slow
def test_native_code_that_keeps_the_interpreters_lock_is_ended_too(tmp_path):
    done = start(
        tmp_path, "dog.enter(Section.STEP); time.sleep(0.7); ctypes.PyDLL(None).sleep(60)", 2.0, backstop=1.0
    )
    assert done.returncode == ExitStatus.CRASHED
    assert "Timeout (0:00:0" in done.stderr and 'File "<string>"' in done.stderr


@pytest.mark.parametrize(
    "done, status",
    [pytest.param("", ExitStatus.CRASHED, marks=pytest.mark.slow), ("dog.done(75)", ExitStatus.STOPPED)],
)
def test_an_interpreter_that_does_not_end_is_ended_with_the_status_of_the_work(tmp_path, done, status):
    program = f"{done}\ndog.enter(Section.EXIT)\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    ended = start(tmp_path, program)
    assert ended.returncode == status and "in _shutdown" in ended.stderr
    assert ended.stderr.startswith("rank 0 has finished, but did not exit within 1 s; killing it\n")


def test_sections_that_keep_within_their_limits_are_left_alone(tmp_path):
    (tmp_path / "config.yaml").touch()  # the run has begun
    # 3.6 s in steps of 0.6 s, under a limit of 3 s: it starts again with each section
    program = "for step in range(6): dog.enter(Section.STEP, 'a', step); time.sleep(0.6)"
    done = start(tmp_path, program + "\ndog.enter(Section.EXIT)", limit=3.0)
    assert (done.returncode, done.stderr) == (0, "")
    (beat,) = read_heartbeats(tmp_path / "heartbeats")
    assert beat.section == "exit" and beat.step == 5 and beat.passed == 7


def test_the_beginning_of_a_save_is_noted_at_once(tmp_path):
    """A rank that dies there is named with that place, and not with one that it left seconds ago."""
    (tmp_path / "config.yaml").touch()
    program = (
        "dog._limits['checkpoint'] = 9.0; dog.enter(Section.CHECKPOINT, 'saving', 7); os.kill(os.getpid(), 9)"
    )
    assert start(tmp_path, program, limit=60).returncode == -signal.SIGKILL
    (beat,) = read_heartbeats(tmp_path / "heartbeats")
    assert (beat.section, beat.place, beat.step) == ("checkpoint", "saving", 7)


def test_an_unwritable_run_directory_does_not_matter(tmp_path):
    (tmp_path / "heartbeats").write_text("a file, not a directory")
    done = start(tmp_path, "time.sleep(60)")
    assert done.returncode == ExitStatus.HUNG and "no heartbeat from 1 of 1 ranks" in done.stderr


def beat(rank, passed, place="p"):
    return Heartbeat(rank, f"host{rank}", 1, Section.STEP, place, 7, passed, 1.0, time.time())


def test_the_rank_that_has_passed_the_fewest_places_is_the_one_to_look_at():
    assert who_is_behind([beat(0, 9), beat(1, 8, "reading data"), beat(2, 9)], 3) == (
        "2 of 3 ranks wait for rank 1 on host1 (step, step 7, reading data)"
    )
    assert "all 2 ranks" in who_is_behind([beat(0, 9), beat(1, 9)], 2)
    assert "no heartbeat from 1 of 3 ranks, first [1]" in who_is_behind([beat(0, 9), beat(2, 9)], 3)
    assert "all 1 ranks" in who_is_behind([beat(0, 9), beat(5, 1)], 1)  # left by a run on more ranks


def test_the_script_shows_those_behind_first_and_ignores_damaged_files(tmp_path):
    directory = tmp_path / "heartbeats"
    directory.mkdir()
    for item in (beat(0, 9), beat(1, 8, "reading data")):
        (directory / f"rank_{item.rank:05d}.json").write_text(json.dumps(item.__dict__))
    (directory / "rank_00002.json").write_text("{")
    shown = forked("scripts/report.py", "--heartbeats", str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    first, second = shown.stdout.splitlines()[1:]
    assert first.split()[:2] == ["1", "7"] and first.endswith("reading data") and second.split()[0] == "0"
    none = forked("scripts/report.py", "--heartbeats", str(directory))
    assert none.returncode == 2 and none.stderr.count("\n") == 1 and "holds no run" in none.stderr


def test_a_heartbeat_gives_a_terminal_no_commands(tmp_path):
    (tmp_path / "heartbeats").mkdir()
    evil = replace(beat(0, 9, "\x1b]0;title\x07 reading"), host="\x1b[2J", section="a\nb")
    (tmp_path / "heartbeats/rank_00000.json").write_text(json.dumps(evil.__dict__))
    done = forked("scripts/report.py", str(tmp_path), "--heartbeats")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2, done.stderr
    assert (
        all(sign.isprintable() for line in done.stdout.splitlines() for sign in line)
        and "\\x1b[2J" in done.stdout
    )


def test_collectives_wait_longer_than_any_section():
    timeouts = TimeoutsConfig(checkpoint_seconds=7200)
    assert timeouts.collective_seconds == 7260
    assert set(timeouts.sections) == {section.value for section in Section} - {"exit"}


def test_a_rank_that_ends_between_two_looks_is_not_dead(tmp_path, monkeypatch):
    """Its heartbeat is read before it says that it ends, and its process is looked at after it has ended."""
    looks = [
        [SimpleNamespace(rank=1, section=section, process_has_died=True)]
        for section in ("step", Section.EXIT)
    ]
    monkeypatch.setattr(Watchdog, "_watch", lambda self: None)  # it would end this process after a minute
    dog = Watchdog({"setup": 60}, tmp_path, 0, 2, 0.5)
    monkeypatch.setattr(dog, "_heartbeats", lambda: looks.pop(0))
    assert dog.dead_ranks() == []
    monkeypatch.setattr(
        dog, "_heartbeats", lambda: [SimpleNamespace(rank=1, section="step", process_has_died=True)]
    )
    assert [beat.rank for beat in dog.dead_ranks()] == [1]
