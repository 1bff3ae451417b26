"""Lengths, places and treatment of masked spans: their distributions, and the promises of `draw_spans`.

Chi-square tests are at level 0.001 with fixed seeds: they either pass for ever or show a change.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from support.data.chi_square import chi_square, chi_square_limit
from support.data.recipes import FIRST_TEXT_TOKEN, SIZE, SPECIAL, make, many, text_of

from data_utils.common.random_streams import new_rng, seed_rng
from data_utils.objectives.bart import BartConfig
from data_utils.objectives.compiled import (
    Scratch,
    Tables,
    cumulative_table,
    draw_length,
)
from data_utils.objectives.masking import draw_spans
from data_utils.objectives.spanbert import SpanBertConfig
from data_utils.objectives.unilmv2 import UniLmV2Config


@njit
def lengths_drawn(stream, table, samples):
    drawn = np.zeros(table.shape[0], np.int64)
    for sample in range(samples):
        seed_rng(stream, np.uint64(9), sample, 0, 0)
        drawn[draw_length(stream, table.shape[0] - 1, table)] += 1
    return drawn[1:]


def tables_for(size, table):
    scratch = Scratch(*np.empty((len(Scratch._fields), size + 2), np.int64))
    return Tables(table, new_rng(), scratch, np.zeros(0, np.bool_))


@njit
def runs_of_samples(tables, free, unit, target, gap, samples):
    """The runs of every sample: starts and ends, in the order drawn, padded with -1."""
    found = np.full((samples, 2, len(free)), -1, np.int64)
    scratch = tables.scratch
    for sample in range(samples):
        seed_rng(tables.rng, np.uint64(9), sample, 0, 0)
        for i in range(len(free)):
            scratch.free[i] = free[i]
            scratch.unit_start[i] = unit[i]
        count = draw_spans(tables, len(free), target, gap, np.uint64(0))
        chosen = 0
        for k in range(count):
            found[sample, 0, k] = scratch.starts[k]
            found[sample, 1, k] = scratch.ends[k]
            chosen += scratch.ends[k] - scratch.starts[k]
        total = 0
        for i in range(len(free)):
            total += scratch.taken[i]
        if total != chosen:  # an assert would be rewritten by pytest, which numba can not compile
            raise ValueError
    return found


SPANBERT = SpanBertConfig()
DISTRIBUTIONS = {
    "spanbert": (SPANBERT.length_weights, [0.8 ** (k - 1) for k in range(1, 11)]),
    "albert": (1 / np.arange(1, 4), [6 / 11, 3 / 11, 2 / 11]),
    "unilm": ([0.8, 0.1, 0.1], [0.8, 0.1, 0.1]),
    "unilmv2": (UniLmV2Config().length_weights, [0.6, 0.08, 0.08, 0.08, 0.08, 0.08]),
    "xlnet": (1 / np.arange(1, 6), [60, 30, 20, 15, 12]),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_lengths_have_the_distribution_of_the_paper(name):
    weights, expected = DISTRIBUTIONS[name]
    expected = np.array(expected) / np.sum(expected)
    counts = lengths_drawn(new_rng(), cumulative_table(weights), 20_000)
    assert chi_square(counts, 20_000 * expected) < chi_square_limit(len(expected) - 1)


def test_barts_lengths_are_poissons_without_zero():
    """Spans of length 0 are drawn too. Exact: the tail has too few samples for a chi-square."""
    expected = np.array([3.0**k / math.factorial(k) for k in range(1, 40)])
    np.testing.assert_allclose(BartConfig().length_weights, expected / expected.sum(), rtol=1e-12)


def test_spanberts_mean_span_has_3_8_words():
    weights = SPANBERT.length_weights / SPANBERT.length_weights.sum()
    assert weights @ np.arange(1, 11) == pytest.approx(3.80, abs=0.005)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    size=st.integers(1, 30),
    target=st.integers(1, 30),
    gap=st.booleans(),
    longest=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_runs_are_disjoint_whole_units_within_the_target(size, target, gap, longest, seed):
    rng = np.random.default_rng(seed)
    free = rng.random(size) < 0.8
    unit = (rng.random(size) < 0.6) | ~free | (np.arange(size) == 0)
    unit[1:] |= ~free[:-1]
    table = cumulative_table(np.ones(longest))
    for starts, ends in runs_of_samples(tables_for(size, table), free, unit, target, gap, 5):
        taken = np.zeros(size + 1, int)
        lengths = []
        for start, end in zip(starts[starts >= 0], ends[starts >= 0], strict=True):
            assert free[start:end].all() and not taken[start:end].any()
            assert unit[start] and (end == size or unit[end])
            if gap:
                assert not taken[max(0, start - 1) : end + 1].any()
            taken[start:end] = 1
            lengths.append(end - start)
            assert unit[start:end].sum() <= longest
        assert sum(lengths) <= target or len(lengths) == 1
        assert bool(lengths) == bool(free.any())
        if unit.all() and not gap:
            assert sum(lengths) == min(target, free.sum())


def test_the_place_of_the_first_run_is_uniform_whatever_its_length():
    """Runs of 1, 2 or 3 tokens in 12: each length at every start where it fits, equally often."""
    ones = np.ones(12, bool)
    table = cumulative_table([0.5, 0.3, 0.2])
    found = runs_of_samples(tables_for(12, table), ones, ones, 4, False, 20_000)
    starts, lengths = found[:, 0, 0], found[:, 1, 0] - found[:, 0, 0]
    for length in (2, 3):
        counts = np.bincount(starts[lengths == length])
        assert len(counts) == 13 - length
        assert chi_square(counts, np.full(13 - length, counts.mean())) < chi_square_limit(12 - length)


@pytest.mark.parametrize("name", ["masked_lm", "unilm"])
def test_every_token_is_masked_equally_often(name):
    """One token per Example: its position is uniform. The treatment is 80/10/10."""
    config = (
        {"masked_ratio": 0.01} if name == "masked_lm" else {"masked_ratio": 0.01, "bidirectional_prob": 1.0}
    )
    if name == "unilm":
        config |= {"seq2seq_prob": 0.0, "left_to_right_prob": 0.0, "next_sentence": False}
    examples = many(make(name, 24, **config), text_of(21), 8000)
    targets = np.array([example.targets[example.weights > 0] for example in examples])
    assert targets.shape == (8000, 1)
    counts = np.bincount(targets[:, 0] - FIRST_TEXT_TOKEN, minlength=20)
    assert len(counts) == 20, "eos and special tokens are never chosen"
    assert chi_square(counts, np.full(20, 400)) < chi_square_limit(19)
    inputs = np.array([example.tokens[example.weights > 0][0] for example in examples])
    kept = inputs == targets[:, 0]
    masked = inputs == SPECIAL.mask
    treated = np.array([masked.sum(), (~masked & ~kept).sum(), kept.sum()])
    assert chi_square(treated, np.array([6400, 800, 800])) < chi_square_limit(2)
    replaced = inputs[~masked & ~kept]
    assert not np.isin(replaced, [SPECIAL.cls, SPECIAL.sep, SPECIAL.eos, SPECIAL.pad, SPECIAL.sop]).any()
    tenths = np.bincount(replaced * 10 // SIZE, minlength=10)
    assert chi_square(tenths, np.full(10, len(replaced) / 10)) < chi_square_limit(9)


@pytest.mark.parametrize(("name", "size"), [("masked_lm", 66), ("unilm", 67), ("unilmv2", 66)])
def test_the_number_of_masked_tokens_is_exact(name, size):
    """round(0.15 n) with CLS and SEP counted."""
    for example in many(make(name, 64), text_of(64), 50):
        rows = (example.objective != 9) & (example.weights > 0) & (example.ord >= 0)
        assert rows.sum() == int(0.15 * size + 0.5)


def test_spanbert_treats_a_span_as_one_and_masks_whole_words():
    made = make("spanbert", 200)
    kinds = []
    for example in many(made, text_of(200, False), 400):
        predicted = np.flatnonzero(example.weights)
        for span in np.split(predicted, np.flatnonzero(np.diff(predicted) > 1) + 1):
            inputs, answers = example.tokens[span], example.targets[span]
            masked, kept = inputs == SPECIAL.mask, inputs == answers
            assert masked.all() or not masked.any()
            assert kept.all() or not kept.all()
            kinds.append(0 if masked.all() else 2 if kept.all() else 1)
            assert answers[0] % 3 != 2, "a word begins here"
    counts = np.bincount(kinds, minlength=3)
    assert chi_square(counts, len(kinds) * np.array([0.8, 0.1, 0.1])) < chi_square_limit(2)
