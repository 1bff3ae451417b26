"""Google's and Azure's protocols through pyarrow: builds, cleaning, copies and pushes, and what the stores refuse."""

import gzip

import pyarrow.fs
import pytest
from support import cleaning
from support.cloud_stores import ACCOUNT, KEY, serving_cloud
from support.commands import forked
from support.corpora import build as build_dataset
from support.stored_corpora import build, corpus_files, lines, write_files

from data_utils.common.errors import ConfigError, DataError, UserError
from data_utils.corpus.inputs import expand_inputs
from data_utils.dataset.local_copy import local_copy

SUFFIXES = (".bin", ".idx", ".json")


@pytest.fixture(params=["gs", "az"])
def cloud(request, monkeypatch):
    monkeypatch.setattr("data_utils.storage.buckets._GCS_SECONDS", 1.0)
    with serving_cloud(request.param) as cloud:
        monkeypatch.setenv(cloud.variable, cloud.endpoint)
        yield cloud


def few_files():
    files = corpus_files(100)
    return {name: files[name] for name in ("a.jsonl", "b.jsonl.gz", "f.parquet", "g.arrow")}


@pytest.mark.parametrize("trouble", [{}, {"cuts": 0.2, "busy": 0.05}], ids=["calm", "cuts"])
def test_a_build_has_the_bytes_of_local_files(tmp_path, cloud, monkeypatch, trouble):
    monkeypatch.setattr("data_utils.storage.objects.RANGE_BYTES", 70_000)
    files = few_files()
    expected = build(write_files(tmp_path / "raw", files), tmp_path / "local")
    cloud.put(files, "raw/")
    cloud.set(**trouble)
    workers = 0 if trouble else 2
    assert build([cloud.url("raw/*")], tmp_path / "remote", workers=workers) == expected
    written = b"".join(path.read_bytes() for path in tmp_path.glob("remote*"))
    assert b"CANARY" not in written and cloud.url("raw/a.jsonl").encode() in written
    ranges = [headers.get("range") or headers.get("x-ms-range") for _, _, headers in cloud.seen()]
    for first, last in (map(int, asked.removeprefix("bytes=").split("-")) for asked in filter(None, ranges)):
        assert last - first < 70_000
