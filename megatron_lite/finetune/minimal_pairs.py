"""Minimal pairs: how often a model gives the acceptable sentence of two the higher score.

BLiMP (doi 10.1162/tacl_a_00321) is such a benchmark. The score of a sentence is
    left-to-right   its log probability, each token given the tokens before it, as in lm_eval
    words           masked models: the sum over tokens, each given all others but the later ones of its word
                    (arXiv:2305.10588)
    tokens          the same, each given all others (arXiv:1910.14659); words of several tokens give themselves away
    blanks          GLM: each word is a blank, whose tokens and end are predicted from left to right
A sum over the whole sentence, not a mean: sentences of a pair may differ in length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_utils.common.errors import DataError
from data_utils.common.files import write_picture
from data_utils.common.progress import progress_bar
from data_utils.tasks.readers.minimal_pairs import BLIMP_PARADIGMS, PUBLISHED, MinimalPair
from data_utils.tasks.templates.continuations import Continuations
from megatron_lite.finetune.harness import Harness

DEFAULT_SCORES = {
    "bert": "words",
    "glm": "blanks",
}  # by the form of the model's inputs; others: left-to-right
PAIRS_OF_A_PASS = 100  # scored together, so that progress is shown


@dataclass
class Paradigm:
    """What was found for the pairs of one paradigm."""

    name: str
    phenomenon: str
    right: list[bool] = field(default_factory=list)
    ties: int = 0  # equal scores of different sentences, which count as wrong
    # Pairs of one sentence twice, which count as right, as in lm_eval: no model could tell them apart.
    same: int = 0

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def standard_error(self) -> float:
        """Of the accuracy, from the sample's variance; NaN for one pair."""
        n, p = len(self.right), self.accuracy
        return math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else math.nan


@dataclass(frozen=True)
class Scores:
    """Accuracies on minimal pairs. All means are over paradigms, each of which counts once."""

    score: str  # one of SCORES
    paradigms: list[Paradigm]

    def phenomena(self) -> dict[str, list[Paradigm]]:
        found: dict[str, list[Paradigm]] = {}
        for paradigm in self.paradigms:
            found.setdefault(paradigm.phenomenon or paradigm.name, []).append(paradigm)
        return dict(sorted(found.items()))

    def as_json(self) -> dict[str, Any]:
        return {
            "score": self.score,
            **_numbers(self.paradigms),
            "phenomena": {name: _numbers(some) for name, some in self.phenomena().items()},
            "paradigms": {
                one.name: {**_numbers([one]), "phenomenon": one.phenomenon} for one in self.paradigms
            },
        }


def mean(paradigms: Sequence[Paradigm]) -> tuple[float, float]:
    """The mean accuracy of paradigms, and its standard error: their samples are independent."""
    accuracy = sum(one.accuracy for one in paradigms) / len(paradigms)
    return accuracy, math.sqrt(sum(one.standard_error**2 for one in paradigms)) / len(paradigms)


def _numbers(paradigms: Sequence[Paradigm]) -> dict[str, Any]:
    accuracy, error = mean(paradigms)
    return {
        "accuracy": accuracy,
        "standard_error": None if math.isnan(error) else error,
        "pairs": sum(len(one.right) for one in paradigms),
        "ties": sum(one.ties for one in paradigms),
        "same": sum(one.same for one in paradigms),
    }


def default_score(template: Continuations) -> str:
    if template.format_name == "glm" and not template.knows_word_blanks:
        return "left-to-right"
    return DEFAULT_SCORES.get(template.format_name, "left-to-right")


def check(template: Continuations, pairs: Sequence[MinimalPair], score: str) -> None:
    """Find what stands against scoring before anything is scored, which takes hours.

    Raises: ConfigError for a score that the run does not give; DataError for a sentence that has no token or does not
        fit.
    """
    template.check_score(score)
    for pair in pairs:
        for text in (pair.good, pair.bad):
            try:
                _tokens(template, text, score)
            except DataError as error:
                raise DataError(f"paradigm {pair.paradigm}: {error}") from None


def measure(harness: Harness, pairs: Sequence[MinimalPair], score: str) -> Scores:
    """Compare the sentences of each pair.

    Args: score: one of SCORES (minimal_pairs.py of the readers) that the run gives.
    Raises: ConfigError and DataError as `check`.
    """
    check(harness.template, pairs, score)
    found: dict[str, Paradigm] = {}
    with progress_bar(total=len(pairs), unit="pairs") as shown:
        for start in range(0, len(pairs), PAIRS_OF_A_PASS):
            some = pairs[start : start + PAIRS_OF_A_PASS]
            scores = scored(harness, [text for pair in some for text in (pair.good, pair.bad)], score)
            for pair, good, bad in zip(some, scores[::2], scores[1::2], strict=True):
                paradigm = found.setdefault(pair.paradigm, Paradigm(pair.paradigm, pair.phenomenon))
                paradigm.right.append(good > bad or pair.is_one_sentence)
                paradigm.ties += good == bad and not pair.is_one_sentence
                paradigm.same += pair.is_one_sentence
            shown.update(len(some))
    return Scores(score, sorted(found.values(), key=lambda one: one.name))


def scored(harness: Harness, texts: Sequence[str], score: str) -> list[float]:
    """The score of each sentence, in nats.

    Sentences of the same tokens (of another case, or with spaces that the tokenizer drops) are scored once: the last
    digits depend on the batch, so they would be unequal by chance.
    """
    tokens = [_tokens(harness.template, text, score) for text in texts]
    different = dict(zip(tokens, texts, strict=True))
    asked = list(different.values())
    if score == "left-to-right":
        requests = [("", _continuation(harness.template, text)) for text in asked]
        totals = [total for total, _ in harness.loglikelihood(requests)]
    else:
        totals = harness.pseudo_loglikelihood(asked, score)
    by_tokens = dict(zip(different, totals, strict=True))
    return [by_tokens[one] for one in tokens]


def _tokens(template: Continuations, text: str, score: str) -> tuple[int, ...]:
    """What is scored of a sentence. Raises: DataError for a sentence that has no token or does not fit."""
    if score == "left-to-right":
        return tuple(template.tokenize("", _continuation(template, text)).continuation)
    return tuple(template.pseudo_tokens(text))


def _continuation(template: Continuations, text: str) -> str:
    # lm_eval puts a space before what follows a context, also an empty one. GPT-2's tokens differ by it.
    return f" {text}" if template.format_name == "causal" else text


def table(measured: Mapping[str, Scores]) -> str:
    """Percent right of each phenomenon and in all, a column for each checkpoint, with standard errors."""
    names = sorted({name for scores in measured.values() for name in scores.phenomena()})
    lines = [["", *(f"{name} ({scores.score})" for name, scores in measured.items())]]
    lines += [
        [name, *(_percent(scores.phenomena().get(name)) for scores in measured.values())] for name in names
    ]
    lines.append(["all", *(_percent(scores.paradigms) for scores in measured.values())])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        f"{line[0]:<{widths[0]}}  "
        + "  ".join(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))
        for line in lines
    ]
    ties = sum(one.ties for scores in measured.values() for one in scores.paradigms)
    if ties:
        text.append(f"{ties} pairs have equal scores, which count as wrong")
    same = max(sum(one.same for one in scores.paradigms) for scores in measured.values())
    if same:
        text.append(f"{same} pairs are one sentence twice, which count as right, as in lm_eval")
    return "\n".join(text)


def _percent(paradigms: Sequence[Paradigm] | None) -> str:
    if not paradigms:
        return "-"
    accuracy, error = mean(paradigms)
    return f"{100 * accuracy:.1f}" + ("" if math.isnan(error) else f" ± {100 * error:.1f}")


def draw(path: Path, measured: Mapping[str, Scores]) -> None:
    """Percent right by phenomenon and in all, for the whole of BLiMP next to the published means. Raises: DataError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = sorted({name for scores in measured.values() for name in scores.phenomena()})
    figure, axes = plt.subplots(figsize=(8, 1.8 + 0.4 * (len(names) + 1)), layout="constrained")
    height = 0.8 / len(measured)
    for number, (label, scores) in enumerate(measured.items()):
        groups = [*(scores.phenomena().get(name, []) for name in names), scores.paradigms]
        means = [mean(group) if group else (0.0, 0.0) for group in groups]
        places = [row + number * height for row in range(len(groups))]
        axes.barh(
            # A legend leaves out labels that begin with _.
            places, [100 * one for one, _ in means], height, label=f" {label} ({scores.score})",
            xerr=[0.0 if math.isnan(error) else 100 * error for _, error in means],
        )  # fmt: skip
    # The published means are those of all paradigms: other benchmarks, and parts of this one, are not comparable.
    is_blimp = all(len(scores.paradigms) == BLIMP_PARADIGMS for scores in measured.values())
    for number, (model, percent) in enumerate(PUBLISHED.items() if is_blimp else ()):
        low = len(names) + (1.0, 1.4)[number % 2]  # neighbours in two lines
        axes.plot([percent] * 2, [len(names) - 0.5, low], "k--", linewidth=1)
        axes.annotate(
            model, (percent, low), fontsize=7, ha="center", va="top", annotation_clip=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
    axes.axvline(50, color="grey", linewidth=0.5)
    places = [row + 0.4 - height / 2 for row in range(len(names) + 1)]
    axes.set_yticks(places, [*(name.replace("_", " ") for name in names), "all"], parse_math=False)
    axes.set_ylim(len(names) + 1.9, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("pairs whose acceptable sentence has the higher score, percent")
    for text in axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0)).get_texts():
        text.set_parse_math(False)
    write_picture(path, figure, "--plot")
    plt.close(figure)
