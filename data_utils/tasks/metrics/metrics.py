"""Metrics of predictions. Those of PACKAGES are their packages', which are imported when one is measured.

    metric                            prediction        reference
    accuracy                          a label           a label: a name or a number, both of one type
    f1                                a label           a label; of the class `positive`
    macro_f1                          a label           a label; mean of the classes that occur in either
    micro_f1                          a label           a label; of all that are not `negative` (TACRED)
    matthews                          a label           a label; two classes or more
    strict_accuracy, loose_macro_f1,  a list of labels  a list of labels; which are all right, F1 of the means of their
    loose_micro_f1                                      precision and recall, F1 of all labels together
    f1a, group_em                     a label           a label; MultiRC: F1 of all answers, and the share of groups in
                                                        which every label is right
    pearson, spearman                 a number          a number
    exact_match                       a text            a text or a list of them; white space does not count
    answer_em, answer_f1              a text            a text or a list of them: SQuAD 1.1, ReCoRD
    answer_em_v2, answer_f1_v2        a text, "" = no   a list of texts, empty where there is no answer: SQuAD 2.0
    entity_f1                         a list of tags    a list of tags: O, B-TYPE, I-TYPE
    tag_accuracy                      a list of tags    a list of tags: the share of words whose tag is right
    bleu, bleu_char, bleu_zh,         a text            a text or a list of them; sacrebleu's tokenizers 13a, char, zh,
    multi_bleu                                          and none without smoothing
    rouge1, rouge2, rougeL, rougeLsum a text            a text or a list of them; F with stems. With _char at the end:
                                                        of characters, for texts that are not in Latin letters

BLEU goes up to 100, as published figures do; all others up to 1. What a package leaves undefined is 0: F1 of a class
that is neither predicted nor there, correlations and `matthews` where one side is constant. Where there are several
references the best one counts. rougeLsum wants a sentence in each line.

Source: the evaluation scripts of SQuAD 1.1 and 2.0, ReCoRD and CoNLL-2000 (conlleval); thunlp/ERNIE, its evaluation of
typing and TACRED, for label sets and `micro_f1`; Gorodkin 2004 for `matthews` of several classes.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.setting_files import shorten

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
BLEU: dict[str, dict[str, Any]] = {
    "bleu": {"tokenize": "13a"},
    "bleu_char": {"tokenize": "char"},
    "bleu_zh": {"tokenize": "zh"},
    "multi_bleu": {"tokenize": "none", "smooth_method": "none", "force": True},
}
_ROUGE_NAMES = tuple(name + suffix for name in ROUGE for suffix in ("", "_char"))
# Metric -> its package, and the package's module.
PACKAGES = {
    **dict.fromkeys(("f1", "f1a", "macro_f1", "micro_f1", "matthews"), ("scikit-learn", "sklearn")),
    **dict.fromkeys(("pearson", "spearman"), ("scipy", "scipy")),
    **dict.fromkeys(BLEU, ("sacrebleu", "sacrebleu")),
    **dict.fromkeys(_ROUGE_NAMES, ("rouge-score", "rouge_score")),
}

_PUNCTUATION = frozenset(string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def measure(
    names: Iterable[str],
    predictions: Sequence[Any],
    references: Sequence[Any],
    *,
    groups: Sequence[Any] | None = None,
    positive: Any = "1",
    negative: Any = None,
) -> dict[str, float]:
    """The metrics of these names, in their order.

    Args:
        predictions, references: of the same samples, in the types of the table above.
        groups: f1a and group_em: what counts together, any values that can be hashed; None = each sample itself alone.
            A sample whose group is None is alone.
        positive: f1 and f1a: the label whose F1 is measured.
        negative: micro_f1: the label that does not count.
    Raises:
        ConfigError for an unknown metric, or if its package is not installed.
        DataError without samples and for unequal counts.
    """
    names = list(names)
    require_metrics(names)
    _require_samples(predictions, references)
    rouge_names = [name for name in names if name.removesuffix("_char") in ROUGE]
    rouge: dict[str, float] = {}
    for is_char in (False, True):
        types = [name.removesuffix("_char") for name in rouge_names if name.endswith("_char") == is_char]
        if types:
            scores = _rouge(types, predictions, references, is_char)
            rouge |= {name + "_char" * is_char: score for name, score in scores.items()}
    options: dict[str, dict[str, Any]] = {
        "f1": {"positive": positive},
        "f1a": {"positive": positive},
        "micro_f1": {"negative": negative},
        "group_em": {"groups": groups},
    }
    with warnings.catch_warnings(action="ignore"):  # packages warn of what they leave undefined
        return {
            name: rouge[name]
            if name in rouge
            else METRIC_FUNCTIONS[name](predictions, references, **options.get(name, {}))
            for name in names
        }


def require_metrics(names: Iterable[str]) -> None:
    """Raise ConfigError for an unknown metric, or one whose package is not installed. Imports nothing."""
    for name in names:
        if name not in KNOWN:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"the nearest is {close[0]}" if close else f"there are {', '.join(sorted(KNOWN))}"
            raise ConfigError(f"unknown metric {shorten(str(name))!r}; {hint}.")
        package, module = PACKAGES.get(name, ("", ""))
        if package and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"metric {name} needs the package {package}, which is not installed; pip install {package}, or choose "
                "other metrics."
            )


def _require_samples(predictions: Sequence[Any], references: Sequence[Any]) -> None:
    if len(predictions) != len(references):
        raise DataError(
            f"there are {len(predictions)} predictions for {len(references)} references; each reference needs one."
        )
    if not len(references):
        raise DataError("there are no samples; the metrics need at least one.")


def accuracy(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    return _mean(p == r for p, r in zip(predictions, references, strict=True))


def f1(predictions: Sequence[Any], references: Sequence[Any], positive: Any = "1") -> float:
    """F1 of one class."""
    return _f1(predictions, references, labels=[positive], average="micro")


def macro_f1(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    """Mean F1 of the classes that are predicted or there. A class that is neither does not count."""
    return _f1(predictions, references, average="macro")


def micro_f1(predictions: Sequence[Any], references: Sequence[Any], negative: Any) -> float:
    """F1 of all labels together but one."""
    labels = sorted({*predictions, *references} - {negative})
    return _f1(predictions, references, labels=labels, average="micro") if labels else 0.0


def _f1(predictions: Sequence[Any], references: Sequence[Any], **options: Any) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(references, predictions, zero_division=0.0, **options))


def strict_accuracy(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    """The share of samples whose labels are all right."""
    return _mean(set(p) == set(r) for p, r in zip(predictions, references, strict=True))


def loose_macro_f1(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    """F1 of precision and recall, each the mean over samples; a sample without labels on a side has 0 there."""
    pairs = [(set(p), set(r)) for p, r in zip(predictions, references, strict=True)]
    precision = _mean(len(p & r) / max(1, len(p)) for p, r in pairs)
    recall = _mean(len(p & r) / max(1, len(r)) for p, r in pairs)
    return 2 * precision * recall / (precision + recall) if recall else 0.0


def loose_micro_f1(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    """2 right / (predicted + there) of the labels of all samples."""
    right = sum(len({*p} & {*r}) for p, r in zip(predictions, references, strict=True))
    total = sum(len({*labels}) for samples in (predictions, references) for labels in samples)
    return 2 * right / total if total else 0.0


def matthews(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(references, predictions))


def pearson(predictions: Sequence[float], references: Sequence[float]) -> float:
    from scipy import stats

    return _correlation(stats.pearsonr, predictions, references)


def spearman(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Pearson's correlation of the ranks; equal values share their mean rank."""
    from scipy import stats

    return _correlation(stats.spearmanr, predictions, references)


def _correlation(function: Callable[..., Any], *sides: Sequence[float]) -> float:
    """Raises: DataError for NaN and infinity, which have no rank and no deviation."""
    arrays = [np.asarray(side, float) for side in sides]
    for array in arrays:
        if not np.isfinite(array).all():
            index = int(np.flatnonzero(~np.isfinite(array))[0])
            raise DataError(f"value {index} is {array[index]}; a correlation needs finite numbers.")
    # scipy warns of a constant side, and refuses a single sample.
    return 0.0 if any((array == array[0]).all() for array in arrays) else float(function(*arrays).statistic)


def group_exact(
    predictions: Sequence[Any], references: Sequence[Any], groups: Sequence[Any] | None = None
) -> float:
    """The share of groups whose labels are all right (MultiRC's EM)."""
    sample_groups = groups if groups is not None else [None] * len(references)
    is_right: dict[Any, bool] = {}
    for number, (p, r, group) in enumerate(zip(predictions, references, sample_groups, strict=True)):
        key = (True, number) if group is None else (False, group)  # so that no group equals a number
        is_right[key] = is_right.get(key, True) and p == r
    return _mean(is_right.values())


def exact_match(predictions: Sequence[str], references: Sequence[Any]) -> float:
    """The share of texts that are equal to a reference, but for the amount of white space."""
    return _best_mean(lambda p, r: p.split() == r.split(), predictions, references)


def normal_answer(text: str) -> str:
    """SQuAD's normal form of an answer: lower case, no punctuation (ASCII), no articles, single blanks."""
    text = "".join(letter for letter in text.lower() if letter not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def _answer_em(prediction: str, reference: str) -> float:
    return normal_answer(prediction) == normal_answer(reference)


def _answer_f1(prediction: str, reference: str) -> float:
    predicted_words, words = normal_answer(prediction).split(), normal_answer(reference).split()
    common = sum((Counter(predicted_words) & Counter(words)).values())
    return 2 * common / (len(predicted_words) + len(words)) if common else 0.0


def _answer_f1_v2(prediction: str, reference: str) -> float:
    is_empty = not normal_answer(reference) or not normal_answer(prediction)
    return _answer_em(prediction, reference) if is_empty else _answer_f1(prediction, reference)


def _best_mean(
    score: Callable[[str, str], float],
    predictions: Sequence[str],
    references: Sequence[Any],
    is_v2: bool = False,
) -> float:
    """The mean over samples of the best score against a reference.

    Args: is_v2: references that say nothing are left out; without any, the one right answer is none.
    """
    best_scores = []
    for number, (prediction, given) in enumerate(zip(predictions, references, strict=True)):
        texts = _as_list(given)
        if is_v2:
            texts = [text for text in texts if normal_answer(text)] or [""]
        if not texts:
            raise DataError(f"sample {number} has no reference; give one, or use the metrics of SQuAD 2.0.")
        best_scores.append(max(score(prediction, text) for text in texts))
    return _mean(best_scores)


def _as_list(texts: str | Sequence[str]) -> Sequence[str]:
    """The references of a sample, which may be one text."""
    return [texts] if isinstance(texts, str) else texts


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first, last) of the entities in a sentence's tags, as conlleval finds them.

    An I- after O or after another type begins an entity: taggers write such tags.
    """
    spans, start, previous = set(), 0, "O"
    for i, tag in enumerate([*tags, "O"]):
        entity_type, previous_type = tag.partition("-")[2], previous.partition("-")[2]
        begins = tag != "O" and (tag.startswith("B") or previous == "O" or entity_type != previous_type)
        if previous != "O" and (begins or tag == "O"):
            spans.add((previous_type, start, i - 1))
        start, previous = i if begins else start, tag
    return spans


def entity_f1(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """2 right / (predicted + there), of entities: type, first and last word must be right."""
    right = total = 0
    for number, (p, r) in enumerate(zip(predictions, references, strict=True)):
        if len(p) != len(r):
            raise DataError(f"sentence {number} has {len(p)} tags for {len(r)} words; each word needs one.")
        predicted, true = entities(p), entities(r)
        right, total = right + len(predicted & true), total + len(predicted) + len(true)
    return 2 * right / total if total else 0.0


def tag_accuracy(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """The share of all words whose tag is right."""
    tags = [pair for p, r in zip(predictions, references, strict=True) for pair in zip(p, r, strict=True)]
    return _mean(p == r for p, r in tags)


def _bleu(predictions: Sequence[str], references: Sequence[Any], **options: Any) -> float:
    import sacrebleu

    lists = [_as_list(texts) for texts in references]
    # sacrebleu wants the first references of all samples, then the second ones, ...
    by_rank: Any = [
        [texts[i] if i < len(texts) else None for texts in lists] for i in range(max(map(len, lists)))
    ]
    return float(sacrebleu.corpus_bleu(list(predictions), by_rank, **options).score)


class _Characters:
    """A tokenizer for rouge-score, whose own one drops all but ASCII letters and digits."""

    def tokenize(self, text: str) -> list[str]:
        return [letter for letter in text.lower() if not letter.isspace()]


def _rouge(
    types: list[str], predictions: Sequence[str], references: Sequence[Any], is_char: bool
) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(types, use_stemmer=not is_char, tokenizer=_Characters() if is_char else None)
    scores = []
    for number, (prediction, texts) in enumerate(zip(predictions, references, strict=True)):
        for text in _as_list(texts):
            if not is_char and text.strip() and not re.search("[a-z0-9]", text.lower()):
                raise DataError(
                    f"reference {number}, {shorten(text)!r}, has no ASCII letters or digits, but {types[0]} counts "
                    f"nothing else; use {types[0]}_char."
                )
        scores.append(scorer.score_multi(_as_list(texts), prediction))
    return {name: _mean(score[name].fmeasure for score in scores) for name in types}


METRIC_FUNCTIONS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "f1a": f1,
    "macro_f1": macro_f1,
    "micro_f1": micro_f1,
    "matthews": matthews,
    "group_em": group_exact,
    "strict_accuracy": strict_accuracy,
    "loose_macro_f1": loose_macro_f1,
    "loose_micro_f1": loose_micro_f1,
    "pearson": pearson,
    "spearman": spearman,
    "exact_match": exact_match,
    "answer_em": functools.partial(_best_mean, _answer_em),
    "answer_f1": functools.partial(_best_mean, _answer_f1),
    "answer_em_v2": functools.partial(_best_mean, _answer_em, is_v2=True),
    "answer_f1_v2": functools.partial(_best_mean, _answer_f1_v2, is_v2=True),
    "entity_f1": entity_f1,
    "tag_accuracy": tag_accuracy,
    **{name: functools.partial(_bleu, **options) for name, options in BLEU.items()},
}
KNOWN = frozenset([*METRIC_FUNCTIONS, *_ROUGE_NAMES])
