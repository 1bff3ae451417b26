"""Records that cannot be read: counted, named or refused, wherever they stand."""

import json

import pytest
from support.data.builds import (
    MPIRUN,
    TIMEOUT,
    build,
    members,
    start,
)
from support.data.corpora import files, texts_of, to_jsonl

from data_utils.common.errors import DataError
from data_utils.dataset.indexed_dataset import IndexedDataset

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
