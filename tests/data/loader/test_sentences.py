"""Rows of whole documents: greedy, each sentence in one row, what is left out, and the corpora of two tokenizers."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.corpora import build as built
from support.data.tokenizer_files import BYTE_SYMBOLS, bert_vocab, write_gpt2

from data_utils.build.corpus import BuildConfig, build_corpus
from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.dataset.indexed_dataset import IndexedDataset
from data_utils.dataset.writer import IndexedDatasetWriter
from data_utils.loader import sentences
from data_utils.loader.config import CorpusConfig, DataConfig, PhaseSamples
from data_utils.loader.corpus_report import corpus_report
from data_utils.loader.loader import open_datasets
from data_utils.loader.mixture import Mixture
from data_utils.loader.mixtures_ahead import mixtures_ahead
from data_utils.loader.sentences import SentenceIndex
from data_utils.objectives import ObjectiveChoice
from data_utils.objectives.optimus import OptimusConfig
from data_utils.tokenizers.tokenizer import TokenizerConfig, load_tokenizer

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
    """The chunks of each place."""
    tokens, lengths, counts = gathered
    chunks = iter(np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else [])
    return [[next(chunks).tolist() for _ in range(count)] for count in counts]


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
    """Chunks are the encoder's and the decoder's by turns, whatever the type of the tokens."""
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


def test_mixed_corpora_keep_their_positions(tmp_path):
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


def test_an_index_pickles_without_its_data(tmp_path):
    encoders, decoders = dataset_of(tmp_path / "e", [3] * 2000)[0], dataset_of(tmp_path / "d", [4] * 2000)[0]
    index = SentenceIndex(encoders, LONGEST, OVERHEAD, 40, decoders)
    data = pickle.dumps(index)
    assert len(data) < 1000
    assert rows_of(pickle.loads(data)) == rows_of(index)


def test_what_is_left_out_is_said(tmp_path):
    dataset, _ = dataset_of(tmp_path / "d", [3, 9, 0, 10, 8, 1, 2, 4])
    said = str(SentenceIndex(dataset, LONGEST, OVERHEAD, 20))
    assert said.startswith(f"{tmp_path / 'd'}: 5 sentences in 4 rows of 20 tokens (1.2 per row); skipped: ")
    assert said.endswith("2 documents with more than 8 tokens and 1 without text, 37.500% of all")


def test_tokens_read_match_the_sentences_and_long_documents_are_warned_of(tmp_path):
    """A corpus of whole documents has few that are a sentence."""
    dataset, _ = dataset_of(tmp_path / "d", [3, 90, 0, 100, 8, 1, 200, 4])
    index = SentenceIndex(dataset, LONGEST, OVERHEAD, 20)
    read = sum(
        len(index.gather_all([(index, np.array([row]), np.array([0]))])[0])
        for row in range(index.num_windows)
    )
    sentences = 4
    assert index.num_tokens == read + sentences  # their ends
    whole, _, *warnings = corpus_report([Mixture([(index, 1.0)], seed=7)], 10 * index.num_windows, 1)
    assert whole.startswith(f"training reads {10 * index.num_tokens} tokens ")
    assert warnings[0].startswith(f"warning: 3 of 8 documents of {tmp_path / 'd'} are longer")
    assert "scripts/split_sentences.py" in warnings[0]


def test_no_sentence_at_all_is_an_error(tmp_path):
    dataset, _ = dataset_of(tmp_path / "d", [9, 0, 10])
    message = r"d has no sentence: of 3 documents, 2 have more than 8 tokens and 1 have none"
    with pytest.raises(DataError, match=message):
        SentenceIndex(dataset, LONGEST, OVERHEAD, 20)


def test_samples_of_a_run_with_one_tokenizer(corpus):
    """Every sentence of at most 20 tokens is in the fields of one row of an epoch, for the encoder and the decoder."""
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
    for sentence in (part for fields in batch for part in Example.from_fields(fields).documents()):
        read.append(sentence.tokens[sentence.ord == 0][1:-1].tolist())
        written.append(sentence.targets[sentence.weights > 0].tolist())
        assert written[-1] == [*read[-1], special.eop]
    assert sorted(read) == sorted(text for text in documents if len(text) <= 20)
    assert (opened.train.batch(np.array([5, 2]))[::-1] == batch[[2, 5]]).all()


def test_caps_of_rows_are_known_before_the_corpora_are_opened(corpus):
    tokenizer = load_tokenizer(TokenizerConfig(kind="bert_wordpiece", path=str(corpus / "vocab.txt")))
    names = {"train": None, "validation": 3}
    train = tuple(
        CorpusConfig(prefix=str(corpus / f"corpus_{name}"), tokens=0.5, max_epochs=cap)
        for name, cap in names.items()
    )
    data, choices = DataConfig(train=train, sequence_length=20), [ObjectiveChoice("optimus", OptimusConfig())]
    phases = [PhaseSamples(0, data, choices, 400, 100)]
    opened = open_datasets(data, choices, tokenizer, seed=3, phases=phases).train.mixture
    (ahead,) = mixtures_ahead(data, 3, choices, phases)
    assert ahead.quotas.tolist() == opened.quotas.tolist()
    corpora = opened.locate(np.arange(400))[0]
    assert np.bincount(corpora)[1] == 3 * opened.indexes[1].num_windows


TEXTS = [
    "the quick brown fox",
    "naive cafe",
    "it's 1999",
    "",
    "the fox jumps over the lazy dog and " * 9,
    "yes",
]


def corpora_of(tmp_path, texts=TEXTS, decoders_texts=None):
    """The same lines by BERT's and by GPT-2's tokenizer, each as published; the decoder's has OPTIMUS's tokens."""
    (tmp_path / "vocab.txt").write_text("\n".join(bert_vocab()) + "\n")
    write_gpt2(tmp_path, {name: i for i, name in enumerate([*BYTE_SYMBOLS, "<|endoftext|>"])}, [])
    made = {}
    for name, config, lines in (
        ("bert", TokenizerConfig(kind="bert_wordpiece", path=str(tmp_path), added_tokens="none"), texts),
        (
            "gpt2",
            TokenizerConfig(kind="gpt2_bpe", path=str(tmp_path), added_tokens="optimus"),
            texts if decoders_texts is None else decoders_texts,
        ),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        source = tmp_path / name / "lines.txt"
        source.write_text("".join(f"{line}\n" for line in lines))
        made[name] = load_tokenizer(config)
        build = BuildConfig(
            inputs=[str(source)], output=str(tmp_path / name / "d"), text_split="lines", overwrite=True
        )
        build_corpus(build, lambda config=config: load_tokenizer(config))
    corpus = CorpusConfig(prefix=str(tmp_path / "bert/d"), decoder_prefix=str(tmp_path / "gpt2/d"))
    return DataConfig(train=(corpus,), sequence_length=32), made["bert"], made["gpt2"]


OPTIMUS = [ObjectiveChoice("optimus", OptimusConfig())]


def test_samples_of_a_run_with_two_tokenizers(tmp_path):
    """BERT's WordPiece reads, GPT-2's BPE writes; what is too long for one is left out for both."""
    data, bert, gpt2 = corpora_of(tmp_path)
    opened = open_datasets(data, OPTIMUS, bert, 3, gpt2)
    (index,) = opened.train.mixture.indexes
    assert (index.num_sentences, index.too_long, index.empty) == (4, 1, 0)  # the blank line is no document
    batch = opened.train.batch(np.arange(index.num_windows))
    sentences = [part for fields in batch for part in Example.from_fields(fields).documents()]
    assert [gpt2.decode(s.targets[s.weights > 0]) for s in sentences] == [
        f"{text}<EOS>" for text in TEXTS if 0 < len(text) <= 32
    ]
    for sentence, text in zip(sentences, [text for text in TEXTS if 0 < len(text) <= 32], strict=True):
        reads = sentence.ord == 0
        assert sentence.tokens[reads].tolist() == [bert.special.cls, *bert.encode(text), bert.special.sep]
        written = [gpt2.special.sop] * 2 + gpt2.encode(text)
        assert sentence.tokens[~reads].tolist() == written
    (facts,) = opened.train.fingerprint()
    assert facts["sha256"] != facts["decoder_sha256"]


def test_local_copies_have_both_datasets(tmp_path):
    data, bert, gpt2 = corpora_of(tmp_path)
    copied = replace(data, local_directory=str(tmp_path / "local"))
    here, there = (open_datasets(each, OPTIMUS, bert, 3, gpt2).train for each in (data, copied))
    assert (here.batch(np.arange(1)) == there.batch(np.arange(1))).all()
    (index,) = there.mixture.indexes
    assert {each.prefix.parent for each in index.datasets} == {tmp_path / "local"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            TEXTS[:-1],
            r"bert/d has 5 documents but its decoder's .*gpt2/d has 4 \(source 0 is lines.txt \(\d+ bytes\) in one "
            r"and lines.txt \(\d+ bytes\) in the other",
        ),
        ([*TEXTS[:-1], "yes, but"], "has 5 documents but its decoder's .* has 5 .source 0 is lines.txt"),
    ],
)
def test_datasets_of_other_texts_are_refused(tmp_path, texts, message):
    data, bert, gpt2 = corpora_of(tmp_path, decoders_texts=texts)
    with pytest.raises(DataError, match=message):
        open_datasets(data, OPTIMUS, bert, 3, gpt2)


def test_equal_sources_with_unequal_documents_are_refused(tmp_path):
    """By another option of the build; and an adopted dataset, which names no sources, by its number of documents."""
    facts = {"sources": [{"path": "a.txt", "bytes": 3}], "split": {"name": "train", "seed": 0}}
    first = built(tmp_path / "a", [[1], [2]], **facts)
    built(tmp_path / "b", [[1]], **facts | {"split": {"name": "train", "seed": 1}})
    message = r'a has 2 .*b has 1 .*split is .*"seed": 0\} in one and .* "seed": 1\} in the other'
    for name, said in (("b", message.replace("b 1", r"\S*b 1")), ("c", r"c has 1 .from the same sources")):
        if name == "c":
            built(tmp_path / "c", [[1]], adopted=True)
        with pytest.raises(DataError, match=said):
            SentenceIndex(first, LONGEST, OVERHEAD, 20, IndexedDataset(tmp_path / name))


def test_each_dataset_needs_its_own_tokenizer(tmp_path):
    data, bert, gpt2 = corpora_of(tmp_path)
    (corpus,) = data.train
    swapped = replace(data, train=(replace(corpus, decoder_prefix=corpus.prefix),))
    with pytest.raises(DataError, match=r"bert/d was built with another tokenizer .bert_wordpiece"):
        open_datasets(swapped, OPTIMUS, bert, 3, gpt2)


def test_prefixes_and_tokenizers_of_the_decoder_go_together(tmp_path):
    data, bert, gpt2 = corpora_of(tmp_path)
    with pytest.raises(
        ConfigError, match=r"data.train\[0\].decoder_prefix is \S*gpt2/d, but decoder_tokenizer is null"
    ):
        open_datasets(data, OPTIMUS, bert, 3)
    alone = replace(data, train=(replace(data.train[0], decoder_prefix=None),))
    with pytest.raises(ConfigError, match=r"data.train\[0\] \(\S*bert/d\) has no decoder_prefix, but"):
        open_datasets(alone, OPTIMUS, bert, 3, gpt2)
    mixed = replace(data, validation=alone.train)
    with pytest.raises(ConfigError, match=r"data.validation\[0\]"):
        open_datasets(mixed, OPTIMUS, bert, 3, gpt2)
