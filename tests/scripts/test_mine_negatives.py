"""Hard negatives equal those of a search through all texts, and never belong to their query."""

import json

import numpy as np
import pytest
from support.commands import assert_refused, forked

from data_utils.build import hard_negatives
from data_utils.build.hard_negatives import Texts, mine

SCRIPT = "scripts/mine_negatives.py"


def problem(seed, queries=90, documents=70, size=16):
    """Records whose queries and positives repeat, and a vector of each text: cosines are exact, and many are equal."""
    rng = np.random.default_rng(seed)
    vectors = {}

    def text(name, most):
        name = f"{name}{rng.integers(most)}"
        vectors.setdefault(name, 2 * rng.integers(0, 2, size).astype(np.float32) - 1)
        return name

    names = [text("d", documents // 2) for _ in range(documents)]
    records = [
        {"query": text("d" if rng.random() < 0.2 else "q", queries // 2), "positive": str(rng.choice(names))}
        for _ in range(queries)
    ]
    return records, names, vectors


def brute_force(records, names, vectors, count, margin):
    def cosine(a, b):
        a, b = (hard_negatives.unit(vectors[text][None]) for text in (a, b))
        return float((a @ b.T)[0, 0])

    found = []
    for record in records:
        own = {each["positive"] for each in records if each["query"] == record["query"]} | {record["query"]}
        limit = cosine(record["query"], record["positive"]) - margin
        scored = [
            (-cosine(record["query"], name), number, name)
            for number, name in enumerate(dict.fromkeys(names))
            if name not in own
        ]
        found.append([name for score, _, name in sorted(scored) if -score <= limit][:count])
    return found


@pytest.mark.parametrize("seed, count, margin", [(1, 3, 0.0), (2, 100, 0.1), (3, 1, 0.5)])
def test_mined_negatives_are_those_of_a_full_search(monkeypatch, seed, count, margin):
    records, names, vectors = problem(seed)
    monkeypatch.setattr(hard_negatives, "_QUERIES", 7)
    monkeypatch.setattr(hard_negatives, "_DOCUMENTS", 11)
    documents = Texts.of(names, np.array([vectors[name] for name in names]))
    query_vectors = np.array([vectors[record["query"]] for record in records])
    found = mine(
        [record["query"] for record in records],
        query_vectors,
        [[record["positive"]] for record in records],
        documents,
        count,
        margin,
    )
    texts = list(documents.numbers)
    mined = [([texts[number] for number in numbers], scores) for numbers, scores in found]
    expected = brute_force(records, names, vectors, count, margin)
    assert any(len(each) == count for each in expected) or count > 10
    for (found_texts, scores), wanted in zip(mined, expected, strict=True):
        assert scores == sorted(scores, reverse=True)
        assert found_texts == wanted


def write(tmp_path, records, names, vectors):
    paths = {name: tmp_path / name for name in ("pairs.jsonl", "texts.jsonl", "q.npy", "d.npy", "out.jsonl")}
    paths["pairs.jsonl"].write_text("".join(json.dumps(record) + "\n" for record in records))
    paths["texts.jsonl"].write_text("".join(json.dumps({"text": name}) + "\n" for name in names))
    np.save(paths["q.npy"], np.array([vectors[record["query"]] for record in records]))
    np.save(paths["d.npy"], np.array([vectors[name] for name in names]))
    return paths


def command(paths, *options):
    pairs, queries, documents, output = (paths[n] for n in ("pairs.jsonl", "q.npy", "d.npy", "out.jsonl"))
    vectors = ["--query-vectors", queries, "--document-vectors", documents]
    return forked(SCRIPT, "--input", pairs, *vectors, "--output", output, *options)


def test_the_command_writes_the_records_with_negatives(tmp_path):
    records, names, vectors = problem(4)
    paths = write(tmp_path, records, names, vectors)
    options = ["--documents", paths["texts.jsonl"], "--negatives", 3, "--margin", 0.1]
    result = command(paths, *options)
    assert result.returncode == 0, result.stderr
    written = paths["out.jsonl"].read_text()
    found = [json.loads(line) for line in written.splitlines()]
    expected = brute_force(records, names, vectors, 3, 0.1)
    assert [each.pop("negatives") for each in found] == expected and found == records
    assert command(paths, *options).returncode == 0 and paths["out.jsonl"].read_text() == written
    # Without documents of their own: the positives.
    np.save(paths["d.npy"], np.array([vectors[record["positive"]] for record in records]))
    assert command(paths, "--negatives", 2).returncode == 0
    found = [json.loads(line)["negatives"] for line in paths["out.jsonl"].read_text().splitlines()]
    positives = [record["positive"] for record in records]
    assert found == brute_force(records, positives, vectors, 2, 0.0)


def test_vectors_that_do_not_belong_are_refused(tmp_path):
    records, names, vectors = problem(5)
    paths = write(tmp_path, records, names, vectors)
    assert_refused(command(paths), "but there are 90 documents")
    documents = ["--documents", paths["texts.jsonl"]]
    np.save(paths["q.npy"], np.zeros((len(records), 5), np.float32))
    assert_refused(command(paths, *documents), "make both with one model")
    paths["texts.jsonl"].write_text("".join(json.dumps({"text": f"x{name}"}) + "\n" for name in names))
    assert_refused(command(paths, *documents), "is not among --documents")
    paths["q.npy"].write_text("no array")
    assert_refused(command(paths, *documents), "not a readable .npy file")
    paths["pairs.jsonl"].write_text('{"query": "a", "positive": 3}\n')
    assert_refused(command(paths), "record 1: field 'positive' holds a number")
