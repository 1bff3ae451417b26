"""Text pairs: the same dataset from every format and number of workers, with what records lack counted."""

import csv
import hashlib
import json

import numpy as np
import pytest
from support.commands import assert_refused, forked
from support.data.builds import build, outputs
from support.data.corpora import damage
from support.data.text_pairs import random_records

from data_utils.common.errors import ConfigError, DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.local_copy import local_copy
from data_utils.dataset.manifest import read_manifest
from data_utils.dataset.tools import merge_datasets
from data_utils.dataset.verification import verify

RECORDS = random_records(np.random.default_rng(1), 60)
FILES = (".bin", ".idx", ".hash", ".score")


def as_columns(records, negatives=2):
    """Rows with a column for each negative."""
    return [
        {
            "query": record["query"],
            "positive": record["positive"],
            **{f"negative_{i + 1}": (record["negatives"] + [""] * negatives)[i] for i in range(negatives)},
            "score": record["score"],
        }
        for record in records
    ]


def write(path, records):
    """A file of records in the format of its ending."""
    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".arrow":
        table = pyarrow.Table.from_pylist(records)
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    else:
        rows = as_columns(records)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="," if path.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    return path


def made(tmp_path, records=RECORDS, name="pairs.jsonl", output="out", **options):
    """The prefix of a build."""
    path = write(tmp_path / name, records)
    build(path, tmp_path / output, **{"text_pairs": True, "split": "", **options})
    return str(tmp_path / output)


def hash_of(text):
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest() if text else bytes(8)
    return int.from_bytes(digest, "little")


def texts_of(prefix):
    """The texts of each record, checked: hashes are of them without prompts."""
    dataset = IndexedDataset(prefix)
    verify(dataset)
    entry = dataset.manifest["text_pairs"]
    texts = [bytes(dataset.document(i).tolist()).decode() for i in range(len(dataset))]
    per_record = 2 + entry["negatives"]
    records = [texts[i : i + per_record] for i in range(0, len(texts), per_record)]
    prompts = [entry["prompts"]["query"]["text"], *[entry["prompts"]["document"]["text"]] * (per_record - 1)]
    plain = [text.removeprefix(prompt) for r in records for text, prompt in zip(r, prompts, strict=True)]
    assert dataset.text_hashes.tolist() == list(map(hash_of, plain))
    return records


def expected(records, negatives, query_prompt="", document_prompt=""):
    found = []
    for record in records:
        texts = [record["positive"], *(record["negatives"] + [""] * negatives)[:negatives]]
        found.append(
            [query_prompt + record["query"], *(document_prompt + text if text else "" for text in texts)]
        )
    return found


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.tsv", "pairs.parquet", "pairs.arrow"])
def test_every_format_gives_the_same_dataset(tmp_path, name):
    lines = made(tmp_path, output="lines")
    other = made(tmp_path, name=name, output="other")
    for suffix in FILES:
        assert (tmp_path / f"lines{suffix}").read_bytes() == (tmp_path / f"other{suffix}").read_bytes()
    assert texts_of(lines) == texts_of(other) == expected(RECORDS, 2)
    assert IndexedDataset(lines).scores.tolist() == [record["score"] for record in RECORDS]


@pytest.mark.parametrize(
    "options",
    [{"split": "a=0.5,b=0.5"}, pytest.param({"deduplicate": True, "split": ""}, marks=pytest.mark.slow)],
)
def test_bytes_are_equal_for_any_workers_and_shards(tmp_path, options):
    records = [*RECORDS, *RECORDS[:20]]
    path, found = write(tmp_path / "pairs.jsonl", records), []
    for number, (workers, shard_bytes) in enumerate([(0, 1 << 20), (1, 400), (2, 900)]):
        directory = tmp_path / str(number)
        directory.mkdir()
        sizes = {"workers": workers, "shard_bytes": shard_bytes, **options}
        report = build(path, directory / "out", text_pairs=True, query_prompt="q: ", **sizes)
        found.append(outputs(directory))
        assert report.duplicates == (20 if "deduplicate" in options else None)
    assert found[0] == found[1] == found[2]


def test_a_query_is_in_one_split(tmp_path):
    records = [{**record, "query": f"word{i % 7}"} for i, record in enumerate(RECORDS)]
    made(tmp_path, records, split="a=0.5,b=0.5")
    queries = [{texts[0] for texts in texts_of(tmp_path / f"out_{name}")} for name in "ab"]
    assert all(queries) and not queries[0] & queries[1]


def test_records_are_padded_cut_and_counted(tmp_path):
    prompts = {"query_prompt": "query: ", "document_prompt": "passage: "}
    prefix = made(tmp_path, negatives=1, **prompts)
    assert texts_of(prefix) == expected(RECORDS, 1, *prompts.values())
    entry = read_manifest(prefix)["text_pairs"]
    given = [len(record["negatives"]) for record in RECORDS]
    assert entry["counts"] == {
        "records": len(RECORDS),
        "missing_negatives": given.count(0),
        "cut_negatives": given.count(2),
    }
    assert entry["prompts"] == {
        "query": {"text": "query: ", "tokens": 7},
        "document": {"text": "passage: ", "tokens": 9},
    }
    assert not read_manifest(prefix)["documents_end_with_eos"]


def test_several_positives_are_several_records(tmp_path):
    records = [
        {"query": "a", "pos": ["b", "c"], "neg": ["d", "e"]},
        {"query": "f", "pos": ["g"], "neg": []},
        {"query": "h", "pos": ["", " "], "neg": ["i"]},  # without a positive
    ]
    prefix = made(tmp_path, records)
    assert texts_of(prefix) == [["a", "b", "d", "e"], ["a", "c", "d", "e"], ["f", "g", "", ""]]
    assert read_manifest(prefix)["empty_documents"] == 1
    assert IndexedDataset(prefix).scores is None


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"anchor": "a", "positive": "b", "negative": "c"}, ("anchor", "positive", ["negative"], None)),
        ({"sentence1": "a", "sentence2": "b", "score": "0.5"}, ("sentence1", "sentence2", [], "score")),
        ({"query": "a", "document": "b"}, ("query", "document", [], None)),
        ({"answer": "b", "question": "a"}, ("question", "answer", [], None)),
        (
            {"anchor": "a", "positive": "b", "negative_2": "c", "negative_10": "e", "negative_1": "d"},
            ("anchor", "positive", ["negative_1", "negative_2", "negative_10"], None),
        ),
    ],
)
def test_usual_columns_are_found(tmp_path, record, columns):
    prefix = made(tmp_path, [record] * 2)
    entry = read_manifest(prefix)["text_pairs"]
    assert tuple(entry["columns"].values()) == columns
    assert entry["negatives"] == len(columns[2])


def test_named_columns_may_be_nested(tmp_path):
    records = [{"text": {"q": "a", "d": "b"}, "query": "no", "positive": "no", "bad": ["c", "d"]}]
    options = {"query_column": "text.q", "positive_column": "text.d", "negative_columns": ["bad"]}
    for name in ("pairs.jsonl", "pairs.parquet"):
        prefix = made(tmp_path, records, name, name.partition(".")[2], **options)
        assert texts_of(prefix) == [["a", "b", "c", "d"]]


@pytest.mark.parametrize("name", ["texts.jsonl", "texts.parquet"])
def test_a_text_may_be_its_own_positive(tmp_path, name):
    records = [{"query": text, "positive": "c", "negatives": [], "score": 0.5} for text in ("a", "b")]
    prefix = made(tmp_path, records, name, positive_column="query", negatives=0)
    assert texts_of(prefix) == [["a", "a"], ["b", "b"]]


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"query": "a", "anchor": "b", "positive": "c"}], {}, "query and anchor"),
        ([{"query": "a", "text": "b"}], {}, "positive-column"),
        ([{"query": "a", "positive": "b", "score": "high"}], {}, "'high', not a number"),
        ([{"query": "a", "positive": 3}], {}, "holds a number"),
        ([{"query": "a", "positive": "b"}, {"query": "a"}], {}, "no field 'positive'"),
        ([{"query": "a", "positive": "b"}], {"negative_columns": ["query"]}, "several roles"),
        ([{"query": "a", "positive": "b"}], {"text_key": "query"}, "--query-column"),
        ([{"query": "a", "positive": "b"}], {"capitals": True}, "--text-pairs is given with --capitals"),
        ([{"query": "a", "positive": "b"}], {"text_pairs": False, "negatives": 1}, "without --text-pairs"),
    ],
)
def test_bad_pairs_are_refused(tmp_path, records, options, message):
    with pytest.raises((ConfigError, DataError), match=message):
        made(tmp_path, records, **options)


def test_merged_datasets_equal_one_build(tmp_path):
    options = {"negatives": 2, "query_prompt": "q: "}
    whole = made(tmp_path, output="whole", **options)
    parts = [
        made(tmp_path, part, output=f"part{i}", **options)
        for i, part in enumerate((RECORDS[:23], RECORDS[23:]))
    ]
    merge_datasets(parts, str(tmp_path / "merged"))
    for suffix in FILES:
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert texts_of(tmp_path / "merged") == texts_of(whole)
    merged, built = (read_manifest(tmp_path / name)["text_pairs"] for name in ("merged", "whole"))
    assert merged == built
    for changes in ({"negatives": 1}, {"query_prompt": "Q: "}):
        other = made(tmp_path, output="other", **{**options, **changes}, overwrite=True)
        with pytest.raises(DataError, match="same number of negatives and the same prompts"):
            merge_datasets([whole, other], str(tmp_path / "never"))


def test_all_files_are_copied_and_checked(tmp_path):
    prefix = made(tmp_path)
    copy = local_copy(prefix, tmp_path / "local")
    assert texts_of(copy) == texts_of(prefix)
    for suffix in (".hash", ".score"):
        damage(tmp_path / f"out{suffix}", lambda data: data.__setitem__(5, data[5] ^ 1))
        with pytest.raises(DataError, match=suffix):
            verify(IndexedDataset(prefix))
        damage(tmp_path / f"out{suffix}", lambda data: data.__setitem__(5, data[5] ^ 1))
    damage(tmp_path / "out.hash", lambda data: data.extend(bytes(8)))
    with pytest.raises(DataError, match=r"out\.hash has"):
        IndexedDataset(prefix)


def test_the_command_builds_and_describes(tmp_path, corpus):
    path = write(tmp_path / "pairs.csv", RECORDS)
    tokenizer = ["--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", str(corpus / "vocab.txt")]
    options = ["--text-pairs", "--query-prompt", "word1 ", "--verify", "--workers", "1"]
    result = forked(
        "scripts/preprocess_data.py", "--input", path, "--output", tmp_path / "out", *tokenizer, *options
    )
    assert result.returncode == 0, result.stderr
    assert "text pairs: 60 records of 4 documents" in result.stdout
    described = forked("scripts/dataset.py", "inspect", tmp_path / "out")
    assert "text_pairs: columns query query, positive positive" in described.stdout
    text = tmp_path / "a.txt"
    text.write_text("a text\n")
    refused = forked(
        "scripts/preprocess_data.py", "--input", text, "--output", tmp_path / "b", *tokenizer, "--text-pairs"
    )
    assert_refused(refused, "text without fields")
