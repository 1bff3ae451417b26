"""Further synthetic tasks, for tests: `from support import synthetic_tasks` makes the reader `synthetic` know them.

What is fixed for a task (which answer a key has, a chain's transitions) is drawn from `world`, so train and validation
share it and differ by `seed`.

    task             kind                    sample
    label_noise      cloze, classification   red or blue among other words; the class is flipped with probability noise
    xor              cloze, classification   red, blue, both or none: yes for exactly one
    word_pair        cloze, classification   two texts with the same key: yes if its neighbours are of one cluster
    choice           cloze                   a key and several answers; the right one is the key's, but for noise
    unequal_choice   cloze                   a key and two answers, one word or several, the short one with chance share
    copy, reverse, sort   seq2seq            words; each of the target's is another one with probability noise
    span             spans                   the answer stands between open and close
    tags             tagging                 an entity's type follows from the word before, and is swapped by noise
    periodic         blanks                  a few words over and over
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from data_utils.tasks.readers.synthetic import (
    CLOSE,
    FILLERS,
    KEYS,
    MARKS,
    NO_YES,
    OPEN,
    TASKS,
    WORDS,
    Drawn,
    SyntheticTask,
    Values,
    best_all,
    generator,
    mixed,
    numbers,
    pick,
)

_TAGS = ("O", "B-A", "B-B")


@lru_cache(maxsize=64)
def _world(name: str, world: int, size: int) -> tuple[int, ...]:
    """A fixed permutation of range(size)."""
    return tuple(int(i) for i in generator(world, "world", name).permutation(size))


def _draw_label_noise(rng: np.random.Generator, values: Values) -> Drawn:
    label = int(rng.integers(2))
    text = mixed(rng, [MARKS[label], *pick(rng, FILLERS, values["length"] - 1)])
    return {"text": text}, NO_YES[label ^ int(rng.random() < values["noise"])]


def _best_but_noise(values: Values) -> dict[str, float]:
    """The rule, which noise contradicts: 1 - noise."""
    return {"accuracy": 1 - values["noise"]}


def _draw_xor(rng: np.random.Generator, values: Values) -> Drawn:
    present = rng.integers(2, size=2)
    marks = [mark for mark, is_there in zip(MARKS, present, strict=True) if is_there]
    text = mixed(rng, [*marks, *pick(rng, FILLERS, values["length"] - len(marks))])
    return {"text": text}, NO_YES[int(present.sum()) % 2]


def _best_xor(values: Values) -> dict[str, float]:
    """All are right. No weights of single words get more than three of the four cases; their expected slopes are 0."""
    return {"accuracy": 1.0, "linear_accuracy": 0.75}


def _draw_word_pair(rng: np.random.Generator, values: Values) -> Drawn:
    order = _world("word_pair", values["world"], len(WORDS))
    half = len(WORDS) // 2
    first, same = int(rng.integers(2)), int(rng.integers(2))
    key = KEYS[rng.integers(len(KEYS))]
    texts = []
    for cluster in (first, first if same else 1 - first):
        neighbour = WORDS[order[cluster * half + int(rng.integers(half))]]
        before, after = pick(rng, FILLERS, 2)
        texts.append(f"{before} {key} {neighbour} {after}")
    return {"text_a": texts[0], "text_b": texts[1]}, NO_YES[same]


def _draw_choice(rng: np.random.Generator, values: Values) -> Drawn:
    answers = _world("choice", values["world"], len(WORDS))[: values["keys"]]
    keys = rng.permutation(values["keys"])[: values["choices"]]  # the first is asked for
    order = rng.permutation(values["choices"])
    choices = tuple(WORDS[answers[keys[i]]] for i in order)
    right = int(np.flatnonzero(order == 0)[0])
    if rng.random() < values["noise"]:
        right = (right + 1 + int(rng.integers(values["choices"] - 1))) % values["choices"]
    inputs = f"{KEYS[keys[0]]} is"
    return {"inputs": inputs, "choices": choices, "text": f"{inputs} {choices[right]}"}, right


def _draw_unequal_choice(rng: np.random.Generator, values: Values) -> Drawn:
    order = _world("unequal_choice", values["world"], len(WORDS))
    key = int(rng.integers(values["keys"]))
    short = WORDS[order[2 * key]]
    # The first word of the long answer is its key's own, so that it says which answer it is.
    long = " ".join([WORDS[order[2 * key + 1]], *FILLERS[: values["length"] - 1]])
    is_short, turned = rng.random() < values["share"], bool(rng.integers(2))
    choices = (long, short) if turned else (short, long)
    right = int(turned) if is_short else 1 - int(turned)
    inputs = f"{KEYS[key]} is"
    return {"inputs": inputs, "choices": choices, "text": f"{inputs} {choices[right]}"}, right


def _best_unequal_choice(values: Values) -> dict[str, float]:
    """Accuracies of a model with the true probabilities, by the sum and by the mean of log probabilities.

    A word and the end of an answer are a token each, and all but an answer's first word are sure. So the sums are
    ln(share) and ln(1 - share), and the means have 2 and length + 1 tokens.
    """
    share, length = values["share"], values["length"]
    sums = math.log(share), math.log(1 - share)
    means = sums[0] / 2, sums[1] / (length + 1)
    return {
        "accuracy_sum": share if sums[0] > sums[1] else 1 - share,
        "accuracy_mean": share if means[0] > means[1] else 1 - share,
    }


def _draw_sequence(
    order: Callable[[np.ndarray], np.ndarray],
) -> Callable[[np.random.Generator, Values], Drawn]:
    def draw(rng: np.random.Generator, values: Values) -> Drawn:
        size = values["words"]
        source = numbers(rng, size, values["length"])
        is_noise = rng.random(len(source)) < values["noise"]
        others = 1 + numbers(rng, size - 1, len(source))
        target = np.where(is_noise, (order(source) + others) % size, order(source))
        texts = [" ".join(WORDS[i] for i in part) for part in (source, target)]
        return {"source": texts[0], "target": texts[1]}, texts[1]

    return draw


def _best_sequence(values: Values) -> dict[str, float]:
    """Exact match (1 - noise)^length; loss of a word, nats: -(1 - e) ln(1 - e) - e ln(e / (words - 1)). The end: 0."""
    noise, words = values["noise"], values["words"]
    loss = -(1 - noise) * math.log(1 - noise) if noise < 1 else 0.0
    loss -= noise * math.log(noise / (words - 1)) if noise else 0.0
    return {"exact_match": (1 - noise) ** values["length"], "word_loss": loss}


def _draw_span(rng: np.random.Generator, values: Values) -> Drawn:
    answer = pick(rng, WORDS, 1 + int(rng.integers(values["most"])))
    before = int(rng.integers(values["length"] + 1))
    first = [*pick(rng, WORDS, before), OPEN]
    words = [*first, *answer, CLOSE, *pick(rng, WORDS, values["length"] - before)]
    text, start = " ".join(answer), len(" ".join(first)) + 1
    return {"question": "what", "context": " ".join(words), "answers": ((text, start),)}, (text,)


def _best_span(values: Values) -> dict[str, float]:
    """The marks say it all."""
    return {"answer_em": 1.0, "answer_f1": 1.0}


def _draw_tags(rng: np.random.Generator, values: Values) -> Drawn:
    groups = _world("tags", values["world"], len(WORDS))
    words = numbers(rng, len(WORDS), values["length"])
    is_swapped = rng.random(len(words)) < values["noise"]
    kinds = [0, *(groups[word] % 3 for word in words[:-1])]  # the first word follows nothing: O
    tags = [_TAGS[3 - kind if kind and swap else kind] for kind, swap in zip(kinds, is_swapped, strict=True)]
    return {"words": tuple(WORDS[word] for word in words)}, tuple(tags)


def _best_tags(values: Values) -> dict[str, float]:
    """Entities of one word, whose places are sure; those whose type noise does not swap are right."""
    return {"entity_f1": 1 - values["noise"]}


def _draw_periodic(rng: np.random.Generator, values: Values) -> Drawn:
    words = pick(rng, WORDS, values["period"])
    text = " ".join(words[i % values["period"]] for i in range(values["length"]))
    return {"text": text}, text


def _best_periodic(values: Values) -> dict[str, float]:
    """The share of hidden words that are known, where floor(ratio * length) are hidden without replacement.

    A hidden word is known if another one of its place in the period is not hidden, else it is guessed.
    """
    length, period = values["length"], values["period"]
    hidden = math.floor(values["ratio"] * length)
    if not hidden:
        return {"word_accuracy": 1.0}
    copies = [len(range(place, length, period)) for place in range(period)]
    lost = sum(copy / length * math.comb(length - copy, hidden - copy) for copy in copies if copy <= hidden)
    lost /= math.comb(length - 1, hidden - 1)
    return {"word_accuracy": 1 - lost * (1 - 1 / len(WORDS))}


_CLASSES = ("cloze", "classification")
_WORLD = {"world": (0, 0, 2**31)}
_LENGTH = {"length": (8, 2, 256)}
_NOISE = (0.1, 0.0, 0.49)
_SEQUENCE = {"length": (6, 1, 128), "words": (16, 2, len(WORDS)), "noise": (0.0, 0.0, 0.49)}
MORE: dict[str, SyntheticTask] = {
    "label_noise": SyntheticTask(
        _CLASSES, {"noise": _NOISE, **_LENGTH}, _draw_label_noise, _best_but_noise, NO_YES
    ),
    "xor": SyntheticTask(_CLASSES, _LENGTH, _draw_xor, _best_xor, NO_YES),
    "word_pair": SyntheticTask(_CLASSES, _WORLD, _draw_word_pair, best_all, NO_YES),
    "choice": SyntheticTask(
        ("cloze",),
        {"keys": (8, 2, len(KEYS)), "choices": (4, 2, len(KEYS)), "noise": _NOISE, **_WORLD},
        _draw_choice,
        _best_but_noise,
    ),
    "unequal_choice": SyntheticTask(
        ("cloze",),
        {"keys": (8, 1, len(KEYS)), "share": (0.6, 0.01, 0.99), "length": (3, 2, 16), **_WORLD},
        _draw_unequal_choice,
        _best_unequal_choice,
    ),
    "copy": SyntheticTask(("seq2seq",), _SEQUENCE, _draw_sequence(lambda words: words), _best_sequence),
    "reverse": SyntheticTask(
        ("seq2seq",), _SEQUENCE, _draw_sequence(lambda words: words[::-1]), _best_sequence
    ),
    "sort": SyntheticTask(("seq2seq",), _SEQUENCE, _draw_sequence(np.sort), _best_sequence),
    "span": SyntheticTask(("spans",), {"length": (16, 0, 256), "most": (3, 1, 16)}, _draw_span, _best_span),
    "tags": SyntheticTask(
        ("tagging",), {**_LENGTH, "noise": _NOISE, **_WORLD}, _draw_tags, _best_tags, _TAGS
    ),
    "periodic": SyntheticTask(
        ("blanks",),
        {"period": (4, 1, 32), "length": (24, 1, 256), "ratio": (0.1, 0.0, 1.0)},
        _draw_periodic,
        _best_periodic,
    ),
}
TASKS.update(MORE)
