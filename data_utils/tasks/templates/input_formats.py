"""The format of a model's inputs: that of the objective that it was trained with.

A task's inputs must look like those of pretraining, or the model meets something new in every sequence. So the run's
objective decides, unless `task.form` says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from data_utils.common.errors import ConfigError
from data_utils.objectives import OBJECTIVES, ObjectiveChoice
from data_utils.objectives.interface import TextFormat

# Objective -> the name of its input format, the setting `task.form`; objectives without one are left out.
_WRITINGS = {name: OBJECTIVES[name].text_format for name in OBJECTIVES.own}
FORMAT_OF_OBJECTIVE = {
    name: writing.input_format for name, writing in _WRITINGS.items() if writing is not None
}
# Formats that need a model of their objectives: one with a decoder, or with UniLM's six segments.
_NEED_THEIR_MODEL = ("encoder_decoder", "unilm")
ROLES_OF_FORMAT: dict[str, tuple[str, ...]] = {
    "glm": ("cls", "mask", "sop", "eop", "eos"),
    "causal": (),
    "prefix": ("cls", "sop", "eos"),
    "bert": ("cls", "sep", "mask"),
    "unilm": ("cls", "sep", "mask"),
    "unilmv2": ("cls", "sep", "mask"),
}


@dataclass(frozen=True)
class InputFormat:
    """The format of inputs.

    Args:
        name: one of FORMS, but not "auto".
        objective: the objective whose format it is; decides between T5, BART and MASS.
        masks: the blank's tokens that the run has learnt ("mask", "smask", "gmask").
        predict_cls: BART: CLS is predicted before the text.
        before: the role of the token before a text, where the objective's section decides (causal).
    """

    name: str
    objective: str
    masks: tuple[str, ...] = ("mask",)
    predict_cls: bool = False
    before: tuple[str | int, ...] | None = None

    @property
    def roles(self) -> tuple[str | int, ...]:
        """The special tokens that the format writes, and that a vocabulary must therefore have."""
        if self.writes_by_unmasking:
            return ("mask", "eos")
        return ROLES_OF_FORMAT.get(self.name, (*self.writing.before, *self.writing.after))

    @property
    def writes_by_unmasking(self) -> bool:
        """Whether a text is written in the stead of masks, in any order (masked diffusion)."""
        return self.writing.generation == "unmasking"

    @property
    def writing(self) -> TextFormat:
        """The objective's declaration."""
        writing = OBJECTIVES[self.objective].text_format
        assert writing is not None, "an objective without one has no input format"
        return writing if self.before is None else replace(writing, before=self.before)

    def loss(self, number: int = 0) -> int:
        """The number of the objective's loss, for the `objective` field."""
        return OBJECTIVES[self.objective].losses[number].number


def choose_input_format(
    setting: str, choices: Sequence[ObjectiveChoice], has_decoder: bool = False
) -> InputFormat:
    """The input format that `task.form` and the run's objectives give.

    Args: has_decoder: the model has an encoder and a decoder, whose formats have a target.
    Raises: ConfigError where the objectives have several formats, or none has the one that is asked for.
    """
    formats = {choice.name: _format_of_objective(choice) for choice in choices}
    names = sorted({input_format.name for input_format in formats.values()})
    if setting == "auto":
        if len(names) > 1:
            raise ConfigError(
                f"task.form is auto, but the objectives {', '.join(formats)} have different input formats; set it to "
                f"one of {', '.join(names)}."
            )
        return next(iter(formats.values()))
    for input_format in formats.values():
        if input_format.name == setting:
            return input_format
    objectives = _objectives_with(setting)
    if setting in _NEED_THEIR_MODEL or (
        has_decoder and not OBJECTIVES[objectives[0]].config_class().has_target
    ):
        raise ConfigError(
            f"task.form is {setting}, but the run's objective is {', '.join(formats)}; set it to auto, or use a run "
            f"of {' or '.join(objectives)}."
        )
    return InputFormat(setting, objectives[0])


def _objectives_with(format_name: str) -> list[str]:
    """The objectives with this format, the ones of a single Transformer first."""
    names = [name for name, its_format in FORMAT_OF_OBJECTIVE.items() if its_format == format_name]
    return sorted(names, key=lambda name: OBJECTIVES[name].config_class.model_module is not None)


def _format_of_objective(choice: ObjectiveChoice) -> InputFormat:
    writing = OBJECTIVES[choice.name].text_format_for(choice.section)
    if writing is None:
        raise ConfigError(
            f"the objective {choice.name} has no input format for tasks; set task.form to one of "
            f"{', '.join(dict.fromkeys(FORMAT_OF_OBJECTIVE.values()))}."
        )
    name = choice.section.reads_as or choice.name
    declared = OBJECTIVES[name].text_format
    # Another objective's, by its settings.
    if declared is not None and writing.input_format != declared.input_format:
        return InputFormat(writing.input_format, _objectives_with(writing.input_format)[0])
    input_format = InputFormat(writing.input_format, name, writing.masks, predict_cls=bool(writing.forced))
    if writing.before == input_format.writing.before:
        return input_format
    return replace(input_format, before=writing.before)
