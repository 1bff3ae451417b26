import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.common.errors import ConfigError, DataError
from data_utils.corpus.documents import (
    FileRange,
    RecordCounts,
    lines_before,
    parse_block,
    plan_shards,
    read_blocks,
    read_documents,
)
from data_utils.corpus.inputs import expand_inputs


def texts_of(path, **options):
    return [document.text for document in read_documents([path], **options)]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


BAD_LINES = {
    "malformed_json": b'{"text": "x", }',
    "invalid_utf8": b'{"text": "\xff\xfe"}',
    "lone_surrogate": b'{"text": "\\ud83d"}',
    "not_an_object": b'["text"]',
    "missing_field": b'{"txt": "x"}',
    "field_not_text": b'{"text": 3}',
}
MESSAGES = {
    "malformed_json": "malformed JSON",
    "invalid_utf8": "byte 0xff at position 11",
    "lone_surrogate": "surrogate",
    "not_an_object": "an array, not an object",
    "missing_field": "no field 'text' (fields: txt; set --text-key to the one with the text)",
    "field_not_text": "field 'text' holds a number",
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_bad_record_names_file_and_line(tmp_path, kind):
    path = write(tmp_path / "a.jsonl", b'{"text": "one"}\n\n' + BAD_LINES[kind] + b'\n{"text": "two"}\n')
    with pytest.raises(DataError) as error:
        texts_of(path)
    message = str(error.value)
    assert (
        message.startswith(f"{path}:3: ") and MESSAGES[kind] in message and "--on-bad-record skip" in message
    )
    assert "\n" not in message
    counts = RecordCounts()
    assert texts_of(path, on_bad_record="skip", counts=counts) == ["one", "two"]
    assert counts.bad == {kind: 1} and counts.blank_lines == 1


def test_truncated_last_line(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "tw\n{"text": "tw')
    counts = RecordCounts()
    assert texts_of(path, on_bad_record="skip", counts=counts) == []
    assert counts.bad == {"malformed_json": 1, "truncated_record": 1}
    assert "file ends inside" in str(counts.examples[1]) and ":2:" in str(counts.examples[1])


def test_a_complete_last_line_needs_no_newline(tmp_path):
    assert texts_of(write(tmp_path / "a.jsonl", b'{"text": "one"}\r\n{"text": "two"}')) == ["one", "two"]


def test_skipping_has_a_limit(tmp_path):
    path = write(tmp_path / "a.jsonl", b"x\n" * 4)
    assert texts_of(path, on_bad_record="skip", max_bad_records=4) == []
    with pytest.raises(DataError, match=r"4 bad records.*malformed_json.*max_bad_records"):
        texts_of(path, on_bad_record="skip", max_bad_records=3)


def test_examples_are_limited(tmp_path):
    counts = RecordCounts()
    path = write(tmp_path / "a.jsonl", b"x\n" * 50)
    texts_of(path, on_bad_record="skip", counts=counts)
    assert counts.num_bad == 50 and len(counts.examples) == 10


def test_empty_documents_are_counted(tmp_path):
    counts = RecordCounts()
    path = write(tmp_path / "a.jsonl", b'{"text": ""}\n{"text": " \\n"}\n \n{"text": "x"}\n')
    assert texts_of(path, counts=counts) == ["x"]
    assert (counts.empty_documents, counts.blank_lines, counts.num_bad) == (2, 1, 0)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt"])
def test_byte_order_marks(tmp_path, suffix):
    content = {".jsonl": '{"text": "x"}\n', ".csv": "text\nx\n", ".txt": "x"}[suffix]
    assert texts_of(write(tmp_path / f"a{suffix}", b"\xef\xbb\xbf" + content.encode())) == ["x"]
    for encoding in ("utf-16", "utf-32"):
        for order in ("", "-be"):
            mark = "".encode(encoding) if not order else "\ufeff".encode(f"{encoding}{order}")
            data = mark + content.encode(f"{encoding}{order or '-le'}")
            with pytest.raises(DataError, match=rf"b{suffix}: the file is {encoding.upper()}, .*iconv"):
                texts_of(write(tmp_path / f"b{suffix}", data))


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (gzip.compress(b'{"text": "x"}\n'), "gzip"),
        (bz2.compress(b'{"text": "x"}\n'), "bzip2"),
        (lzma.compress(b'{"text": "x"}\n'), "xz"),
        (zstandard.compress(b'{"text": "x"}\n'), "zstd"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS"),
    ],
)
def test_a_file_with_another_content_than_its_name_says(tmp_path, content, kind):
    with pytest.raises(DataError, match=kind):
        texts_of(write(tmp_path / "a.jsonl", content))


def test_other_encodings_have_their_remedy(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:1: invalid UTF-8: byte 0xe9 .*iconv -f LATIN1"):
        texts_of(write(tmp_path / "a.jsonl", '{"text": "caf\xe9"}\n'.encode("latin-1")))
    with pytest.raises(DataError, match=r"a\.jsonl:1: NUL bytes: UTF-16 .*iconv -f UTF-16LE"):
        texts_of(write(tmp_path / "a.jsonl", '{"text": "x"}\n'.encode("utf-16-le")))


@pytest.mark.parametrize(
    ("line", "key", "text"),
    [
        ('{"text": "x", "score": NaN, "other": [Infinity, -Infinity]}', "text", "x"),
        ('{"text": "x", "score": 1e999, "other": [-1e999]}', "text", "x"),
        ('{"meta": {"body": "x"}}', "meta.body", "x"),
        ('{"a": {"b.c": "x"}}', "a.b.c", "x"),
        ('{"a.b": "x", "a": {"b": "y"}}', "a.b", "x"),  # a field of the whole name comes first
        ('{"text": "x", "id": 1, "id": 2}', "text", "x"),  # the text is beyond doubt
        ('{"text": "x", "meta": {"text": "y"}, "list": ["text"]}', "text", "x"),
        ('{"text": "\\"text\\"", "n": 1}', "text", '"text"'),
    ],
)
def test_the_text_of_a_line(tmp_path, line, key, text):
    assert texts_of(write(tmp_path / "a.jsonl", line.encode()), text_key=key) == [text]


@pytest.mark.parametrize(
    ("line", "key", "kind"),
    [
        ('{"text": "x", "text": "y"}', "text", "key_twice"),
        ('{"a": {"b": "x"}, "a": {"b": "y"}}', "a.b", "key_twice"),
        ('{"text": "\\ud83d", "score": NaN}', "text", "lone_surrogate"),
        ('{"text": NaN}', "text", "field_not_text"),
        ('{"a": "x"}', "a.b", "missing_field"),
        ('{"a": {"b": 3}}', "a.b", "field_not_text"),
    ],
)
def test_a_line_without_one_text(tmp_path, line, key, kind):
    counts = RecordCounts()
    path = write(tmp_path / "a.jsonl", line.encode() + b"\n")
    assert texts_of(path, text_key=key, on_bad_record="skip", counts=counts) == []
    assert counts.bad == {kind: 1}


COMPRESS = {
    ".gz": gzip.compress,
    ".GZ": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files(tmp_path, suffix):
    compress = COMPRESS[suffix]
    lines = b"".join(b'{"text": "%d"}\n' % i for i in range(5000))
    data = compress(lines[:1000]) + compress(lines[1000:])  # files may be concatenated
    path = write(tmp_path / f"a.jsonl{suffix}", data)
    assert texts_of(path) == [str(i) for i in range(5000)]
    for cut in (len(data) - 4, 0):
        with pytest.raises(DataError, match=r"cut.jsonl.*is truncated"):
            texts_of(write(tmp_path / f"cut.jsonl{suffix}", data[:cut]))
    with pytest.raises(DataError, match=r"damaged.jsonl.*damaged compressed data"):
        texts_of(write(tmp_path / f"damaged.jsonl{suffix}", b"no compressed data at all"))


@pytest.mark.parametrize("suffix", [*COMPRESS, ""])
def test_progress_adds_up_to_the_stored_size(tmp_path, suffix):
    compress = {**COMPRESS, "": bytes}[suffix]
    data = compress(b"".join(b'{"text": "%d"}\n' % (i * 7919) for i in range(5000)))
    path = write(tmp_path / f"a.jsonl{suffix}", data)
    assert sum(block.input_bytes for block in read_blocks([FileRange(path)], block_bytes=4096)) == len(data)


RECORD = st.sampled_from(
    [b"", b" ", b"\t\r", b"\xff", b"a b", b"{}", b'{"text": "x"}', b'{"text": "\xc3\xa9"}', b"{"]
)


@given(st.lists(RECORD, max_size=30), st.integers(1, 64), st.sampled_from(["jsonl", "lines", "blank_lines"]))
@settings(deadline=None)
def test_block_size_changes_nothing(tmp_path_factory, records, block_bytes, record_format):
    suffix = "jsonl" if record_format == "jsonl" else "txt"
    path = write(tmp_path_factory.mktemp("blocks") / f"a.{suffix}", b"first\n" + b"\n".join(records))

    def read(size):
        counts, found = RecordCounts(), []
        for block in read_blocks([FileRange(path)], text_split=record_format, block_bytes=size):
            parsed = parse_block(block)
            counts.merge(parsed.counts)
            found += zip(parsed.lines, parsed.texts, strict=True)
        return found, counts

    assert read(block_bytes) == read(1 << 20)


@given(
    st.lists(st.lists(RECORD, max_size=20), min_size=1, max_size=3),
    st.integers(1, 100),
    st.sampled_from(["jsonl", "lines", "blank_lines", "file"]),
)
@settings(deadline=None)
def test_pieces_hold_each_record_once_with_its_line(tmp_path_factory, contents, shard_bytes, text_split):
    directory, suffix = tmp_path_factory.mktemp("file_ranges"), "jsonl" if text_split == "jsonl" else "txt"
    paths = [write(directory / f"{i}.{suffix}", b"\n".join(records)) for i, records in enumerate(contents)]
    groups = plan_shards(paths, text_split, shard_bytes)
    assert all(len({file_range.path for file_range in group}) == len(group) for group in groups)

    def read(file_ranges):
        found, bad = [], []
        for file_range in file_ranges:
            before = lines_before(file_range, text_split)
            for block in read_blocks([file_range], text_split=text_split, block_bytes=16):
                parsed = parse_block(block)
                lines = [line + before for line in parsed.lines]
                found += [(block.source, *pair) for pair in zip(lines, parsed.texts, strict=True)]
                bad += [(place.source, place.line + before) for place in parsed.counts.examples]
        return found, bad

    whole = read(FileRange(path) for path in paths)
    assert read(file_range for group in groups for file_range in group) == whole


def test_files_that_cannot_be_cut_stay_whole(tmp_path):
    names = ("a.jsonl.gz", "b.txt", "c.parquet", "d.jsonl", "e.jsonl")
    paths = [write(tmp_path / name, b"x" * 250) for name in names]
    write(paths[-1], b"")
    groups = plan_shards(paths, "file", 100)
    assert [
        [(file_range.path.name, file_range.start, file_range.stop) for file_range in group]
        for group in groups
    ] == [
        [("a.jsonl.gz", 0, None)],
        [("b.txt", 0, None)],
        [("c.parquet", 0, None)],
        [("d.jsonl", 0, 100)],
        [("d.jsonl", 100, 200)],
        [("d.jsonl", 200, None), ("e.jsonl", 0, None)],
    ]


def test_small_files_are_shared_by_number(tmp_path):
    paths = [write(tmp_path / f"{i}.txt", b"x") for i in range(5)]
    groups = plan_shards(paths, "file", 100, shard_files=2)
    assert [[file_range.path for file_range in group] for group in groups] == [
        paths[:2],
        paths[2:4],
        paths[4:],
    ]


@given(st.lists(st.text(min_size=1).filter(lambda text: not text.isspace())))
@settings(deadline=None)
def test_any_text_survives(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("texts") / "a.jsonl"
    texts = [text for text in texts if text.encode("utf-8", "replace").decode() == text]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert [(document.text, document.line) for document in read_documents([path])] == [
        (text, i) for i, text in enumerate(texts, 1)
    ]


def test_text_files(tmp_path):
    path = write(tmp_path / "a.txt", b"\n one\r\ntwo\n\n \nthree\n\n\nfour")
    assert texts_of(path) == ["\n one\ntwo\n\n \nthree\n\n\nfour"]
    paragraphs = list(read_documents([path], text_split="blank_lines"))
    assert [(d.text, d.line) for d in paragraphs] == [("one\ntwo", 2), ("three", 6), ("four", 9)]
    assert texts_of(path, text_split="lines") == [" one", "two", "three", "four"]
    bad = write(tmp_path / "b.txt", b"fine\n\n\xff\n")
    with pytest.raises(DataError, match=r"b\.txt:3: invalid UTF-8"):
        texts_of(bad, text_split="lines")


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    for kind in (
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ):
        table = pyarrow.table({"text": pyarrow.array(["one", "", "two"]).cast(kind), "id": [1, 2, 3]})
        pyarrow.parquet.write_table(table, path)
        counts = RecordCounts()
        found = [(d.text, d.line) for d in read_documents([path], counts=counts)]
        assert found == [("one", 1), ("two", 3)] and counts.empty_documents == 1
    with pytest.raises(DataError, match="no column 'body'; set --text-key to one of text, id"):
        texts_of(path, text_key="body")
    with pytest.raises(DataError, match="column 'id' holds int64, not text"):
        texts_of(path, text_key="id")


def test_parquet_bad_rows_and_damage(tmp_path):
    path = tmp_path / "a.parquet"
    damaged = pyarrow.array([b"fine", b"\xff", None]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": damaged}), path)
    with pytest.raises(DataError, match=r"a\.parquet:2: invalid UTF-8"):
        texts_of(path)
    counts = RecordCounts()
    assert texts_of(path, on_bad_record="skip", counts=counts) == ["fine"]
    assert counts.bad == {"invalid_utf8": 1, "field_not_text": 1}
    write(path, path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable parquet file"):
        texts_of(path)


def test_parquet_rows_keep_their_numbers_across_batches(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"row {i}" for i in range(1, 1501)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=400)
    assert [(d.text, d.line) for d in read_documents([path])] == [(t, i) for i, t in enumerate(texts, 1)]
    assert sum(block.input_bytes for block in read_blocks([FileRange(path)])) == path.stat().st_size


def test_inputs(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt", "d.xml"):
        write(tmp_path / name, b"")
    expected = [tmp_path / "c.txt", tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert expand_inputs([tmp_path / "c.txt", tmp_path / "*.jsonl", tmp_path / "a.jsonl"]) == expected
    for pattern, message in [
        ("e.jsonl", "does not exist"),
        ("e*.jsonl", "matches no file"),
        ("", "is a directory"),
        ("d.xml", "unknown suffix"),
    ]:
        with pytest.raises(DataError, match=message):
            expand_inputs([tmp_path / pattern])
    with pytest.raises(DataError, match="no input"):
        expand_inputs([])


@pytest.mark.parametrize("cut", [FileRange(Path(), 10, None), FileRange(Path(), 0, 10)])
def test_the_end_of_a_huge_record_is_not_searched_for_in_all_of_the_file(tmp_path, monkeypatch, cut):
    """A worker read the rest of the file to memory, and refused nothing if the record was the last."""
    monkeypatch.setattr("data_utils.corpus.documents.MAX_RECORD_BYTES", 100_000)
    path = write(tmp_path / "a.jsonl", b"x" * 1_000_000 + b"\n{}\n")
    with pytest.raises(
        DataError, match=r"a\.jsonl: after byte 10 no record ends within 100000 bytes; split it"
    ):
        list(read_blocks([FileRange(path, cut.start, cut.stop)]))


def test_a_huge_record_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("data_utils.corpus.documents.MAX_RECORD_BYTES", 1000)
    path = write(tmp_path / "a.jsonl", b"{}\n" + b"x" * 2000)
    with pytest.raises(DataError, match=r"a\.jsonl:2: a record is longer than 1000 bytes"):
        list(read_blocks([FileRange(path)], block_bytes=100))


def test_options_are_checked():
    for options in ({"text_split": "words"}, {"on_bad_record": "ignore"}, {"max_bad_records": -1}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            list(read_documents(["x.txt"], **options))


@pytest.mark.parametrize(
    ("content", "key", "remedy"),
    [
        ('[\n{"text": "a"}\n]\n', "text", "put each object on its own line: jq -c '.[]' FILE"),
        ('[{"text": "a"}, {"text": "b"}]\n', "text", "jq -c '.[]' FILE"),
        ('{\n "text": "a"\n}\n', "text", "put each object on its own line: jq -c . FILE"),
        ('{"text": "a",\n "id": 1}\n', "text", "put each object on its own line: jq -c . FILE"),
        ('{"text": "a"}{"text": "b"}\n', "text", "put each object on its own line: jq -c . FILE"),
        ('{"text": "a"}\r{"text": "b"}\r', "text", "jq -c . FILE"),
        ('{"text":\n "a"\n}\n', "text", "jq -c . FILE"),
        ('{"text": "a"},\n{"text": "b"},\n', "text", "remove the comma after each object: sed"),
        ('{"data": [{"text": "a"}]}\n', "text", "jq -c '.data[]' FILE"),
        ('{"meta": {"body": "a"}}\n', "meta", "--text-key meta.body"),
        ("id,text\n1,a\n", "text", "Rename it to .csv or .tsv"),
        ('{"text ": "a"}\n', "text", "(fields: 'text '; "),
        ("plain text\n", "text", "plain text needs .txt"),
    ],
)
def test_json_in_another_shape_has_its_remedy(tmp_path, content, key, remedy):
    path = write(tmp_path / "a.json", content.encode())
    with pytest.raises(DataError) as error:
        texts_of(path, text_key=key)
    assert str(error.value).startswith(f"{path}:1: ") and remedy in str(error.value)


@pytest.mark.parametrize("split", ["file", "lines", "blank_lines"])
@pytest.mark.parametrize("content", [b"fine\x00 text\n", "two bytes a character".encode("utf-16-le")])
def test_a_nul_byte_is_no_text(tmp_path, split, content):
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(DataError, match=r"a\.txt:1: a NUL byte.* or UTF-16 \(iconv"):
        texts_of(path, text_split=split)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (
            "Salesforce/wikitext",
            r"datasets\.load_dataset\('Salesforce/wikitext', split='train'\)\.save_to_disk",
        ),
        ("raw/absent.txt", r"check the path \(relative to /"),
        ("/absent.txt", r"does not exist; check the path\.$"),
    ],
)
def test_an_input_that_is_not_there_has_its_remedy(name, remedy):
    with pytest.raises(DataError, match=remedy):
        expand_inputs([name])


def test_bytes_after_compressed_data_are_named(tmp_path):
    data = gzip.compress(b'{"text": "a"}\n')
    assert texts_of(write(tmp_path / "padded.jsonl.gz", data + data + bytes(8))) == ["a", "a"]
    with pytest.raises(DataError, match=r"more\.jsonl\.gz: other bytes follow the compressed data"):
        texts_of(write(tmp_path / "more.jsonl.gz", data + b"more"))
