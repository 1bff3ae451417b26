"""Corpora of labelled pairs: each pair once in an epoch, whole, for its objective alone, in any batch and phase."""

import itertools
from collections import Counter

import numpy as np
import pytest
from support.data.corpora import build as write_dataset
from support.data.labelled_pairs import write_pairs
from support.project import small_run

from data_utils.common.batch_fields import Example
from data_utils.common.errors import ConfigError, DataError
from data_utils.common.losses import CLASS_HEADS
from data_utils.common.settings import build, merge
from data_utils.loader.loader import open_datasets
from data_utils.loader.mixture import BLOCK_SIZE
from data_utils.loader.pair_corpora import PairIndex
from data_utils.objectives import LOSS_NAMES
from data_utils.tokenizers.tokenizer import load_tokenizer
from megatron_lite.config.tree import Config

OF_PAIRS = ("relevance", "discourse_relation")
MIXED = {"masked_lm": 1.0, "relevance": 2.0, "discourse_relation": 1.0}


@pytest.mark.parametrize("longest, overhead", [(20, 4), (9, 0), (40, 4)])
def test_windows_hold_whole_documents_as_many_as_fit(tmp_path, longest, overhead):
    rng = np.random.default_rng(longest)
    documents = [rng.integers(0, 1000, rng.integers(1, 25)) for _ in range(500)]
    index = PairIndex(write_dataset(tmp_path / "a", documents), longest, overhead, has_entities=False)
    expected, used = [], longest + 1
    for document in documents:  # a document too long ends a window
        cost = len(document) + overhead
        if cost > longest:
            used = longest + 1
            continue
        if used + cost > longest:
            expected.append([])
            used = 0
        expected[-1].append(document.tolist())
        used += cost
    tokens, lengths, counts = index.gather(np.arange(index.num_windows))
    chunks = [chunk.tolist() for chunk in np.split(tokens, np.cumsum(lengths)[:-1])]
    ends = np.cumsum(counts)
    assert [chunks[end - count : end] for end, count in zip(ends, counts, strict=True)] == expected
    assert index.too_long == sum(len(document) + overhead > longest for document in documents)
    assert (index.chunks(1)[:, 1] - index.chunks(1)[:, 0]).tolist() == list(map(len, expected[1]))


@pytest.fixture(scope="module")
def pairs(corpus, tmp_path_factory):
    """The prefixes of corpora of 300, 200 and 250 distinct pairs, and label of each pair by its ids."""
    directory, found = tmp_path_factory.mktemp("pairs"), {}
    for number, (name, count) in enumerate({"a": 300, "b": 200, "c": 250}.items()):
        rng, made = np.random.default_rng(number), {}
        while len(made) < count:
            halves = [tuple(rng.integers(0, 60, rng.integers(2, 6)).tolist()) for _ in range(2)]
            made[tuple(halves)] = int(rng.choice(3, p=[0.6, 0.3, 0.1]))
        texts = [
            (*(" ".join(f"word{i}" for i in half) for half in both), label) for both, label in made.items()
        ]
        prefix = write_pairs(directory / name, corpus / "vocab.txt", texts)
        found[name] = (
            prefix,
            {tuple(tuple(6 + i for i in half) for half in both): label for both, label in made.items()},
        )
    return found


def tree_of(corpus, pairs, objectives, **changes):
    train = [
        {"prefix": pairs["c"][0], "objective": "discourse_relation"},
        {"prefix": str(corpus / "corpus_train")},
        {"prefix": pairs["a"][0], "objective": "relevance"},
        {"prefix": pairs["b"][0], "objective": "relevance", "weight": 3.0},
    ]
    model = {"sentence_classes": 2, "segments": 2, "class_heads": ["relevance:3", "discourse_relation:3"]}
    tree = {
        "objectives": objectives,
        "model": {"max_position": 80, **model},
        "data": {"train": train, "validation": []},
        "discourse_relation": {"classes": 3},
    }
    return merge(merge(small_run(corpus, "run"), tree), changes)


def loader_of(tree):
    config = build(Config, tree)
    tokenizer = load_tokenizer(config.tokenizer)
    seed = config.training.seed
    data = open_datasets(
        config.data, config.objective_choices, tokenizer, seed, phases=config.phase_plan.samples
    )
    return data, config


def read(loader, samples, size):
    """Rows of samples 0, 1, ... read in batches of `size`: the objective of each, and its pairs with their labels."""
    for first in range(0, samples, size):
        for fields in loader.batch(np.arange(first, min(samples, first + size))):
            found, name = [], ""
            for example in Example.from_fields(fields).documents():
                name = LOSS_NAMES[example.objective[-1]]
                whole = np.where(example.weights > 0, example.targets, example.tokens)
                middle, label = int(example.segment_ids.argmax()), int(example.targets[0])
                halves = (
                    tuple(whole[1 : middle - 1].tolist()),
                    tuple(whole[middle:-1].tolist()),
                )
                found.append((halves, label if example.objective[0] in CLASS_HEADS.values() else None))
            yield name, found


NAMES = {"masked": "masked_lm", "masked_relevance": "relevance", "masked_discourse": "discourse_relation"}


def counted(rows):
    """How many samples each objective has, and how often each pair of theirs came."""
    samples, seen = Counter(), {name: Counter() for name in OF_PAIRS}
    for name, found in rows:
        samples[NAMES[name]] += 1
        if NAMES[name] in seen:
            seen[NAMES[name]].update(found)
    return samples, seen


def test_each_pair_comes_once_in_an_epoch_of_its_corpus_and_for_its_objective(corpus, pairs):
    """Shares of a block are exact; batches of another size hold the same rows."""
    data, _ = loader_of(tree_of(corpus, pairs, MIXED))
    assert [line.split(": ", 1)[1] for line in data.notes] == [
        f"{count} labelled pairs in {index.num_windows} samples; skipped: 0 pairs with more than 60 tokens"
        for count, index in zip(
            (250, 300, 200), [data.train.mixture.indexes[i] for i in (0, 2, 3)], strict=True
        )
    ]
    samples, seen = counted(read(data.train, BLOCK_SIZE, 7))
    assert samples == {name: BLOCK_SIZE * weight / 4 for name, weight in MIXED.items()}
    corpora = {"discourse_relation": [("c", 1)], "relevance": [("a", 0.25), ("b", 0.75)]}
    for objective, its in corpora.items():
        assert set(seen[objective]) == {pair for name, _ in its for pair in pairs[name][1].items()}
        for name, share in its:
            (index,) = [
                each for each in data.train.mixture.indexes if str(each.dataset.prefix) == pairs[name][0]
            ]
            epochs = samples[objective] * share / index.num_windows
            counts = {seen[objective][pair] for pair in pairs[name][1].items()}
            assert counts <= {int(epochs), int(epochs) + 1} and epochs > 2
    others = np.array([100, 7, 4000, 2, 9000])
    rows = data.train.batch(others)
    assert all(np.array_equal(row, data.train.batch(others[i : i + 1])[0]) for i, row in enumerate(rows))


def test_labels_and_objectives_of_any_part_are_near_their_shares(corpus, pairs):
    """Shares among the first 600 samples, less than an epoch, are within 3 sigma."""
    data, _ = loader_of(tree_of(corpus, pairs, {"masked_lm": 3, "relevance": 1}, data={"train": [
        {"prefix": str(corpus / "corpus_train")}, {"prefix": pairs["a"][0], "objective": "relevance"}]}))  # fmt: skip
    samples, seen = counted(read(data.train, 120, 50))
    assert abs(samples["relevance"] - 30) < 3 * np.sqrt(120 * 0.25 * 0.75)
    assert set(seen["relevance"].values()) == {1}  # so far
    total = sum(seen["relevance"].values())
    shares = np.bincount(list(pairs["a"][1].values())) / 300
    labels = np.bincount([label for _, label in seen["relevance"].elements()], minlength=3)
    assert (np.abs(labels - total * shares) < 3 * np.sqrt(total * shares * (1 - shares))).all()


def test_phases_continue_where_the_one_before_ended(corpus, pairs):
    """Pairs join late, change their share, and are alone in the end: no pair is read again before all others were."""
    phases = [
        {"samples": 400, "objectives": {"masked_lm": 1}},
        {"samples": 400, "objectives": {"masked_lm": 1, "relevance": 1}},
        {"samples": 400, "objectives": MIXED},
        {"objectives": {"discourse_relation": 1}},
    ]
    changes = {"phases": phases, "training": {"steps": 200}}
    data, config = loader_of(tree_of(corpus, pairs, MIXED, **changes))
    first = [0, 400, 800, 1200, 1600]
    assert config.phase_plan.first_samples == first[:-1]
    rows = list(read(data.train, 1600, 8))
    parts = [counted(rows[a:b]) for a, b in itertools.pairwise(first)]
    assert [set(samples) for samples, _ in parts] == [
        {"masked_lm"}, {"masked_lm", "relevance"}, set(MIXED), {"discourse_relation"}
    ]  # fmt: skip
    for name, objective in (("a", "relevance"), ("b", "relevance"), ("c", "discourse_relation")):
        counts = [sum(seen[objective][pair] for _, seen in parts) for pair in pairs[name][1].items()]
        assert max(counts) - min(counts) <= 1 <= min(counts)
    assert [mixture.epochs(1)[1] > 0 for mixture in data.train.mixtures] == [True] * 4


def test_pairs_are_read_no_more_often_than_their_corpus_allows(corpus, pairs):
    """What their share would read beyond that is text, in each phase."""
    train = [{"prefix": str(corpus / "corpus_train"), "tokens": 1},
             {"prefix": pairs["a"][0], "objective": "relevance", "tokens": 1, "max_epochs": 2}]  # fmt: skip
    changes = {"data": {"train": train}, "phases": [{"samples": 400}, {}], "training": {"steps": 100}}
    data, _ = loader_of(tree_of(corpus, pairs, {"masked_lm": 1, "relevance": 1}, **changes))
    samples, seen = counted(read(data.train, 800, 8))
    windows = data.train.mixture.indexes[1].num_windows
    assert samples["relevance"] == 2 * windows < 400
    assert set(seen["relevance"].values()) == {2} and len(seen["relevance"]) == 300


def test_objectives_of_pairs_alone_and_a_validation_of_pairs(corpus, pairs):
    own = [{"prefix": pairs["c"][0], "objective": "relevance"}]
    tree = tree_of(corpus, pairs, {"relevance": 1}, data={"train": own, "validation": own})
    data, _ = loader_of(tree)
    for loader in (data.train, data.validation):
        samples, seen = counted(read(loader, loader.mixture.indexes[0].num_windows, 5))
        assert set(samples) == {"relevance"}
        assert seen["relevance"] == Counter(pairs["c"][1].items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"train": [{"prefix": "a"}]}}, "relevance has a positive weight, but no corpus with"),
        (
            {"data": {"train": [{"prefix": "a", "objective": "relevance"}]}},
            "masked_lm has a positive weight, but no corpus without an objective of its own has one",
        ),
        ({"data": {"validation": [{"prefix": "a"}]}}, "relevance has a positive weight"),
        ({"data": {"region": 4096}}, "data.region is 4096, but pairs are no windows of text; set it to 0"),
        ({"data": {"short_prob": 0.1}}, "data.short_prob is 0.1, but pairs are no windows of text; set it to 0"),
        (
            {"phases": [{"steps": 3, "sequence_length": 32}, {}]},
            "relevance packs whole documents",
        ),
        ({"phases": [{"steps": 3, "weights": {"corpus_train": 1}}, {}]}, r"phases\[0\]: relevance has a pos"),
        ({"relevance": {"classes": 1}}, "relevance.classes is 1; it must be at least 2"),
        ({"relevance": {"classes": 4}}, "model.class_heads is .*'relevance:4'"),
        ({"model": {"class_heads": ["relevance:3"], "sentence_classes": 0}}, "sentence_classes"),
        ({"discourse_relation": {"mask_token_prob": 0.8, "random_token_prob": 0.4}}, "exceeds 1"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(corpus, pairs, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        build(Config, tree_of(corpus, pairs, MIXED, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "objectives", "error", "message"),
    [
        ({"objective": "relevence"}, {"masked_lm": 1}, ConfigError, "objective 'relevence', which is not one"),
        ({"objective": "masked_lm"}, {"masked_lm": 1}, ConfigError, r"objectives for pairs \(none\)"),
        ({"objective": "relevance"}, {"masked_lm": 1}, ConfigError, "add it to objectives"),
        ({"objective": "relevance", "prefix": None}, {"masked_lm": 1, "relevance": 1}, DataError,
         "has no labels, .* --second-key and --labels, or with --markers"),
        ({"objective": "relevance", "of": 2}, {"masked_lm": 1, "relevance": 1}, DataError,
         r"has 2 labels, but relevance\.classes is 3; set both it and the head in model.class_heads to 2"),
        ({"objective": "relevance", "of": 3}, {"masked_lm": 1, "relevance": 1}, DataError, "no pair of at most 60"),
    ],
)  # fmt: skip
def test_corpora_that_are_not_the_objectives_are_refused(
    corpus, pairs, tmp_path, entry, objectives, error, message
):
    text = {"prefix": str(corpus / "corpus_train")}
    own = {"prefix": pairs["a"][0], **entry}
    if "prefix" in entry:
        own["prefix"] = text["prefix"]
    if labels := own.pop("of", 0):
        long = " ".join(["word1"] * 40)
        own["prefix"] = write_pairs(tmp_path / "own", corpus / "vocab.txt", [(long, long, 0)], labels)
    with pytest.raises(error, match=message) as raised:
        loader_of(tree_of(corpus, pairs, objectives, data={"train": [text, own]}))
    assert "\n" not in str(raised.value)
