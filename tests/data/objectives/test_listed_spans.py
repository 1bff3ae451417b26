"""Spans that a corpus lists: how often each is masked, by enumeration of all draws; that none is cut."""

import itertools
import math
from collections import Counter
from functools import cache

import numpy as np
import pytest
from support.data.chi_square import chi_square, chi_square_limit
from support.data.recipes import FIRST_TEXT_TOKEN, SPECIAL, make, text_of, vocabulary, windows

from data_utils.common.batch_fields import Example
from data_utils.loader.loader import collate
from data_utils.objectives.mixed import Mixed

KEPT = {"mask_token_prob": 0.0, "random_token_prob": 0.0}  # predicted tokens stay as they are
WORDS = vocabulary().word_start


def filled(made, chunks, spans, samples=1):
    """The Examples of each sample; spans: for each chunk (start, end), in tokens of it."""
    lengths = [np.full(len(chunk), -1, np.int32) for chunk in chunks]
    for own, listed in zip(lengths, spans, strict=True):
        for start, end in listed:
            own[start] = end - start
    given = np.stack([np.tile(np.concatenate(rows), samples) for rows in (chunks, lengths)])
    sizes = np.tile([len(chunk) for chunk in chunks], samples)
    batch = collate(made, given, sizes, np.full(samples, len(chunks)), np.arange(samples))
    return [Example.from_fields(fields).documents() for fields in batch]


def outcomes(size, spans, target, share):
    """Probability of each set of masked tokens of a text of one-token words, geometric spans of one word.

    Sets are drawn as the section says: with probability `share` one of the listed spans that fit, else one token.
    """

    def fits(taken, start, end):
        return end - start <= target - len(taken) and not taken & set(range(start - 1, end + 1))

    @cache
    def after(taken):
        if len(taken) >= target:
            return {taken: 1.0}
        listed = [span for span in spans if fits(taken, *span)]
        single = [(i, i + 1) for i in range(size) if fits(taken, i, i + 1)]
        found = Counter()
        for options, weight in ((listed, share if listed else 0.0), (single, 1 - share if listed else 1.0)):
            for start, end in options:
                for end_set, chance in after(taken | set(range(start, end))).items():
                    found[end_set] += weight * chance / len(options)
        return found if listed or single else {taken: 1.0}

    return after(frozenset())


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_masks_have_the_probabilities_of_all_draws(share):
    """Every set of masked tokens as often as by enumeration, and each listed span within 3 sigma."""
    text = (FIRST_TEXT_TOKEN + 3 * np.arange(14)).astype(np.int32)  # each token a word
    spans = [(0, 2), (3, 6), (8, 10), (10, 13)]
    made = make("spanbert", 40, spans="listed", span_prob=share, max_span_length=1, masked_ratio=0.32, **KEPT)
    expected, count = outcomes(14, spans, 5, share), 6000  # 0.32 of 16 tokens
    assert sum(expected.values()) == pytest.approx(1)
    drawn = [
        frozenset((np.flatnonzero(one.weights) - 1).tolist())
        for (one,) in filled(made, [text], [spans], count)
    ]
    found = Counter(drawn)
    assert set(found) <= set(expected)
    usual = [mask for mask, chance in expected.items() if count * chance >= 5]
    rest = count - sum(found[mask] for mask in usual)
    seen = np.array([*(found[mask] for mask in usual), rest])
    wanted = np.array([count * expected[mask] for mask in usual])
    wanted = np.append(wanted, max(count - wanted.sum(), 1e-9))
    if wanted[-1] < 5:
        seen, wanted = seen[:-1], wanted[:-1]
    if len(usual) > 1:
        assert chi_square(seen, wanted) < chi_square_limit(len(wanted) - 1)
    for start, end in spans:
        whole = set(range(start, end))
        share_of_it = sum(chance for mask, chance in expected.items() if whole <= mask)
        hits = sum(whole <= mask for mask in drawn)
        assert abs(hits - count * share_of_it) <= 3 * math.sqrt(count * share_of_it * (1 - share_of_it)) + 1


def random_spans(rng, length):
    """Disjoint spans of 1 to 5 tokens."""
    ends = np.sort(rng.choice(length + 1, min(length + 1, 2 * int(rng.integers(0, 6))), replace=False))
    pairs = itertools.zip_longest(ends[::2].tolist(), ends[1::2].tolist())
    return [(a, min(b, a + 5)) for a, b in pairs if b is not None]


def places(example, text):
    """For each token of a text whose tokens are distinct: is it predicted, and in which text of the pair is it?"""
    of = {}
    for token, target, weight, segment in zip(
        example.tokens, example.targets, example.weights, example.segment_ids, strict=True
    ):
        of[int(target if weight and token != SPECIAL.cls else token)] = (bool(weight), int(segment))
    return [of[int(token)] for token in text]


@pytest.mark.parametrize("next_sentence", [False, True])
def test_ernie_masks_all_of_a_listed_span_or_nothing(next_sentence):
    """In random windows, also where texts are cut into pairs; all else goes by words."""
    rng, masked = np.random.default_rng(3), Counter()
    made = make("ernie", 120, segmenter="listed", next_sentence=next_sentence, masked_ratio=0.3, **KEPT)
    for chunks in windows(150, 120, 4):
        spans = [random_spans(rng, len(chunk) - (chunk[-1] == SPECIAL.eos)) for chunk in chunks]
        ((*examples,),) = filled(made, chunks, spans)
        tokens = np.concatenate([np.where(e.weights > 0, e.targets, e.tokens) for e in examples])
        states = {}
        for example in examples:
            for chunk in chunks:
                own = [token for token in chunk if token != SPECIAL.eos]
                here = set(np.where(example.weights > 0, example.targets, example.tokens).tolist())
                if here & set(map(int, own)):
                    shown = [token for token in own if int(token) in here]
                    for token, state in zip(shown, places(example, shown), strict=True):
                        states[int(token)] = (*state, id(example))
        assert len(tokens)
        for chunk, listed in zip(chunks, spans, strict=True):
            covered = set()
            for start, end in listed:
                found = {states[int(token)] for token in chunk[start:end]}
                assert len(found) == 1, (chunk[start:end], found)
                masked[next(iter(found))[0]] += 1
                covered |= set(range(start, end))
            for i in range(1, len(chunk)):
                if {i - 1, i} & covered or chunk[i] == SPECIAL.eos or WORDS[chunk[i]]:
                    continue
                if states[int(chunk[i - 1])][1:] == states[int(chunk[i])][1:]:
                    assert states[int(chunk[i - 1])][0] == states[int(chunk[i])][0]
    assert min(masked.values()) > 60


def test_spanbert_replaces_a_span_as_one():
    """All of a run of predicted tokens is [MASK], random, or kept; with probability 1 every run is a listed span."""
    text, spans = text_of(60, False), [(i, i + 3) for i in range(0, 60, 5)]
    text[:] = FIRST_TEXT_TOKEN + 3 * np.arange(60)
    made, kinds = make("spanbert", 80, spans="listed", span_prob=1.0), Counter()
    for (example,) in filled(made, [text], [spans], 400):
        rows = np.flatnonzero(example.weights)
        for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
            assert (int(run[0]) - 1, int(run[-1])) in spans
            is_mask, is_kept = (example.tokens[run] == other for other in (SPECIAL.mask, text[run - 1]))
            assert is_mask.all() or not is_mask.any()
            kinds["mask" if is_mask.all() else "kept" if is_kept.all() else "random"] += 1
    total = sum(kinds.values())
    for kind, share in (("mask", 0.8), ("kept", 0.1), ("random", 0.1)):
        assert abs(kinds[kind] - total * share) < 3 * math.sqrt(total * share * (1 - share))


@pytest.mark.parametrize("name, option", [("spanbert", "spans"), ("ernie", "segmenter")])
def test_spans_that_a_window_cuts_and_texts_without_spans_go_by_words(name, option):
    """Rows equal `words`; without spans the draws of SpanBERT differ, since a listed one is asked for first."""
    text = text_of(50, False)
    (alone,) = filled(make(name, 80, **{option: "words"}), [text], [[]])
    cut = np.stack([text, np.full(50, -1, np.int32)])
    cut[1, 45] = 9
    one = np.ones(1, np.int64)
    chosen = {option: "listed", **({"span_prob": 0.0} if name == "spanbert" else {})}
    row = collate(make(name, 80, **chosen), cut, one * 50, one, one * 0)
    assert np.array_equal(Example.from_fields(row[0]).documents()[0].tokens, alone[0].tokens)
    example = make(name, 80, **chosen).example(text, 0)  # without a corpus
    assert np.array_equal(example.tokens, alone[0].tokens)


def test_other_objectives_of_a_mixture_do_not_see_spans():
    made = [make("spanbert", 60, spans="listed"), make("blank_infilling", 60), make("causal", 60)]
    mixed = Mixed(made, [1, 1, 1], 7)
    text = np.tile(text_of(50, False), 40)
    spans = np.full(len(text), -1, np.int32)
    spans[::50] = 4
    given = (np.full(40, 50), np.ones(40, np.int64), np.arange(40))
    rows, chosen = collate(mixed, np.stack([text, spans]), *given), mixed.choose(np.arange(40))
    plain = collate(mixed, text, *given)
    assert set(chosen) == {0, 1, 2}
    assert np.array_equal(rows[chosen > 0], plain[chosen > 0])
    assert not np.array_equal(rows[chosen == 0], plain[chosen == 0])
