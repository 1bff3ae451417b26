"""Synthetic tasks whose best possible score is known, so that training can be judged without data.

A sample is a pure function of (seed, number). task.reader synthetic takes a string for a file:
`noisy_votes:n=5,p=0.7,samples=1000,seed=1`; what is left out has its default. Training and validation differ by `seed`.
`optimum` gives the scores of the best predictor, which knows the rule and not the noise.

    task             kind                    sample
    noisy_votes      cloze, classification   n words red or blue, each of the class's own with probability p
    recall           seq2seq                 keys with words, and one of the keys again, to which its word is the answer

tests/support/tasks/synthetic_tasks.py has twelve more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_utils.common.errors import ConfigError
from data_utils.common.seeds import derive_seed
from data_utils.common.setting_files import shown
from data_utils.tasks.readers.files import Intake, TaskRecords

NO_YES = ("no", "yes")
MARKS = ("blue", "red")  # of no and of yes
OPEN, CLOSE = "open", "close"
FILLERS = tuple(f"f{i}" for i in range(16))
KEYS = tuple(f"k{i}" for i in range(16))
WORDS = tuple(f"w{i}" for i in range(32))

Values = Mapping[str, Any]
Drawn = tuple[dict[str, Any], Any]  # fields and label


def synthetic_vocabulary() -> list[str]:
    """Every word of the synthetic tasks; each is one token of a WordPiece vocabulary that holds it."""
    return [*NO_YES, *MARKS, OPEN, CLOSE, "is", "what", *FILLERS, *KEYS, *WORDS]


@dataclass(frozen=True)
class Spec:
    """A synthetic file: its task, how many samples, and the values of its settings."""

    name: str
    seed: int
    samples: int
    values: Values


@dataclass(frozen=True)
class SyntheticTask:
    """A synthetic task.

    Args:
        settings: name -> (default, least, most); a whole number if the default is one.
        draw: fields and label of a sample.
        optimum: the scores of the best predictor.
    """

    kinds: tuple[str, ...]
    settings: Mapping[str, tuple[Any, Any, Any]]
    draw: Callable[[np.random.Generator, Values], Drawn]
    optimum: Callable[[Values], dict[str, float]]
    labels: tuple[str, ...] = ()


def read_synthetic(intake: Intake) -> TaskRecords:
    """The samples that `intake.path` describes. Raises ConfigError for an unknown task, setting or value."""
    spec = parsed(str(intake.path))
    kinds = TASKS[spec.name].kinds
    if intake.config.kind not in kinds:
        raise ConfigError(
            f"task.kind is {intake.config.kind}; the synthetic task {spec.name} is one of {', '.join(kinds)}."
        )
    for number, (fields, label) in enumerate(samples(spec)):
        with intake.at(f"sample {number}"):
            intake.add(fields, label)
    return intake.finish()


def samples(spec: Spec) -> Iterator[Drawn]:
    """Fields and label of each sample, in order."""
    for number in range(spec.samples):
        yield sample(spec, number)


def sample(spec: Spec, number: int) -> Drawn:
    """Fields and label of one sample: a pure function of the task, its settings, the seed and the number."""
    return TASKS[spec.name].draw(generator(spec.seed, spec.name, number), spec.values)


def optimum(text: str) -> dict[str, float]:
    """The best scores that a predictor can expect: metric -> value. Args: text: as for `parsed`."""
    spec = parsed(text)
    return TASKS[spec.name].optimum(spec.values)


def labels_of_synthetic(text: str) -> tuple[str, ...]:
    """The classes or tags of a synthetic task, () where it has none."""
    return TASKS[parsed(text).name].labels


def parsed(text: str) -> Spec:
    """`NAME:key=value,...`. Raises ConfigError for what the task does not know."""
    name, _, rest = text.partition(":")
    if name not in TASKS:
        raise ConfigError(f"{shown(text)} is not a synthetic task; the tasks are {', '.join(TASKS)}.")
    settings = {"samples": (1000, 1, 10**9), "seed": (0, 0, 2**63 - 1), **TASKS[name].settings}
    values = {key: default for key, (default, _, _) in settings.items()}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in settings:
            raise ConfigError(
                f"{shown(text)}: {name} has no setting {shown(key)}; it has {', '.join(settings)}."
            )
        values[key] = _number(text, key, value, *settings[key])
    return Spec(name, values.pop("seed"), values.pop("samples"), values)


def _number(text: str, key: str, value: str, default: Any, least: Any, most: Any) -> Any:
    try:
        number = type(default)(value)
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise ConfigError(f"{shown(text)}: {key} is {shown(value)}; it must be {kind} in [{least}, {most}].")
    return number


def generator(seed: int, *names: str | int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=derive_seed(seed, "synthetic", *names)))


def pick(rng: np.random.Generator, words: Sequence[str], count: int) -> list[str]:
    """Words with replacement."""
    return [words[i] for i in numbers(rng, len(words), count)]


def numbers(rng: np.random.Generator, below: int, count: int) -> np.ndarray:
    return np.asarray(rng.integers(below, size=count))


def mixed(rng: np.random.Generator, words: Sequence[str]) -> str:
    return " ".join(words[i] for i in rng.permutation(len(words)))


def _draw_votes(rng: np.random.Generator, values: Values) -> Drawn:
    label = int(rng.integers(2))
    is_own = rng.random(values["n"]) < values["p"]
    votes = [MARKS[label if own else 1 - label] for own in is_own]
    return {"text": mixed(rng, [*votes, *pick(rng, FILLERS, values["fillers"])])}, NO_YES[label]


def _best_votes(values: Values) -> dict[str, float]:
    """The majority: sum over k > n/2 of C(n, k) p^k (1-p)^(n-k), and half of a tie."""
    n, p = values["n"], values["p"]
    chances = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    return {"accuracy": sum(chances[n // 2 + 1 :]) + (chances[n // 2] / 2 if n % 2 == 0 else 0.0)}


def best_all(values: Values) -> dict[str, float]:
    """Everything follows from the text."""
    return {"accuracy": 1.0}


def _draw_recall(rng: np.random.Generator, values: Values) -> Drawn:
    keys = rng.permutation(len(KEYS))[: values["pairs"]]
    words = pick(rng, WORDS, values["pairs"])
    asked = int(rng.integers(values["pairs"]))
    said = " ".join(f"{KEYS[key]} {word}" for key, word in zip(keys, words, strict=True))
    return {"source": f"{said} {KEYS[keys[asked]]}", "target": words[asked]}, words[asked]


def _best_recall(values: Values) -> dict[str, float]:
    return {"exact_match": 1.0}


TASKS: dict[str, SyntheticTask] = {
    "noisy_votes": SyntheticTask(
        ("cloze", "classification"),
        {"n": (5, 1, 99), "p": (0.7, 0.5, 1.0), "fillers": (3, 0, 256)},
        _draw_votes,
        _best_votes,
        NO_YES,
    ),
    "recall": SyntheticTask(("seq2seq",), {"pairs": (4, 1, len(KEYS))}, _draw_recall, _best_recall),
}
