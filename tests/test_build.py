import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from byte_tokenizer import ByteTokenizer, DyingTokenizer, NarrowTokenizer, SilentTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils import build
from data_utils.build import BuildConfig, build_corpus, parse_split, split_rule
from data_utils.documents import read_blocks
from data_utils.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_lite.errors import ConfigError, DataError

SPLIT = "train=0.8,validation=0.1,test=0.1"


def write_corpus(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def make(tmp_path, texts, make_tokenizer=ByteTokenizer, name="corpus", **options):
    path = write_corpus(tmp_path / "input.jsonl", texts)
    config = BuildConfig(inputs=[path], output=str(tmp_path / "out" / name), **options)
    return build_corpus(config, make_tokenizer)


def texts_of(prefix):
    dataset = IndexedDataset(prefix)
    return [bytes(dataset.document(i)[:-1].tolist()).decode() for i in range(len(dataset))]


def files(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks from a small corpus."""
    monkeypatch.setattr(build, "read_blocks", lambda *arguments: read_blocks(*arguments, block_bytes=500))


def test_documents_in_order_each_with_eos(tmp_path):
    texts = ["one", "zwölf", "three\nlines"]
    report = make(tmp_path, texts)
    dataset = IndexedDataset(tmp_path / "out/corpus")
    assert texts_of(tmp_path / "out/corpus") == texts
    assert [dataset.document(i)[-1] for i in range(3)] == [256] * 3
    dataset.verify()
    dataset.require_tokenizer("bytes-1", 257, 256)
    assert sum(report.documents.values()) == 3 and sum(report.tokens.values()) == dataset.num_tokens == 23
    assert report.text_bytes == 20
    manifest = dataset.manifest
    assert manifest["documents_end_with_eos"] and manifest["tokenizer"]["config"] == {"kind": "bytes"}
    assert manifest["sources"] == [
        {"path": str(tmp_path / "input.jsonl"), "bytes": (tmp_path / "input.jsonl").stat().st_size}
    ]


def test_any_number_of_workers_gives_the_same_bytes(tmp_path, small_blocks):
    texts = [f"document {i} " * (i % 7 + 1) for i in range(400)] + ["", "  "]
    for workers in (1, 2, 3):
        make(tmp_path, texts, split=SPLIT, workers=workers)
        (tmp_path / "out").rename(tmp_path / str(workers))
    assert len(files(tmp_path / "1")) == 9
    assert files(tmp_path / "1") == files(tmp_path / "2") == files(tmp_path / "3")


def test_splits_share_the_documents(tmp_path):
    texts = [f"document {i}" for i in range(2000)]
    make(tmp_path, texts, split=SPLIT)
    parts = [texts_of(tmp_path / f"out/corpus_{name}") for name in ("train", "validation", "test")]
    assert sorted(text for part in parts for text in part) == sorted(texts)
    for part, fraction in zip(parts, (0.8, 0.1, 0.1), strict=True):
        order = [texts.index(text) for text in part]
        assert order == sorted(order)
        # 5 standard deviations of the binomial distribution
        assert abs(len(part) - 2000 * fraction) < 5 * (2000 * fraction * (1 - fraction)) ** 0.5
    assert IndexedDataset(tmp_path / "out/corpus_test").manifest["split"] == {
        "name": "test",
        "rule": SPLIT,
        "seed": 0,
    }


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_the_split_depends_on_the_text_alone(text):
    config = BuildConfig(inputs=["x"], output="x", split="a=0.5,b=0.5")
    assert split_rule(config).split_of(text) == split_rule(config).split_of(text) in (0, 1)


def test_another_seed_gives_another_split():
    def splits(seed):
        rule = split_rule(BuildConfig(inputs=["x"], output="x", split="a=0.5,b=0.5", split_seed=seed))
        return [rule.split_of(str(i)) for i in range(100)]

    assert splits(0) == splits(0) != splits(1)


@pytest.mark.parametrize(
    "text",
    ["train", "train=", "train=x", "train=0.5", "a=0.5,a=0.5", "a=1.5,b=-0.5", "a/b=1", "a=0,b=1", "a=nan"],
)
def test_split_text_is_checked(text):
    with pytest.raises(ConfigError, match="split"):
        parse_split(text)


def test_split_names_and_fractions():
    assert parse_split("") == {"": 1.0}
    assert parse_split("train=0.7,test=0.2,dev=0.1") == {"train": 0.7, "test": 0.2, "dev": 0.1}


def test_options_are_checked():
    for options in ({"workers": 0}, {"output": "a/"}, {"output": ""}, {"on_bad_record": "maybe"}):
        with pytest.raises(ConfigError):
            BuildConfig(**{"inputs": ["x"], "output": "x", **options})


@pytest.mark.parametrize("texts", [[], ["", " "]])
def test_an_empty_corpus_is_an_error(tmp_path, texts):
    with pytest.raises(DataError, match="no document with tokens"):
        make(tmp_path, texts)
    assert files(tmp_path / "out") == {}


def test_texts_without_tokens_count_as_empty(tmp_path):
    with pytest.raises(DataError, match=r"\(2 empty documents"):
        make(tmp_path, ["a", "b"], SilentTokenizer)


def test_an_empty_split_is_an_error(tmp_path):
    with pytest.raises(DataError, match="split corpus_test would receive none of the 1 documents"):
        make(tmp_path, ["only"], split="train=0.999999999,test=0.000000001")
    assert files(tmp_path / "out") == {}


def test_existing_output_needs_overwrite(tmp_path):
    make(tmp_path, ["old"])
    before = files(tmp_path / "out")
    with pytest.raises(DataError, match=r"corpus\.bin already exists.*--overwrite"):
        make(tmp_path, ["new"])
    with pytest.raises(DataError, match="outside the vocabulary"):
        make(tmp_path, ["new"], NarrowTokenizer, overwrite=True)
    assert files(tmp_path / "out") == before
    make(tmp_path, ["new"], overwrite=True)
    assert texts_of(tmp_path / "out/corpus") == ["new"]


def test_a_crash_between_two_splits_never_mixes_two_builds(tmp_path, monkeypatch):
    make(tmp_path, [f"old {i}" for i in range(50)], split="a=0.5,b=0.5")
    finish, calls = IndexedDatasetWriter.finish, []

    def finish_once(writer, manifest):
        calls.append(writer)
        if len(calls) == 2:
            raise RuntimeError("crash")
        finish(writer, manifest)

    monkeypatch.setattr(IndexedDatasetWriter, "finish", finish_once)
    with pytest.raises(RuntimeError, match="crash"):
        make(tmp_path, [f"new {i}" for i in range(50)], split="a=0.5,b=0.5", overwrite=True)
    assert texts_of(tmp_path / "out/corpus_a")[0].startswith("new")
    with pytest.raises(DataError, match="does not exist"):
        IndexedDataset(tmp_path / "out/corpus_b")


def test_an_input_is_never_overwritten(tmp_path):
    path = write_corpus(tmp_path / "corpus.json", ["precious"])
    config = BuildConfig(inputs=[path], output=str(tmp_path / "corpus"), overwrite=True)
    with pytest.raises(DataError, match=r"corpus\.json is also an input"):
        build_corpus(config, ByteTokenizer)
    assert list(files(tmp_path)) == ["corpus.json"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_record_stops_or_is_counted(tmp_path, small_blocks, workers):
    path = tmp_path / "bad.jsonl"
    good = b'{"text": "fine and long enough for some blocks"}\n' * 50
    path.write_bytes(good + b"{nonsense\n" + good + b'{"text": 1}\n')
    options = {"inputs": [str(path)], "output": str(tmp_path / "out/corpus"), "workers": workers}
    with pytest.raises(DataError, match=r"bad\.jsonl:51: malformed JSON"):
        build_corpus(BuildConfig(**options), ByteTokenizer)
    assert files(tmp_path / "out") == {}
    report = build_corpus(BuildConfig(**options, on_bad_record="skip"), ByteTokenizer)
    assert report.counts.bad == {"malformed_json": 1, "field_not_text": 1}
    manifest = IndexedDataset(tmp_path / "out/corpus").manifest
    assert manifest["bad_records"] == report.counts.bad and manifest["num_documents"] == 100
    assert any("malformed_json" in line for line in report.lines())


def test_a_worker_that_dies_is_an_error_and_no_hang(tmp_path, small_blocks):
    with pytest.raises(DataError, match="worker process died"):
        make(tmp_path, ["x" * 100] * 50 + ["die"] + ["x" * 100] * 50, DyingTokenizer, workers=2)
    assert files(tmp_path / "out") == {}
    assert multiprocessing.active_children() == []


SLOW_BUILD = """
import sys
from functools import partial
from byte_tokenizer import SlowTokenizer
from data_utils import build
if __name__ == "__main__":
    build.read_blocks = partial(build.read_blocks, block_bytes=500)
    config = build.BuildConfig(inputs=[sys.argv[1]], output=sys.argv[2], workers=2)
    build.build_corpus(config, SlowTokenizer)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_shows_no_dataset_and_leaves_no_process(tmp_path, signal_number):
    path = write_corpus(tmp_path / "input.jsonl", ["x" * 400] * 2000)
    script = tmp_path / "slow_build.py"
    script.write_text(SLOW_BUILD)
    repository = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(
        [sys.executable, str(script), path, str(tmp_path / "out/corpus")],
        env={**os.environ, "PYTHONPATH": f"{repository}:{repository / 'tests'}"},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    partial_lengths = tmp_path / "out/corpus.bin.partial"
    _wait_until(lambda: partial_lengths.exists() and partial_lengths.stat().st_size)  # workers have answered
    if signal_number == signal.SIGINT:
        os.killpg(process.pid, signal_number)  # as a terminal does
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal_number, errors
    _wait_until(lambda: not _alive(process.pid))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert not names & {"corpus.bin", "corpus.idx", "corpus.json"}
    assert signal_number == signal.SIGKILL or not names


def _wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(group):
    """The processes of a group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # gone in between
            continue
        if int(process_group) == group and state != "Z":
            found.append(path.parent.name)
    return found
