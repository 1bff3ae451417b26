"""A build that is continued with something else, or that meets another one."""

import os

import pytest
from support.data.builds import TIMEOUT, build, finished_shards, start
from support.data.byte_tokenizer import (
    ByteTokenizer,
    OtherTokenizer,
)
from support.data.corpora import to_jsonl
from support.waiting import wait_until

from data_utils.common.errors import DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.verification import verify
from data_utils.storage.objects import input_change

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


def test_inputs_that_need_too_large_a_plan_are_refused_before_the_work(tmp_path, monkeypatch):
    """The plan was written, and could not be read back at the end of the build."""
    for number in range(30):
        (tmp_path / f"{number}.jsonl").write_text(to_jsonl(["text"]))
    monkeypatch.setattr("data_utils.build.shards._MAX_BYTES", 1000)
    with pytest.raises(DataError, match=r"^30 input files need a plan of [\d,]+ bytes, more than the 1,000"):
        build(tmp_path / "*.jsonl", tmp_path / "out/c")
    assert not (tmp_path / "out/c.build").exists()


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: (raw / "3.jsonl").write_text("{}"), r"another version of input \S*/raw/3\.jsonl"),
        (lambda raw: (raw / "3.jsonl").unlink(), r"other input files, with \S*/raw/3\.jsonl;"),
        (lambda raw: (raw / "33.jsonl").write_text("{}"), r"other input files, without \S*/raw/33\.jsonl;"),
    ],
)
def test_the_one_file_that_differs_is_named(tmp_path, change, message):
    raw = tmp_path / "raw"
    raw.mkdir()
    for number in range(9):
        (raw / f"{number}.jsonl").write_text("{\n" if number == 8 else to_jsonl(["text"] * 30))
    with pytest.raises(DataError, match="malformed"):
        build(raw / "*.jsonl", tmp_path / "out/c")
    change(raw)
    with pytest.raises(DataError, match=f"was started with {message}"):
        build(raw / "*.jsonl", tmp_path / "out/c")


def test_the_order_of_inputs_is_compared():
    inputs = [["a", 1, 2], ["b", 3, 4]]
    assert input_change(inputs, inputs[::-1], "input files") == "other input files, in another order"


def test_an_input_that_changes_during_the_build_is_noticed(tmp_path, input_path):
    class Meddler(ByteTokenizer):
        def encode_batch(self, texts):
            os.utime(input_path, (1, 1))
            return super().encode_batch(texts)

    with pytest.raises(DataError, match=r"while the text was read there came another version of input"):
        build(input_path, tmp_path / "out/c", Meddler, shard_bytes=20_000)
    assert not list((tmp_path / "out").glob("*"))
    build(input_path, tmp_path / "out/c")  # as the message says


def test_a_damaged_shard_is_noticed(tmp_path, stopped):
    next((tmp_path / "out/c.build/shard-000000").glob("*.tokens")).write_bytes(b"x")
    with pytest.raises(DataError, match=r"shard-000000 is damaged.*--restart"):
        build(stopped, tmp_path / "out/c", on_bad_record="skip")
    build(stopped, tmp_path / "out/c", on_bad_record="skip", restart=True)


def test_a_directory_of_the_user_is_not_touched(tmp_path, input_path):
    (tmp_path / "c.build").mkdir()
    (tmp_path / "c.build/thesis.tex").write_text("precious")
    with pytest.raises(DataError, match=r"contains thesis\.tex"):
        build(input_path, tmp_path / "c", shard_bytes=1 << 20)
    assert (tmp_path / "c.build/thesis.tex").read_text() == "precious"


def test_a_second_build_at_the_same_time_is_refused(tmp_path, input_path):
    process = start(input_path, tmp_path / "out/c")
    wait_until(lambda: finished_shards(tmp_path / "out/c"))
    with pytest.raises(DataError, match="another process"):
        build(input_path, tmp_path / "out/c", split="", shard_bytes=2000)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors
    verify(IndexedDataset(tmp_path / "out/c"))
