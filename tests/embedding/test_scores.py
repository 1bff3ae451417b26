"""STS, retrieval and reranking by the vectors of a run, as scripts/evaluate.py prints them."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from support.commands import assert_refused, forked
from support.hf.hf_runs import tree, write_run, write_vocabulary

from data_utils.common.errors import DataError
from data_utils.tasks.readers.similarity import read_scored_pairs
from megatron_lite.embedding.scores import ranking_measures, similarity

PAIRS = [("a b", "a c", 2.5), ('say "a" b', "c", 0.0), ("d", "d, e", 5.0)]


def test_pairs_are_read_of_every_kind_of_file(tmp_path):
    first, second, scores = zip(*PAIRS, strict=True)
    named = {"sentence1": first, "sentence2": second, "score": scores}
    rows = [dict(zip(named, row, strict=True)) for row in PAIRS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(
        pa.table({name: list(values) for name, values in named.items()}), tmp_path / "b.parquet"
    )
    (tmp_path / "c.tsv").write_text("".join(f"{c}\t{a}\t{b}\n" for a, b, c in PAIRS))
    (tmp_path / "d.csv").write_text('a b,a c,2.5\r\n"say ""a"" b",c,0\r\nd,"d, e",5\r\n')
    sick = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\r\n"
    (tmp_path / "e.tsv").write_text(sick + "".join(f"1\t{a}\t{b}\t{c}\tNEUTRAL\r\n" for a, b, c in PAIRS))
    for path in sorted(tmp_path.iterdir()):
        found = read_scored_pairs([path])
        assert list(zip(found.first, found.second, found.scores, strict=True)) == PAIRS, path


def test_lines_without_a_score_are_left_out_and_counted(tmp_path):
    (tmp_path / "a.tsv").write_text("1\ta\tb\n\tc\td\n3\te\tf\n")
    found = read_scored_pairs([tmp_path / "a.tsv", tmp_path / "a.tsv"])
    assert found.without_score == 2 and found.first == ["a", "e"] * 2
    for text, message in (("x\ta\tb\n1\ta\tb\n", "neither"), ("1\ta\tb\n1\tc\td\n", "all the same")):
        (tmp_path / "b.tsv").write_text(text)
        with pytest.raises(DataError, match=message):
            read_scored_pairs([tmp_path / "b.tsv"])


def test_similarities_are_those_of_their_definitions():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 5, generator=generator).double(), torch.randn(4, 5, generator=generator).double()
    lengths = a.norm(dim=1)[:, None] * b.norm(dim=1)
    expected = {
        "dot": a @ b.T,
        "cosine": a @ b.T / lengths,
        "euclidean": -(a[:, None] - b).square().sum(-1).sqrt(),
        "manhattan": -(a[:, None] - b).abs().sum(-1),
    }
    for kind, values in expected.items():
        assert torch.allclose(similarity(a, b, kind), values)


def test_measures_of_a_ranking_by_hand():
    """Two queries: the relevant document first, and the two of the other at 2 and 3 of 3."""
    relevant = {"p": {"a": 1}, "q": {"b": 1, "c": 1}}
    ranking = {"p": {"a": 3.0, "b": 2.0, "c": 1.0}, "q": {"a": 3.0, "b": 2.0, "c": 1.0}}
    found = ranking_measures(relevant, ranking)
    gains = (1 / np.log2(3) + 1 / np.log2(4)) / (1 + 1 / np.log2(3))
    assert found == pytest.approx(
        {
            "nDCG@10": 50 * (1 + gains),
            "MRR@10": 50 * (1 + 1 / 2),
            "MAP": 50 * (1 + (1 / 2 + 2 / 3) / 2),
            "recall@1": 50.0,
            "recall@10": 100.0,
            "recall@100": 100.0,
        }
    )


def test_the_command_measures_what_a_run_has_seen_equal(tmp_path):
    """Queries that are their documents' texts, and pairs whose scores are the model's own order."""
    write_run(tmp_path / "run", tree(write_vocabulary(tmp_path)))
    texts = [f"word{i} word{i + 1} word{2 * i}" for i in range(12)]
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    lines = [json.dumps({"_id": f"d{i}", "title": "", "text": text}) for i, text in enumerate(texts)]
    # A document with the query's id is left out.
    lines.append(json.dumps({"_id": "q0", "title": "", "text": texts[0]}))
    (beir / "corpus.jsonl").write_text("\n".join(lines))
    queries = [json.dumps({"_id": f"q{i}", "text": text}) for i, text in enumerate(texts)]
    (beir / "queries.jsonl").write_text("\n".join(queries))
    qrels = "".join(f"q{i}\td{i}\t1\n" for i in range(12))
    (beir / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{qrels}")
    reranking = {"query": texts[0], "positive": [texts[0]], "negative": texts[1:4]}
    (tmp_path / "rerank.jsonl").write_text(json.dumps(reranking))
    (tmp_path / "sts.tsv").write_text(f"5\t{texts[0]}\t{texts[0]}\n1\t{texts[0]}\t{texts[5]}\n")
    options = ["--sts", tmp_path / "sts.tsv", "--retrieval", beir, "--reranking", tmp_path / "rerank.jsonl"]
    options += ["--json", tmp_path / "out.json"]
    done = forked("scripts/evaluate.py", "--checkpoint", tmp_path / "run", *options)
    assert done.returncode == 0, done.stderr
    found = {one["kind"]: one["measures"] for one in json.loads((tmp_path / "out.json").read_text())}
    assert found["sts"] == {"spearman": pytest.approx(100.0)}
    for kind in ("retrieval", "reranking"):
        assert found[kind]["nDCG@10"] == found[kind]["MAP"] == pytest.approx(100.0)
    assert "nDCG@10 100.00" in done.stdout
    refused = forked("scripts/evaluate.py", "--checkpoint", tmp_path / "run", *options, "--batch", "3")
    assert_refused(refused, "measure vectors")
