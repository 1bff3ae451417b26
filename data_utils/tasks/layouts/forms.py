"""The form of a model's inputs: which layout its objective has taught it.

A task's inputs must look like those of pretraining, or the model meets something new in every row. So the run's
objective decides, unless `task.form` says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_utils.base.errors import ConfigError
from data_utils.objectives import OBJECTIVES, ObjectiveChoice

# Objective -> the form of its inputs.
FORM_OF_OBJECTIVE = {
    "blank_infilling": "glm",
    "causal": "causal",
    "prefix_lm": "prefix",
    "masked_lm": "bert",
    "spanbert": "bert",
    "albert": "bert",
    "ernie": "bert",
    "xlnet": "bert",
    "unilm": "unilm",
    "unilmv2": "unilmv2",
    "t5": "encoder_decoder",
    "bart": "encoder_decoder",
    "mass": "encoder_decoder",
}
# Forms that only a model of theirs can take: with a decoder, or with UniLM's six segments.
_OWN_ONLY = ("encoder_decoder", "unilm")
ROLES_OF_FORM: dict[str, tuple[str, ...]] = {
    "glm": ("cls", "mask", "sop", "eop", "eos"),
    "causal": (),
    "prefix": ("cls", "sop", "eos"),
    "bert": ("cls", "sep", "mask"),
    "unilm": ("cls", "sep", "mask"),
    "unilmv2": ("cls", "sep", "mask"),
}
ROLES_OF_ENCODER_DECODER = {"t5": ("eos",), "bart": ("cls", "eos"), "mass": ("cls", "sep")}


@dataclass(frozen=True)
class Form:
    """The layout of inputs.

    Args:
        name: one of FORMS, but not "auto".
        objective: the objective whose layout it is; decides between T5, BART and MASS.
        masks: the blank's tokens that the run has learnt ("mask", "smask", "gmask").
        predict_cls: BART: CLS is predicted before the text.
    """

    name: str
    objective: str
    masks: tuple[str, ...] = ("mask",)
    predict_cls: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        """The special tokens that the layout writes, and that a vocabulary must therefore have."""
        return ROLES_OF_FORM.get(self.name) or ROLES_OF_ENCODER_DECODER.get(self.objective, ())

    def loss(self, number: int = 0) -> int:
        """The number of the objective's loss, for the `objective` plane."""
        return OBJECTIVES[self.objective].losses[number].number


def form_of(setting: str, choices: Sequence[ObjectiveChoice]) -> Form:
    """The form that `task.form` and the run's objectives give.

    Raises: ConfigError where the objectives have inputs of several forms, or none has the form that is asked for.
    """
    forms = {choice.name: _natural(choice) for choice in choices}
    if setting == "auto":
        if len({form.name for form in forms.values()}) > 1:
            raise ConfigError(
                f"task.form is auto, but the objectives {', '.join(forms)} have inputs of different forms; set it to "
                f"one of {', '.join(sorted({form.name for form in forms.values()}))}."
            )
        return next(iter(forms.values()))
    for form in forms.values():
        if form.name == setting:
            return form
    fitting = [name for name, form in FORM_OF_OBJECTIVE.items() if form == setting]
    if setting in _OWN_ONLY:
        raise ConfigError(
            f"task.form is {setting}, but the run's objective is {', '.join(forms)}; set it to auto, or give a run of "
            f"{' or '.join(fitting)}."
        )
    return Form(setting, fitting[0])


def _natural(choice: ObjectiveChoice) -> Form:
    section = choice.section
    if choice.name == "blank_infilling":
        if section.masked_lm:
            return Form("bert", "masked_lm")
        learnt = (
            section.token_prob + section.single_span_prob,
            section.sentence_prob,
            section.document_prob,
        )
        masks = tuple(
            kind for kind, share in zip(("mask", "smask", "gmask"), learnt, strict=True) if share > 1e-9
        )
        return Form("glm", choice.name, masks)
    form = FORM_OF_OBJECTIVE.get(choice.name)
    if form is None:
        raise ConfigError(
            f"the objective {choice.name} has no form of its own for tasks; set task.form to one of "
            f"{', '.join(dict.fromkeys(FORM_OF_OBJECTIVE.values()))}."
        )
    return Form(form, choice.name, predict_cls=choice.name == "bart" and section.predict_cls)
