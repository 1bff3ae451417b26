"""What blank infilling draws, as distributions. Seeds are fixed: these pass for ever, or show a change."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from support.data.blank_infilling import MIXED, SPECIAL, masked_positions, objective, poisson, spans_of
from support.data.chi_square import chi_square, chi_square_limit
from support.data.recipes import many, text_of


def test_span_lengths_are_truncated_poisson():
    """Lengths are drawn until their sum reaches T, so they are not independent of their number.

    But whether an i-th length is drawn depends on the earlier ones only, so (Wald) the expected number of
    spans of length k per Example is p_k x E[number]. The last length alone would be biased upwards. Each
    count is compared in units of its standard error over Examples; 5 of them for 12 lengths together.
    """
    p, target = poisson(39), int(0.15 * 513)
    sums = np.zeros(target)  # distribution of the sum of the lengths so far, below the target
    sums[0], expected_number = 1.0, 0.0
    while sums.sum() > 1e-12:
        expected_number += sums.sum()
        sums = np.convolve(sums, np.concatenate([[0], p]))[:target]
    examples = many(objective(row_length=700), text_of(512, with_eos=False), 6000)
    lengths = [np.array([len(span[1]) - 1 for span in spans_of(example)]) for example in examples]
    assert abs(np.mean([len(drawn) for drawn in lengths]) - expected_number) < 5 * 2.7 / np.sqrt(6000)
    for k in range(1, 13):
        counts = np.array([(drawn == k).sum() for drawn in lengths])
        error = counts.std() / np.sqrt(len(counts))
        assert abs(counts.mean() - p[k - 1] * expected_number) < 5 * error, k


def placements(lengths: tuple[int, ...], size: int) -> list[tuple[tuple[int, int], ...]]:
    """All ways to place spans of these lengths, in this order, with at least one token between them."""
    if not lengths:
        return [()]
    found = []
    for start in range(size - sum(lengths) - len(lengths) + 2):
        end = start + lengths[0]
        for rest in placements(lengths[1:], size - end - 1):
            found.append(((start, end), *((a + end + 1, b + end + 1) for a, b in rest)))
    return found


def by_reference(lengths: tuple[int, ...], size: int) -> list[tuple[tuple[int, int], ...]]:
    """What each tuple of independent offsets leads to in the reference, with repetitions."""
    free = size - sum(lengths) - len(lengths) + 1
    found = []
    for offsets in itertools.product(range(free + 1), repeat=len(lengths)):
        spans, shift = [], 0
        for offset, length in zip(sorted(offsets), lengths, strict=True):
            spans.append((offset + shift, offset + shift + length))
            shift += length + 1
        found.append(tuple(spans))
    return found


@pytest.mark.parametrize(("placement", "possible"), [("uniform", placements), ("reference", by_reference)])
def test_every_configuration_has_its_probability(placement, possible):
    """Exhaustive at 8 tokens: lengths 1 or 2 until 3 are masked, in every order, at every place."""
    size, p = 8, poisson(2)
    draws = {(1, 1, 1): p[0] ** 3, (1, 1, 2): p[0] ** 2 * p[1], (1, 2): p[0] * p[1], (2, 1): p[1] * p[0]}
    draws[(2, 2)] = p[1] ** 2
    expected: Counter = Counter()
    for lengths, probability in draws.items():
        orders = list(itertools.permutations(lengths))
        for order in orders:
            places = possible(order, size)
            for place in places:
                expected[place] += probability / len(orders) / len(places)
    assert sum(expected.values()) == pytest.approx(1)
    made = objective(masked_ratio=0.34, max_span_length=2, placement=placement)
    samples = 20_000
    seen = Counter(tuple(masked_positions(example)) for example in many(made, text_of(size, False), samples))
    assert set(seen) == set(expected)
    keys = list(expected)
    statistic = chi_square(np.array([seen[k] for k in keys]), samples * np.array([expected[k] for k in keys]))
    assert statistic < chi_square_limit(len(keys) - 1)


def test_part_b_order_is_uniform():
    """Three spans: 6 orders of part B, each equally likely whatever the text order."""
    made = objective(masked_ratio=0.34, max_span_length=1)
    samples = 6000
    orders = Counter(
        tuple(np.argsort([span[2] for span in spans_of(example)]).tolist())
        for example in many(made, text_of(8, False), samples)
    )
    assert len(orders) == 6
    assert chi_square(np.array(list(orders.values())), np.full(6, samples / 6)) < chi_square_limit(5)


def test_the_mix_of_objectives():
    samples = 20_000
    examples = many(objective(**MIXED), text_of(30), samples)
    counts = np.bincount([example.objective[0] for example in examples], minlength=3)
    assert chi_square(counts, samples * np.array([0.4, 0.3, 0.3])) < chi_square_limit(2)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize(
    ("config", "low", "high"),
    [
        ({}, 15, 29),  # n = 31: int(0.5 n) .. n - 2
        ({"document_min_ratio": 0.25, "document_max_ratio": 0.75}, 7, 23),
        ({"document_min_context": 1}, 15, 30),  # the paper: all but CLS, where eos may be masked
    ],
)
def test_document_lengths_and_positions_are_uniform(tail, config, low, high):
    made = objective(token_prob=0.0, document_tail_prob=float(tail), **config)
    if not tail and high == 30:
        high = 29  # placed anywhere, eos stays
    samples = 4000
    spans = [masked_positions(example)[0] for example in many(made, text_of(30), samples)]
    lengths = np.array([end - start for start, end in spans])
    assert lengths.min() == low and lengths.max() == high
    expected = np.full(high - low + 1, samples / (high - low + 1))
    assert chi_square(np.bincount(lengths - low), expected) < chi_square_limit(len(expected) - 1)
    if tail:
        assert all(end == 30 for _, end in spans)
    else:
        starts = np.array([start for start, end in spans if end - start == low])
        places = 29 - low + 1
        expected = np.full(places, len(starts) / places)
        assert chi_square(np.bincount(starts, minlength=places), expected) < chi_square_limit(places - 1)


def test_tail_probability():
    examples = many(objective(token_prob=0.0, document_tail_prob=0.3), text_of(30), 4000)
    tails = sum(example.targets[-1] == SPECIAL.eos for example in examples)
    assert abs(tails / 4000 - 0.3) < 5 * np.sqrt(0.21 / 4000)
