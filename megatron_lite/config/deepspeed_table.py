"""DeepSpeed's options, each with one policy, which says what happens to its value: deepspeed.yaml.

- SETTING: the value becomes a setting of this project (deepspeed_file.py).
- PASSED_ON: DeepSpeed, or this project's optimizer in its engine, reads the value; STAGE_3: the same at ZeRO 3 alone.
- NO_EFFECT: training computes the same numbers without it, so a start prints that it has no effect.
- REFUSED: training would compute other numbers.

Values that set nothing are accepted everywhere: null, "auto", false, and sections that are off. Nothing here imports
deepspeed or torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import load_yaml, shown
from data_utils.common.settings import build, merge, nest, section, setting, to_tree

_NOTHING = (None, "auto", False)
COMMENTS = ("_", "#", "//", "comment")  # JSON has no comments, so that people write them as keys
# Types of options, with the ranges that make sense; "any" of those that nothing here reads.
OPTION_TYPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "flag": (bool, {}), "count": (int, {"at_least": 0}), "size": (int, {"at_least": 1}),
    "depth": (int, {"at_least": -1}), "number": (float, {"at_least": 0}),
    "share": (float, {"at_least": 0, "at_most": 1}), "numbers": (tuple[float, ...], {}),
    "dtype": (str, {"one_of": ("fp32", "fp16", "bf16")}), "stage": (int, {"one_of": (0, 1, 2, 3)}),
    "device": (str, {"one_of": ("none", "cpu", "nvme")}), "section": (dict[str, Any], {}), "any": (Any, {}),
    "warmup": (str, {"one_of": ("log", "linear")}), "none": (int, {"one_of": (-1,)}),
}  # fmt: skip


class Policy(Enum):
    SETTING = "setting"
    PASSED_ON = "passed_on"
    STAGE_3 = "stage_3"
    NO_EFFECT = "no_effect"
    REFUSED = "refused"


class Option(NamedTuple):
    policy: Policy
    type_name: str = "any"  # of OPTION_TYPES
    reason: str = ""  # SETTING: which one; NO_EFFECT: why it has none; REFUSED: the remedy
    harmless: tuple[Any, ...] = ()  # values that change nothing


class Table(NamedTuple):
    options: dict[str, Option]  # by dotted key
    former: dict[str, str]
    former_flags: dict[str, tuple[str, Any]]

    @property
    def top_level(self) -> set[str]:
        """Names at the top of a DeepSpeed file."""
        return {key.partition(".")[0] for key in (*self.options, *self.former, *self.former_flags)}

    @property
    def sections(self) -> set[str]:
        return {key.rsplit(".", depth)[0] for key in self.options for depth in range(1, key.count(".") + 1)}


@functools.cache
def table() -> Table:
    """Read when options are given, as it takes a while."""
    rows = load_yaml(Path(__file__).with_name("deepspeed.yaml"))
    options = {key: Option(Policy.SETTING, *row) for key, row in rows["setting"].items()}
    for policy in (Policy.PASSED_ON, Policy.STAGE_3):
        options |= {key: Option(policy, type_name) for key, type_name in rows[policy.value].items()}
    for reason, keys in rows["no_effect"].items():
        options |= dict.fromkeys(keys.split(), Option(Policy.NO_EFFECT, reason=reason))
    for reason, keys in rows["refused"].items():
        for key, harmless in keys.items():
            options[key] = Option(Policy.REFUSED, reason=reason, harmless=tuple(harmless))
    flags = {key: tuple(meaning) for key, meaning in rows["former_flags"].items()}
    return Table(options, rows["former"], flags)


@dataclass
class SortedOptions:
    """Options by policy: dotted key of the table -> value."""

    settings: dict[str, Any] = field(default_factory=dict)  # values that become settings of this project
    passed_on: dict[str, Any] = field(default_factory=dict)  # values for DeepSpeed
    stage_3: dict[str, Any] = field(default_factory=dict)  # values for DeepSpeed at ZeRO 3 alone
    no_effect: dict[str, str] = field(default_factory=dict)  # key -> the reason
    problems: list[str] = field(default_factory=list)  # a sentence each

    def for_deepspeed(self, stage: int) -> dict[str, Any]:
        """The nested mapping that DeepSpeed gets at a ZeRO stage."""
        options: dict[str, Any] = {}
        for key, value in (self.passed_on | (self.stage_3 if stage == 3 else {})).items():
            options = merge(options, nest(key, value))
        return options

    def without_effect(self, stage: int) -> dict[str, str]:
        """Options without effect at a ZeRO stage: key -> reason."""
        if stage == 3:
            return self.no_effect
        set_options = [key for key, value in self.stage_3.items() if not _sets_nothing(value)]
        return self.no_effect | dict.fromkeys(set_options, "it applies to ZeRO 3 only")

    def refuse(self, source: str = "") -> None:
        """Raise ConfigError with all problems in one line, if there are any."""
        if not self.problems:
            return
        begin = f"{source}: " if source else ""
        if len(self.problems) > 1:
            begin += f"{len(self.problems)} DeepSpeed options must change. "
        raise ConfigError(begin + " ".join(dict.fromkeys(self.problems)))


def sort_options(options: Mapping[str, Any]) -> SortedOptions:
    """Sort a nested mapping of options by policy. Raises nothing: problems are part of the result."""
    result = SortedOptions()
    seen: dict[str, tuple[str, Any]] = {}  # key -> the spelling in the file, value
    for written, key, value in _leaves(options, "", ""):
        if key in seen and seen[key][1] != value:
            result.problems.append(
                f"deepspeed.{written} and deepspeed.{seen[key][0]} are the same option; remove one."
            )
        option = table().options.get(key)
        # "auto" leaves the decision to the program that reads the file: here its settings decide.
        if key in seen or (option is not None and (value is None or value == "auto")):
            continue
        seen[key] = written, value
        try:
            value = _checked(key, value)
        except ConfigError as error:
            result.problems.append(str(error))
            continue
        assert option is not None, "unknown keys are refused"
        if option.policy is Policy.SETTING:
            result.settings[key] = value
        elif option.policy is Policy.PASSED_ON:
            result.passed_on[key] = value
        elif option.policy is Policy.STAGE_3:
            result.stage_3[key] = value
        elif _sets_nothing(value) or value in option.harmless:
            continue
        elif option.policy is Policy.NO_EFFECT:
            result.no_effect[key] = option.reason
        else:
            what = "is on" if isinstance(value, Mapping) else f"is {shown(value)}"
            result.problems.append(f"deepspeed.{key} {what}: {option.reason}.")
    return result


def _leaves(tree: Mapping[str, Any], written: str, path: str) -> Iterator[tuple[str, str, Any]]:
    """The options of a section: spelling in the file, key of the table, value."""
    names = table()
    for name, value in tree.items():
        if str(name).startswith(COMMENTS):
            continue
        as_written, key = f"{written}{name}", f"{path}{name}"
        key = names.former.get(key, key)
        if f"{path}stage3_{name}" in names.options:
            key = f"{path}stage3_{name}"
        if key in names.former_flags and value in (*_NOTHING, True):
            if value is True:
                yield as_written, *names.former_flags[key]
        elif key not in names.sections or not (isinstance(value, Mapping) or value in _NOTHING):
            yield as_written, key, value
        elif isinstance(value, Mapping):
            # Of a section that is off only that it is off has a meaning.
            given = (
                {name: inner for name, inner in value.items() if name == "enabled"}
                if _is_off(value)
                else value
            )
            yield from _leaves(given, f"{as_written}.", f"{key}.")


def _is_off(section: Mapping[str, Any]) -> bool:
    """Whether a section says that it is off, by its `enabled`, or by those inside it."""
    if "device" in section:  # of what is offloaded
        return section["device"] in (None, "none", "auto")
    switches = list(_switches(section))
    return bool(switches) and all(switch in _NOTHING for switch in switches)


def _sets_nothing(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _is_off(value) or all(inner in _NOTHING for inner in value.values())
    return value is False


def _switches(section: Mapping[str, Any]) -> Iterator[Any]:
    if "enabled" in section:
        yield section["enabled"]
        return
    for inner in section.values():
        if isinstance(inner, Mapping):
            yield from _switches(inner)


def _checked(key: str, value: Any) -> Any:
    """The value in the table's type. Raises: ConfigError; for an unknown key it names the nearest one."""
    checked = to_tree(build(_root(), nest(f"deepspeed.{key}", value)))["deepspeed"]
    for name in key.split("."):
        checked = checked[name]
    return checked


@functools.cache
def _root() -> Any:
    options = option_class("Options", {key: option.type_name for key, option in table().options.items()})
    return make_dataclass("Root", [("deepspeed", options, section(options))], frozen=True, kw_only=True)


def option_class(name: str, type_names: Mapping[str, str]) -> Any:
    """A section class for `build`. Args: type_names: dotted key -> name of its type; each is None by default."""
    own: dict[str, str] = {}
    nested: dict[str, dict[str, str]] = {}
    for key, type_name in type_names.items():
        first, dot, rest = key.partition(".")
        if dot:
            nested.setdefault(first, {})[rest] = type_name
        else:
            own[key] = type_name
    leaves = [
        (key, OPTION_TYPES[type_name][0] | None, setting(None, "", **OPTION_TYPES[type_name][1]))
        for key, type_name in own.items()
    ]
    sections = [
        (key, cls, section(cls)) for key, inner in nested.items() for cls in [option_class(key, inner)]
    ]
    return make_dataclass(name, [*leaves, *sections], frozen=True, kw_only=True, slots=True)
