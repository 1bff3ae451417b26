"""Every metric that is ours against the library or script that published figures are made with; the others by hand."""

import re
import string
from collections import Counter

import numpy as np
import pytest
import sacrebleu
from rouge_score import rouge_scorer
from seqeval import metrics as seqeval
from sklearn import metrics

from data_utils.common.errors import ConfigError, DataError
from data_utils.tasks.metrics.metrics import KNOWN, PACKAGES, entities, measure, require_metrics

CASES = 1000
# sklearn takes milliseconds for a case.
FEW = pytest.mark.parametrize("cases", [25, pytest.param(CASES, marks=pytest.mark.slow)])


def one(name, predictions, references, **options):
    return measure([name], predictions, references, **options)[name]


def random_labels(rng, classes):
    """Predictions and references of 1 to 20 samples; one class alone, and predictions of constants, do occur."""
    size = int(rng.integers(1, 21))
    references = rng.integers(0, classes, size)
    predictions = np.where(rng.random(size) < 0.5, references, rng.integers(0, classes, size))
    return predictions.tolist(), references.tolist()


def test_scores_of_labels_by_hand():
    """Of `b` 2 are right, 3 predicted and 3 there; of `a` 1, 2 and 1; of `c` none, none and 1."""
    predictions, references = ["b", "b", "a", "a", "b"], ["b", "b", "b", "a", "c"]
    expected = {"accuracy": 3 / 5, "f1": 2 * 2 / (3 + 3), "f1a": 2 * 2 / (3 + 3)}
    expected |= {"macro_f1": (2 * 2 / 6 + 2 * 1 / 3 + 0) / 3, "micro_f1": 2 * 2 / (3 + 4)}
    assert measure(expected, predictions, references, positive="b", negative="a") == pytest.approx(expected)
    # (tp tn - fp fn) / sqrt((tp + fp) (tp + fn) (tn + fp) (tn + fn))
    assert one("matthews", [1, 1, 1, 0], [1, 1, 0, 0]) == pytest.approx(
        (2 * 1 - 1 * 0) / np.sqrt(3 * 2 * 2 * 1)
    )
    assert one("f1", ["no", "yes"], ["no", "yes"], positive="yes") == 1.0


def test_correlations_by_hand():
    """Of the numbers a quadratic curve, of their ranks all; equal values share a rank."""
    found = measure(["pearson", "spearman"], [1.0, 2.0, 3.0], [1.0, 4.0, 9.0])
    assert found == pytest.approx({"pearson": 8 / np.sqrt(2 * 98 / 3), "spearman": 1.0})
    assert one("spearman", [1, 2, 2, 5], [1, 2, 3, 4]) == pytest.approx(4.5 / np.sqrt(4.5 * 5))


@pytest.mark.filterwarnings("error")
def test_what_packages_leave_undefined_is_0():
    """One class, a class that is neither predicted nor there, a constant side, a single sample."""
    for p, r in (([1, 1], [0, 1]), ([0, 0], [0, 0]), ([1], [1])):
        assert one("matthews", p, r) == one("micro_f1", [0] * len(r), [0] * len(r), negative=0) == 0.0
        assert one("f1", p, r, positive=2) == one("pearson", p, r) == one("spearman", p, r) == 0.0
    assert one("macro_f1", ["a", "a"], ["a", "b"]) == pytest.approx(1 / 3)
    with pytest.raises(DataError, match="value 1 is nan; a correlation needs finite numbers"):
        one("spearman", [1.0, float("nan")], [1.0, 2.0])


@pytest.mark.filterwarnings("ignore")  # sklearn warns of labels that do not occur
@FEW
def test_scores_of_label_sets_match_sklearn(cases):
    """Macro F1 is that of the published code: of the means of precision and recall over samples."""
    rng = np.random.default_rng(4)
    for _ in range(cases):
        size, share = int(rng.integers(1, 12)), rng.random()
        there = rng.random((size, 4)) < share
        found = np.where(rng.random((size, 4)) < 0.7, there, rng.random((size, 4)) < share)
        names = np.array(list("abcd"))
        sides = [[names[row].tolist() for row in side] for side in (found, there)]
        precision, recall, _, _ = metrics.precision_recall_fscore_support(
            there, found, average="samples", zero_division=0.0
        )
        expected = {
            "strict_accuracy": metrics.accuracy_score(there, found),
            "loose_micro_f1": metrics.f1_score(there, found, average="micro", zero_division=0.0),
            "loose_macro_f1": 2 * precision * recall / (precision + recall) if recall else 0.0,
        }
        assert measure(expected, *sides) == pytest.approx(expected, abs=1e-12)


def test_groups_are_right_as_a_whole():
    rng = np.random.default_rng(3)
    for _ in range(CASES):
        p, r = random_labels(rng, classes=2)
        groups = rng.integers(0, 6, len(r)).tolist()
        whole = [
            all(p[i] == r[i] for i in range(len(r)) if groups[i] == group) for group in sorted(set(groups))
        ]
        assert one("group_em", p, r, groups=groups) == pytest.approx(sum(whole) / len(whole))
        assert one("group_em", p, r) == one("group_em", p, r, groups=[None] * len(r)) == one("accuracy", p, r)
    # A sample without a group is none of another's, whatever its number.
    assert one("group_em", [1, 0, 1], [1, 1, 1], groups=[0, None, 0]) == 0.5


TYPES = ("PER", "LOC", "MISC-X")


def test_entity_f1_matches_seqeval():
    """Tags at random, so most sentences break the rules of BIO: I- after O, or after another type."""
    rng = np.random.default_rng(4)
    tags = ["O", *(f"{prefix}-{kind}" for prefix in "BI" for kind in TYPES)]
    for _ in range(CASES):
        lengths = rng.integers(1, 9, int(rng.integers(1, 6)))
        r = [[tags[i] for i in rng.integers(0, len(tags), n)] for n in lengths]
        p = [[tag if rng.random() < 0.7 else tags[rng.integers(0, len(tags))] for tag in each] for each in r]
        assert one("entity_f1", p, r) == pytest.approx(seqeval.f1_score(r, p, zero_division=0), abs=1e-12)


def test_entities_by_hand():
    tags = ["B-A", "I-A", "O", "I-B", "I-A", "B-A", "B-A", "O"]
    assert entities(tags) == {("A", 0, 1), ("B", 3, 3), ("A", 4, 4), ("A", 5, 5), ("A", 6, 6)}
    assert entities([]) == set() and one("entity_f1", [["O"]], [["O"]]) == 0.0


PIECES = [
    "The",
    "cat",
    "a",
    "an",
    "theatre",
    "Cat's",
    "--",
    "x-ray",
    "12",
    "the",
    "Ünder",
    "…",
    ".",
    "I.B.M.",
    "\n",
]


def random_answer(rng, longest=6):
    return " ".join(rng.choice(PIECES, int(rng.integers(0, longest))))


def words_of(text):
    """SQuAD's words, said another way: cut at white space and articles after punctuation is gone."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in re.split(r"\s+|\b(?:a|an|the)\b", text) if word]


def answer_scores(prediction, answers, is_v2):
    answers = [words_of(answer) for answer in answers]
    if is_v2:
        answers = [words for words in answers if words] or [[]]
    words = words_of(prediction)
    exact = float(words in answers)
    best = 0.0
    for gold in answers:
        left, shared = Counter(gold), 0
        for word in words:
            shared, left[word] = shared + (left[word] > 0), left[word] - 1
        if is_v2 and not (gold and words):
            best = max(best, float(gold == words))
        elif shared:
            precision, recall = shared / len(words), shared / len(gold)
            best = max(best, 2 * precision * recall / (precision + recall))
    return exact, best


@pytest.mark.parametrize("suffix", ["", "_v2"])
def test_answers_are_scored_as_by_squads_script(suffix):
    rng = np.random.default_rng(5)
    partial = 0
    for _ in range(CASES):
        prediction = random_answer(rng)
        answers = [random_answer(rng) for _ in range(int(rng.integers(0 if suffix else 1, 4)))]
        if rng.random() < 0.3 and answers:
            prediction = answers[0].upper().replace(" ", "  ")
        exact, best = answer_scores(prediction, answers, bool(suffix))
        found = measure([f"answer_em{suffix}", f"answer_f1{suffix}"], [prediction], [answers])
        assert list(found.values()) == pytest.approx([exact, best], abs=1e-12)
        partial += 0.0 < best < 1.0
    assert partial > CASES / 10


def test_an_article_alone_is_no_answer():
    """The two scripts differ: the first compares the words that are left, of which there are none."""
    assert measure(["answer_em", "answer_f1"], ["The"], [["an"]]) == {"answer_em": 1.0, "answer_f1": 0.0}
    found = measure(["answer_em_v2", "answer_f1_v2"], ["", "no", ""], [[], [], ["yes"]])
    assert found == pytest.approx({"answer_em_v2": 1 / 3, "answer_f1_v2": 1 / 3})
    with pytest.raises(DataError, match="sample 1 has no reference"):
        one("answer_em", ["a b", "c"], [["b"], []])


def test_exact_match_forgives_white_space_only():
    assert one("exact_match", ["a  b\n", "a b.", "A"], ["a b", ["x", "a b."], "a"]) == pytest.approx(2 / 3)


WORDS = ["the", "cat", "sat", "sitting,", "on", "a", "mat.", "dogs", "running;", "U.S.", "3.5%", "don't"]


def random_texts(rng, count):
    return [" ".join(rng.choice(WORDS, int(rng.integers(1, 12)))) for _ in range(count)]


def test_bleu_matches_sacrebleu():
    rng = np.random.default_rng(6)
    options = {"bleu": {}, "bleu_char": {"tokenize": "char"}, "bleu_zh": {"tokenize": "zh"},
               "multi_bleu": {"tokenize": "none", "smooth_method": "none", "force": True}}  # fmt: skip
    references, predictions = random_texts(rng, 20), random_texts(rng, 20)
    predictions[::3] = references[::3]
    for name, option in options.items():
        expected = sacrebleu.corpus_bleu(predictions, [references], **option).score
        assert one(name, predictions, references) == expected
    # Several references, and not the same number of them for each sample.
    several = [["the cat sat on the mat", "a cat sat on a mat"], ["dogs run on the mat today"]]
    expected = sacrebleu.corpus_bleu(
        ["a cat sat on the mat", "dogs run on a mat"],
        [[several[0][0], several[1][0]], [several[0][1], None]],
    ).score
    assert one("bleu", ["a cat sat on the mat", "dogs run on a mat"], several) == expected > 0


def test_rouge_matches_rouge_score():
    rng = np.random.default_rng(7)
    names = ["rouge1", "rougeLsum", "rougeL", "rouge2"]
    theirs = rouge_scorer.RougeScorer(names, use_stemmer=True)
    predictions, references = (
        ["\n".join(random_texts(rng, int(rng.integers(1, 4)))) for _ in range(50)] for _ in range(2)
    )
    scores = [theirs.score(r, p) for p, r in zip(predictions, references, strict=True)]
    expected = {name: np.mean([score[name].fmeasure for score in scores]) for name in names}
    found = measure(names, predictions, references)
    assert list(found) == names and found == pytest.approx(expected, abs=1e-12)
    assert one("rougeLsum", ["a cat"], [["dogs", "a cat"]]) == 1.0  # the best reference counts


def test_sentences_are_lines():
    """Two sentences in exchanged order, by hand: half of the words are in order, all are in a sentence."""
    found = measure(["rougeL", "rougeLsum"], ["c d\na b"], ["a b\nc d"])
    assert found == pytest.approx({"rougeL": 0.5, "rougeLsum": 1.0})


def test_texts_without_latin_letters_have_scores_of_characters():
    found = measure(["rouge1_char", "rouge2_char"], ["北京 天气"], ["北京天汽"])
    assert found == pytest.approx({"rouge1_char": 3 / 4, "rouge2_char": 2 / 3})
    with pytest.raises(DataError, match=r"reference 1, '北京', has no ASCII letters .* use rouge1_char\."):
        one("rouge1", ["a", "b"], ["a", "北京"])


def test_bad_input_is_one_line(monkeypatch):
    with pytest.raises(DataError, match="2 predictions for 1 references"):
        one("accuracy", [1, 1], [1])
    with pytest.raises(DataError, match="no samples"):
        one("accuracy", [], [])
    with pytest.raises(DataError, match="sentence 0 has 1 tags for 2 words"):
        one("entity_f1", [["O"]], [["O", "O"]])
    with pytest.raises(ConfigError, match=r"unknown metric 'acuracy'; the nearest is accuracy"):
        require_metrics(["acuracy"])
    with pytest.raises(ConfigError, match=r"unknown metric 'zzz'; there are accuracy, .*spearman"):
        require_metrics(["zzz"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    require_metrics(KNOWN - set(PACKAGES))
    packages = {
        "multi_bleu": "sacrebleu",
        "rougeL_char": "rouge-score",
        "f1": "scikit-learn",
        "pearson": "scipy",
    }
    for name, package in packages.items():
        with pytest.raises(
            ConfigError, match=f"{name} needs the package {package}, .* pip install {package}"
        ):
            one(name, ["a"], ["a"])
