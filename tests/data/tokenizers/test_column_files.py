"""Data sets that Hugging Face `datasets` saved, written here by pyarrow in the same form, and other Arrow files."""

import json
import struct

import pyarrow
import pytest

from data_utils.build.config import BuildConfig
from data_utils.build.corpus import build_corpus
from data_utils.common.errors import DataError
from data_utils.corpus import column_files
from data_utils.corpus.documents import FileRange, RecordCounts, read_blocks, read_documents
from data_utils.corpus.inputs import expand_inputs

TEXTS = [f"row {i}" for i in range(1, 1501)]


def write_arrow(path, table, rows=1000, as_file=False):
    """Args: rows: of a record batch; `datasets` writes 1000."""
    new = pyarrow.ipc.new_file if as_file else pyarrow.ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def save_to_disk(directory, table, shards=2, split="train", **state):
    """What `Dataset.save_to_disk` of datasets 5 writes, its names and keys."""
    directory.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    size = -(-len(table) // shards)
    for i, name in enumerate(names):
        write_arrow(directory / name, table.slice(i * size, size))
    content = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
        **state,
    }
    (directory / "state.json").write_text(json.dumps(content))
    (directory / "dataset_info.json").write_text(json.dumps({"features": {}, "splits": {}}))
    return directory


def save_dict_to_disk(directory, splits):
    for name, table in splits.items():
        save_to_disk(directory / name, table, split=name)
    (directory / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return directory


def table_of(texts, **columns):
    return pyarrow.table({"id": range(len(texts)), "text": texts, **columns})


def read(path, **options):
    return [(document.text, document.line) for document in read_documents([path], **options)]


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize(
    "kind",
    [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(),
     pyarrow.dictionary(pyarrow.int32(), pyarrow.string())],
    ids=str,
)  # fmt: skip
def test_arrow_files_of_both_formats(tmp_path, as_file, kind):
    table = table_of(pyarrow.array(TEXTS).cast(kind))
    path = write_arrow(tmp_path / "cache-0123456789abcdef.arrow", table, as_file=as_file)
    assert read(path) == [(text, i) for i, text in enumerate(TEXTS, 1)]
    blocks = list(read_blocks([FileRange(path)]))
    assert max(block.num_lines for block in blocks) <= 512
    assert 0.9 * path.stat().st_size < sum(block.input_bytes for block in blocks) <= path.stat().st_size


def test_a_saved_data_set_is_read_in_the_order_of_its_files(tmp_path):
    directory = save_to_disk(tmp_path / "saved", table_of(TEXTS))
    assert [text for text, _ in read(directory)] == TEXTS
    names = [path.name for path in expand_inputs([directory])]
    assert names == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]


def test_a_split_is_named(tmp_path):
    whole = save_dict_to_disk(tmp_path / "whole", {"train": table_of(TEXTS), "test": table_of(["one"])})
    with pytest.raises(DataError, match=r"several splits; give one of them: .*whole/train or .*whole/test\."):
        expand_inputs([whole])
    assert read(whole / "test") == [("one", 1)]


def test_a_corpus_of_a_saved_data_set(corpus, tmp_path):
    """Its tokens equal the same texts' in JSON lines."""
    from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer

    texts = [json.loads(line)["text"] for line in (corpus / "text.jsonl").read_text().splitlines()]
    saved = save_to_disk(tmp_path / "saved", table_of(texts))
    tokenizer = TokenizerConfig(kind="bert_wordpiece", path=str(corpus / "vocab.txt"))
    for name, source in (("a", saved), ("b", corpus / "text.jsonl")):
        config = BuildConfig(inputs=[str(source)], output=str(tmp_path / name))
        build_corpus(config, lambda: load_tokenizer(tokenizer))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_a_column_that_is_missing_or_no_text(tmp_path):
    directory = save_to_disk(tmp_path / "saved", table_of(TEXTS[:3]))
    with pytest.raises(
        DataError,
        match=r"data-00000-of-00002\.arrow: there is no column 'body'; set --text-key to one of id, text",
    ):
        read(directory, text_key="body")
    with pytest.raises(DataError, match="column 'id' holds int64, not text"):
        read(directory, text_key="id")


def test_bad_rows_are_named(tmp_path):
    damaged = pyarrow.array([b"fine", b"\xff", None]).view(pyarrow.string())
    path = write_arrow(tmp_path / "a.arrow", table_of(damaged))
    with pytest.raises(DataError, match=r"a\.arrow:2: invalid UTF-8"):
        read(path)
    counts = RecordCounts()
    assert read(path, on_bad_record="skip", counts=counts) == [("fine", 1)]
    assert counts.bad == {"invalid_utf8": 1, "field_not_text": 1}


@pytest.mark.parametrize("as_file", [False, True])
def test_damaged_files(tmp_path, as_file):
    path = write_arrow(tmp_path / "a.arrow", table_of(TEXTS), as_file=as_file)
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2], bytes(len(whole))):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.arrow: not a readable Arrow file .*; download it again"):
            read(path)


def test_wrong_offsets_end_no_process(tmp_path):
    path = write_arrow(tmp_path / "a.arrow", table_of(["aaaa", "bbbb", "cccc"]))
    content, offsets = path.read_bytes(), struct.pack("<4i", 0, 4, 8, 12)
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, struct.pack("<4i", 0, 4, 2**31 - 1, 12)))
    with pytest.raises(DataError, match=r"a\.arrow: not a readable Arrow file"):
        read(path)


@pytest.mark.parametrize(
    "state, message",
    [
        (None, "not one that Hugging Face `save_to_disk` wrote .no state.json.; give files"),
        ("[]", r"state\.json is not a JSON object"),
        ("{", r"state\.json is not a JSON object"),
        ('{"_data_files": []}', r"state\.json lists no Arrow files"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', r"state\.json lists no Arrow files"),
        ('{"_data_files": [{"filename": "a.arrow"}]}', r"a\.arrow is listed in state\.json but missing"),
        ('{"_data_files": [{"filename": "a.arrow"}], "_indices_files": [{}]}', "flatten_indices"),
    ],
)
def test_other_directories_are_refused(tmp_path, state, message):
    if state is not None:
        (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match=message):
        expand_inputs([tmp_path])


def test_reading_takes_little_memory(tmp_path):
    """Of a file of 40 MB, most of it in another column, no more than a block is held."""
    texts, other = ["a" * 2_000] * 1000, ["b" * 38_000] * 1000
    path = write_arrow(tmp_path / "a.arrow", table_of(texts, other=other), rows=50)
    allocated, largest = pyarrow.total_allocated_bytes(), 0
    for rows, _ in column_files.column_texts(path, "text"):
        assert len(rows) == 50
        largest = max(largest, pyarrow.total_allocated_bytes() - allocated)
    assert largest < 1_000_000
