"""Which form of inputs a run's objectives give."""

from __future__ import annotations

import pytest
from support.tasks.task_inputs import record, renderer

from data_utils.common.errors import ConfigError
from data_utils.objectives import OBJECTIVES, ObjectiveChoice
from data_utils.tasks.config import FORMS
from data_utils.tasks.templates.input_formats import FORMAT_OF_OBJECTIVE, InputFormat, choose_input_format


def choice(name, **section):
    return ObjectiveChoice(name, OBJECTIVES[name].config_class(**section))


def test_every_objective_has_a_form():
    """But OPTIMUS's, whose encoder and decoder meet in a vector: its classifier reads that. Text pairs have any."""
    assert set(FORMAT_OF_OBJECTIVE) == set(OBJECTIVES) - {"optimus", "electra", "contrastive", "tsdae"}
    assert set(FORMAT_OF_OBJECTIVE.values()) == set(FORMS) - {"auto"}
    with pytest.raises(ConfigError, match="the objective optimus has no input format"):
        choose_input_format("auto", [choice("optimus")])
    for name in FORMAT_OF_OBJECTIVE:
        found = choose_input_format("auto", [choice(name)])
        assert (found.name, found.objective) == (FORMAT_OF_OBJECTIVE[name], name)
        assert found.loss() == OBJECTIVES[name].losses[0].number


def test_a_run_of_text_pairs_has_the_form_of_its_texts():
    for form, expected in (
        ("bert", ("bert", "masked_lm")),
        ("glm", ("glm", "blank_infilling")),
        ("xlnet", ("bert", "xlnet")),
        ("t5", ("encoder_decoder", "t5")),
        ("bart", ("encoder_decoder", "bart")),
        ("causal_cls", ("causal", "causal")),
        ("causal_none", ("causal", "causal")),
    ):
        found = choose_input_format("auto", [choice("contrastive", form=form)])
        assert (found.name, found.objective) == expected
        own = OBJECTIVES["contrastive"].text_format_for(choice("contrastive", form=form).section)
        assert found.writing.before == own.before


def test_the_masks_that_a_run_has_learnt():
    def masks(**section):
        return choose_input_format("auto", [choice("blank_infilling", **section)]).masks

    assert masks() == ("mask",)
    assert masks(token_prob=0.5) == ("mask", "gmask")
    assert masks(token_prob=0.0, sentence_prob=0.5) == ("smask", "gmask")
    assert masks(token_prob=0.0, sentence_prob=1.0) == ("smask",)
    assert choose_input_format("auto", [choice("blank_infilling", masked_lm=True)]).name == "bert"
    assert choose_input_format("auto", [choice("bart", predict_cls=True)]).predict_cls


def test_several_objectives_need_one_form():
    assert choose_input_format("auto", [choice("masked_lm"), choice("ernie")]).objective == "masked_lm"
    mixed = [choice("masked_lm"), choice("causal")]
    with pytest.raises(ConfigError, match=r"masked_lm, causal have different input formats.* bert, causal"):
        choose_input_format("auto", mixed)
    assert choose_input_format("causal", mixed) == InputFormat("causal", "causal")
    assert choose_input_format("bert", [choice("unilm")]) == InputFormat("bert", "masked_lm")
    for setting, remedy in (("encoder_decoder", "t5 or bart or mass or ul2"), ("unilm", "unilm")):
        message = rf"task.form is {setting}, but the run's objective is masked_lm; .* a run of {remedy}\."
        with pytest.raises(ConfigError, match=message):
            choose_input_format(setting, [choice("masked_lm")])
    assert choose_input_format("unilmv2", [choice("masked_lm")]) == InputFormat("unilmv2", "unilmv2")


@pytest.mark.parametrize("setting", ["causal", "bert", "unilmv2"])
def test_an_encoder_with_decoder_takes_formats_with_a_target_alone(setting):
    """Elsewhere predicted tokens would be the encoder's, which has no head."""
    with pytest.raises(
        ConfigError, match=f"task.form is {setting}, but the run's objective is t5; set it to auto"
    ):
        choose_input_format(setting, [choice("t5")], has_decoder=True)
    assert choose_input_format("prefix", [choice("t5")], has_decoder=True).name == "prefix"


@pytest.mark.parametrize("name", FORMAT_OF_OBJECTIVE)
@pytest.mark.parametrize("kind", ["cloze", "classification", "seq2seq"])
def test_segments_match_the_objective(name, kind):
    """The model has a row for each segment of its objective, and no more."""
    given = record("a", text_a="rain", text_b="falls", source="rain", target="falls")
    words = {"template": "{text_a} [MASK]", "verbalizers": {"a": "yes", "b": "no"}} if kind == "cloze" else {}
    try:
        made = renderer(name, kind=kind, labels=("a", "b"), **words)
    except ConfigError:  # this model cannot do such a task
        return
    segments = max(OBJECTIVES[name].config_class().segments, 1)
    assert all(example.segment_ids.max() < segments for example in made.sample(given, 0).documents)
