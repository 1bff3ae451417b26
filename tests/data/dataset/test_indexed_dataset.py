import json
import os
import pickle
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.corpora import build, damage

from data_utils.common import files
from data_utils.common.errors import DataError
from data_utils.dataset import indexed_dataset, writer
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.tools import adopt_dataset
from data_utils.dataset.verification import verify
from data_utils.dataset.writer import IndexedDatasetWriter, index_chunks, remove_dataset, token_dtype
from data_utils.loader.sampler import WindowIndex


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_golden_bytes_of_megatrons_format(tmp_path):
    build(tmp_path / "d", [[1, 2, 3], [258]])
    assert (tmp_path / "d.bin").read_bytes() == bytes([1, 0, 2, 0, 3, 0, 2, 1])
    expected = (
        b"MMIDIDX\x00\x00"
        + bytes([1, 0, 0, 0, 0, 0, 0, 0])  # version
        + bytes([8])  # uint16
        + bytes([2, 0, 0, 0, 0, 0, 0, 0])  # sequences
        + bytes([3, 0, 0, 0, 0, 0, 0, 0])  # document boundaries
        + bytes([3, 0, 0, 0, 1, 0, 0, 0])  # lengths
        + bytes([0] * 8 + [6] + [0] * 7)  # byte pointers
        + bytes([0] * 8 + [1] + [0] * 7 + [2] + [0] * 7)  # boundaries
    )
    assert (tmp_path / "d.idx").read_bytes() == expected


def test_golden_bytes_of_a_large_vocabulary(tmp_path):
    build(tmp_path / "d", [[1, 70000]], vocab_size=70001)
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<ii", 1, 70000)
    assert (tmp_path / "d.idx").read_bytes()[17] == 4


def test_dtype_is_chosen_as_in_megatron():
    assert [token_dtype(n).name for n in (1, 65499, 65500, 100000)] == ["uint16", "uint16", "int32", "int32"]


@given(
    st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=20), min_size=1, max_size=40),
    st.integers(1, 7),
)
@settings(max_examples=30, deadline=None)  # each example waits for the disk
def test_round_trip(tmp_path_factory, documents, chunk):
    prefix = tmp_path_factory.mktemp("round") / "d.v1"  # a dot in the prefix is no suffix
    with pytest.MonkeyPatch.context() as patch:
        for module in (indexed_dataset, writer):
            patch.setattr(module, "CHUNK", chunk)  # every chunked loop is entered more than once
        dataset = build(prefix, documents, eos=5)
        verify(dataset)
    assert [dataset.document(i).tolist() for i in range(len(dataset))] == documents
    assert dataset.num_tokens == len(dataset.tokens) == sum(map(len, documents))
    assert pickle.loads(pickle.dumps(dataset)).document(0).tolist() == documents[0]


@pytest.mark.parametrize("bad", [-1, 100, 70000])
def test_an_id_that_does_not_fit_is_an_error(tmp_path, bad):
    with pytest.raises(DataError, match=f"token id {bad} is outside the vocabulary of 100"):
        build(tmp_path / "d", [[1], [2, bad]], vocab_size=100)
    assert names(tmp_path) == []


def test_an_abandoned_writer_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), IndexedDatasetWriter(tmp_path / "d", 100) as writer:
        writer.add(np.arange(5), np.array([5]))
        writer.seal()
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_an_abandoned_rebuild_keeps_the_old_dataset(tmp_path):
    build(tmp_path / "d", [[1, 2]])
    with pytest.raises(DataError), IndexedDatasetWriter(tmp_path / "d", 100) as writer:
        writer.add(np.array([200]), np.array([1]))
    verify(IndexedDataset(tmp_path / "d"))
    assert names(tmp_path) == ["d.bin", "d.idx", "d.json"]


class Crash(BaseException):
    pass


def test_a_crash_at_any_point_of_a_rebuild_is_seen(tmp_path, monkeypatch):
    """Stop before the k-th step on disk, for every k: old data, new data, or an error; never a mix."""
    old, new = [[1], [2, 3]], [[4, 5], [6]]  # of equal size: only the order of the steps tells them apart
    outcomes = set()
    for stop in range(100):
        remove_dataset(tmp_path / "d")
        build(tmp_path / "d", old, eos=1)
        steps = iter(range(stop))

        def counted(function, steps=steps):
            def wrapper(*arguments, **options):
                if next(steps, None) is None:
                    raise Crash
                return function(*arguments, **options)

            return wrapper

        unfinished = IndexedDatasetWriter(tmp_path / "d", 1000)
        unfinished.add(np.array([4, 5, 6]), np.array([2, 1]))
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", counted(os.replace))
            patch.setattr(indexed_dataset.Path, "unlink", counted(indexed_dataset.Path.unlink))
            patch.setattr(files, "sync_file", counted(files.sync_file))
            patch.setattr(writer, "sync_directory", counted(writer.sync_directory))
            try:
                unfinished.finish({"eos": 4})
                finished = True
            except Crash:
                finished = False
        unfinished._files.close()  # what the end of the process would do
        try:
            dataset = IndexedDataset(tmp_path / "d")
            verify(dataset)
            found = [dataset.document(i).tolist() for i in range(len(dataset))]
            assert found in (old, new) and dataset.manifest["eos"] == found[0][0]
            outcomes.add(str(found))
        except DataError:
            outcomes.add("error")
            with pytest.raises(DataError, match=r"not complete|does not exist"):
                adopt_dataset(tmp_path / "d")  # what a build left is not another program's
        if finished:
            break
    assert finished and found == new
    assert outcomes == {str(old), str(new), "error"}
    build(tmp_path / "d", new)  # leftovers do not stop the next build
    assert names(tmp_path) == ["d.bin", "d.idx", "d.json"]


def test_two_writers_exclude_each_other(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", 100) as first:
        first.add(np.array([1]), np.array([1]))
        with pytest.raises(DataError, match="another process"):
            IndexedDatasetWriter(tmp_path / "d", 100)
        first.finish({})
    verify(IndexedDataset(tmp_path / "d"))


def test_a_full_disk_is_one_error(tmp_path):
    writer = IndexedDatasetWriter(tmp_path / "d", 100)
    writer._files.close()
    writer._bin = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    writer._lengths = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(DataError, match="No space left"):
        writer.add(np.array([1]), np.array([1]))
    writer.abort()
    assert names(tmp_path) == []


def test_an_unwritable_path_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        IndexedDatasetWriter(tmp_path / "file" / "d", 100)


def test_an_empty_dataset_is_refused(tmp_path):
    with pytest.raises(DataError, match="no document"):
        build(tmp_path / "d", [])
    assert names(tmp_path) == []


def test_manifest(tmp_path):
    dataset = build(tmp_path / "d", [[1, 2], [3]], eos=3)
    manifest = json.loads((tmp_path / "d.json").read_text())
    assert dataset.manifest == manifest
    assert manifest["num_documents"] == 2 and manifest["num_tokens"] == 3 and manifest["eos"] == 3
    assert manifest["files"][".bin"]["bytes"] == 6 and manifest["dtype"] == "uint16"


DAMAGES = {
    "bin cut": (".bin", lambda data: data.pop(), "manifest records"),
    "idx cut": (".idx", lambda data: data.pop(), "manifest records"),
    "json cut": (".json", lambda data: data.__delitem__(slice(20, None)), "is not valid JSON"),
    "json deep": (
        ".json",
        lambda data: data.__setitem__(slice(None), b"[" * 100000),
        "nested deeper than 40 levels",
    ),
    "json version": (
        ".json",
        lambda data: data.__setitem__(slice(None), data.replace(b'version": 3', b'version": 9')),
        "version 9",
    ),
    "json old version": (
        ".json",
        lambda data: data.__setitem__(slice(None), data.replace(b'version": 3', b'version": 2')),
        "version 2",
    ),
    "json empty": (".json", lambda data: data.__setitem__(slice(None), b"{}"), "not a dataset manifest"),
    "json list": (".json", lambda data: data.__setitem__(slice(None), b"[]"), "not a dataset manifest"),
    "magic": (".idx", lambda data: data.__setitem__(0, 0), "magic"),
    "index version": (".idx", lambda data: data.__setitem__(9, 7), "version 7"),
    "dtype": (".idx", lambda data: data.__setitem__(17, 6), "dtype code 6"),
    "count": (".idx", lambda data: data.__setitem__(18, 99), "header requires"),
    "huge count": (".idx", lambda data: data.__setitem__(24, 99), "cut off"),
    "length": (".idx", lambda data: data.__setitem__(34, 99), "do not match"),
    "last length": (".idx", lambda data: data.__setitem__(42, 99), "does not match"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_at_open(tmp_path, name):
    suffix, change, message = DAMAGES[name]
    build(tmp_path / "d", [[1, 2], [3], [4]])
    damage(tmp_path / f"d{suffix}", change)
    with pytest.raises(DataError, match=message) as error:
        IndexedDataset(tmp_path / "d")
    assert str(tmp_path / f"d{suffix}") in str(error.value) and "rebuild" in str(error.value)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_files(tmp_path, suffix):
    build(tmp_path / "d", [[1]])
    (tmp_path / f"d{suffix}").unlink()
    with pytest.raises(DataError, match=f"d{suffix} does not exist"):
        IndexedDataset(tmp_path / "d")


def test_verify_finds_a_changed_token(tmp_path):
    dataset = build(tmp_path / "d", [[1, 2], [3]])
    damage(tmp_path / "d.bin", lambda data: data.__setitem__(0, 7))
    with pytest.raises(DataError, match="block at byte 0 "):
        verify(dataset)


def test_adopting_finds_wrong_contents(tmp_path):
    documents = [[i] for i in range(1, 300)]
    build(tmp_path / "d", documents)
    (tmp_path / "d.json").unlink()
    damage(tmp_path / "d.idx", lambda data: data.__setitem__(34 + 4 * 7, 2))  # between two checks at open
    with pytest.raises(DataError, match="pointers that do not match"):
        adopt_dataset(tmp_path / "d")
    assert names(tmp_path) == ["d.bin", "d.idx"]


def test_verify_checks_ids_and_document_ends(tmp_path):
    with pytest.raises(DataError, match="does not end with eos"):
        verify(build(tmp_path / "d", [[1, 9], [2]], eos=9, documents_end_with_eos=True))
    verify(build(tmp_path / "e", [[1, 9], [9]], eos=9, documents_end_with_eos=True))
    dataset = build(tmp_path / "f", [[1, 50]])
    dataset.manifest["vocab_size"] = 50
    with pytest.raises(DataError, match="outside the vocabulary"):
        verify(dataset)


def test_a_foreign_dataset_opens_when_it_is_adopted(tmp_path, caplog):
    """Two documents and int64 tokens, as Megatron-LM writes them."""
    (tmp_path / "d.bin").write_bytes(np.arange(5, dtype="<i8").tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 5, 2, 3)
    (tmp_path / "d.idx").write_bytes(header + struct.pack("<2i2q3q", 3, 2, 0, 24, 0, 1, 2))
    with pytest.raises(DataError, match=rf"has no manifest.*dataset\.py adopt {tmp_path}/d"):
        IndexedDataset(tmp_path / "d")
    dataset = adopt_dataset(tmp_path / "d")
    assert [dataset.document(i).tolist() for i in range(2)] == [[0, 1, 2], [3, 4]]
    verify(dataset)
    dataset.require_tokenizer("any", 10, 0)
    assert "its tokenizer cannot be checked" in caplog.text
    with pytest.raises(DataError, match="already has a manifest"):
        adopt_dataset(tmp_path / "d")


def test_a_build_at_work_is_not_adopted(tmp_path):
    build(tmp_path / "d", [[1]])
    (tmp_path / "d.json").unlink()
    with IndexedDatasetWriter(tmp_path / "d", 100):
        for refused in (IndexedDataset, adopt_dataset):
            with pytest.raises(DataError, match="not complete, because its build was stopped"):
                refused(tmp_path / "d")


def test_a_wrong_prefix_names_the_right_one(tmp_path):
    for name in ("c_train", "c_validation"):
        build(tmp_path / name, [[1]])
    with pytest.raises(
        DataError, match=rf"c\.bin does not exist; there are {tmp_path}/c_train, {tmp_path}/c_val"
    ):
        IndexedDataset(tmp_path / "c")
    with pytest.raises(DataError, match=rf"give the prefix without \.bin: {tmp_path}/c_train\.$"):
        IndexedDataset(tmp_path / "c_train.bin")
    with pytest.raises(DataError, match="check the prefix or build"):
        IndexedDataset(tmp_path / "absent")


def changes_of(tree, path=()):
    """Every place of a tree with what may become of it: nothing, another type, another value."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        if isinstance(tree[key], (dict, list)):
            yield from changes_of(tree[key], (*path, key))
        for change in ("remove", None, 7, "x", [], {}):
            if change != tree[key]:
                yield (*path, key), change


def test_any_change_of_the_manifest_is_one_error(tmp_path):
    tokenizer = {"fingerprint": "abc", "config": {"kind": "bert_wordpiece", "lowercase": True}}
    facts = {"tokenizer": tokenizer, "sources": [{"path": "a.jsonl", "bytes": 3}], "eos": 3}
    build(tmp_path / "d", [[1, 2], [3]], documents_end_with_eos=False, **facts)
    path = tmp_path / "d.json"
    written = path.read_text()
    changes = list(changes_of(json.loads(written)))
    assert len(changes) > 100
    for (*way, key), change in changes:
        tree = json.loads(written)
        node = tree
        for step in way:
            node = node[step]
        if change == "remove":
            del node[key]
        else:
            node[key] = change
        path.write_text(json.dumps(tree))
        with pytest.raises(
            DataError,
            match=rf"{path} (does not match|has version|is not a dataset manifest)",
        ):
            IndexedDataset(tmp_path / "d")
    path.write_text(json.dumps(json.loads(written)))  # another layout is no change
    IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize(
    "facts", [{"eos": "3"}, {"tokenizer": []}, {"documents_end_with_eos": 1}, {"vocab_size": 1.5}]
)
def test_a_manifest_that_was_written_wrong_is_one_error(tmp_path, facts):
    with pytest.raises(DataError, match=rf"d\.json says {next(iter(facts))} "):
        build(tmp_path / "d", [[1]], **facts)


def test_another_tokenizer_is_refused_by_name(tmp_path):
    tokenizer = {"fingerprint": "abc", "config": {"kind": "bert_wordpiece"}}
    dataset = build(tmp_path / "d", [[1]], eos=9, tokenizer=tokenizer)
    dataset.require_tokenizer("abc", 1000, 9)
    for other in (("xyz", 1000, 9), ("abc", 1001, 9), ("abc", 1000, 8)):
        with pytest.raises(
            DataError,
            match=r"bert_wordpiece.*abc.*than the configured one.*; set the section tokenizer to that of .*\.json",
        ):
            dataset.require_tokenizer(*other)


def refuse_to_map(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(19, "No such device")

    monkeypatch.setattr(indexed_dataset.mmap, "mmap", refuse)


def test_where_mapping_is_refused_a_dataset_does_not_open(tmp_path, monkeypatch):
    build(tmp_path / "d", [[1, 2, 3], [4], [5, 9]], eos=9)
    refuse_to_map(monkeypatch)
    with pytest.raises(DataError, match=r"d\.bin cannot be memory-mapped \(.*\); copy the dataset"):
        IndexedDataset(tmp_path / "d")


def test_prefetch_takes_any_place(tmp_path):
    dataset = build(tmp_path / "d", [list(range(999))] * 20)
    dataset.prefetch(np.array([0, 1, 9000, dataset.num_tokens - 1]), 5000)
    dataset.prefetch(np.empty(0, np.int64), 5000)
    verify(dataset)


def test_a_view_keeps_its_file_mapped(tmp_path):
    view = build(tmp_path / "d", [[1, 2, 3]]).document(0)  # the dataset object is gone
    remove_dataset(tmp_path / "d")
    assert view.tolist() == [1, 2, 3]


def read_as_published(prefix):
    """A reader written from the published format alone: sequences, and the documents they belong to."""
    with open(f"{prefix}.idx", "rb") as file:
        assert file.read(9) == b"MMIDIDX\x00\x00"
        (version,) = struct.unpack("<Q", file.read(8))
        (code,) = struct.unpack("<B", file.read(1))
        (num_sequences,) = struct.unpack("<Q", file.read(8))
        (num_boundaries,) = struct.unpack("<Q", file.read(8))
        lengths = struct.unpack(f"<{num_sequences}i", file.read(4 * num_sequences))
        pointers = struct.unpack(f"<{num_sequences}q", file.read(8 * num_sequences))
        boundaries = struct.unpack(f"<{num_boundaries}q", file.read(8 * num_boundaries))
        assert not file.read()
    assert version == 1
    kind, size = {4: ("i", 4), 8: ("H", 2)}[code]
    with open(f"{prefix}.bin", "rb") as file:
        data = file.read()
    sequences = [
        list(struct.unpack(f"<{length}{kind}", data[pointer : pointer + length * size]))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return [sequences[start:stop] for start, stop in pairwise(boundaries)]


@pytest.mark.parametrize("vocab_size", [65499, 65500])
def test_another_reader_of_the_format_agrees(tmp_path, vocab_size):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, vocab_size, rng.integers(1, 50)).tolist() for _ in range(200)]
    build(tmp_path / "d", documents, vocab_size)
    assert read_as_published(tmp_path / "d") == [[document] for document in documents]


def without_manifest(prefix, dtype, num_documents, num_tokens):
    """Files with holes that would take minutes to read for their checksums."""
    sizes = {suffix: {"bytes": Path(f"{prefix}{suffix}").stat().st_size} for suffix in (".bin", ".idx")}
    counts = {"num_documents": num_documents, "num_tokens": num_tokens, "dtype": dtype}
    return IndexedDataset(prefix, manifest={"files": sizes, **counts})


def test_more_tokens_than_an_int32_can_count(tmp_path):
    """3,000 documents of a million tokens, holes in a file except for the last few."""
    count, length = 3000, 1_000_000
    with open(tmp_path / "d.idx", "wb") as file:
        file.writelines(index_chunks(np.full(count, length), np.dtype("<u2")))
    with open(tmp_path / "d.bin", "wb") as file:
        file.truncate(count * length * 2)
        file.seek(count * length * 2 - 6)
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    dataset = without_manifest(tmp_path / "d", "uint16", count, count * length)
    assert dataset.num_tokens == count * length > 2**31
    assert dataset.document(count - 1)[-3:].tolist() == [7, 8, 9] and dataset.document(1)[-1] == 0
    index = WindowIndex(dataset, 1000, 1)
    tokens, lengths, _ = index.gather(np.array([index.num_windows - 1]))
    assert tokens[-3:].tolist() == [7, 8, 9] and lengths.sum() == len(tokens)


def test_more_documents_than_an_int32_can_count(tmp_path):
    """All documents are empty but the last one, so that nearly the whole index is a hole in its file."""
    count = 2**31 + 5
    header, _ = index_chunks(np.zeros(0), np.dtype("<u2"))
    with open(tmp_path / "d.idx", "wb") as file:
        file.write(header[:18] + struct.pack("<QQ", count, count + 1))
        file.seek(34 + 4 * (count - 1))
        file.write(struct.pack("<i", 3))
        file.truncate(34 + 12 * count + 8 * (count + 1))
    (tmp_path / "d.bin").write_bytes(np.array([7, 8, 9], "<u2").tobytes())
    dataset = without_manifest(tmp_path / "d", "uint16", count, 3)
    assert len(dataset) == count and dataset.document(count - 1).tolist() == [7, 8, 9]
    assert WindowIndex(dataset, 1000).gather(np.array([0]))[0].tolist() == [7, 8, 9]


def test_opening_leaves_nothing_of_the_index_mapped(tmp_path):
    """Neither what the checks read nor, later, two megabytes around each page that a search reads (flag `nh`)."""
    dataset = build(tmp_path / "d", [[1, 2, 3]] * 5000)
    entries = Path("/proc/self/smaps").read_text().split(str(tmp_path / "d.idx"))
    assert len(entries) == 2
    resident = next(line for line in entries[1].splitlines() if line.startswith("Rss:"))
    flags = next(line for line in entries[1].splitlines() if line.startswith("VmFlags:"))
    assert resident.split() == ["Rss:", "0", "kB"]
    assert "nh" in flags.split()
    assert len(dataset) == 5000
