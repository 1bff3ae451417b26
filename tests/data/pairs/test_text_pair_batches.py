"""Batches of text pairs: of one corpus, in one order on any ranks, no text twice, as transformers reads texts."""

import dataclasses
import hashlib
from collections import Counter

import numpy as np
import pytest
from support.data.text_pairs import random_records, write_text_pairs
from support.project import small_run

from data_utils.common.batch_fields import DOC, OBJECTIVE, ORD, POSITION_IDS, TOKENS, WEIGHTS
from data_utils.common.checksums import FileChecksums
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.losses import CONTRASTIVE
from data_utils.common.settings import build, merge
from data_utils.dataset.indexed_dataset import DTYPE_CODES, HEADER, INDEX_VERSION, MAGIC, IndexedDataset
from data_utils.dataset.manifest import manifest_bytes
from data_utils.loader.loader import open_datasets
from data_utils.loader.mixture import BLOCK_SIZE, Mixture, batch_indices
from data_utils.loader.text_pairs import TextPairIndex
from data_utils.objectives.contrastive import FORMS, Contrastive, ContrastiveConfig
from data_utils.tokenizers.tokenizer import load_tokenizer
from data_utils.tokenizers.vocabulary import vocabulary_of
from megatron_lite.config.tree import Config
from megatron_lite.models.text_pairs.batch import PairBatch, PairSamples
from megatron_lite.transformer.build import model_spec

SIZE = 16  # samples of a global batch
PROMPTS = {"query_prompt": "word1 word2 ", "document_prompt": "word3 "}


@pytest.fixture(scope="module")
def records():
    """Of two corpora, each with texts of its own and some of them twice."""
    found = {name: random_records(np.random.default_rng(i), 90, words=12) for i, name in enumerate("ab")}
    for each in found.values():
        for i in range(0, len(each), 2):
            key = ("query", "positive")[i // 2 % 2]
            each[i][key] = each[i // 3][key]
    for record in found["b"]:
        for key in ("query", "positive"):
            record[key] += " word50"
        record["negatives"] = [f"{text} word51" for text in record["negatives"]]
    return found


@pytest.fixture(scope="module")
def prefixes(corpus, records, tmp_path_factory):
    directory = tmp_path_factory.mktemp("text_pairs")
    return {
        name: write_text_pairs(
            directory / name, corpus / "vocab.txt", each, negatives=2 if name == "a" else 1, **PROMPTS
        )
        for name, each in records.items()
    }


def tree_of(corpus, prefixes, objectives=None, **changes):
    train = [
        {"prefix": prefixes[name], "objective": "contrastive", "weight": w}
        for name, w in (("a", 3), ("b", 1))
    ]
    tree = {
        "objectives": objectives or {"contrastive": 1.0},
        "model": {"max_position": 80},
        "data": {"train": train, "validation": []},
        "batch": {"global_batch_size": SIZE, "micro_batch_size": 2},
        "contrastive": {"query_length": 8, "document_length": 10, "negatives": 2},
    }
    run = small_run(corpus, "run")
    del run["blank_infilling"]
    return merge(merge(run, tree), changes)


def opened(tree):
    config = build(Config, tree)
    tokenizer = load_tokenizer(config.tokenizer)
    phases, seed = config.phase_plan.samples, config.training.seed
    data = open_datasets(
        config.data, config.objective_choices, tokenizer, seed, phases=phases, unit=config.sample_unit
    )
    return data.train, config


def samples_of(tree) -> PairSamples:
    loader, config = opened(tree)
    return model_spec(config).samples(config, loader, "train")


def texts_of_row(row):
    """Number -> tokens of each document of a row."""
    return {int(n): row[TOKENS, row[DOC] == n].tolist() for n in np.unique(row[DOC]) if n >= 0}


def test_each_batch_is_of_one_corpus_with_exact_quotas(corpus, prefixes):
    loader, _ = opened(tree_of(corpus, prefixes))
    corpora, ordinals = loader.mixture.deal(np.arange(2 * BLOCK_SIZE * SIZE))
    by_batch = corpora.reshape(-1, SIZE)
    assert (by_batch == by_batch[:, :1]).all()
    for block in by_batch[:, 0].reshape(2, BLOCK_SIZE):
        assert Counter(block.tolist()) == {0: BLOCK_SIZE * 3 // 4, 1: BLOCK_SIZE // 4}
    for number in (0, 1):  # none is left out, and none comes twice
        assert ordinals[corpora == number].tolist() == list(range((corpora == number).sum()))
    for count in (0, SIZE, 5 * SIZE + 3, BLOCK_SIZE * SIZE + 7):
        assert loader.mixture.dealt(count).tolist() == [int((corpora[:count] == n).sum()) for n in (0, 1)]


def test_each_record_comes_once_in_an_epoch_also_across_phases(corpus, prefixes):
    phases = [{"steps": 4}, {"weights": {"a": 1, "b": 9}, "batch": {"micro_batch_size": 4}}]
    loader, _ = opened(tree_of(corpus, prefixes, phases=phases, training={"steps": 60}))
    seen = {0: [], 1: []}
    for step in range(60):
        indices = np.arange(step * SIZE, (step + 1) * SIZE)
        corpora, epochs, windows = loader.mixture_at(indices).locate(indices)
        assert len(set(corpora.tolist())) == 1
        seen[corpora[0]] += list(zip(epochs.tolist(), windows.tolist(), strict=True))
    for found in seen.values():
        assert len(set(found)) == len(found)
        last = max(epoch for epoch, _ in found)
        for epoch in range(last):
            assert sorted(window for e, window in found if e == epoch) == list(range(90))
    assert loader.mixtures[1].epochs(56 * SIZE) == [len(found) / 90 for found in seen.values()]


@pytest.mark.parametrize("objectives", [{"contrastive": 1.0}, {"contrastive": 1.0, "masked_lm": 1.0}])
def test_ranks_and_resumption_see_the_same_batches(corpus, prefixes, objectives):
    tree = tree_of(corpus, prefixes, objectives)
    if len(objectives) > 1:
        tree["data"]["train"].append({"prefix": str(corpus / "corpus_train")})
    whole = samples_of(tree)
    kinds = set()
    for step in range(6):
        expected = whole.batch(np.arange(step * SIZE, (step + 1) * SIZE))
        is_pairs = isinstance(expected, PairBatch)
        kinds.add(is_pairs)
        for dp in (1, 2, 4):
            counted, rows = 0, {}
            for rank in range(dp):
                # Another object, as after a start from this step.
                samples = samples_of(tree) if step == 3 else whole
                sizes = {"global_batch_size": SIZE, "micro_batch_size": 2, "dp_rank": rank, "dp_size": dp}
                for indices in batch_indices(step * SIZE, **sizes):
                    batch = samples.batch(indices)
                    fields = batch.fields if is_pairs else batch
                    rows.update(zip((indices - step * SIZE).tolist(), fields, strict=True))
                    if is_pairs:
                        counted += batch.loss_divisor
                        np.testing.assert_array_equal(batch.records.texts, expected.records.texts)
                        np.testing.assert_array_equal(batch.numbers, expected.numbers[indices - step * SIZE])
            whole_fields = expected.fields if is_pairs else expected
            np.testing.assert_array_equal([rows[i] for i in range(SIZE)], whole_fields)
            assert not is_pairs or counted == expected.records.is_counted.sum()
    assert kinds == ({True, False} if len(objectives) > 1 else {True})


def test_records_with_a_text_of_an_earlier_one_are_left_out(corpus, prefixes, records):
    samples = samples_of(tree_of(corpus, prefixes))
    skipped = 0
    for step in range(12):
        indices = np.arange(step * SIZE, (step + 1) * SIZE)
        corpora, _, windows = samples._loader.mixture.locate(indices)
        chosen = [records["ab"[corpora[0]]][window] for window in windows]
        expected = [
            all(record[key] != earlier[key] for earlier in chosen[:i] for key in ("query", "positive"))
            for i, record in enumerate(chosen)
        ]
        batch = samples.batch(indices)
        assert batch.records.is_counted.tolist() == expected
        assert [bool((row[DOC] >= 0).any()) for row in batch.fields] == expected
        assert batch.loss_divisor == sum(expected)
        assert batch.loss_divisors(64)[CONTRASTIVE.number] == sum(expected)
        skipped += SIZE - sum(expected)
    assert skipped > 10
    everything = samples_of(tree_of(corpus, prefixes, contrastive={"loss": "cosent"})).batch(np.arange(SIZE))
    assert everything.records.is_counted.all() and everything.records.texts.shape == (SIZE, 2)


def test_texts_stand_as_transformers_reads_them(corpus, prefixes, records):
    from transformers import BertTokenizer

    theirs = BertTokenizer(str(corpus / "vocab.txt"))
    samples = samples_of(tree_of(corpus, prefixes))
    prompts, lengths = list(PROMPTS.values()), (8, 10)
    cut = 0
    for step in range(6):
        indices = np.arange(step * SIZE, (step + 1) * SIZE)
        corpora, _, windows = samples._loader.mixture.locate(indices)
        batch = samples.batch(indices)
        for row, window, number in zip(batch.fields, windows, batch.numbers, strict=True):
            record = records["ab"[corpora[0]]][window]
            read = 1 + (2 if corpora[0] == 0 else 1)  # negatives of a corpus
            texts = [record["query"], record["positive"], *record["negatives"]][: read + 1]
            expected = {}
            for i, text in enumerate(texts if number >= 0 else []):
                options = {"truncation": True, "max_length": lengths[i > 0]}
                expected[i] = theirs(prompts[i > 0] + text, **options)["input_ids"]
                cut += len(theirs(prompts[i > 0] + text)["input_ids"]) > lengths[i > 0]
            assert texts_of_row(row) == expected
            for i in expected:
                is_text = row[DOC] == i
                assert row[POSITION_IDS, is_text].tolist() == list(range(is_text.sum()))
                assert not row[ORD, is_text].any() and not row[WEIGHTS].any()
                assert set(row[OBJECTIVE, is_text].tolist()) == {CONTRASTIVE.number}
    assert cut > 20


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_its_special_tokens_in_their_places(corpus, form):
    config = load_tokenizer(build(Config, small_run(corpus, "run")).tokenizer)
    section = ContrastiveConfig(query_length=6, document_length=5, negatives=1, form=form)
    objective = Contrastive(section, vocabulary_of(config), 1, 64)
    batch = np.empty((1, 10, objective.row_length), np.int32)
    text, lengths = np.arange(100, 110, dtype=np.int32), np.array([9, 1, 0])
    objective.fill(batch, text, lengths, np.array([3]), np.array([0]))
    special, text_format = config.special, FORMS[form]
    before, after = (
        [getattr(special, role) for role in roles] for roles in (text_format.before, text_format.after)
    )
    room = 6 - len(before) - len(after)
    first = [*before, *range(100, 100 + room), *after]
    assert texts_of_row(batch[0]) == {0: first, 1: [*before, 109, *after]}
    orders = batch[0, ORD, : len(first)].tolist()
    assert orders == (list(range(len(first))) if text_format.is_causal else [0] * len(first))


def test_a_batch_says_where_its_texts_are(corpus, prefixes):
    samples = samples_of(tree_of(corpus, prefixes, embedding={"pooling": "mean", "include_prompt": False}))
    batch = next(
        batch
        for step in range(20)
        if not (batch := samples.batch(np.arange(step * SIZE, (step + 1) * SIZE))).records.is_counted.all()
    )
    padded = batch.padded(SIZE + 3)
    for each in (batch, padded):
        flat, texts = each.fields[:, TOKENS].ravel(), each.records.texts.shape[1]
        for sequence, row in enumerate(each.fields):
            tokens = texts_of_row(row)
            for number in range(texts):
                mine = np.flatnonzero(each.token_texts == sequence * texts + number)
                assert flat[mine].tolist() == tokens.get(number, [])
                assert (number in tokens) == (sequence * texts + number in each.texts)
        # CLS and the prompt
        assert each.skipped.tolist() == [2 if text % texts else 3 for text in each.texts]
    assert padded.numbers[SIZE:].tolist() == [-1] * 3 and padded.loss_divisor == batch.loss_divisor
    assert padded.records is batch.records


def sparse_dataset(directory, records, negatives):
    """A dataset of records without text but for the last one, in files that take no space."""
    documents = records * (2 + negatives)
    tokens = np.arange(2 + negatives, dtype="<u2")
    (directory / "x.bin").write_bytes(tokens.tobytes())
    with (directory / "x.idx").open("wb") as file:
        code = next(code for code, dtype in DTYPE_CODES.items() if dtype == "<u2")
        file.write(HEADER.pack(MAGIC, INDEX_VERSION, code, documents, documents + 1))
        file.truncate(HEADER.size + 12 * documents + 8 * (documents + 1))
        ends = np.arange(len(tokens))
        file.seek(HEADER.size + 4 * (documents - len(tokens)))
        file.write(np.ones(len(tokens), "<i4").tobytes())
        file.seek(HEADER.size + 4 * documents + 8 * (documents - len(tokens)))
        file.write((2 * ends).astype("<i8").tobytes())
    with (directory / "x.hash").open("wb") as file:
        file.truncate(8 * documents)
    empty = FileChecksums(1 << 40).tree()
    files = {
        suffix: {"bytes": (directory / f"x{suffix}").stat().st_size, **empty, "crc32": "0" * 8}
        for suffix in (".bin", ".idx", ".hash")
    }
    prompt = {"text": "", "tokens": 0}
    entry = {"negatives": negatives, "prompts": {"query": prompt, "document": prompt}}
    facts = {"files": files, "num_documents": documents, "num_tokens": len(tokens), "dtype": "uint16"}
    (directory / "x.json").write_bytes(manifest_bytes({**facts, "text_pairs": entry}))
    return str(directory / "x")


def test_a_hundred_million_records_need_no_memory(tmp_path):
    import tracemalloc

    prefix = sparse_dataset(tmp_path, 10**8, 1)
    tracemalloc.start()
    index = TextPairIndex(IndexedDataset(prefix), 512, 1)
    mixture = Mixture([(index, 1.0)], seed=3, unit=SIZE)
    _, _, windows = mixture.locate(np.arange(7 * SIZE, 8 * SIZE))
    tokens, lengths, counts = index.gather(np.array([windows[0], 10**8 - 1]))
    assert tracemalloc.get_traced_memory()[0] < 4 << 20
    tracemalloc.stop()
    assert index.num_windows == 10**8 and windows.max() > 10**7
    assert (tokens.tolist(), lengths.tolist(), counts.tolist()) == ([0, 1, 2], [0, 0, 0, 1, 1, 1], [3, 3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"phases": [{"steps": 2}, {"batch": {"global_batch_size": 32}}]},
            r"phases\[1\].batch.global_batch_size is 32",
        ),
        ({"phases": [{"steps": 2}, {"skip_samples": 8}]}, "whole global batches are left out"),
        ({"batch": {"ramp": {"start": 4, "by": 4, "samples": 32}}}, "batch.ramp is set"),
        ({"contrastive": {"matryoshka_sizes": [16, 64]}}, "more than model.hidden_size"),
        ({"contrastive": {"matryoshka_sizes": [16, 8], "matryoshka_weights": [1]}}, "1 numbers for 2"),
        ({"contrastive": {"loss": "cosent", "directions": "joint"}}, "no directions"),
        ({"contrastive": {"loss": "mse", "matryoshka_sizes": [8]}}, "compares whole vectors"),
        ({"phases": [{"steps": 2}, {"contrastive": {"loss": "cosent"}}]}, "contrastive.loss is set"),
        ({"data": {"short_prob": 0.1}}, "no windows of text"),
        ({"contrastive": {"query_length": 100}}, "max_position"),
    ],
)
def test_settings_that_contradict_pairs_are_refused(corpus, prefixes, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(Config, tree_of(corpus, prefixes, **changes)).phase_plan  # noqa: B018


def test_corpora_that_do_not_suit_are_refused(corpus, prefixes, records, tmp_path):
    text = tree_of(corpus, prefixes, {"masked_lm": 1.0})
    del text["contrastive"]
    text["data"]["train"] = [{"prefix": prefixes["a"]}]
    with pytest.raises(DataError, match="names no objective"):
        opened(text)
    tree = tree_of(corpus, prefixes)
    tree["data"]["train"][0]["prefix"] = str(corpus / "corpus_train")
    with pytest.raises(DataError, match="--text-pairs"):
        opened(tree)
    with pytest.raises(ConfigError, match=r"query prompt of .* has 2 tokens"):
        opened(tree_of(corpus, prefixes, contrastive={"query_length": 4}))
    plain = [{key: record[key] for key in ("query", "positive")} for record in records["a"]]
    prefix = write_text_pairs(tmp_path / "plain", corpus / "vocab.txt", plain)
    with pytest.raises(DataError, match="no scores"):
        opened(tree_of(corpus, {"a": prefix, "b": prefix}, contrastive={"loss": "cosent"}))


def test_vectors_of_a_teacher_that_do_not_suit_are_refused(corpus, prefixes, tmp_path):
    path = tmp_path / "teacher.npy"

    def samples(vectors, loss="mse"):
        tree = tree_of(corpus, prefixes, contrastive={"loss": loss})
        tree["data"]["train"] = [{"prefix": prefixes["a"], "objective": "contrastive", "vectors": vectors}]
        return samples_of(tree)

    for array, message in (
        (np.zeros((89, 32), np.float32), r"float32 \[89, 32\], but needs a vector for each of the 90"),
        (np.zeros((90, 32), np.int32), "is int32"),
        (np.zeros((90, 16), np.float32), "--dimensions 32"),
        (np.array([{}]), "cannot be read"),  # a pickle
    ):
        np.save(path, array)
        with pytest.raises(DataError, match=message):
            samples(str(path))
    for vectors, loss in ((None, "mse"), (str(path), "infonce")):
        with pytest.raises(DataError, match="mse alone reads and needs"):
            samples(vectors, loss)


def test_vectors_of_other_texts_are_refused_if_their_hashes_are_there(corpus, prefixes, records, tmp_path):
    path = tmp_path / "teacher.npy"
    np.save(path, np.zeros((len(records["a"]), 32), np.float32))
    tree = tree_of(corpus, prefixes, contrastive={"loss": "mse"})
    tree["data"]["train"] = [{"prefix": prefixes["a"], "objective": "contrastive", "vectors": str(path)}]
    samples_of(tree)  # vectors of another program

    queries = [record["query"].encode() for record in records["a"]]
    swapped = [queries[1], queries[0], *queries[2:]]
    for texts in (queries, swapped, queries[:-1]):
        hashes = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
        (tmp_path / "teacher.npy.hash").write_bytes(hashes)
        if texts is queries:
            samples_of(tree)
            continue
        with pytest.raises(DataError, match=r"vectors .* are of other texts than the queries"):
            samples_of(tree)


def test_a_section_has_the_settings_of_its_rows():
    section = ContrastiveConfig(query_length=8, document_length=10, negatives=2)
    assert section.row_length_for(512) == 40 and section.least_row_length(512) == 38
    assert dataclasses.replace(section, loss="cosent").least_row_length(512) == 18
