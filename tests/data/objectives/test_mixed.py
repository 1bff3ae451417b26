"""Several objectives in one run: shares, rows equal to the objective's alone, the registry."""

from __future__ import annotations

import numpy as np
import pytest
from support.data.chi_square import chi_square, chi_square_limit
from support.data.recipes import SPECIAL, make, text_of, vocabulary

from data_utils.common.batch_fields import FIELDS, OBJECTIVE
from data_utils.common.errors import ConfigError
from data_utils.common.seeds import derive_seed
from data_utils.loader.loader import collate
from data_utils.objectives import LOSS_NAMES, OBJECTIVES, ObjectiveChoice, make_objective, objective_class
from data_utils.objectives.mixed import Mixed
from data_utils.tokenizers.vocabulary import Vocabulary


def choice(name: str, weight: float = 1.0) -> ObjectiveChoice:
    return ObjectiveChoice(name, OBJECTIVES[name].config_class(), weight)


def mixture(*choices: ObjectiveChoice, seed: int = 7, sequence_length: int = 40) -> Mixed:
    return make_objective(choices, vocabulary(), seed, sequence_length)


def test_the_shares_are_the_weights():
    """Chi-square at 0.999."""
    made = mixture(choice("causal", 2.0), choice("masked_lm", 1.0), choice("t5", 5.0), choice("mass", 0.0))
    counts = np.bincount(made.choose(np.arange(8000)), minlength=4)
    assert counts[3] == 0
    assert chi_square(counts[:3], np.array([2000, 1000, 5000])) < chi_square_limit(2)


def test_rows_match_each_objective_alone():
    names = ("masked_lm", "causal", "blank_infilling")
    made = mixture(*map(choice, names))
    chunks = [text_of(n) for n in (20, 9, 30, 12, 17, 36) * 4]
    counts = np.array([2, 1, 2, 1] * 4)
    lengths = np.array([len(chunk) for chunk in chunks])
    samples = np.arange(100, 116)
    batch = collate(made, np.concatenate(chunks), lengths, counts, samples)
    assert batch.shape == (16, len(FIELDS), made.row_length)
    ends = np.cumsum(counts)
    key = derive_seed(7, "objective")
    for i, objective in enumerate(made.choose(samples)):
        mine = chunks[ends[i] - counts[i] : ends[i]]
        alone = make(names[objective], 40, seed=key, row_length=made.row_length)
        row = collate(alone, np.concatenate(mine), [len(p) for p in mine], [len(mine)], samples[i : i + 1])
        assert (row[0] == batch[i]).all()


def test_one_objective_needs_no_mixture():
    made = make_objective([choice("causal")], vocabulary(), 7, 40)
    assert not isinstance(made, Mixed)
    batch = collate(made, text_of(30), [30], [1], [0])
    assert LOSS_NAMES[batch[0, OBJECTIVE, 0]] == "causal"


def test_weights_that_make_no_sense():
    with pytest.raises(ConfigError, match=">= 0"):
        mixture(choice("causal", -1.0), choice("t5"))
    with pytest.raises(ConfigError, match="all objectives are 0"):
        mixture(choice("causal", 0.0), choice("t5", 0.0))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_registry(name):
    cls = objective_class(name)
    section = cls.config_class
    made = make_objective([ObjectiveChoice(name, section())], vocabulary(), 1, 24)
    assert type(made) is cls and made.sequence_length == 24 and made.row_length % 8 == 0


def test_an_unknown_objective_is_refused():
    with pytest.raises(ConfigError, match=r"'bert'; it must be one of blank_infilling, causal"):
        objective_class("bert")


@pytest.mark.parametrize("name", ["spanbert", "albert", "ernie"])
def test_whole_words_need_to_be_known(name):
    with pytest.raises(ConfigError, match="start of words is unknown"):
        make_objective([choice(name)], Vocabulary(SPECIAL, 3000), 1, 24)


def test_sentences_need_to_be_known():
    with pytest.raises(ConfigError, match="permute_sentences"):
        make_objective([choice("bart")], Vocabulary(SPECIAL, 3000), 1, 24)
