import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.byte_tokenizer import ByteTokenizer, EndlessTokenizer, NarrowTokenizer, SilentTokenizer
from support.data.corpora import files, make, texts_of, write_corpus

from data_utils.build.config import parse_split, split_rule
from data_utils.build.corpus import BuildConfig, build_corpus
from data_utils.common.errors import ConfigError, DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import SUFFIXES
from data_utils.dataset.verification import verify
from data_utils.dataset.writer import IndexedDatasetWriter

SPLIT = "train=0.8,validation=0.1,test=0.1"
SPLIT_NAMES = ("train", "validation", "test")


def test_documents_in_order_each_with_eos(tmp_path):
    texts = ["one", "zwölf", "three\nlines"]
    report = make(tmp_path, texts)
    dataset = IndexedDataset(tmp_path / "out/corpus")
    assert texts_of(tmp_path / "out/corpus") == texts
    assert [dataset.document(i)[-1] for i in range(3)] == [256] * 3
    verify(dataset)
    dataset.require_tokenizer("bytes-1", 257, 256)
    assert sum(report.documents.values()) == 3 and sum(report.tokens.values()) == dataset.num_tokens == 23
    assert report.text_bytes == 20
    manifest = dataset.manifest
    assert manifest["documents_end_with_eos"] and manifest["tokenizer"]["config"] == {"kind": "bytes"}
    assert manifest["sources"] == [
        {"path": str(tmp_path / "input.jsonl"), "bytes": (tmp_path / "input.jsonl").stat().st_size}
    ]


def test_documents_of_a_vocabulary_without_eos(tmp_path):
    make(tmp_path, ["one", "two", "three"], EndlessTokenizer)
    dataset = IndexedDataset(tmp_path / "out/corpus")
    assert [bytes(dataset.document(i).tolist()).decode() for i in range(3)] == ["one", "two", "three"]
    assert dataset.manifest["documents_end_with_eos"] is False
    verify(dataset)
    dataset.require_tokenizer("bytes-1", 257, EndlessTokenizer.special.eos)


def test_any_number_of_workers_and_shards_gives_the_same_bytes(tmp_path):
    texts = [f"document {i} " * (i % 7 + 1) for i in range(400)] + ["", "  "]
    expected = {}
    for workers, shard_bytes in ((0, 500), (1, 700), (3, 3000), (1, 1 << 20), (2, 7777)):
        make(tmp_path, texts, split=SPLIT, workers=workers, shard_bytes=shard_bytes)
        made = files(tmp_path / "out")
        assert set(made) == {f"corpus_{name}{suffix}" for name in SPLIT_NAMES for suffix in SUFFIXES}
        expected = expected or made
        assert made == expected
        shutil.rmtree(tmp_path / "out")


def make_of_files(directory, count, output, **options):
    """Build of `count` files with a text each."""
    directory.mkdir(exist_ok=True)
    for number in range(count):
        write_corpus(directory / f"{number}.jsonl", [f"text {number}"])
    config = BuildConfig(inputs=[f"{directory}/*.jsonl"], output=str(output / "corpus"), **options)
    return build_corpus(config, ByteTokenizer)


def test_many_small_files_are_shared_by_the_workers(tmp_path, monkeypatch):
    """100,000 files of 150 bytes were one shard, the work of one process, which a kill lost whole."""
    raw = tmp_path / "raw"
    assert make_of_files(raw, 5, tmp_path / "whole").shards == 1
    monkeypatch.setattr("data_utils.build.corpus._SHARD_FILES", 2)
    assert make_of_files(raw, 5, tmp_path / "shared", workers=2).shards == 3
    assert files(tmp_path / "shared") == files(tmp_path / "whole")


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
    assert split_rule(config).split_index(text) == split_rule(config).split_index(text) in (0, 1)


def test_the_seed_of_no_split_is_refused():
    with pytest.raises(ConfigError, match="--split-seed is given without --split, which it is for"):
        BuildConfig(inputs=["x"], output="x", split_seed=7)


def test_another_seed_gives_another_split():
    def splits(seed):
        rule = split_rule(BuildConfig(inputs=["x"], output="x", split="a=0.5,b=0.5", split_seed=seed))
        return [rule.split_index(str(i)) for i in range(100)]

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
    for options in (
        {"workers": -1},
        {"shard_bytes": 0},
        {"output": "a/"},
        {"output": ""},
        {"on_bad_record": "maybe"},
    ):
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
    with pytest.raises(DataError, match="split corpus_test receives none of the 1 documents"):
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
    monkeypatch.undo()
    report = make(
        tmp_path, [f"new {i}" for i in range(50)], split="a=0.5,b=0.5"
    )  # goes on, without overwrite
    assert report.finished_before == report.shards
    assert texts_of(tmp_path / "out/corpus_b")[0].startswith("new")


def test_an_input_is_never_overwritten(tmp_path):
    path = write_corpus(tmp_path / "corpus.json", ["precious"])
    config = BuildConfig(inputs=[path], output=str(tmp_path / "corpus"), overwrite=True)
    with pytest.raises(DataError, match=r"corpus\.json is also an input"):
        build_corpus(config, ByteTokenizer)
    assert list(files(tmp_path)) == ["corpus.json"]


def test_a_bad_record_stops_or_is_counted(tmp_path):
    path = tmp_path / "bad.jsonl"
    good = b'{"text": "fine and long enough for some shards"}\n' * 50
    path.write_bytes(good + b"{nonsense\n" + good + b'{"text": 1}\n')
    options = {"inputs": [str(path)], "output": str(tmp_path / "out/corpus"), "shard_bytes": 500}
    with pytest.raises(DataError, match=r"bad\.jsonl:51: malformed JSON"):
        build_corpus(BuildConfig(**options), ByteTokenizer)
    with pytest.raises(
        DataError, match=r"2 bad records .*max_bad_records \(1\); the first is .*bad\.jsonl:51:"
    ):
        build_corpus(BuildConfig(**options, on_bad_record="skip", max_bad_records=1), ByteTokenizer)
    report = build_corpus(BuildConfig(**options, on_bad_record="skip"), ByteTokenizer)
    assert report.counts.bad == {"malformed_json": 1, "field_not_text": 1}
    assert [place.line for place in report.counts.examples] == [51, 102]
    manifest = IndexedDataset(tmp_path / "out/corpus").manifest
    assert manifest["bad_records"] == report.counts.bad and manifest["num_documents"] == 100
    assert any("malformed_json" in line for line in report.lines())


def test_a_failed_build_without_a_finished_shard_leaves_nothing(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{nonsense\n")
    config = BuildConfig(inputs=[str(tmp_path / "bad.jsonl")], output=str(tmp_path / "out/corpus"))
    with pytest.raises(DataError, match="malformed"):
        build_corpus(config, ByteTokenizer)
    assert files(tmp_path / "out") == {}


def test_exact_duplicates_are_left_out(tmp_path):
    texts = [f"document {i % 60}" for i in range(100)] + ["other"]
    make(tmp_path, texts, name="all", split=SPLIT)
    report = make(tmp_path, texts, split=SPLIT, deduplicate=True, workers=2)
    for name in SPLIT_NAMES:
        kept = texts_of(tmp_path / f"out/corpus_{name}")
        assert kept == list(dict.fromkeys(texts_of(tmp_path / f"out/all_{name}")))
        verify(IndexedDataset(tmp_path / f"out/corpus_{name}"))
    assert report.duplicates == 40 and sum(report.documents.values()) == 61
    assert IndexedDataset(tmp_path / "out/corpus_test").manifest["duplicates"] == 40
    assert "duplicates" not in IndexedDataset(tmp_path / "out/all_test").manifest


def test_contamination_is_reported(tmp_path):
    words = [f"w{i}" for i in range(1000)]
    texts = [" ".join(words[i : i + 50]) for i in range(0, 1000, 50)]
    evaluation = write_corpus(
        tmp_path / "eval.jsonl",
        [" ".join(["Foreign,", *words[300:320]]).upper(), "short", " ".join(words[::-1])],
    )
    reports = [
        make(tmp_path, texts, name=f"c{shard_bytes}", evaluation_inputs=[evaluation], shard_bytes=shard_bytes)
        for shard_bytes in (100, 10000)
    ]
    found = reports[0].contamination
    assert (
        found == reports[1].contamination == IndexedDataset(tmp_path / "out/c100").manifest["contamination"]
    )
    assert (found["documents"], found["evaluation_texts_found"], found["evaluation_texts_too_short"]) == (
        1,
        1,
        1,
    )
    assert found["evaluation_ngrams_found"] == 20 - 13 + 1
    assert found["examples"] == [f"{tmp_path}/input.jsonl:7: shares 8 word sequences with evaluation texts"]
    assert len(IndexedDataset(tmp_path / "out/c100")) == len(texts)


@pytest.mark.parametrize(("text_split", "documents"), [("file", 1), ("blank_lines", 20), ("lines", 0)])
def test_evaluation_texts_are_cut_as_the_corpus_is(tmp_path, text_split, documents):
    """A book of short lines: no line of it is an n-gram long, but all of it is found in itself."""
    paragraphs = [
        "\n".join(" ".join(f"w{p}x{line}x{i}" for i in range(8)) for line in range(5)) for p in range(20)
    ]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs) + "\n")
    inputs = [str(tmp_path / "book.txt")]
    options = {"text_split": text_split, "evaluation_inputs": inputs}
    config = BuildConfig(inputs=inputs, output=str(tmp_path / "out/c"), **options)
    found = build_corpus(config, ByteTokenizer).contamination
    assert found["documents"] == found["evaluation_texts_found"] == documents
    assert found["evaluation_texts"] == found["evaluation_texts_too_short"] + documents


def test_bad_records_of_evaluation_texts_follow_the_policy(tmp_path):
    """The message advises to skip them, so that must help."""
    (tmp_path / "eval.jsonl").write_text('{"text": "x"}\n{\n')
    options = {"evaluation_inputs": [str(tmp_path / "eval.jsonl")]}
    with pytest.raises(DataError, match=r"eval\.jsonl:2: .*--on-bad-record skip"):
        make(tmp_path, ["a"], **options)
    assert make(tmp_path, ["a"], on_bad_record="skip", **options).contamination["evaluation_texts"] == 1
