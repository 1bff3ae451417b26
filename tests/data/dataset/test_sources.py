"""A manifest names every file of which a dataset was built, also where there are a million."""

import json
import random

import pytest
from support.data.byte_tokenizer import ByteTokenizer

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.errors import DataError
from data_utils.dataset import sources
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.manifest import checksum, manifest_bytes
from data_utils.dataset.sources import described_sources, sources_of
from data_utils.dataset.tools import merge_datasets


def build(directory, output):
    build_corpus(BuildConfig(inputs=[str(directory / "*/*.txt")], output=str(output)), ByteTokenizer)
    return IndexedDataset(output)


def write_files(directory, count):
    for number in range(count):
        path = directory / f"{number % 3}/{number:04}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text" * (number % 5 + 1))
    return [(str(path), path.stat().st_size) for path in sorted(directory.glob("*/*.txt"))]


def test_many_sources_are_named_by_directory(tmp_path, monkeypatch):
    files = write_files(tmp_path / "raw", 40)
    few = build(tmp_path / "raw", tmp_path / "few")
    assert list(sources_of(few.manifest)) == files and len(few.manifest["sources"]) == 40
    monkeypatch.setattr(sources, "LISTED", 10)
    many = build(tmp_path / "raw", tmp_path / "many")
    assert list(sources_of(many.manifest)) == files
    assert [len(group["names"]) for group in many.manifest["source_groups"]] == [14, 13, 13]
    merged = merge_datasets([str(tmp_path / "few"), str(tmp_path / "many")], str(tmp_path / "both"))
    assert list(sources_of(merged.manifest)) == files * 2


def test_every_list_of_paths_comes_back(monkeypatch):
    monkeypatch.setattr(sources, "LISTED", 0)
    generator = random.Random(1)
    parts = ["", "/", "a", "b.txt", "raw/", "a//", "../", "ü", "with space", "line\nbreak"]
    for _ in range(300):
        files = [
            ("".join(generator.choices(parts, k=4)), generator.randrange(9))
            for _ in range(generator.randrange(9))
        ]
        assert list(sources_of(json.loads(json.dumps(described_sources(files))))) == files


def test_a_build_of_too_many_files_is_refused_before_it_begins(tmp_path, monkeypatch):
    write_files(tmp_path / "raw", 40)
    monkeypatch.setattr(sources, "LISTED", 10)
    monkeypatch.setattr(sources, "MAX_BYTES", 500)
    with pytest.raises(
        DataError, match=r"40 input files need [\d,]+ bytes to list, .* join files, or build several"
    ):
        build(tmp_path / "raw", tmp_path / "out/many")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_million_sources_have_room():
    files = [
        (f"/data/crawl/part-{number // 1000:05}/document-{number:09}.jsonl.zst", 12345)
        for number in range(10**6)
    ]
    assert len(manifest_bytes(described_sources(files))) < 64 << 20


def test_a_group_with_other_sizes_than_names_is_damage(tmp_path, monkeypatch):
    write_files(tmp_path / "raw", 12)
    monkeypatch.setattr(sources, "LISTED", 1)
    manifest = json.loads(json.dumps(build(tmp_path / "raw", tmp_path / "d").manifest))
    manifest["source_groups"][0]["bytes"].pop()
    manifest["checksum"] = checksum(manifest)
    (tmp_path / "d.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="has entries that contradict each other"):
        IndexedDataset(tmp_path / "d")
