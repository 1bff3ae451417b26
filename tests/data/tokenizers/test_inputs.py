"""Which files paths, globs and directories name; nothing that they name is left out without a word."""

import gzip
import json
import os
import socket

import pytest

from data_utils.common.errors import DataError
from data_utils.corpus.documents import read_documents
from data_utils.corpus.inputs import expand_inputs


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*names, content='{"text": "x"}\n'):
    for name in names:
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        data = content.encode()
        with open(name, "wb") as file:
            file.write(gzip.compress(data) if name.lower().endswith(".gz") else data)


def names_of(*patterns):
    return [str(path) for path in expand_inputs(patterns)]


def test_all_that_cannot_be_read_is_named_in_one_message(here):
    write("good.jsonl", "raw/a.jsonl", "raw/c.xml")
    os.symlink("blobs/gone", "raw/b.jsonl")
    os.symlink("loop.jsonl", "raw/loop.jsonl")
    os.mkdir("raw/folder")
    write("raw/folder/x.jsonl")
    os.mkdir("raw/empty.jsonl")
    os.mkfifo("raw/pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("raw/socket.jsonl")
    os.symlink("/dev/null", "raw/device.jsonl")
    write("raw/e.jsonl.gz.zip", "raw/f.parquet", "raw/g.tar.gz", content="")
    with pytest.raises(DataError) as error:
        expand_inputs(["good.jsonl", "raw/*", "missing*.jsonl", "missing.jsonl", "{a,b}.jsonl", "absent/**"])
    message = str(error.value)
    assert message.startswith("15 inputs cannot be read: (1) ") and "\n" not in message
    for part in (
        "raw/b.jsonl is a link to blobs/gone, which",
        "raw/loop.jsonl is a link to",
        "raw/folder is a directory",
        "raw/empty.jsonl is a directory without part files",
        "raw/pipe.jsonl is a pipe",
        "raw/socket.jsonl is a socket",
        "raw/device.jsonl is a device",
        "raw/e.jsonl.gz.zip is an archive",
        "raw/g.tar.gz is an archive",
        "raw/f.parquet: not a readable parquet file (it is empty)",
        "raw/c.xml has an unknown suffix",
        "pattern missing*.jsonl matches no file",
        "pattern absent/** matches no file",
        "missing.jsonl does not exist",
        "remove the quotes",
    ):
        assert part in message


def test_files_and_folders_without_permission_are_named(here, monkeypatch):
    """os.access is asked, so that this holds for root too, who may read all."""
    write("raw/a.jsonl", "raw/locked.jsonl", "raw/closed/b.jsonl")
    allowed = os.access
    closed = ("raw/locked.jsonl", "raw/closed")
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in closed and allowed(path, mode))
    with pytest.raises(DataError, match=r"raw/locked\.jsonl cannot be read \(Permission denied\)"):
        expand_inputs(["raw/*.jsonl"])
    for pattern in ("raw/*/*.jsonl", "raw/**/b.jsonl", "raw/closed/*"):
        with pytest.raises(DataError, match="raw/closed cannot be read"):
            expand_inputs([pattern])


@pytest.mark.parametrize(
    "name", ["A.JSONL", "a.Json.GZ", "a.NDJSON", "a.TXT", "a.txt.ZST", "a.Parquet", "a.CSV", "a.jsonl.XZ"]
)
def test_endings_in_upper_case(here, name):
    write(name)
    assert names_of(name) == names_of("*.*") == [name]


def test_upper_case_files_are_read(here):
    write("A.JSONL", "B.JSON.GZ")
    assert [document.text for document in read_documents(["A.JSONL", "B.JSON.GZ"])] == ["x", "x"]


def test_a_directory_of_part_files_is_its_files(here, caplog):
    """What Spark, Dask and pyarrow write under the name of a file."""
    write("c.jsonl/part-00001.json", "c.jsonl/part-00000.json.gz", "c.jsonl/lang=en/part-0.json")
    write("c.jsonl/_SUCCESS", "c.jsonl/.part-00001.json.crc", content="")
    write("c.jsonl/_temporary/part-9.json")
    parts = ["c.jsonl/lang=en/part-0.json", "c.jsonl/part-00000.json.gz", "c.jsonl/part-00001.json"]
    for pattern in ("c.jsonl", "c.jsonl/", "*.jsonl"):
        caplog.clear()
        assert names_of(pattern) == parts
        (warning,) = caplog.messages
        for name in ("_SUCCESS", ".part-00001.json.crc", "_temporary"):
            assert f"c.jsonl/{name}" in warning
    caplog.clear()
    assert names_of("c.jsonl/*.*", "c.jsonl/**/_S*", "c.jsonl/**/part-0.json") == [*parts[1:], parts[0]]
    assert "c.jsonl/_SUCCESS" in caplog.text
    write("c.jsonl/part-00002")
    with pytest.raises(DataError, match=r"c\.jsonl/part-00002 has an unknown suffix"):
        expand_inputs(["*.jsonl"])


def test_two_stars_enter_folders(here):
    write("raw/a.txt", "raw/deep/er/b.txt", "raw/deep/c.txt", content="x")
    expected = ["raw/a.txt", "raw/deep/c.txt", "raw/deep/er/b.txt"]
    assert names_of("raw/**") == names_of("raw/**/*") == names_of("raw/**/*.txt") == expected
    os.makedirs("raw/nothing")
    assert names_of("raw/**") == names_of("raw/**/*") == expected


def test_a_file_with_two_names_is_read_once(here, caplog):
    write("a.jsonl", "b.jsonl")
    os.symlink("a.jsonl", "link.jsonl")
    os.link("b.jsonl", "hard.jsonl")
    assert names_of("a.jsonl", "./a.jsonl", "*.jsonl") == ["a.jsonl", "b.jsonl"]
    (warning,) = caplog.messages
    assert (
        "given twice" in warning
        and "link.jsonl (is a.jsonl)" in warning
        and "hard.jsonl (is b.jsonl)" in warning
    )


def test_empty_files_are_said(here, caplog):
    write("a.jsonl")
    write("b.jsonl", "c.txt", "d.csv", content="")
    assert names_of("*.*") == ["a.jsonl", "b.jsonl", "c.txt", "d.csv"]
    assert "3 inputs are empty: b.jsonl, c.txt, d.csv" in caplog.text


def test_brackets_in_names(here):
    write("data[v2]/a.jsonl", "data[v2]/x/b.jsonl", "datav/c.jsonl", "d[1].jsonl", "e[1]/f/g.jsonl")
    assert names_of("data[v2]/*.jsonl") == ["data[v2]/a.jsonl"]
    assert names_of(f"{here}/data[v2]/**/*.jsonl") == [
        f"{here}/data[v2]/a.jsonl",
        f"{here}/data[v2]/x/b.jsonl",
    ]
    assert names_of("d[1].jsonl") == ["d[1].jsonl"]
    assert names_of("data[u-w]/*.jsonl") == ["datav/c.jsonl"]
    with pytest.raises(
        DataError, match=r"pattern \*\[1\]/f/\*\.jsonl matches no file.*\[\[\] a literal bracket"
    ):
        expand_inputs(["*[1]/f/*.jsonl"])


def test_a_link_on_the_way_up_is_followed(here):
    """The system's `..` is the folder above what a link points to, not the one that the link is in."""
    write("far/x/a.jsonl", "x/b.jsonl")
    os.makedirs("far/deep")
    os.symlink("far/deep", "link")
    assert names_of("link/../x/*.jsonl") == ["link/../x/a.jsonl"]


def test_a_dangling_link_stops_a_build_before_any_work(here):
    from support.commands import forked

    write("raw/a.jsonl")
    os.symlink("blobs/gone", "raw/b.jsonl")
    write("vocab.txt", content="[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nx\n")
    before = sorted(os.listdir())
    options = ["--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", "vocab.txt", "--workers", "1"]
    done = forked("scripts/preprocess_data.py", *options, "--input", "raw/*", "--output", "out", cwd=here)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "raw/b.jsonl is a link to blobs/gone" in done.stderr and sorted(os.listdir()) == before


def test_what_is_left_out_is_on_the_screen(here):
    from support.commands import forked

    write("c.jsonl/part-0.json")
    write("c.jsonl/_SUCCESS", content="")
    write("vocab.txt", content="[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nx\n")
    options = ["--tokenizer-kind", "bert_wordpiece", "--tokenizer-path", "vocab.txt", "--workers", "1"]
    done = forked("scripts/preprocess_data.py", *options, "--input", "*.jsonl", "--output", "out", cwd=here)
    assert done.returncode == 0 and "c.jsonl/_SUCCESS" in done.stderr, done.stderr
    assert [source["path"] for source in json.loads((here / "out.json").read_text())["sources"]] == [
        "c.jsonl/part-0.json"
    ]
