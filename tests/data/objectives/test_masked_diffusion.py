"""Masked diffusion: how much of a text is masked, and the weights that make the sum an estimate for all tokens."""

from __future__ import annotations

import numpy as np
from support.data.chi_square import chi_square, chi_square_limit
from support.data.recipes import SPECIAL, make, many, text_of

LONG = 1900


def test_the_masked_share_is_uniform_and_the_weight_its_inverse():
    """A long text shows the probability of its masks; the weight says it exactly."""
    shares, z_scores = [], []
    for example in many(make("masked_diffusion", LONG), text_of(LONG, False), 2000):
        masked = example.tokens == SPECIAL.mask
        (weight,) = set(example.weights[masked].tolist()) or {1000.0}
        assert 1.0 <= weight <= 1000.0 and (example.weights[~masked] == 0).all()
        assert (example.ord == 0).all() and (example.targets[masked] == text_of(LONG, False)[masked]).all()
        shares.append(1 / weight)
        z_scores.append((masked.sum() - LONG / weight) / np.sqrt(LONG / weight * (1 - 1 / weight) + 1e-9))
    drawn = np.histogram(shares, bins=10, range=(0.001, 1.0))[0]
    assert chi_square(drawn, np.full(10, 200.0)) < chi_square_limit(9)
    assert abs(np.mean(z_scores)) < 5 / np.sqrt(2000) and abs(np.var(z_scores) - 1) < 5 * np.sqrt(2 / 2000)


def test_weights_add_up_to_the_tokens_on_average_also_by_place():
    """E[masked / p] = 1 for each token, eos included; the variance given p is (1 - p) / p."""
    size, samples = 12, 40_000
    totals = sum(example.weights for example in many(make("masked_diffusion", 16), text_of(size), samples))
    deviation = np.sqrt((np.log(1000) / 0.999 - 1) / samples)
    assert (np.abs(totals / samples - 1) < 5 * deviation).all()


def test_tokens_of_a_text_are_masked_independently():
    """Given p, neighbours are masked together with p squared: in all p(1 - p) pairs of one masked token."""
    both = one = expected_both = expected_one = 0.0
    for example in many(make("masked_diffusion", LONG), text_of(LONG, False), 400):
        masked = example.weights > 0
        if not masked.any():
            continue
        share = 1 / example.weights[masked][0]
        both += np.count_nonzero(masked[1:] & masked[:-1])
        one += np.count_nonzero(masked[1:] ^ masked[:-1])
        expected_both += share**2 * (LONG - 1)
        expected_one += 2 * share * (1 - share) * (LONG - 1)
    assert abs(both / expected_both - 1) < 0.01 and abs(one / expected_one - 1) < 0.01


def test_the_least_share_is_a_setting():
    for example in many(make("masked_diffusion", 16, least_share=1.0), text_of(9), 20):
        assert (example.tokens == SPECIAL.mask).all() and (example.weights == 1).all()
    weights = [e.weights.max() for e in many(make("masked_diffusion", 16, least_share=0.5), text_of(9), 200)]
    assert 1.9 < max(weights) <= 2.0
