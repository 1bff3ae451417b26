"""Tables in text as Python's csv module and spreadsheets write them, and texts within the columns of other tables."""

import csv
import gzip

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.common.errors import DataError
from data_utils.corpus.documents import FileRange, RecordCounts, read_blocks, read_documents

TEXTS = ["plain", 'with "quotes", commas', "two\nlines", "tab\there", " spaces ", "\u00e9\u4e2d"]


def read(path, **options):
    return [(document.text, document.line) for document in read_documents([path], **options)]


def write_rows(path, rows, **options):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows(rows)
    return path


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".CSV", ",")])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_tables_in_text(tmp_path, suffix, delimiter, end):
    rows = [["id", "text"], *([i, text] for i, text in enumerate(TEXTS))]
    path = write_rows(tmp_path / f"a{suffix}", rows, delimiter=delimiter, lineterminator=end)
    assert read(path) == [(text, i) for i, text in enumerate(TEXTS, 2)]  # 1 is the row of names
    packed = tmp_path / f"b{suffix}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed) == read(path)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"))))
@settings(deadline=None)
def test_any_text_survives_a_table(tmp_path_factory, texts):
    """Written by pyarrow."""
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    pyarrow.csv.write_csv(
        pyarrow.table({"n": range(len(texts)), "text": pyarrow.array(texts, pyarrow.string())}), path
    )
    assert [text for text, _ in read(path)] == [text for text in texts if text.strip()]
    assert sum(block.input_bytes for block in read_blocks([FileRange(path)])) == (
        path.stat().st_size if texts else 0
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id,body\n1,a\n", r"a\.csv: there is no column 'text'; set --text-key to one of id, body"),
        (b"id, text\n1, a\n", r"set --text-key to one of id, ' text' \(the first row"),
        (b"id,text\r1,a\r", r"end in a bare carriage return.*tr '\\r' '\\n'"),
        (b"text,text\na,b\n", r"a\.csv: 2 columns have the name 'text'"),
        ("id,text\n1,a\n".encode("utf-16-le"), r"NUL bytes: UTF-16 without a byte order mark"),
        (b"id;text\n1;a\n", r"separated by commas, but the first row is 'id;text'"),
        (b'text\n"never closed\n' + b"more\n" * 9, r"a\.csv:11: not a valid table"),
        (b'text\n"a" b\n', r"a\.csv:2: not a valid table"),
        (b"id,text\n1,a,b\n", r"a\.csv:2: the row has 3 fields, but the first row has 2"),
        (b"text\n\xe9\n", r"a\.csv:2: invalid UTF-8: byte 0xe9"),
    ],
)
def test_a_table_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(path)


def test_tables_without_rows_are_empty_files(tmp_path):
    """As for JSON lines: nothing at all, a row of names, blank lines before it."""
    for content, texts in ((b"", []), (b"\n\n", []), (b"id,text\n", []), (b"\n\nid,text\n1,a\n", ["a"])):
        path = tmp_path / "a.csv"
        path.write_bytes(content)
        assert [text for text, _ in read(path)] == texts


def test_bad_rows_are_counted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,text\n1,a\n2\n\n3,\xe9\n4,\n5,b\n")
    counts = RecordCounts()
    assert read(path, on_bad_record="skip", counts=counts) == [("a", 2), ("b", 6)]
    assert counts.bad == {"wrong_columns": 1, "invalid_utf8": 1} and counts.empty_documents == 1


def test_a_column_within_a_column(tmp_path):
    rows = [
        {"meta": {"body": "a", "n": 1}, "x": {"y": {"z": "deep"}}},
        {"meta": None, "x": {"y": {"z": "er"}}},
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with (
        pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        path = tmp_path / name
        assert read(path, text_key="x.y.z") == [("deep", 1), ("er", 2)]
        counts = RecordCounts()
        assert read(path, text_key="meta.body", on_bad_record="skip", counts=counts) == [("a", 1)]
        assert counts.bad == {"field_not_text": 1}
        with pytest.raises(DataError, match=r"column 'meta' holds struct.*one of meta\.body, meta\.n"):
            read(path, text_key="meta")
        with pytest.raises(DataError, match=r"no column 'meta\.text'; .*one of meta\.body"):
            read(path, text_key="meta.text")


def test_a_column_of_the_whole_name_comes_first(tmp_path):
    table = pyarrow.Table.from_pylist([{"a.b": "x", "a": {"b": "y"}}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", text_key="a.b") == [("x", 1)]


def test_two_columns_of_one_name(tmp_path):
    array = pyarrow.array(["x"])
    pyarrow.parquet.write_table(
        pyarrow.Table.from_arrays([array, array, array], ["text", "text", "id"]), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match=r"a\.parquet: 2 columns have the name 'text'; rename all but one"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", text_key="id") == [("x", 1)]


@pytest.mark.parametrize(
    "kind",
    [pyarrow.binary(), pyarrow.large_binary(), pyarrow.dictionary(pyarrow.int32(), pyarrow.binary()),
     pyarrow.dictionary(pyarrow.int8(), pyarrow.large_string())],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_text_that_its_writer_called_bytes(tmp_path, kind, suffix):
    """Hive and old Spark write texts so."""
    is_text = pyarrow.types.is_dictionary(kind) and kind.value_type == pyarrow.large_string()
    values = ["one", "two", "one"] if is_text else [b"one", b"two", b"one"]
    array = pyarrow.array(values, kind.value_type if pyarrow.types.is_dictionary(kind) else kind)
    table = pyarrow.table(
        {"text": array.dictionary_encode().cast(kind) if pyarrow.types.is_dictionary(kind) else array}
    )
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    assert read(path) == [("one", 1), ("two", 2), ("one", 3)]


def test_bad_text_within_a_column_is_a_bad_row(tmp_path):
    body = pyarrow.array([b"fine", b"\xff", b"too"]).view(pyarrow.string())
    table = pyarrow.table({"meta": pyarrow.StructArray.from_arrays([body], ["body"])})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with (
        pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        counts = RecordCounts()
        options = {"text_key": "meta.body", "on_bad_record": "skip", "counts": counts}
        assert read(tmp_path / name, **options) == [("fine", 1), ("too", 3)]
        assert counts.bad == {"invalid_utf8": 1}
