"""Which form of inputs a run's objectives give."""

from __future__ import annotations

import pytest

from data_utils.base.errors import ConfigError
from data_utils.objectives import OBJECTIVES, ObjectiveChoice
from data_utils.tasks.config import FORMS
from data_utils.tasks.forms import FORM_OF_OBJECTIVE, Form, form_of


def choice(name, **section):
    return ObjectiveChoice(name, OBJECTIVES[name].config_class(**section))


def test_every_objective_has_a_form():
    assert set(FORM_OF_OBJECTIVE) == set(OBJECTIVES)
    assert set(FORM_OF_OBJECTIVE.values()) == set(FORMS) - {"auto"}
    for name in OBJECTIVES:
        found = form_of("auto", [choice(name)])
        assert (found.name, found.objective) == (FORM_OF_OBJECTIVE[name], name)
        assert found.loss() == OBJECTIVES[name].losses[0].number


def test_the_masks_that_a_run_has_learnt():
    def masks(**section):
        return form_of("auto", [choice("blank_infilling", **section)]).masks

    assert masks() == ("mask",)
    assert masks(token_prob=0.5) == ("mask", "gmask")
    assert masks(token_prob=0.0, sentence_prob=0.5) == ("smask", "gmask")
    assert masks(token_prob=0.0, sentence_prob=1.0) == ("smask",)
    assert form_of("auto", [choice("blank_infilling", masked_lm=True)]).name == "bert"
    assert form_of("auto", [choice("bart", predict_cls=True)]).predict_cls


def test_several_objectives_need_one_form():
    assert form_of("auto", [choice("masked_lm"), choice("ernie")]).objective == "masked_lm"
    mixed = [choice("masked_lm"), choice("causal")]
    with pytest.raises(ConfigError, match=r"masked_lm, causal have inputs of different forms.* bert, causal"):
        form_of("auto", mixed)
    assert form_of("causal", mixed) == Form("causal", "causal")
    assert form_of("bert", [choice("unilm")]) == Form("bert", "masked_lm")
    with pytest.raises(ConfigError, match=r"task.form is encoder_decoder, but the run's objective is causal"):
        form_of("encoder_decoder", [choice("causal")])
