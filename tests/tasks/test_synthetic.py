"""Synthetic tasks: predictors that know the rule reach the stated optimum, and no more.

Where a task has a fixed world, the predictor learns it by counting samples of another seed.
"""

import math
import re
from collections import Counter, defaultdict

import numpy as np
import pytest
from support.tasks.labelled_files import task

from data_utils.common.errors import ConfigError
from data_utils.tasks.readers.by_name import read_records, task_labels
from data_utils.tasks.readers.synthetic import (
    TASKS,
    optimum,
    parsed,
    sample,
    samples,
    synthetic_vocabulary,
)

DEFAULTS = {name: f"{name}:samples=40,seed=3" for name in TASKS}


def drawn(text):
    return list(samples(parsed(text)))


def assert_near(scores, expected):
    """The mean is within 3 standard errors, above as below."""
    scores = np.asarray(scores, float)
    error = scores.std() / math.sqrt(len(scores))
    assert abs(scores.mean() - expected) <= 3 * error + 1e-12, (scores.mean(), expected, error)


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_is_a_function_of_seed_and_number(name):
    spec = parsed(DEFAULTS[name])
    all_samples = list(samples(spec))
    assert [sample(spec, number) for number in (39, 7)] == [all_samples[39], all_samples[7]]
    assert list(samples(parsed(f"{name}:samples=60,seed=3")))[:40] == all_samples
    assert list(samples(parsed(f"{name}:samples=40,seed=4"))) != all_samples


@pytest.mark.parametrize("name", TASKS)
def test_every_word_is_in_the_vocabulary(name):
    known = set(synthetic_vocabulary())
    assert len(known) == len(synthetic_vocabulary())
    labels = {"O", "B-A", "B-B"}
    found = set(re.findall(r"[\w-]+", " ".join(str(each) for each in drawn(DEFAULTS[name]))))
    fields = {"text", "text_a", "text_b", "inputs", "choices", "source", "target", "question", "context"}
    assert {w for w in found if not w.isdigit()} <= known | labels | fields | {"answers", "words", "None"}
    assert all(re.fullmatch(r"[a-z]+\d*", word) for word in known)


@pytest.mark.parametrize("name", TASKS)
def test_they_are_records_of_every_type(name):
    for kind in TASKS[name].kinds:
        config = task("synthetic", "mine", kind, train=DEFAULTS[name])
        records = read_records(config, DEFAULTS[name], labelled=True)
        assert [(dict(r.fields), r.label) for r in records] == drawn(DEFAULTS[name])
        assert [record.index for record in records] == list(range(40))
        assert task_labels(config) == TASKS[name].labels
        used = {tag for r in records for tag in (r.label if isinstance(r.label, tuple) else (r.label,))}
        assert not task_labels(config) or used == set(task_labels(config))


def votes(record):
    words = record["text"].split()
    return words.count("red") - words.count("blue")


@pytest.mark.parametrize(
    ("settings", "value"), [("n=5,p=0.7", 0.83692), ("n=9,p=0.6", 0.73343), ("n=4,p=0.8", 0.896)]
)
def test_noisy_votes(settings, value):
    text = f"noisy_votes:{settings},samples=4000,seed=1"
    assert optimum(text)["accuracy"] == pytest.approx(value, abs=1e-5)
    scores = [
        0.5 if votes(fields) == 0 else (votes(fields) > 0) == (label == "yes")
        for fields, label in drawn(text)
    ]
    assert_near(scores, value)


def test_label_noise():
    text = "label_noise:noise=0.2,samples=4000,seed=1"
    assert optimum(text)["accuracy"] == 0.8
    assert_near([(votes(fields) > 0) == (label == "yes") for fields, label in drawn(text)], 0.8)


def test_xor():
    """The rule is always right; weights of words get three of the four equal cases at most, and no word says more."""
    text = "xor:samples=4000,seed=1"
    cells = defaultdict(Counter)
    for fields, label in drawn(text):
        words = set(fields["text"].split())
        cells["red" in words, "blue" in words][label] += 1
    assert all(set(cells[cell]) == {"no" if cell[0] == cell[1] else "yes"} for cell in cells)
    share = {cell: sum(count.values()) / 4000 for cell, count in cells.items()}
    best = max(
        sum(
            part for cell, part in share.items() if (np.dot(cell, weights) + bias > 0) == (cell[0] != cell[1])
        )
        for weights in [(a, b) for a in (-2, -1, 0, 1, 2) for b in (-2, -1, 0, 1, 2)]
        for bias in (-2.5, -1.5, -0.5, 0.5, 1.5)
    )
    assert best == pytest.approx(optimum(text)["linear_accuracy"], abs=0.03)
    for place in (0, 1):
        yes = [cells[cell]["yes"] for cell in cells if cell[place]]
        assert abs(sum(yes) / sum(share[cell] * 4000 for cell in cells if cell[place]) - 0.5) < 0.04
    assert optimum(text)["accuracy"] == 1.0


def neighbours(fields):
    first, second = (fields[name].split() for name in ("text_a", "text_b"))
    assert first[1] == second[1] and first[1].startswith("k")
    return first[2], second[2]


def test_word_pair():
    cluster = {}
    pairs = [
        (*neighbours(fields), label == "yes") for fields, label in drawn("word_pair:samples=2000,seed=1")
    ]
    cluster[pairs[0][0]] = 0
    for _ in range(20):
        for a, b, same in pairs:
            for known, other in ((a, b), (b, a)):
                if known in cluster:
                    cluster[other] = cluster[known] if same else 1 - cluster[known]
    assert sorted(Counter(cluster.values()).values()) == [16, 16]
    test = drawn("word_pair:samples=2000,seed=2")
    right = [(cluster[a] == cluster[b]) == (label == "yes") for f, label in test for a, b in [neighbours(f)]]
    assert np.mean(right) == optimum("word_pair")["accuracy"] == 1.0
    assert_near([label == "yes" for _, label in test], 0.5)
    other = drawn("word_pair:samples=500,seed=2,world=1")
    right = [(cluster[a] == cluster[b]) == (label == "yes") for f, label in other for a, b in [neighbours(f)]]
    assert np.mean(right) < 0.9


def test_choice():
    settings = "noise=0.2,keys=6,choices=4,samples=4000"
    counts = defaultdict(Counter)
    for fields, label in drawn(f"choice:{settings},seed=1"):
        counts[fields["inputs"]][fields["choices"][label]] += 1
    answer = {inputs: count.most_common(1)[0][0] for inputs, count in counts.items()}
    assert len(answer) == 6 == len(set(answer.values()))
    test = drawn(f"choice:{settings},seed=2")
    assert_near([f["choices"][label] == answer[f["inputs"]] for f, label in test], 0.8)
    assert all(answer[f["inputs"]] in f["choices"] and len(set(f["choices"])) == 4 for f, _ in test)
    assert_near([label for _, label in test], 1.5)  # the place says nothing
    assert optimum("choice:noise=0.2") == {"accuracy": 0.8}


@pytest.mark.parametrize(("share", "length"), [(0.6, 3), (0.9, 2), (0.7, 8), (0.3, 5)])
def test_unequal_choice(share, length):
    """A model with the counted probabilities; sum and mean choose different answers where the optimum says so."""
    settings = f"share={share},length={length},keys=4,samples=4000"
    counts = defaultdict(Counter)
    for fields, label in drawn(f"unequal_choice:{settings},seed=1"):
        chosen = fields["choices"][label]
        assert fields["text"] == f"{fields['inputs']} {chosen}"
        counts[fields["inputs"]][chosen] += 1
    scores = {"sum": [], "mean": []}
    for fields, label in drawn(f"unequal_choice:{settings},seed=2"):
        count = counts[fields["inputs"]]
        logs = [math.log(count[choice] / count.total()) for choice in fields["choices"]]
        sizes = [len(choice.split()) + 1 for choice in fields["choices"]]
        assert sorted(sizes) == [2, length + 1]
        scores["sum"].append(int(np.argmax(logs)) == label)
        scores["mean"].append(int(np.argmax(np.divide(logs, sizes))) == label)
    best = optimum(f"unequal_choice:{settings}")
    assert_near(scores["sum"], best["accuracy_sum"])
    assert_near(scores["mean"], best["accuracy_mean"])
    assert (best["accuracy_sum"] != best["accuracy_mean"]) == ((share, length) in ((0.6, 3), (0.7, 8)))


@pytest.mark.parametrize("name", ["copy", "reverse", "sort"])
def test_sequences(name):
    rule = {
        "copy": list,
        "reverse": lambda words: words[::-1],
        "sort": lambda w: sorted(w, key=lambda x: int(x[1:])),
    }
    text = f"{name}:noise=0.1,length=5,words=12,samples=4000,seed=1"
    exact, losses = [], []
    for fields, label in drawn(text):
        target, wanted = fields["target"].split(), rule[name](fields["source"].split())
        assert label == fields["target"] and len(target) == 5
        exact.append(target == wanted)
        right = sum(a == b for a, b in zip(target, wanted, strict=True))
        losses.append(-(right * math.log(0.9) + (5 - right) * math.log(0.1 / 11)) / 5)
    assert_near(exact, optimum(text)["exact_match"])
    assert_near(losses, optimum(text)["word_loss"])
    assert optimum(name) == {"exact_match": 1.0, "word_loss": 0.0}
    assert all(f["target"].split() == rule[name](f["source"].split()) for f, _ in drawn(DEFAULTS[name]))


def test_span():
    lengths = Counter()
    for fields, label in drawn("span:samples=500,seed=1"):
        (found,) = re.findall("open (.*) close", fields["context"])
        ((answer, start),) = fields["answers"]
        assert (found,) == (answer,) == label and fields["context"].startswith(answer, start)
        lengths[len(answer.split())] += 1
    assert set(lengths) == {1, 2, 3} and optimum("span")["answer_em"] == 1.0


def test_tags():
    """All entities have one word, so precision and recall are the share of entities with the right type."""
    counts = defaultdict(Counter)
    for fields, tags in drawn("tags:noise=0.2,samples=500,seed=1"):
        for word, tag in zip(fields["words"], tags[1:], strict=False):
            counts[word][tag] += 1
    tag_after = {word: count.most_common(1)[0][0] for word, count in counts.items()}
    right = []
    for fields, tags in drawn("tags:noise=0.2,samples=1000,seed=2"):
        assert tags[0] == "O"
        for word, tag in zip(fields["words"], tags[1:], strict=False):
            assert (tag == "O") == (tag_after[word] == "O")
            if tag != "O":
                right.append(tag == tag_after[word])
    assert len(right) > 3000
    assert_near(right, optimum("tags:noise=0.2")["entity_f1"])


def test_recall():
    places = Counter()
    for fields, label in drawn("recall:pairs=4,samples=500,seed=1"):
        *said, key = fields["source"].split()
        assert len(said) == 8 and len(set(said[::2])) == 4
        assert said[1::2][said[::2].index(key)] == fields["target"] == label
        places[said[::2].index(key)] += 1
    assert min(places.values()) > 80 and optimum("recall") == {"exact_match": 1.0}


@pytest.mark.parametrize(
    "settings", ["period=4,length=12,ratio=0.5", "period=5,length=7,ratio=0.3", "ratio=0.01"]
)
def test_periodic(settings):
    """Words drawn to be hidden are looked up among those that are left, else guessed."""
    text = f"periodic:{settings},samples=3000,seed=1"
    values = parsed(text).values
    rng, scores = np.random.default_rng(0), []
    for fields, _ in drawn(text):
        words = fields["text"].split()
        assert all(word == words[i % values["period"]] for i, word in enumerate(words))
        hidden = set(rng.permutation(len(words))[: math.floor(values["ratio"] * len(words))].tolist())
        for place in hidden:
            copies = [words[i] for i in range(place % values["period"], len(words), values["period"])
                      if i not in hidden]  # fmt: skip
            guess = copies[0] if copies else f"w{rng.integers(32)}"
            scores.append(guess == words[place])
    if not scores:
        assert optimum(text) == {"word_accuracy": 1.0}
    else:
        assert_near(scores, optimum(text)["word_accuracy"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("votes:n=3", "'votes:n=3' is not a synthetic task; the tasks are noisy_votes, recall"),
        ("data/train.tsv", "is not a synthetic task"),
        ("xor:n=3", "'xor:n=3': xor has no setting 'n'; it has samples, seed, length"),
        ("xor:length=1", "'xor:length=1': length is '1'; it must be a whole number in \\[2, 256\\]"),
        ("xor:length=3.5", "length is '3.5'; it must be a whole number"),
        ("noisy_votes:p=0.3", "p is '0.3'; it must be a number in \\[0.5, 1.0\\]"),
        ("noisy_votes:p=nan", "p is 'nan'"),
        ("noisy_votes:p", "p is ''"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read_records(task("synthetic", "mine", "cloze", labels=("no", "yes")), text, labelled=True)


def test_another_type_is_refused():
    with pytest.raises(
        ConfigError, match=r"task\.kind is tagging; the synthetic task xor is one of cloze, class"
    ):
        read_records(task("synthetic", "xor", "tagging"), "xor", labelled=True)
