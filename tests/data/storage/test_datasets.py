"""Datasets in stores: pushed, verified, and copied to a node under cuts, kills and damage."""

import multiprocessing
import os
import shutil
import signal

import numpy as np
import pytest
from support.commands import forked, python
from support.data.corpora import build
from support.data.stores import serving
from support.waiting import wait_until

from data_utils.common import files
from data_utils.common.errors import ConfigError, DataError, run_command
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.local_copy import local_copy
from data_utils.dataset.manifest import read_manifest
from data_utils.dataset.verification import verify
from data_utils.loader.config import CorpusConfig, DataConfig
from data_utils.storage import objects

SUFFIXES = (".bin", ".idx", ".json")


@pytest.fixture
def dataset(tmp_path):
    """A dataset of several blocks of checksums, with ids that do not repeat in a block."""
    draw = np.random.default_rng(0)
    build(tmp_path / "d", [draw.integers(0, 50_000, 1000).tolist() for _ in range(2500)], vocab_size=50_001)
    return tmp_path / "d"


def run(*arguments):
    return python("scripts/dataset.py", *map(str, arguments))


def content(prefix):
    return {suffix: prefix.with_name(f"{prefix.name}{suffix}").read_bytes() for suffix in SUFFIXES}


@pytest.fixture
def server(dataset):
    with serving({f"/x/d{suffix}": data for suffix, data in content(dataset).items()}) as server:
        yield server


def test_a_copy_of_a_store_is_the_dataset_under_cuts(tmp_path, dataset, server, monkeypatch):
    server.cuts, server.busy = 0.85, 0.2
    copy = local_copy(f"{server.url}/x/d", tmp_path / "local")
    assert content(copy) == content(dataset)
    verify(IndexedDataset(copy))
    assert copy.name == local_copy(dataset, tmp_path / "near").name
    server.seen.clear()
    assert local_copy(f"{server.url}/x/d", tmp_path / "local") == copy
    assert all(path == "/x/d.json" for path, _, _ in server.seen)
    assert not list((tmp_path / "local").glob("*.partial"))


def sent(server):
    """Bytes that were asked for."""
    bounds = (asked.removeprefix("bytes=").split("-") for path, asked, _ in server.seen if path == "/x/d.bin")
    return sum(int(last) - int(first) + 1 for first, last in bounds)


def test_a_killed_copy_goes_on_with_the_blocks_that_are_right(tmp_path, dataset, server, monkeypatch):
    monkeypatch.setattr("data_utils.dataset.transfer.RANGE_BYTES", 1 << 20)
    size, url = len(content(dataset)[".bin"]), f"{server.url}/x/d"
    server.most_bytes = (3 << 20) + 100_000
    child = multiprocessing.get_context("fork").Process(target=local_copy, args=(url, tmp_path / "local"))
    child.start()
    last_range = size % (1 << 20)
    # All that the server sends at least: the ranges come in any order, and the shorter last one may be among the first.
    [partial] = wait_for_partial(tmp_path / "local", (2 << 20) + last_range)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    with partial.open("r+b") as file:
        file.write(b"wrong")  # what a disk may have lost
    server.most_bytes = None
    server.seen.clear()
    copy = local_copy(url, tmp_path / "local")
    assert content(copy) == content(dataset)
    assert 1 << 20 <= sent(server) <= size - (1 << 20) - last_range + 1


def test_a_copy_that_stopped_between_two_files_keeps_the_first(tmp_path, dataset, server, monkeypatch):
    """And needs no space for a second one."""
    size, url = len(content(dataset)[".bin"]), f"{server.url}/x/d"
    server.refuse["/x/d.idx"] = 403
    with pytest.raises(DataError, match=r"d.idx.* 403"):
        local_copy(url, tmp_path / "local")
    server.refuse.clear()
    server.seen.clear()
    free = len(content(dataset)[".idx"]) + (64 << 10)  # blocks of the disk
    assert free < size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(size, size, free))
    assert content(local_copy(url, tmp_path / "local")) == content(dataset)
    assert sent(server) <= 1  # what asks for its size


def test_a_local_copy_that_stopped_between_two_files_needs_no_space_for_a_second_one(
    tmp_path, dataset, monkeypatch
):
    copy = local_copy(dataset, tmp_path / "local")
    for suffix in (".idx", ".json"):
        copy.with_name(f"{copy.name}{suffix}").unlink()
    size = len(content(dataset)[".bin"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(size, size, size // 2))
    is_there = []

    def new_file(path):
        is_there.append(path.exists())
        return files.new_file(path)

    monkeypatch.setattr("data_utils.dataset.local_copy.new_file", new_file)
    assert content(local_copy(dataset, tmp_path / "local")) == content(dataset) and not any(is_there)


def wait_for_partial(directory, size):
    found = []

    def is_there():
        found[:] = [path for path in directory.glob("*.bin.partial") if path.stat().st_blocks * 512 >= size]
        return found

    wait_until(is_there)
    return found


def test_damage_in_a_store_is_one_line_and_what_is_right_stays(tmp_path, dataset, server):
    good = server.files["/x/d.bin"]
    server.files["/x/d.bin"] = good[: 3 << 20] + b"?" + good[(3 << 20) + 1 :]
    with pytest.raises(
        DataError, match=rf"x/d.bin is damaged: the block at byte {3 << 20} .*push the dataset"
    ):
        local_copy(f"{server.url}/x/d", tmp_path / "local")
    server.files["/x/d.bin"] = good
    assert content(local_copy(f"{server.url}/x/d", tmp_path / "local")) == content(dataset)
    server.files["/x/d.bin"] = good[:-2]
    with pytest.raises(DataError, match=r"x/d.bin has 4,999,998 bytes, but the manifest records 5,000,000"):
        local_copy(f"{server.url}/x/d", tmp_path / "other")
    del server.files["/x/d.json"]
    with pytest.raises(DataError, match=r"d.json"):
        local_copy(f"{server.url}/x/d", tmp_path / "other")


def test_links_in_the_place_of_a_partial_file_are_not_followed(tmp_path, dataset, server):
    name = local_copy(dataset, tmp_path / "near").name
    mine = tmp_path / "mine"
    mine.write_text("precious")
    planted = tmp_path / "local" / f"{name}.bin.partial"
    planted.parent.mkdir()
    planted.symlink_to(mine)
    with pytest.raises(DataError, match="symbolic link"):
        local_copy(f"{server.url}/x/d", tmp_path / "local")
    assert mine.read_text() == "precious"


def test_push_writes_the_manifest_last_and_replaces_only_when_asked(tmp_path, dataset, bucket):
    url = "s3://corpora/sets/d"
    assert "s3://corpora/sets/d" in run("push", dataset, "s3://corpora/sets/").stdout
    assert bucket.keys() == ["sets/d.bin", "sets/d.idx", "sets/d.json"]
    assert {suffix: bucket.get(f"sets/d{suffix}") for suffix in SUFFIXES} == content(dataset)
    for command in ("inspect", "verify"):
        assert "2,500 documents, 2,500,000 tokens" in run(command, url).stdout
    assert content(local_copy(url, tmp_path / "local")) == content(dataset)


def test_push_over_another_dataset(tmp_path, dataset, bucket):
    def push(prefix, *options):
        return run("push", prefix, "s3://corpora/d", *options)

    assert push(dataset).returncode == push(dataset).returncode == 0
    build(tmp_path / "e", [[1, 2, 3]])
    refused = push(tmp_path / "e")
    assert refused.returncode == 2 and "--overwrite" in refused.stderr
    assert read_manifest("s3://corpora/d") == read_manifest(dataset)
    assert push(tmp_path / "e", "--overwrite").returncode == 0
    assert IndexedDataset(local_copy("s3://corpora/d", tmp_path / "local")).document(0).tolist() == [1, 2, 3]


def test_a_stopped_push_opens_to_nobody(tmp_path, dataset, bucket):
    content_of_bin = bytearray(content(dataset)[".bin"])
    content_of_bin[7] ^= 1
    dataset.with_name("d.bin").write_bytes(content_of_bin)
    refused = run("push", dataset, "s3://corpora/d")
    assert refused.returncode == 2 and "block at byte 0" in refused.stderr
    assert "d.json" not in "".join(bucket.keys())
    with pytest.raises(DataError, match=r"the store has no s3://corpora/d.json"):
        local_copy("s3://corpora/d", tmp_path / "local")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("push", "d", "https://host/d"), "no bucket"),
        pytest.param(
            ("push", "d", "s3://"), "s3:// names no bucket; write s3://BUCKET/NAME", marks=pytest.mark.slow
        ),
        pytest.param(("push", "d", "hf://datasets/org/d"), "hf upload", marks=pytest.mark.slow),
        (("push", "d", "s3://key:CANARY@b/d"), "AWS_ACCESS_KEY_ID|environment"),
        pytest.param(("push", "d", "elsewhere"), "no bucket", marks=pytest.mark.slow),
        pytest.param(("stats", "s3://b/d"), "download its", marks=pytest.mark.slow),
        (("merge", "s3://b/d", "--output", "e"), "download its"),
    ],
)
def test_commands_that_need_files_or_buckets_say_so(dataset, arguments, words):
    done = forked("scripts/dataset.py", *arguments, cwd=dataset.parent)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "CANARY" not in done.stderr
    assert any(word in done.stderr for word in words.split("|")), done.stderr


def test_a_run_needs_a_directory_for_what_is_in_a_store():
    corpora = (CorpusConfig(prefix="s3://bucket/d"),)
    with pytest.raises(ConfigError, match=r"s3://bucket/d is in a store.*data.local_directory"):
        DataConfig(train=corpora)
    assert DataConfig(train=corpora, local_directory="/scratch").train[0].key == "d"
    for prefix in ("https://user:CANARY@host/d", "https://host/d?sig=CANARY"):
        with pytest.raises(ConfigError) as error:
            DataConfig(validation=(CorpusConfig(prefix=prefix),), local_directory="/scratch")
        assert "CANARY" not in str(error.value)


def test_attempts_of_a_copy_end_in_one_line(tmp_path, server, capfd):
    server.busy = 1.0
    with pytest.raises(SystemExit):
        run_command(lambda: local_copy(f"{server.url}/x/d", tmp_path / "local") and None)
    assert "10 attempts in a row" in capfd.readouterr().err
    assert objects.RETRY_POLICY.attempts == 10
