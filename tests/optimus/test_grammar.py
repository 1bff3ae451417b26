"""A latent space that is learnt, in small: sentences of a grammar whose entropy is known (benchmarks/latent.py)."""

from __future__ import annotations

import itertools
import math

import pytest
from support.latent_training import learn

from benchmarks.latent import (
    BATCH,
    GRAMMAR,
    Grammar,
    Setup,
    means_of,
    numbers_of,
    require_no_leak,
    table,
    written,
)
from data_utils.common.errors import DataError
from data_utils.common.settings import merge
from megatron_lite.models.optimus import uses
from megatron_lite.models.optimus.bounds import measure
from megatron_lite.models.optimus.inputs import Sampling

SMALL = Grammar("{} in {} .", (("cat", "dog", "girl", "boy"), ("house", "garden", "street", "forest")))
STEPS = 250


def test_a_grammar_knows_its_sentences():
    assert GRAMMAR.entropy == pytest.approx(5 * math.log(6)) and len({*GRAMMAR.words}) == 30 + 4
    for numbers, text in zip(GRAMMAR.draw(1, 50), GRAMMAR.sentences(1, 50), strict=True):
        words = [slot[i] for slot, i in zip(GRAMMAR.slots, numbers, strict=True)]
        assert GRAMMAR.filled(text) == GRAMMAR.filled(text.replace(" .", ".")) == words
        assert len(text.split()) == GRAMMAR.length and set(text.split()) <= {*GRAMMAR.words}
    assert GRAMMAR.filled("the old cat") == ["old", "cat", "", "", ""]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Stacks of one layer of width 32, which begin with nothing."""
    work = tmp_path_factory.mktemp("grammar")
    stack = {
        **Setup(work).stack,
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "init_std": 0.1,
    }
    setup = Setup(work, SMALL, latent_size=4, rows=2, encoder={}, stack=stack)
    setup.write_corpus(2000)
    return setup


def learnt(setup, schedule):
    return learn(merge(setup.optimus(schedule, STEPS, 1, begin=None), {"optimizer": {"lr": 5e-3}}))


@pytest.fixture(scope="module")
def annealed(small):
    return learnt(small, "default")


def test_annealing_keeps_the_divergence_and_the_weight_1_from_the_start_makes_it_vanish(small, annealed):
    """The claim of the paper in small, with 2.77 nats a sentence: divergence 2.2 against 0.01."""
    kept = numbers_of(annealed, SMALL, 64, samples=5)
    vanished = numbers_of(learnt(small, "plain"), SMALL, 64, samples=5)
    for name, numbers in {"annealed": kept, "plain": vanished}.items():
        require_no_leak(name, numbers, SMALL.entropy)
        assert -numbers["bound"] < SMALL.entropy + 1
    assert kept["divergence"] > 1 and kept["mutual_information"] > 1 and kept["active_units"] == 4
    assert vanished["divergence"] < 0.2 and vanished["mutual_information"] < 0.3
    assert kept["reconstruction"] < vanished["reconstruction"] - 1
    assert kept["slots_reconstructed"] > vanished["slots_reconstructed"] + 0.2
    lines = table({"annealed": [kept, kept], "plain": [vanished]}).splitlines()
    assert len(lines) == 2 + 3 + 2 and lines[-2].endswith(" ± 0.00 |") and lines[-1].endswith(" ± nan |")


def test_bounds_of_a_learnt_model_rise_with_the_samples(annealed):
    """On the same sentences each step down, if there is one, is no more than 3 standard errors."""
    sentences = annealed.read(SMALL.sentences(7, 64))
    found = [
        measure(annealed, sentences, Sampling(samples=k, chunk=min(k, 5), batch=BATCH)) for k in (1, 5, 20)
    ]
    bounds = [-found[-1].negative_elbo, *(one.bound for one in found)]
    for lower, higher in itertools.pairwise(bounds):
        assert (higher - lower).mean() > -3 * (higher - lower).std() / 8
    assert bounds[-1].mean() > bounds[0].mean() + 0.1


def test_ends_of_an_interpolation_are_the_reconstructions(annealed):
    mu = means_of(annealed, SMALL.sentences(8, 2))
    texts = written(annealed, uses.between(mu, 5))
    assert [texts[0], texts[-1]] == written(annealed, mu)


def test_numbers_below_the_entropy_are_refused():
    leak = {"bound": -2.0, "bound_error": 0.1}
    with pytest.raises(
        DataError, match=r"run: 2\.000 nats for a sentence are fewer than the grammar's 2\.773"
    ):
        require_no_leak("run", leak, SMALL.entropy)
    require_no_leak("run", {**leak, "bound_error": 0.3}, SMALL.entropy)
