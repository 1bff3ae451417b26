"""Search over a stub model whose probabilities are known, against all answers written out."""

import itertools
import math

import pytest
import torch

from data_utils.common.errors import ConfigError
from data_utils.common.seeds import derive_seed
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.inference.search import Search, repeats

END, TOKENS = 5, range(5)  # six tokens
LIMIT = 4
EVERY = 1024  # beams: more than there are answers of up to 4 tokens


def log_p(text, prefix):
    """What follows: a pure function of the text and what is written so far."""
    generator = torch.Generator().manual_seed(derive_seed(1, "stub", text, *prefix) >> 1)
    return (2 * torch.randn(6, generator=generator)).log_softmax(-1)


class Stub:
    """Rows of texts with what each has written."""

    def __init__(self, texts):
        self.rows = [(text, ()) for text in texts]

    def first(self):
        return torch.stack([log_p(*row) for row in self.rows])

    def next(self, tokens):
        self.rows = [(text, (*span, token)) for (text, span), token in zip(self.rows, tokens, strict=True)]
        return self.first()

    def select(self, rows):
        self.rows = [self.rows[row] for row in rows]


def all_answers(text, limit=LIMIT):
    """Every answer -> log probability: (tokens, True) with its end, (tokens, False) cut at the limit."""
    found = {}
    for length in range(limit + 1):
        for span in itertools.product(TOKENS, repeat=length):
            total = sum(log_p(text, span[:i])[token].item() for i, token in enumerate(span))
            if length == limit:
                found[span, False] = total
            else:
                found[span, True] = total + log_p(text, span)[END].item()
    return found


def search(config, ignored=(), **options):
    return Search(GenerationConfig(**{"max_length": LIMIT} | config), {END}, (), ignored, **options)


def run(texts, ignored=(), limits=None, generators=(), **config):
    return search(config, ignored).run(Stub(texts), limits or [LIMIT] * len(texts), generators)


def best(scores):
    return max(scores, key=scores.__getitem__)


def has_no_repeat(span, size):
    grams = [span[i : i + size] for i in range(len(span) - size + 1)]
    return len(grams) == len(set(grams))


PENALTIES = [
    {"length_penalty": 0.0},
    {"length_penalty": 1.0},
    {"length_penalty": 2.5},
    {"length_penalty": -1.0},
    {"length_penalty": 1.0, "length_penalty_form": "gnmt"},
    {"length_penalty": 3.0, "length_penalty_form": "gnmt"},
]


def scored(answers, length_penalty, length_penalty_form="power"):
    """Σ log p / length^α, or over ((5 + length) / 6)^α; the end is a token."""
    scores = {}
    for (span, ended), total in answers.items():
        length = len(span) + ended
        base = (5 + length) / 6 if length_penalty_form == "gnmt" else length
        scores[span, ended] = total / base**length_penalty
    return scores


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_wide_beams_find_the_best_of_all_answers(penalty):
    for text in range(3):
        expected = scored(all_answers(text), **penalty)
        (found,) = run([text], strategy="beam", num_beams=EVERY, **penalty)
        assert {(tuple(f.tokens), f.ended): f.score for f in found} == pytest.approx(expected, abs=1e-4)
        assert (tuple(found[0].tokens), found[0].ended) == best(expected)


@pytest.mark.parametrize(
    "limits, may_be", [
        ({"min_length": 2}, lambda span, ended: len(span) >= 2),
        ({"no_repeat_ngram_size": 1}, lambda span, ended: has_no_repeat(span, 1)),
        ({"no_repeat_ngram_size": 2}, lambda span, ended: has_no_repeat(span, 2)),
        ({"min_length": 3, "no_repeat_ngram_size": 2}, lambda span, ended: len(span) >= 3 and has_no_repeat(span, 2)),
    ], ids=str,
)  # fmt: skip
def test_what_may_not_be_is_not_found_and_nothing_else_is_lost(limits, may_be):
    for text in range(3):
        answers = {key: total for key, total in all_answers(text).items() if may_be(*key)}
        (found,) = run([text], strategy="beam", num_beams=EVERY, length_penalty=0.0, **limits)
        assert {(tuple(f.tokens), f.ended): f.score for f in found} == pytest.approx(answers, abs=1e-4)
        ((greedy,),) = run([text], **limits)
        assert (tuple(greedy.tokens), greedy.ended) in answers


def test_probabilities_of_all_answers_and_the_unfinished_mass_are_one():
    for text in range(3):
        (found,) = run([text], strategy="beam", num_beams=EVERY, length_penalty=0.0)
        ended = sum(math.exp(f.score) for f in found if f.ended)
        unfinished = sum(math.exp(f.score) for f in found if not f.ended)
        assert 0.0 < unfinished < 1.0 and ended + unfinished == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("beams", [1, 2, 3, 7])
def test_several_texts_are_searched_as_if_alone(beams):
    texts, limits = list(range(12)), [1 + text % 5 for text in range(12)]
    for config in ({"strategy": "beam", "num_beams": beams}, {"no_repeat_ngram_size": beams}):
        config["max_length"] = 8
        together = run(texts, limits=limits, **config)
        assert together == [
            run([t], limits=[limit], **config)[0] for t, limit in zip(texts, limits, strict=True)
        ]
        assert {len(found[0].tokens) for found in together} > {1, 2}
        for found, limit in zip(together, limits, strict=True):
            assert all(len(f.tokens) + f.ended <= limit for f in found)


def test_draws_of_a_text_do_not_depend_on_the_others():
    def generators():
        return [torch.Generator().manual_seed(seed) for seed in range(12)]

    config = {"strategy": "sample", "temperature": 1.5}
    together = run(list(range(12)), generators=generators(), **config)
    alone = [run([t], generators=[g], **config)[0] for t, g in enumerate(generators())]
    assert together == alone and len({str(found) for found in together}) > 6


def test_one_beam_is_greedy():
    for text in range(20):
        ((greedy,),) = run([text])
        (beam, *_) = run([text], strategy="beam", num_beams=1)[0]
        assert (beam.tokens, beam.ended) == (greedy.tokens, greedy.ended)


class Scripted(Stub):
    """Probabilities by hand: prefix -> {token: probability}."""

    def __init__(self, table):
        super().__init__([0])
        self.table, self.steps = table, 0

    def first(self):
        self.steps += 1
        rows = [self.table.get(span, {END: 1.0}) for _, span in self.rows]
        return torch.tensor([[row.get(token, 0.0) for token in range(6)] for row in rows]).log()


def test_the_search_stops_by_the_best_live_score_at_its_present_length():
    """Answers have ended with -0.51 and -0.60 per token. The best live one has -2.41 in two tokens, -1.20 each: it is
    given up, although with sure tokens it would have -0.40 each at six."""
    state = Scripted({(): {0: 0.45, 1: 0.4, 2: 0.15}, (0,): {END: 0.8, 3: 0.2}, (1,): {END: 0.75, 2: 0.25}})
    config = {"strategy": "beam", "num_beams": 2, "max_length": 9}
    (found,) = search(config).run(state, [9])
    assert [f.tokens for f in found] == [[0], [1]] and state.steps == 2
    # Two have ended after three steps, one of them with -0.80 per token. The live one has -0.41, and goes on.
    table = {
        (): {END: 0.5, 0: 0.4, 1: 0.1}, (0,): {2: 0.8, END: 0.2}, (1,): {2: 1.0}, (0, 2): {3: 0.9, END: 0.1},
        (1, 2): {END: 0.9, 3: 0.1}, (0, 2, 3): {END: 1.0},
    }  # fmt: skip
    state = Scripted(table)
    (found,) = search(config).run(state, [9])
    assert [f.tokens for f in found] == [[0, 2, 3], []] and state.steps == 4


def test_answers_that_are_cut_count_only_where_asked():
    options = {"strategy": "beam", "num_beams": 3, "length_penalty": 0.0, "max_length": 1}
    table = {(): {0: 0.6, 1: 0.3, END: 0.1}}
    (found,) = search(options).run(Scripted(table), [1])
    assert [(f.tokens, f.ended) for f in found] == [([0], False), ([1], False), ([], True)]
    (found,) = search(options, takes_cut=False).run(Scripted(table), [1])
    assert [(f.tokens, f.ended) for f in found] == [([], True)]
    (found,) = search(options, takes_cut=False).run(Scripted({(): {0: 0.6, 1: 0.4}}), [1])
    assert [(f.tokens, f.ended) for f in found][:2] == [([0], False), ([1], False)]


@pytest.mark.parametrize("strategy", ["greedy", "beam"])
def test_nothing_may_follow(strategy):
    """Five tokens, none of which may occur twice, and an end that is forbidden: the answer stops where it is."""
    (found,) = run([0], limits=[9], strategy=strategy, max_length=9, min_length=8, no_repeat_ngram_size=1)
    assert sorted(found[0].tokens) == [0, 1, 2, 3, 4]


def test_repeats_by_hand():
    assert repeats([1, 2, 3, 1, 2], 3) == [3]
    assert repeats([1, 2, 1, 3, 1], 2) == [2, 3]
    assert repeats([1, 2], 1) == [1, 2] and repeats([1, 2], 3) == [] and repeats([], 1) == []
    assert repeats([1, 1, 1], 3) == [1] and repeats([1, 1], 3) == []
    assert repeats([1, 9, 3, 1, 9], 3, ignored=[9]) == [] and repeats([9, 1, 3, 9, 1, 3], 3, [9]) == [9]


def test_settings_that_contradict_are_refused():
    with pytest.raises(ConfigError, match=r"min_length \(64\) must be smaller than max_length \(64\)"):
        GenerationConfig(min_length=64)
    with pytest.raises(ConfigError, match=r"length_penalty_form is gnmt, but strategy is greedy"):
        GenerationConfig(length_penalty_form="gnmt")
    with pytest.raises(ConfigError, match=r"no_repeat_except is '\.', but no_repeat_ngram_size is 0"):
        GenerationConfig(no_repeat_except=".")
