"""Builds that are killed at any moment, run out of memory or disk, or lose a worker.

The tests that start whole processes run a few cases; the marker `slow` runs them all.
"""

import gzip
import os
import random
import resource
import shutil
import signal
import traceback
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from support.data.builds import (
    MPIRUN,
    TIMEOUT,
    build,
    files_only,
    finished_shards,
    members,
    outputs,
    start,
)
from support.data.byte_tokenizer import (
    CountingTokenizer,
    DyingTokenizer,
    HungryTokenizer,
)
from support.data.corpora import files, make, texts_of, to_jsonl
from support.waiting import random_delay, wait_until

from data_utils.common.errors import DataError
from data_utils.corpus.documents import RecordBlock, parse_block
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.verification import verify


def run_in_fork(work, seconds=0):
    """Run `work` in a copy of this process; returns its exit status, negative for a signal (SIGALRM: too late)."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(seconds)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_step(number):
    """Kill this process before its `number`-th step on disk."""
    left = [number]

    def counted(function):
        def wrapper(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapper

    for name in ("rename", "replace", "fsync", "unlink", "mkdir", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize("rebuild", [False, True])
def test_a_kill_at_any_step_on_disk(tmp_path, monkeypatch, rebuild):
    """For every k: die before the k-th step. Visible is old, new or nothing; a rerun gives new, or refuses new."""
    # A kill loses no written page, so nothing is lost by not waiting for the disk.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for name in ("old", "new"):
        (tmp_path / f"{name}.jsonl").write_text(to_jsonl(f"{name} {i}" for i in range(40)))
        build(tmp_path / f"{name}.jsonl", tmp_path / name / "c", deduplicate=True)
    options = {"deduplicate": True, "overwrite": rebuild}
    seen, step, status, done = set(), 0, None, 0
    while status != 0:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        if rebuild:
            shutil.copytree(tmp_path / "old", tmp_path / "out")

        def work(step=step):
            kill_at_step(step)
            build(tmp_path / "new.jsonl", tmp_path / "out/c", **options)

        status = run_in_fork(work)
        assert status in (0, -signal.SIGKILL)
        states = {state_of(tmp_path / f"out/c_{split}", tmp_path, split) for split in "ab"}
        seen |= states
        directory, manifest = tmp_path / "out/c.build", tmp_path / "out/c_a.json"
        if (
            status
            and not rebuild
            and states == {"new"}
            and not (directory.exists() and any(directory.iterdir()))
        ):
            with pytest.raises(DataError, match="already exists"):  # killed when it had removed all
                build(tmp_path / "new.jsonl", tmp_path / "out/c", **options)
        elif status:  # the same command again
            is_done, written = (
                (directory / "done.json").exists(),
                manifest.exists() and manifest.stat().st_mtime_ns,
            )
            report = build(tmp_path / "new.jsonl", tmp_path / "out/c", **options)
            assert (report is None) == is_done and (not is_done or manifest.stat().st_mtime_ns == written)
            done += is_done
            assert not directory.exists()
        assert outputs(tmp_path / "out") == files(tmp_path / "new"), step
        step += 1
    assert seen == ({"old", "absent", "new"} if rebuild else {"absent", "new"})
    assert step > 40 and done > 5  # the steps were counted


def state_of(prefix, tmp_path, split):
    try:
        dataset = IndexedDataset(prefix)
    except DataError:
        return "absent"
    for name in ("old", "new"):
        built = IndexedDataset(tmp_path / name / f"c_{split}")
        if dataset.manifest == built.manifest and dataset.tokens.tolist() == built.tokens.tolist():
            verify(dataset)
            return name
    return "mixed"


KILLS = [*range(3), 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4, *range(6, 100)))]


@pytest.mark.parametrize("seed", KILLS)
def test_a_kill_of_any_process_at_a_random_moment(tmp_path, input_path, seed):
    """Parent, worker, rank or helper; the others end by themselves, and the next run completes the build."""
    rng = random.Random(seed)
    ranks = 2 if seed % 6 == 5 else 0
    if ranks and MPIRUN is None:
        pytest.skip("there is no mpirun")
    output = tmp_path / "out/c"
    process = start(input_path, output, ranks=ranks)
    wait_until(lambda: len(members(output)) > 1 or process.poll() is not None)
    if seed % 2:
        wait_until(lambda: finished_shards(output) or process.poll() is not None)
    random_delay(rng, 1.5)
    victims = members(output)
    if victims:
        os.kill(rng.choice(victims), signal.SIGKILL)
    _, errors = process.communicate(timeout=TIMEOUT)
    if not ranks:  # mpirun has its own words and status for a rank that was killed
        assert process.returncode in (0, 2, -signal.SIGKILL), errors
        assert process.returncode != 2 or errors.count("\n") == 1, errors
    wait_until(lambda: not members(output))
    build(input_path, tmp_path / "expected/c", split="", shard_bytes=1 << 20)
    expected = files(tmp_path / "expected")
    assert outputs(tmp_path / "out").items() <= expected.items()  # nothing partial under a final name
    if Path(f"{output}.build/plan.json").exists() or not Path(f"{output}.json").exists():
        before = finished_shards(output)
        report = build(input_path, output, shard_bytes=2000, split="")
        assert report.finished_before == before
    assert files_only(tmp_path / "out") == expected


def test_an_interrupted_build_continues_with_the_missing_shards(tmp_path, input_path):
    process = start(input_path, tmp_path / "out/c")
    wait_until(lambda: finished_shards(tmp_path / "out/c") >= 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGINT and "interrupted" in errors, errors
    wait_until(lambda: not members(tmp_path / "out/c"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["c.build"]
    CountingTokenizer.texts = 0
    options = {"shard_bytes": 2000, "split": ""}
    report = build(input_path, tmp_path / "out/c", CountingTokenizer, **options)
    assert 2 <= report.finished_before < report.shards
    assert 0 < CountingTokenizer.texts < 200
    build(input_path, tmp_path / "expected/c", split="", shard_bytes=1 << 20)
    assert files(tmp_path / "out") == files(tmp_path / "expected")


@pytest.mark.parametrize("seed", [2, 5])
def test_a_build_interrupted_while_its_workers_start_is_one_line(tmp_path, input_path, seed):
    """A worker has the handlers of the command until its own are set."""
    process = start(input_path, tmp_path / "out/c")
    wait_until(lambda: len(members(tmp_path / "out/c")) > 1)
    random_delay(random.Random(seed), 0.7)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGINT
    assert errors.startswith("interrupted") and errors.count("\n") == 1, errors


@pytest.mark.parametrize(
    ("ends", "how"),
    [("status", "status 9"), ("SIGKILL", "SIGKILL"), ("SIGSEGV", "SIGSEGV"), ("SIGABRT", "SIGABRT")],
)
def test_a_worker_that_dies_is_an_error_that_names_the_record(tmp_path, ends, how):
    texts = ["x" * 100] * 30 + [f"die {ends} " + "y" * 1000] + ["x" * 100] * 30
    size = len(to_jsonl([texts[30]]))
    message = (
        rf"died \({how}\) at .*input\.jsonl:31: a record of {size:,} bytes; if memory ran out, .*--workers"
    )
    with pytest.raises(DataError, match=message):
        make(tmp_path, texts, DyingTokenizer, workers=2)
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"corpus.build"}
    make(tmp_path, texts)
    assert texts_of(tmp_path / "out/corpus") == texts


@pytest.mark.parametrize("workers", [0, 1])
def test_a_document_beyond_the_memory_is_an_error_that_names_it(tmp_path, workers):
    texts = ["x" * 100] * 30 + ["hungry " + "y" * 1000] + ["x" * 100] * 30
    size = len(to_jsonl([texts[30]]))
    message = rf"memory ran out at .*input\.jsonl:31: a record of {size:,} bytes; .*split the record"
    with pytest.raises(DataError, match=message):
        make(tmp_path, texts, HungryTokenizer, workers=workers)
    assert outputs(tmp_path / "out") == {} and not list((tmp_path / "out").glob("*.partial"))
    make(tmp_path, texts)
    assert texts_of(tmp_path / "out/corpus") == texts


def limit_memory(more):
    """Limit this process to a number of bytes beyond the memory that it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@pytest.mark.parametrize("name", ["large.txt", "large.txt.gz", "large.txt.zst", "large.parquet"])
def test_a_large_document_under_a_memory_limit(tmp_path, name):
    """96 MB, first whole, and then with 130 MB to spare: enough to begin to read it, not to tokenize it."""
    path, text = tmp_path / name, "word " * 19_000_000
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), path)
    else:
        compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
        path.write_bytes(compress(text.encode()))
    del text

    def work():
        limit_memory(130 << 20)
        with pytest.raises(DataError, match=rf"memory ran out at .*{name}:1: "):
            build(path, tmp_path / "out/c", split="")

    assert run_in_fork(work, seconds=60) == 0
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_json_record_beyond_the_memory_is_not_called_malformed():
    """Else `--on-bad-record skip` would leave a good document out."""
    block = RecordBlock("a.jsonl", "jsonl", 0, 1, b'{"text": "' + b"x" * (96 << 20) + b'"}', 0, 0)

    def work():
        limit_memory(4 << 20)
        with pytest.raises(MemoryError):
            parse_block(block)

    assert run_in_fork(work) == 0


# ------------------------------------------------------------------------------------------------------------
# Disks


# What is written when the disk is full, and a size at which that happens: 10,000 documents of 2 tokens need
# 80 kB in shards, then 40 kB for tokens and 40 kB for lengths, then 200 kB for the index.
@pytest.mark.parametrize(("kilobytes", "resumes"), [(60, False), (140, True), (300, True)])
def test_a_full_disk_is_one_error_and_loses_nothing(tmp_path, small_disk, kilobytes, resumes):
    path = tmp_path / "input.jsonl"
    path.write_text(to_jsonl("xyz"[i % 3] for i in range(10_000)))
    options = {"split": "", "shard_bytes": 100_000}
    disk = small_disk(f"size={kilobytes}k")
    with pytest.raises(DataError, match=r"No space left on device.*free some space"):
        build(path, disk / "c", **options)
    assert outputs(disk) == {}
    small_disk("size=4m")
    report = build(path, disk / "c", **options)
    assert (report.finished_before == report.shards) == resumes
    build(path, tmp_path / "expected/c", split="", shard_bytes=1 << 20)
    assert files(disk) == files(tmp_path / "expected")


def test_a_read_only_target_is_one_error(tmp_path, input_path, small_disk):
    disk = small_disk("size=1m")
    small_disk("ro")
    with pytest.raises(DataError, match="Read-only file system"):
        build(input_path, disk / "c")
