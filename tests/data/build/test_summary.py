"""What a build says of its documents: lengths and duplicates against a count of every document."""

import statistics

import numpy as np
import pytest
from support.data.builds import build
from support.data.corpora import make, to_jsonl

from data_utils.build.summary import DocumentStatistics


def statistics_of(documents, **options):
    found = DocumentStatistics(**options)
    for start in range(0, len(documents), 700):
        part = documents[start : start + 700]
        lengths = np.array([len(document) for document in part], "<i4")
        found.add(np.concatenate([np.array(document, "<u2") for document in part]), lengths)
    return found.shape()


@pytest.mark.parametrize("seed", range(5))
def test_lengths_and_duplicates_match_a_count(seed):
    rng = np.random.default_rng(seed)
    pool = [tuple(rng.integers(0, 3, rng.integers(1, 9)).tolist()) for _ in range(900)]
    documents = [pool[place] for place in rng.integers(0, len(pool), 3000)]
    shape = statistics_of(documents)
    assert shape.median_tokens == statistics.median_low(map(len, documents))
    assert shape.duplicates == pytest.approx(1 - len(set(documents)) / len(documents), abs=1e-12)
    assert shape.compared == len(documents)


def test_a_sample_has_every_copy_of_its_documents():
    documents = [(place % 6000, 1) for place in range(24_000)]  # each four times
    shape = statistics_of(documents, max_hashes=1000)
    assert shape.duplicates == 0.75 and 4 * 400 < shape.compared <= 4 * 1000


def test_one_document_many_times_and_long_ones():
    shape = statistics_of([(7,)] * 2000 + [(1,) * 70_000], max_hashes=2)
    assert shape.median_tokens == 1 and shape.duplicates > 0.99
    assert statistics_of([(1,) * 70_000]).median_tokens == 1 << 16


def test_short_documents_and_duplicates_are_warned_of(tmp_path):
    report = make(tmp_path, ["one two"] * 30 + [f"text {i}" for i in range(50)])
    lines = list(report.lines())
    assert "  tokens per document: median 8, mean 8; 36.3 % are exact duplicates of another" in lines
    assert [
        line.partition(",")[0].partition(" of the")[0] for line in lines if line.startswith("warning")
    ] == [
        "warning: half",
        "warning: 36 %",
    ]
    report = make(tmp_path, ["one two"] * 30 + [f"text {i}" for i in range(50)], name="b", deduplicate=True)
    assert report.shape.duplicates == 0 and "warning: half" in "".join(report.lines())


def test_good_documents_are_not_warned_of(tmp_path):
    report = make(
        tmp_path,
        [f"a document of more than sixty-four bytes, each of which is a token: {i}" for i in range(9)],
    )
    assert "; 0.0 % are exact duplicates" in "\n".join(report.lines()) and not list(report.warnings())


def test_whole_text_files_are_reported(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("one\n\ntwo\n")
    (tmp_path / "c.jsonl").write_text(to_jsonl(["three"]))
    lines = "\n".join(build(tmp_path / "*.*", tmp_path / "out/c", split="").lines())
    assert "each of the 2 .txt files is one document; --text-split splits them" in lines
    lines = "\n".join(build(tmp_path / "*.*", tmp_path / "out/d", split="", text_split="lines").lines())
    assert ".txt" not in lines
