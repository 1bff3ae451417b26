"""What a build must survive: kills at any moment, bad records anywhere, full disks, changed inputs.

The tests that start whole processes run a few cases; the marker `slow` runs them all.
"""

import gzip
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from concurrent.futures.process import _ExecutorManagerThread
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from support.byte_tokenizer import (
    AnnouncingTokenizer,
    ByteTokenizer,
    CountingTokenizer,
    DyingTokenizer,
    HungryTokenizer,
    OtherTokenizer,
)
from support.corpora import files, make, texts_of, to_jsonl
from support.project import ROOT
from support.waiting import random_delay, wait_until

from data_utils.base.errors import DataError
from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.text.documents import Block, parse_block

DRIVER = ROOT / "tests/support/build_driver.py"
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
SPLIT = "a=0.5,b=0.5"
MARK = "BUILD_OF_TEST"  # an environment variable by which children of children are found
TIMEOUT = 120  # seconds; no build here takes more than a few


def build(path, output, tokenizer=ByteTokenizer, **options):
    options = {"shard_bytes": 400, "split": SPLIT, **options}
    return build_corpus(BuildConfig(inputs=[str(path)], output=str(output), **options), tokenizer)


def outputs(directory):
    """The finished files, without the working directory and partial files."""
    return {name: data for name, data in files_only(directory).items() if not name.endswith(".partial")}


def files_only(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


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
    """For every k: die before the k-th step. Visible is old, new or nothing; a rerun gives new."""
    # A kill loses no written page, so nothing is lost by not waiting for the disk.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for name in ("old", "new"):
        (tmp_path / f"{name}.jsonl").write_text(to_jsonl(f"{name} {i}" for i in range(40)))
        build(tmp_path / f"{name}.jsonl", tmp_path / name / "c", deduplicate=True)
    options = {"deduplicate": True, "overwrite": rebuild}
    seen, step, status = set(), 0, None
    while status != 0:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        if rebuild:
            shutil.copytree(tmp_path / "old", tmp_path / "out")

        def work(step=step):
            kill_at_step(step)
            build(tmp_path / "new.jsonl", tmp_path / "out/c", **options)

        status = run_in_fork(work)
        assert status in (0, -signal.SIGKILL)
        for split in "ab":
            seen.add(state_of(tmp_path / f"out/c_{split}", tmp_path, split))
        if status:
            rerun(tmp_path, options)
        assert files(tmp_path / "out") == files(tmp_path / "new"), step
        step += 1
    assert seen == ({"old", "absent", "new"} if rebuild else {"absent", "new"})
    assert step > 40  # the steps were counted


def state_of(prefix, tmp_path, split):
    try:
        dataset = IndexedDataset(prefix)
    except DataError:
        return "absent"
    for name in ("old", "new"):
        built = IndexedDataset(tmp_path / name / f"c_{split}")
        if dataset.manifest == built.manifest and dataset.tokens.tolist() == built.tokens.tolist():
            dataset.verify()
            return name
    return "mixed"


def rerun(tmp_path, options):
    """The same command again. Only a build that was complete may refuse, because its output exists."""
    try:
        build(tmp_path / "new.jsonl", tmp_path / "out/c", **options)
    except DataError as error:
        assert "already exists" in str(error) and not (tmp_path / "out/c.build/plan.json").exists()
        shutil.rmtree(tmp_path / "out/c.build", ignore_errors=True)


def start(path, output, tokenizer="SlowTokenizer", workers=2, ranks=0, **options):
    config = {
        "inputs": [str(path)],
        "output": str(output),
        "workers": workers,
        "shard_bytes": 2000,
        **options,
    }
    command = [sys.executable, str(DRIVER), json.dumps(config), tokenizer]
    if ranks:
        command = [MPIRUN, "-n", str(ranks), *command, "mpi"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: str(output)},
    )


def members(output):
    """The processes that `start` started for an output, and their children, as far as they still run."""
    mark = f"{MARK}={output}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes().split(b"\0") and "Z" not in state_of_process(path):
                found.append(int(path.name))
        except OSError:  # gone in between, or of another user
            continue
    return sorted(found)


def state_of_process(path):
    return (path / "stat").read_text().rpartition(")")[2].split()[0]


def finished_shards(output):
    return len(list(Path(f"{output}.build").glob("shard-??????")))


@pytest.fixture
def input_path(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_text(to_jsonl(f"{i} " * 100 for i in range(200)))
    return path


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


def test_an_interrupted_build_goes_on_with_the_missing_shards(tmp_path, input_path):
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


def pool_is_broken():
    managers = [thread for thread in threading.enumerate() if isinstance(thread, _ExecutorManagerThread)]
    pools = [manager.executor_reference() for manager in managers]
    return all(pool is None or pool._broken for pool in pools)


@pytest.mark.parametrize("moment", ["before the second starts", "while the second starts"])
def test_a_worker_that_dies_before_all_have_started(tmp_path, monkeypatch, moment):
    """The pool of Python 3.11 starts workers one by one; one that comes after the break it would join for ever."""
    original, started = SpawnProcess.start, []
    loaded = tmp_path / "loaded"
    loaded.mkdir()
    monkeypatch.setenv("ANNOUNCED", str(loaded))

    def kill_the_first():
        if started:
            os.kill(started[0].pid, signal.SIGKILL)
            wait_until(pool_is_broken)

    def start_slowly(process):
        if moment.startswith("before"):
            kill_the_first()
        original(process)
        if moment.startswith("while"):
            wait_until((loaded / str(process.pid)).exists)  # before that it would die by itself
            kill_the_first()
        started.append(process)

    monkeypatch.setattr(SpawnProcess, "start", start_slowly)
    (tmp_path / "a.jsonl").write_text(to_jsonl(["x" * 100] * 30))

    def work():
        with pytest.raises(DataError, match="worker process died"):
            build(tmp_path / "a.jsonl", tmp_path / "out/c", AnnouncingTokenizer, workers=2)
        wait_until(lambda: not multiprocessing.active_children())

    assert run_in_fork(work, seconds=60) == 0


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
    """Let this process have so many bytes of memory beyond what it has now."""
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
    block = Block("a.jsonl", "jsonl", 0, 1, b'{"text": "' + b"x" * (96 << 20) + b'"}', 0, 0)

    def work():
        limit_memory(4 << 20)
        with pytest.raises(MemoryError):
            parse_block(block)

    assert run_in_fork(work) == 0


# ------------------------------------------------------------------------------------------------------------
# A build that is continued with something else


@pytest.fixture
def stopped(tmp_path):
    """A build with finished shards that a bad record in the last one stopped."""
    path = tmp_path / "input.jsonl"
    path.write_text(to_jsonl(f"text {i}" for i in range(50)) + "{\n")
    with pytest.raises(DataError, match=r"input\.jsonl:51: malformed"):
        build(path, tmp_path / "out/c")
    assert finished_shards(tmp_path / "out/c") > 1
    return path


@pytest.mark.parametrize(
    ("tokenizer", "options", "message"),
    [
        (OtherTokenizer, {}, r"another tokenizer \(bytes bytes-1\)"),
        (ByteTokenizer, {"split_seed": 1}, "split_seed 0 instead of 1"),
        (ByteTokenizer, {"text_key": "body"}, "text_key 'text' instead of 'body'"),
        (ByteTokenizer, {"shard_bytes": 500}, "shard_bytes 400 instead of 500"),
        (ByteTokenizer, {"deduplicate": True}, "deduplicate False instead of True"),
    ],
)
def test_another_build_over_a_stopped_one_is_refused(tmp_path, stopped, tokenizer, options, message):
    with pytest.raises(DataError, match=f"was started with {message}.*--restart"):
        build(stopped, tmp_path / "out/c", tokenizer, **options)
    assert build(stopped, tmp_path / "out/c", on_bad_record="skip").finished_before > 0


def test_a_changed_input_is_refused_and_a_restart_helps(tmp_path, stopped):
    stopped.write_text(to_jsonl(f"text {i}" for i in range(51)))
    with pytest.raises(DataError, match=r"another version of input .*input\.jsonl.*--restart"):
        build(stopped, tmp_path / "out/c")
    report = build(stopped, tmp_path / "out/c", restart=True)
    assert report.finished_before == 0 and sum(report.documents.values()) == 51
    stopped.unlink()


def test_an_input_that_changes_during_the_build_is_noticed(tmp_path, input_path):
    class Meddler(ByteTokenizer):
        def encode_batch(self, texts):
            os.utime(input_path, (1, 1))
            return super().encode_batch(texts)

    with pytest.raises(DataError, match="another version of input"):
        build(input_path, tmp_path / "out/c", Meddler, shard_bytes=20_000)
    assert outputs(tmp_path / "out") == {}


def test_a_damaged_shard_is_noticed(tmp_path, stopped):
    next((tmp_path / "out/c.build/shard-000000").glob("*.tokens")).write_bytes(b"x")
    with pytest.raises(DataError, match=r"shard-000000 is damaged.*--restart"):
        build(stopped, tmp_path / "out/c", on_bad_record="skip")
    build(stopped, tmp_path / "out/c", on_bad_record="skip", restart=True)


def test_a_directory_of_the_user_is_not_touched(tmp_path, input_path):
    (tmp_path / "c.build").mkdir()
    (tmp_path / "c.build/thesis.tex").write_text("precious")
    with pytest.raises(DataError, match=r"holds thesis\.tex"):
        build(input_path, tmp_path / "c", shard_bytes=1 << 20)
    assert (tmp_path / "c.build/thesis.tex").read_text() == "precious"


def test_a_second_build_at_the_same_time_is_refused(tmp_path, input_path):
    process = start(input_path, tmp_path / "out/c")
    wait_until(lambda: finished_shards(tmp_path / "out/c"))
    with pytest.raises(DataError, match="another process"):
        build(input_path, tmp_path / "out/c", split="", shard_bytes=2000)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors
    IndexedDataset(tmp_path / "out/c").verify()


# ------------------------------------------------------------------------------------------------------------
# Bad records

BAD_LINES = {
    "malformed_json": b'{"text": "x", }',
    "invalid_utf8": b'{"text": "\xff\xfe"}',
    "byte_order_mark": b'\xef\xbb\xbf{"text": "x"}',
    "lone_surrogate": b'{"text": "\\ud83d"}',
    "control_character": b'{"text": "a\x00b"}',
    "not_an_object": b'["text"]',
    "missing_field": b'{"txt": "x"}',
    "field_not_text": b'{"text": null}',
}
PLACES = {"start": 0, "middle": 30, "end": 60}
GOOD = [b'{"text": "fine record number %d"}' % i for i in range(60)]


def write_with(path, bad, at):
    """60 good records and one bad one before the record `at`; returns the line of the bad one."""
    lines = [*GOOD[:at], bad, *GOOD[at:]]
    data = b"\n".join(lines) + b"\n"
    path.write_bytes(
        b"\xef\xbb\xbf" + data if not at else data
    )  # a first record is not the start of the file
    return at + 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_record_anywhere(tmp_path, kind, place):
    path = tmp_path / "bad.jsonl"
    line = write_with(path, BAD_LINES[kind], PLACES[place])
    with pytest.raises(DataError, match=rf"bad\.jsonl:{line}: "):
        build(path, tmp_path / "out/c", split="")
    report = build(path, tmp_path / "out/c", split="", on_bad_record="skip")
    check_skipped(report.counts.bad, tmp_path / "out/c", {kind: 1}, [line])


def check_skipped(bad, prefix, kinds, lines):
    dataset = IndexedDataset(prefix)
    assert bad == dataset.manifest["bad_records"] == kinds
    assert [int(example.split(":")[1]) for example in dataset.manifest["bad_record_examples"]] == lines
    assert texts_of(prefix) == [json.loads(line)["text"] for line in GOOD]


CASES = [("middle", 4, 0), ("end", 2, 2)]
CASES += [
    pytest.param(place, workers, ranks, marks=pytest.mark.slow)
    for place in PLACES
    for workers, ranks in ((4, 0), (1, 2))
]


@pytest.mark.parametrize(("place", "workers", "ranks"), CASES)
def test_bad_records_in_many_processes(tmp_path, place, workers, ranks):
    """All kinds at once: right counts, right places, the same bytes as one process makes; and no hang."""
    if ranks and MPIRUN is None:
        pytest.skip("there is no mpirun")
    path = tmp_path / "bad.jsonl"
    at = PLACES[place]
    data = b"\n".join([*GOOD[:at], *BAD_LINES.values(), *GOOD[at:]]) + b"\n"
    path.write_bytes(b"\xef\xbb\xbf" + data if not at else data)
    options = {"tokenizer": "ByteTokenizer", "workers": workers, "ranks": ranks, "shard_bytes": 300}
    process = start(path, tmp_path / "out/c", **options)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2 and errors.count("\n") == 1, errors
    first = int(errors.split("bad.jsonl:")[1].split(":")[0])
    assert at < first <= at + len(BAD_LINES)  # shards are done in any order, so it need not be the first
    process = start(path, tmp_path / "out/c", on_bad_record="skip", **options)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors
    kinds = dict.fromkeys(BAD_LINES, 1)
    check_skipped(kinds, tmp_path / "out/c", kinds, [at + 1 + i for i in range(len(BAD_LINES))])
    build(path, tmp_path / "expected/c", split="", on_bad_record="skip")
    assert files(tmp_path / "out") == files(tmp_path / "expected")
    assert not members(tmp_path / "out/c")


@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun")
def test_an_error_on_one_rank_ends_all(tmp_path, input_path):
    process = start(input_path, tmp_path / "out/c", "MissingOnSecondRank", workers=1, ranks=2)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    assert errors == "error: tokenizer vocab.txt does not exist; copy it to this node.\n"
    assert not (tmp_path / "out").exists()


def test_a_cut_off_last_record(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(GOOD) + b'\n{"text": "fi')
    with pytest.raises(DataError, match=r"bad\.jsonl:61: .*the file ends inside this record"):
        build(path, tmp_path / "out/c")


def test_a_large_document_in_the_middle(tmp_path):
    path = tmp_path / "large.jsonl"
    texts = ["before", "word " * 2_500_000, "after"]
    path.write_text(to_jsonl(texts))
    build(path, tmp_path / "out/c", split="", shard_bytes=1 << 20)
    assert texts_of(tmp_path / "out/c") == texts


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
    with pytest.raises(DataError, match=r"No space left on device.*free some space and run again"):
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
