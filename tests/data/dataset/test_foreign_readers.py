"""The same bytes in other people's hands: Megatron-core and datatrove read our datasets, and we read theirs."""

import numpy as np
import pytest
import torch
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile
from datatrove.utils.dataset import DatatroveFileDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from data_utils.common.errors import DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.tools import adopt_dataset
from data_utils.dataset.verification import verify
from data_utils.dataset.writer import IndexedDatasetWriter
from data_utils.loader.sampler import WindowIndex

VOCABULARIES = [5000, 70000]  # uint16 and int32


def documents(vocab_size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab_size, n) for n in (5, 1, 300, 2, 77)]


def write_ours(prefix, vocab_size):
    texts = documents(vocab_size)
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        writer.add(np.concatenate(texts).astype(writer.dtype), np.array([len(text) for text in texts]))
        writer.finish({})
    return texts


def assert_ours_reads(prefix, texts):
    ours = adopt_dataset(prefix)
    assert len(ours) == len(texts) and ours.num_tokens == sum(map(len, texts))
    for i, text in enumerate(texts):
        assert np.array_equal(ours.document(i), text)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_megatron_core_reads_what_we_write(tmp_path, vocab_size):
    texts = write_ours(tmp_path / "corpus", vocab_size)
    theirs = MegatronDataset(str(tmp_path / "corpus"))
    assert len(theirs) == len(texts)
    assert theirs.sequence_lengths.tolist() == [len(text) for text in texts]
    assert theirs.document_indices.tolist() == list(range(len(texts) + 1))
    for i, text in enumerate(texts):
        assert np.array_equal(theirs[i], text)
        assert np.array_equal(theirs.get(i, offset=1, length=len(text) - 1), text[1:])


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_we_read_what_megatron_core_writes_and_the_bytes_are_the_same(tmp_path, vocab_size):
    texts = write_ours(tmp_path / "ours", vocab_size)
    dtype = IndexedDataset(tmp_path / "ours").dtype.type
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for text in texts:
        builder.add_item(torch.from_numpy(text))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert_ours_reads(tmp_path / "theirs", texts)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_datatrove_reads_our_tokens_and_we_its_datasets(tmp_path, vocab_size):
    texts = write_ours(tmp_path / "ours", vocab_size)
    size = IndexedDataset(tmp_path / "ours").dtype.itemsize
    stream, window = np.concatenate(texts), 16
    read = DatatroveFileDataset(str(tmp_path / "ours.bin"), seq_len=window - 1, token_size=size)
    assert len(read) == len(stream) // window
    for i in range(len(read)):
        assert read[i]["input_ids"].tolist() == stream[i * window : (i + 1) * window].tolist()

    theirs = MegatronTokenizedFile(str(tmp_path), "theirs", token_size=size)
    for text in texts:
        theirs.write(text.tolist())
    theirs.close()
    assert_ours_reads(tmp_path / "theirs", texts)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


def write_theirs(prefix, sequences, ends=None, dtype=np.uint16, **options):
    """As megatron-core writes them. Args: ends: after how many sequences documents end; None: after each."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, **options)
    for number, sequence in enumerate(sequences, 1):
        builder.add_item(torch.tensor(sequence))
        for _ in range(1 if ends is None else ends.count(number)):
            builder.end_document()
    builder.finalize(f"{prefix}.idx")


SENTENCES = [[5, 6, 7], [8], [9, 10], [11], [], [12, 13]]


def test_sentences_of_a_document_are_joined(tmp_path):
    """BERT's and ICT's datasets: `preprocess_data.py --split-sentences` of Megatron-LM."""
    write_theirs(tmp_path / "d", SENTENCES, [3, 4, 4, 6])
    ours = adopt_dataset(tmp_path / "d")
    assert [ours.document(i).tolist() for i in range(len(ours))] == [[5, 6, 7, 8, 9, 10], [11], [12, 13]]
    again = IndexedDataset(tmp_path / "d")
    assert again.lengths.tolist() == again.read_lengths(0, 9).tolist() == [6, 1, 2]
    assert again.pointers.tolist() == [0, 12, 14] and verify(again) == 13
    tokens, lengths, _ = WindowIndex(again, window_length=9).gather(np.array([0]))
    assert tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13] and lengths.tolist() == [6, 1, 2]


def test_each_sequence_is_a_document_on_demand(tmp_path):
    write_theirs(tmp_path / "d", SENTENCES, [3, 6])
    ours = adopt_dataset(tmp_path / "d", by_sequence=True)
    assert ours.lengths.tolist() == [3, 1, 2, 1, 0, 2]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_every_type_of_number(tmp_path, dtype):
    write_theirs(tmp_path / "d", [[5, 6], [7]], dtype=dtype)
    assert_ours_reads(tmp_path / "d", [[5, 6], [7]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_that_are_no_ids(tmp_path, dtype):
    write_theirs(tmp_path / "d", [[5, 6], [7]], dtype=dtype)
    with pytest.raises(DataError, match=r"d\.idx has version 1 and dtype code [67], which are not"):
        adopt_dataset(tmp_path / "d")


@pytest.mark.parametrize(
    ("dtype", "token"),
    [(np.int64, 2**33 + 5), (np.int64, 2**31), (np.int64, -1), (np.int32, -7), (np.int8, -1)],
)
def test_ids_that_no_vocabulary_has(tmp_path, dtype, token):
    write_theirs(tmp_path / "d", [[5, 6], [7, token]], dtype=dtype)
    with pytest.raises(DataError, match=rf"d\.bin has the id {token} at token 3, outside 0 to 2\^31 - 1"):
        adopt_dataset(tmp_path / "d")
    assert not (tmp_path / "d.json").exists()


def test_ids_beyond_the_vocabulary_of_a_run(tmp_path, caplog):
    write_theirs(tmp_path / "d", [[5, 6], [50_000, 7]])
    dataset = adopt_dataset(tmp_path / "d")
    dataset.require_tokenizer("any", 50_001, 0)
    with pytest.raises(
        DataError,
        match="contains the id 50000, but the tokenizer has only 50000 ids; set the section tokenizer",
    ):
        dataset.require_tokenizer("any", 50_000, 0)


def test_files_that_are_no_dataset_of_tokens(tmp_path):
    write_theirs(tmp_path / "cut", [[5, 6], [7]])
    data = (tmp_path / "cut.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(data[:-1])
    with pytest.raises(
        DataError, match=r"cut\.bin has 5 bytes, which is not a multiple of the 2 bytes of a token"
    ):
        adopt_dataset(tmp_path / "cut")
    builder = IndexedDatasetBuilder(str(tmp_path / "modes.bin"), dtype=np.uint16, multimodal=True)
    builder.add_item(torch.tensor([5, 6]), mode=1)
    builder.end_document()
    builder.finalize(str(tmp_path / "modes.idx"))
    with pytest.raises(DataError, match=r"modes\.idx has .* bytes, but its header requires"):
        adopt_dataset(tmp_path / "modes")
    IndexedDatasetBuilder(str(tmp_path / "none.bin")).finalize(str(tmp_path / "none.idx"))
    with pytest.raises(DataError, match=r"none\.idx holds no tokens"):
        adopt_dataset(tmp_path / "none")
    (tmp_path / "old.bin").write_bytes(data)
    (tmp_path / "old.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(64))
    with pytest.raises(DataError, match=r"old\.idx does not start with"):
        adopt_dataset(tmp_path / "old")
    write_theirs(tmp_path / "open", SENTENCES, [3])  # the last document does not end
    with pytest.raises(
        DataError, match=r"open\.idx has document boundaries that do not increase from 0 to 6"
    ):
        adopt_dataset(tmp_path / "open")
    assert len(adopt_dataset(tmp_path / "open", by_sequence=True)) == 6
