"""A latent space that is learnt, in small: sentences of a grammar whose entropy is known (benchmarks/latent.py)."""

from __future__ import annotations

import math

import pytest
import torch
from support.distributed import run_ranks
from support.training import fit

from benchmarks.latent import GRAMMAR, Grammar, Setup, numbers_of, require_no_leak
from data_utils.base.errors import DataError
from megatron_lite.config.generation import GenerationConfig
from megatron_lite.latent import uses
from megatron_lite.latent.bounds import measure, posteriors
from megatron_lite.latent.inputs import Sampling
from megatron_lite.latent.open_run import open_latent

SMALL = Grammar("{} in {} .", (("cat", "dog", "girl", "boy"), ("house", "garden", "street", "forest")))
STEPS = 240


def test_a_grammar_knows_its_sentences():
    assert GRAMMAR.entropy == pytest.approx(6 * math.log(8)) and len({*GRAMMAR.words}) == 48 + 3
    for numbers, text in zip(GRAMMAR.draw(1, 50), GRAMMAR.sentences(1, 50), strict=True):
        assert GRAMMAR.filled(text) == [words[i] for words, i in zip(GRAMMAR.slots, numbers, strict=True)]
        assert len(text.split()) == GRAMMAR.length and set(text.split()) <= {*GRAMMAR.words}
    assert GRAMMAR.filled("the old cat") == ["old", "cat", "", "", "", ""]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Stacks of one layer, from nothing, annealed."""
    work = tmp_path_factory.mktemp("grammar")
    small = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    setup = Setup(work, SMALL, latent_size=4, rows=2, stack={**Setup(work).stack, **small})
    setup.write_corpus(2000)
    settings = setup.optimus("annealed", STEPS, 1, begin=None)
    run_ranks(fit, 1, settings)
    return open_latent(work / "annealed-1", device=torch.device("cpu"))


def test_the_latent_vector_carries_the_sentence(model):
    """Of 2.77 nats: the divergence has not vanished, the slots come back, analogies change one of them."""
    found = numbers_of(model, SMALL, 96, samples=5)
    print(found)
    require_no_leak("small", found, SMALL.entropy)
    assert -found["bound"] < SMALL.entropy + 0.5
    assert found["divergence"] > 1 and found["mutual_information"] > 1
