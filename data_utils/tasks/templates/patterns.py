"""Patterns and verbalizers of the cloze tasks, as data: GLM's, of which many are PET's.

A pattern is a text with fields in braces and one [MASK], the blank. After a colon a field may have options:

    strip   punctuation at its end is left out
    lower   it begins in lower case
    fixed   it is never cut where the sample is too long; other fields are
    exact   the spaces around it are kept

The verbalizers are what fills the blank, by the names of the classes; without them, a record brings its own choices.
Source: the patterns of THUDM/GLM, tasks/superglue; Schick and Schuetze, arXiv:2001.07676 and arXiv:2009.07118.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from data_utils.common.errors import ConfigError, DataError
from data_utils.common.setting_files import shown
from data_utils.tasks.base import TaskRecord
from data_utils.tasks.config import TaskConfig
from data_utils.tasks.readers.files import label_name, plain_name

MARK = "[MASK]"
OPTIONS = ("strip", "lower", "fixed", "exact")
# Generic names of a record's texts, for tasks that name them otherwise.
_OTHER_NAMES = {"premise": "text_a", "hypothesis": "text_b", "text": "text_a", "text_a": "text"}


@dataclass(frozen=True)
class Slot:
    """An element of a pattern: fixed text, a field, or (with neither) the blank."""

    text: str = ""
    field: str = ""
    options: tuple[str, ...] = ()

    @property
    def is_blank(self) -> bool:
        return not self.text and not self.field


@dataclass(frozen=True)
class Pattern:
    """A template and what fills its blank.

    Args:
        verbalizers: class -> its words; empty: the record's own choices.
        is_glued: no space stands before the words.
    """

    template: str
    verbalizers: Mapping[str, str] = field(default_factory=dict)
    is_glued: bool = False


@dataclass(frozen=True)
class TextSegment:
    """A substring of a sample's text. Only shortenable segments are cut."""

    text: str
    shortenable: bool = False


def parse_template(template: str, path: str = "task.template") -> tuple[Slot, ...]:
    """The slots of a template. Raises ConfigError unless it can be read and has one blank."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"{path} {shown(template)} cannot be read: {error}; write {{{{ and }}}} for literal braces."
        ) from None
    slots: list[Slot] = []
    for text, name, spec, conversion in parsed:
        for number, fixed_text in enumerate(text.split(MARK)):
            if number > 0:
                slots.append(Slot())  # the blank
            if fixed_text:
                slots.append(Slot(text=fixed_text))
        if name is not None:
            options = tuple((spec or "").split())
            unknown = [option for option in options if option not in OPTIONS]
            if not name.isidentifier() or conversion or unknown:
                raise ConfigError(
                    f"{path} {shown(template)}: a field must be {{name}} or {{name:options}}, with options among "
                    f"{', '.join(OPTIONS)}."
                )
            slots.append(Slot(field=name, options=options))
    return tuple(slots)


def require_one_blank(slots: tuple[Slot, ...], template: str, path: str = "task.template") -> None:
    blanks = sum(slot.is_blank for slot in slots)
    if blanks != 1:
        raise ConfigError(
            f"{path} {shown(template)} contains {MARK} {blanks} times; it must contain it once."
        )


def chosen_pattern(config: TaskConfig) -> Pattern:
    """The pattern that a task's settings choose. Raises ConfigError for an unknown one, or none."""
    if config.template is not None:
        words = dict(_verbalizer(label, value) for label, value in config.verbalizers.items())
        return Pattern(config.template, words)
    patterns = PATTERNS.get(plain_name(config.name))
    if patterns is None:
        raise ConfigError(
            f"task.name is {shown(config.name)}, which has no patterns; set task.template and task.verbalizers, or "
            f"task.name to one of {', '.join(sorted(PATTERNS))}."
        )
    if config.pattern >= len(patterns):
        known = ", ".join(f"{number} ({pattern.template})" for number, pattern in enumerate(patterns))
        raise ConfigError(
            f"task.pattern is {config.pattern}, but {config.name} has the patterns {known}; choose one of them."
        )
    if config.verbalizers:
        raise ConfigError("task.verbalizers is set without task.template; set both.")
    return patterns[config.pattern]


def _verbalizer(label: Any, words: Any) -> tuple[str, str]:
    """A class's name and its words."""
    if not isinstance(label, (str, int)):
        raise ConfigError(f"task.verbalizers has the label {shown(label)}; write the class in quotes.")
    if not isinstance(words, str) or not words.strip():
        raise ConfigError(f"task.verbalizers.{label} is {shown(words)}; it must be text, in quotes.")
    return label_name(label), words


def field_text(name: str, record: TaskRecord, config: TaskConfig) -> str:
    """A text of a record. Raises DataError where it has none."""
    fields = record.fields
    generic_names = dict(zip(config.text_fields, ("text_a", "text_b"), strict=False))
    for candidate in (name, generic_names.get(name, ""), _OTHER_NAMES.get(name, "")):
        if isinstance(fields.get(candidate), str):
            return fields[candidate]
    raise DataError(
        f"{record.location}: the pattern needs the text {name!r}, but the sample has {', '.join(fields)}; use one "
        "of these in the pattern, or correct the file."
    )


def rendered(
    slots: tuple[Slot, ...], record: TaskRecord, config: TaskConfig
) -> tuple[list[TextSegment], list[TextSegment] | None]:
    """The texts before and after the blank; after: None without a blank.

    A space goes to the beginning of what follows it, as tokenizers have it; before the blank there is none, because a
    filling brings its own. A text's [MASK] stays text.
    """
    sides: list[list[Slot]] = [[]]
    for slot in slots:
        if slot.is_blank:
            sides.append([])
        else:
            sides[-1].append(slot)
    before, *after = [list(_segments(side, record, config)) for side in sides]
    return before, after[0] if after else None


def _segments(slots: list[Slot], record: TaskRecord, config: TaskConfig) -> Iterator[TextSegment]:
    joined: list[TextSegment] = []
    for slot in slots:
        text = _transformed(slot, record, config) if slot.field else slot.text
        shortenable = bool(slot.field) and "fixed" not in slot.options
        if joined and not shortenable and not joined[-1].shortenable:
            joined[-1] = TextSegment(joined[-1].text + text)
        else:
            joined.append(TextSegment(text, shortenable))
    space = ""
    for segment in joined:
        text = space + segment.text
        space = " " if text.endswith(" ") else ""
        if text.strip(" "):
            yield TextSegment(text.rstrip(" "), segment.shortenable)


def _transformed(slot: Slot, record: TaskRecord, config: TaskConfig) -> str:
    text = field_text(slot.field, record, config)
    if "exact" not in slot.options:
        text = text.strip()
    if "strip" in slot.options:
        text = text.rstrip(string.punctuation)
    if "lower" in slot.options:
        text = text[:1].lower() + text[1:]
    return text


# ------------------------------------------------------------------------------------------------------------
# The tables. Classes are named as the files name them; numbers are those of the file.

_NO_YES = {"not_entailment": "No", "entailment": "Yes"}
_FALSE_TRUE = {"not_entailment": "false", "entailment": "true"}
_ENTAILED = (
    '"{hypothesis:strip}" ? [MASK], "{premise}"',
    "{hypothesis:strip}? [MASK], {premise}",
    '"{hypothesis:strip}" ? [MASK]. "{premise}"',
    "{hypothesis:strip}? [MASK]. {premise}",
)
_TRUE_OR_FALSE = "{premise} question: {hypothesis:strip} True or False? answer: [MASK]"
_RTE = (*(Pattern(text, _NO_YES) for text in _ENTAILED), Pattern(_TRUE_OR_FALSE, _FALSE_TRUE))
_BOOLEAN = ({"false": "No", "true": "Yes"}, {"false": "false", "true": "true"})
_MULTIRC_WORDS = {"0": "No", "1": "Yes"}
_PASSAGE = "{passage:strip}. Question: {question:strip fixed}?"
_PRONOUN = "the pronoun '*{pronoun:fixed}*'"
_TOPIC = (
    "[MASK]: {text_a} {text_b}",
    "[MASK] KIND: {text_a} {text_b}",
    "{text_a} ([MASK]) {text_b}",
    "{text_a} {text_b} ([MASK])",
    "[ Category: [MASK]] {text_a} {text_b}",
    "[MASK]- {text_a} {text_b}",
)
_BAD_GOOD = {"0": "bad", "1": "good"}
_REVIEW = (
    "It was [MASK]. {text_a}",
    "{text_a}. All in all, it was [MASK].",
    "Just [MASK]! {text_a}",
    "{text_a} In summary, the restaurant is [MASK].",
)
_ZERO_ONE = {"0": "No", "1": "Yes"}
_MNLI_WORDS = (
    {"contradiction": "Wrong", "entailment": "Right", "neutral": "Maybe"},
    {"contradiction": "No", "entailment": "Yes", "neutral": "Maybe"},
)
_MNLI = tuple(
    Pattern(text, words)
    for words in _MNLI_WORDS
    for text in ('"{premise:strip}" ? [MASK], "{hypothesis}"', "{premise:strip}? [MASK], {hypothesis}")
)
_OPTIONS_OF_COPA = '"{choice1:strip lower fixed}" or "{choice2:strip lower fixed}"?'


def _numbered(words: str) -> dict[str, str]:
    return {str(number): word for number, word in enumerate(words.split(), start=1)}


PATTERNS: dict[str, tuple[Pattern, ...]] = {
    "copa": (
        Pattern(_OPTIONS_OF_COPA + " {premise:strip}{joint:fixed exact} [MASK]."),
        Pattern(
            "{choice1:strip lower fixed} or {choice2:strip lower fixed}? {premise:strip}{joint:fixed exact} [MASK]."
        ),
        Pattern(_OPTIONS_OF_COPA + " {premise:strip} [MASK] {choice:strip lower fixed}"),
    ),
    "rte": _RTE,
    "axb": _RTE,
    "axg": _RTE,
    "wnli": tuple(
        Pattern(p.template, {"0": p.verbalizers["not_entailment"], "1": p.verbalizers["entailment"]})
        for p in _RTE
    ),
    "cb": (
        *(
            Pattern(text, {"contradiction": "No", "neutral": "Maybe", "entailment": "Yes"})
            for text in _ENTAILED
        ),
        Pattern(
            "{premise} question: {hypothesis} true, false or neither? answer: [MASK]",
            {"contradiction": "false", "neutral": "neither", "entailment": "true"},
        ),
    ),
    "boolq": tuple(
        Pattern(text, words)
        for text in (
            "{passage} Question: {question}? Answer: [MASK].",
            "{passage} Based on the previous passage, {question}? [MASK].",
            "Based on the following passage {question}? [MASK]. {passage}",
        )
        for words in _BOOLEAN
    ),
    "multirc": (
        Pattern(_PASSAGE + " Is it {answer:fixed}? [MASK].", _MULTIRC_WORDS),
        Pattern(_PASSAGE + ' Is the correct answer "{answer:fixed}"? [MASK].', _MULTIRC_WORDS),
        Pattern(
            "{passage:strip}. Based on the previous passage, {question:strip fixed}? "
            'Is "{answer:fixed}" a correct answer? [MASK].',
            _MULTIRC_WORDS,
        ),
        Pattern(
            "{passage:strip} {question:strip fixed}- [[MASK]] {answer:fixed}", {"0": "False", "1": "True"}
        ),
        Pattern(_PASSAGE + " {answer:fixed}? [MASK].", _MULTIRC_WORDS),
    ),
    "wic": (
        Pattern('"{sentence1}" / "{sentence2}" Similar sense of "{word:fixed}"? [MASK].', _BOOLEAN[0]),
        Pattern(
            "{sentence1} {sentence2} Does {word:fixed} have the same meaning in both sentences? [MASK]",
            _BOOLEAN[0],
        ),
        Pattern(
            '{word:fixed} . Sense (1) (a) "{sentence1}" ([MASK]) "{sentence2}"',
            {"false": "2", "true": "b"},
            is_glued=True,
        ),
    ),
    "wsc": (
        Pattern("{text} The pronoun '*{pronoun:fixed}*' refers to [MASK]."),
        Pattern(f"{{text}} In the previous sentence, {_PRONOUN} refers to [MASK]."),
        Pattern(f"{{text}} Question: In the passage above, what does {_PRONOUN} refer to? Answer: [MASK]."),
    ),
    "record": (Pattern("{passage} {query_start:fixed} [MASK]{query_end:fixed exact}"),),
    "race": (
        Pattern("{context} {query_start:fixed} [MASK]{query_end:fixed exact}"),
        Pattern("{context} Based on the previous passage, {query_start:fixed} [MASK]{query_end:fixed exact}"),
    ),
    "squad": (Pattern("{context} {question:fixed} [MASK]."),),
    "sst2": (
        Pattern("{text_a} It was [MASK].", {"0": "terrible", "1": "great"}),
        Pattern("{text_a} It was [MASK].", _BAD_GOOD),
    ),
    "yelp2": tuple(Pattern(text, _BAD_GOOD) for text in _REVIEW),
    "yelp5": tuple(Pattern(text, _numbered("terrible bad okay good great")) for text in _REVIEW),
    "agnews": tuple(
        Pattern(text.replace("KIND", "News"), _numbered("World Sports Business Tech")) for text in _TOPIC
    ),
    "yahoo": tuple(
        Pattern(
            text.replace("KIND", "Question"),
            _numbered(
                "Society Science Health Education Computer Sports Business Entertainment Relationship Politics"
            ),
        )
        for text in _TOPIC
    ),
    **dict.fromkeys(("mnli", "mnlimm", "ax"), _MNLI),
    "cola": (Pattern('"{text_a}" This is [MASK].', {"0": "incorrect", "1": "correct"}),),
    "mrpc": (
        Pattern("{text_a} [MASK], {text_b:lower}", _ZERO_ONE),
        Pattern("{text_a} Does it mean that {text_b:lower}? [MASK]", _ZERO_ONE),
    ),
    "qqp": (
        Pattern("{text_a} Do you mean {text_b:lower} [MASK].", _ZERO_ONE),
        Pattern("{text_a} [MASK], {text_b:lower}", _ZERO_ONE),
    ),
    "qnli": tuple(
        Pattern(text, _NO_YES)
        for text in (
            "{text_b} Question: {text_a:strip}? Do you know the answer? [MASK].",
            "{text_b} Based on the previous passage, do you know the answer {text_a:strip}? [MASK].",
            "Based on the following passage, do you know the answer {text_a:strip}? [MASK]. {text_b}",
        )
    ),
    "choices": (Pattern("{inputs} [MASK]"),),
}
