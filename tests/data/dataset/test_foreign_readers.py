"""The same bytes in other people's hands: Megatron-core and datatrove read our datasets, and we read theirs."""

import numpy as np
import pytest
import torch
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile
from datatrove.utils.dataset import DatatroveFileDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.tools import adopt_dataset
from data_utils.dataset.writer import IndexedDatasetWriter

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
