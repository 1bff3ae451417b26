"""Rows of whole documents: greedy, each sentence in one row, what is left out, and the corpora of two tokenizers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.base.errors import DataError
from data_utils.dataset.indexed_dataset import FileTokens, IndexedDataset, IndexedDatasetWriter
from data_utils.objectives import Example, ObjectiveChoice
from data_utils.objectives.optimus import OptimusConfig
from data_utils.samples import sentences
from data_utils.samples.config import CorpusConfig, DataConfig
from data_utils.samples.loader import open_datasets
from data_utils.samples.mixture import Mixture
from data_utils.samples.sentences import SentenceIndex
from data_utils.text.tokenizers import TokenizerConfig, load_tokenizer

EOS = 7
LONGEST, OVERHEAD = 8, 4
LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=40).filter(
    lambda lengths: any(1 <= n <= 8 for n in lengths)
)
ROW = st.integers(2 * LONGEST + OVERHEAD, 60)


def dataset_of(prefix, lengths, first=100, with_eos=True, vocab_size=60000):
    """Tokens count up from `first` over the dataset; eos follows each document. Also the texts."""
    texts, token = [], first
    for length in lengths:
        texts.append(list(range(token, token + length)))
        token += length
    documents = [text + [EOS] * with_eos for text in texts]
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        tokens = [token for document in documents for token in document]
        writer.add(np.array(tokens, np.int64), np.array(list(map(len, documents)), np.int64))
        writer.finish({"documents_end_with_eos": with_eos, "eos": EOS})
    return IndexedDataset(prefix), texts


def greedy(sentences, row_length):
    """The definition: pairs of texts (or None: left out), each in the row of the one before if it fits."""
    rows, used = [], 0
    for pair in sentences:
        if not all(1 <= len(text) <= LONGEST for text in pair):
            continue
        cost = sum(map(len, pair)) + OVERHEAD
        if not rows or used + cost > row_length:
            rows.append([])
            used = 0
        rows[-1].append(pair)
        used += cost
    return rows


def texts_of(gathered):
    """The pieces of each place."""
    tokens, lengths, counts = gathered
    pieces = iter(np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else [])
    return [[next(pieces).tolist() for _ in range(count)] for count in counts]


def rows_of(index, windows=None):
    windows = np.arange(index.num_windows) if windows is None else windows
    return texts_of(SentenceIndex.gather_all([(index, windows, np.arange(len(windows)))]))


@given(LENGTHS, ROW, st.booleans(), st.integers(1, 7))
@settings(max_examples=80, deadline=None)
def test_rows_are_packed_greedily_and_hold_each_sentence_once(
    tmp_path_factory, lengths, row_length, with_eos, chunk
):
    dataset, texts = dataset_of(tmp_path_factory.mktemp("rows") / "d", lengths, with_eos=with_eos)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "_CHUNK", chunk)  # rows that several chunks make
        index = SentenceIndex(dataset, LONGEST, OVERHEAD, row_length)
    expected = greedy([(text, text) for text in texts], row_length)
    assert rows_of(index) == [[text for text, _ in row] for row in expected]
    assert index.num_sentences == sum(map(len, expected)) == sum(1 <= n <= LONGEST for n in lengths)
    assert (index.empty, index.too_long) == (lengths.count(0), sum(n > LONGEST for n in lengths))


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=30), ROW, st.booleans()
)
@settings(max_examples=80, deadline=None)
def test_two_datasets_leave_out_what_either_does_not_fit(tmp_path_factory, pairs, row_length, wide):
    """Pieces are the encoder's and the decoder's by turns, whatever the type of the tokens."""
    folder = tmp_path_factory.mktemp("pairs")
    encoders, first = dataset_of(folder / "e", [n for n, _ in pairs])
    decoders, second = dataset_of(
        folder / "d", [n for _, n in pairs], 5000, vocab_size=100_000 if wide else 60000
    )
    expected = greedy(zip(first, second, strict=True), row_length)
    if not expected:
        with pytest.raises(DataError, match="has no sentence"):
            SentenceIndex(encoders, LONGEST, OVERHEAD, row_length, decoders)
        return
    index = SentenceIndex(encoders, LONGEST, OVERHEAD, row_length, decoders)
    assert rows_of(index) == [[text for pair in row for text in pair] for row in expected]


def test_an_epoch_has_each_sentence_once_and_is_shuffled(tmp_path):
    dataset, texts = dataset_of(tmp_path / "d", [1 + 3 * i % 11 for i in range(300)])
    index = SentenceIndex(dataset, LONGEST, OVERHEAD, 50)
    mixture = Mixture([(index, 1.0)], seed=3)
    epochs = []
    for epoch in range(2):
        numbers = np.arange(index.num_windows) + epoch * index.num_windows
        rows = texts_of(mixture.fetch(numbers))
        assert sorted(text for row in rows for text in row) == [
            text for text in texts if len(text) <= LONGEST
        ]
        epochs.append(rows)
        mixture.prefetch(numbers)
    assert epochs[0] != epochs[1] != rows_of(index)
    alone = [texts_of(mixture.fetch(np.array([i])))[0] for i in range(index.num_windows)]
    assert alone == epochs[0]  # a row is a function of its number


def test_mixed_corpora_keep_their_places(tmp_path):
    """Rows of two pairs of datasets in one batch."""
    indexes = []
    for corpus, count in enumerate((40, 70)):
        pair = [
            dataset_of(tmp_path / f"{side}{corpus}", [1 + i % 5] * count, 100 + 1000 * (2 * corpus + i))[0]
            for i, side in enumerate("ed")
        ]
        indexes.append(SentenceIndex(pair[0], LONGEST, OVERHEAD, 40, pair[1]))
    mixture = Mixture([(indexes[0], 1.0), (indexes[1], 2.0)], seed=5)
    numbers = np.arange(60)
    corpora, _, windows = mixture.locate(numbers)
    assert set(corpora) == {0, 1}
    expected = [rows_of(indexes[c], np.array([w]))[0] for c, w in zip(corpora, windows, strict=True)]
    assert texts_of(mixture.fetch(numbers)) == expected


def test_files_that_cannot_be_mapped_give_the_same_rows(tmp_path, monkeypatch):
    lengths = [3, 9, 1, 0, 8, 5, 2]
    dataset_of(tmp_path / "e", lengths), dataset_of(tmp_path / "d", lengths[::-1], 5000)

    def index():
        encoders, decoders = IndexedDataset(tmp_path / "e"), IndexedDataset(tmp_path / "d")
        return SentenceIndex(encoders, LONGEST, OVERHEAD, 30, decoders)

    mapped = rows_of(index())
    monkeypatch.setattr(IndexedDataset, "_map", lambda dataset, suffix: None)
    read = index()
    read.prefetch(np.array([0]))
    assert isinstance(read.dataset.tokens, FileTokens) and rows_of(read) == mapped


def test_an_index_pickles_without_its_data(tmp_path):
    encoders, decoders = dataset_of(tmp_path / "e", [3] * 2000)[0], dataset_of(tmp_path / "d", [4] * 2000)[0]
    index = SentenceIndex(encoders, LONGEST, OVERHEAD, 40, decoders)
    data = pickle.dumps(index)
    assert len(data) < 1000
    assert rows_of(pickle.loads(data)) == rows_of(index)


def test_what_is_left_out_is_said(tmp_path):
    dataset, _ = dataset_of(tmp_path / "d", [3, 9, 0, 10, 8, 1, 2, 4])
    said = str(SentenceIndex(dataset, LONGEST, OVERHEAD, 20))
    assert said.startswith(f"{tmp_path / 'd'}: 5 sentences in 4 rows of 20 tokens (1.2 a row); left out: ")
    assert said.endswith("2 documents of more than 8 tokens and 1 without text, 37.500% of all")


def test_no_sentence_at_all_is_an_error(tmp_path):
    dataset, _ = dataset_of(tmp_path / "d", [9, 0, 10])
    message = (
        r"d has no sentence: of 3 documents 2 have more than 8 tokens and 1 none; raise data\.sequence_length"
    )
    with pytest.raises(DataError, match=message):
        SentenceIndex(dataset, LONGEST, OVERHEAD, 20)


def test_samples_of_a_run_with_one_tokenizer(corpus):
    """Every sentence of at most 20 tokens is in the planes of one row of an epoch, for the encoder and the decoder."""
    tokenizer = load_tokenizer(TokenizerConfig(kind="bert_wordpiece", path=str(corpus / "vocab.txt")))
    data = DataConfig(train=(CorpusConfig(prefix=str(corpus / "corpus_train")),), sequence_length=20)
    opened = open_datasets(data, [ObjectiveChoice("optimus", OptimusConfig())], tokenizer, seed=3)
    dataset, special = IndexedDataset(corpus / "corpus_train"), tokenizer.special
    documents = [dataset.document(i)[:-1].tolist() for i in range(len(dataset))]
    index = opened.train.mixture.indexes[0]
    assert opened.notes == [str(index)] and 0 < index.too_long < len(dataset)
    batch = opened.train.batch(np.arange(index.num_windows))
    assert batch.shape[2] == 4 * (2 * 20 + 4)
    read, written = [], []
    for sentence in (part for planes in batch for part in Example.from_planes(planes).documents()):
        read.append(sentence.tokens[sentence.ord == 0][1:-1].tolist())
        written.append(sentence.targets[sentence.weights > 0].tolist())
        assert written[-1] == [*read[-1], special.eop]
    assert sorted(read) == sorted(text for text in documents if len(text) <= 20)
    assert (opened.train.batch(np.array([5, 2]))[::-1] == batch[[2, 5]]).all()
