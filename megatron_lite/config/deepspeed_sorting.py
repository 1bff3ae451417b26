"""A user's DeepSpeed options, sorted by the policies of deepspeed_keys.py."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shown
from data_utils.common.settings import build, merge, nest, section, to_tree
from megatron_lite.config.coming_from import find_argument
from megatron_lite.config.deepspeed_keys import (
    ALIASES,
    FORMER_FLAGS,
    KEYS,
    OPTION_TYPES,
    Options,
    Policy,
)

_ROOT = make_dataclass("Root", [("deepspeed", Options, section(Options))], frozen=True, kw_only=True)
_SECTIONS = {key.rsplit(".", depth)[0] for key in KEYS for depth in range(1, key.count(".") + 1)}
COMMENTS = ("_", "#", "//", "comment")  # JSON has no comments, so that people write them as keys
_TOP_LEVEL = {key.partition(".")[0] for key in (*KEYS, *ALIASES, *FORMER_FLAGS)}
_NAMES = {name for key in (*KEYS, *ALIASES, *FORMER_FLAGS) for name in key.split(".")}
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_OFFLOADS = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")


@dataclass
class SortedOptions:
    """Options by policy: dotted key, in the spelling of the table -> value."""

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
        set_options = {
            key: KEYS[key] for key, value in self.stage_3.items() if value not in KEYS[key].harmless
        }
        return self.no_effect | {key: option.reason for key, option in set_options.items()}

    def refuse(self, source: str = "") -> None:
        """Raise ConfigError with all problems in one line, if there are any."""
        if not self.problems:
            return
        begin = f"{source}: " if source else ""
        if len(self.problems) > 1:
            begin += f"{len(self.problems)} DeepSpeed options must change. "
        raise ConfigError(begin + " ".join(dict.fromkeys(self.problems)))


def ignored_keys(options: Mapping[str, Any]) -> list[str]:
    """The keys of a DeepSpeed file that mean nothing to DeepSpeed, which ignores unknown ones outside of sections.

    A name that resembles one of DeepSpeed's is none of them, since it is a typing error or stands in the wrong
    section. Neither are other programs' names, which mean something, and sections that are on: a changed DeepSpeed may
    have such a feature.
    """
    return [
        key
        for key, value in options.items()
        if key not in _TOP_LEVEL and not key.startswith(COMMENTS) and _means_nothing(key, value)
    ]


def _means_nothing(key: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is False
    near = difflib.get_close_matches(key, _TOP_LEVEL, n=1, cutoff=0.6)
    is_scalar = value is None or isinstance(value, (str, int, float))
    return is_scalar and not near and key not in _NAMES and find_argument(key.replace("-", "_")) is None


def sort_options(options: Mapping[str, Any]) -> SortedOptions:
    """Sort a nested mapping of options by policy. Raises nothing: problems are part of the result."""
    result = SortedOptions()
    seen: dict[str, tuple[str, Any]] = {}  # key -> the spelling in the file, value
    for written, key, value in _leaves(options, "", ""):
        if key in seen and seen[key][1] != value:
            result.problems.append(
                f"deepspeed.{written} and deepspeed.{seen[key][0]} are the same option; remove one."
            )
        option = KEYS.get(key)
        # "auto" leaves the decision to the program that reads the file: here its settings decide.
        if key in seen or (option is not None and (value is None or value == "auto")):
            continue
        seen[key] = written, value
        is_foreign = option is None and not isinstance(value, Mapping) and key not in _TOP_LEVEL
        argument = find_argument(key.replace("-", "_")) if is_foreign else None
        if argument is not None:
            remedy = (
                f"set {' and '.join(argument.keys)} instead, and remove it"
                if argument.setting
                else argument.note
            )
            result.problems.append(f"deepspeed.{written} is no option of DeepSpeed: {remedy}.")
            continue
        try:
            value = _checked(key, value, option.type_name if option is not None else "")
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
        # Features are refused because they would train differently; one that is off changes nothing.
        elif value in option.harmless or (
            option.type_name in ("free", "switch") and _is_off(value, option.type_name)
        ):
            continue
        elif option.policy is Policy.NO_EFFECT:
            result.no_effect[key] = option.reason
        else:
            what = "is on" if option.type_name == "switch" else f"is {shown(value)}"
            result.problems.append(f"deepspeed.{key} {what}: {option.reason}.")
    return result


def _leaves(tree: Mapping[str, Any], written: str, path: str) -> Iterator[tuple[str, str, Any]]:
    """The options of a section: spelling in the file, key of the table, value."""
    for name, value in tree.items():
        if str(name).startswith(COMMENTS):
            continue
        as_written, key = f"{written}{name}", f"{path}{name}"
        key = ALIASES.get(key, key)
        if key == "zero_optimization" and isinstance(value, bool):  # as in early versions of DeepSpeed
            if value:
                yield as_written, "zero_optimization.stage", 1
        elif key in FORMER_FLAGS and (flag := _without_quotes(value, "flag")) in (None, "auto", True, False):
            if flag is True:
                yield as_written, *FORMER_FLAGS[key]
        elif key not in _SECTIONS or not (isinstance(value, Mapping) or value in (None, "auto", False)):
            yield as_written, key, value
        elif isinstance(value, Mapping):
            yield from _section_leaves(value, f"{as_written}.", key)


def _section_leaves(section: Mapping[str, Any], written: str, key: str) -> Iterator[tuple[str, str, Any]]:
    # Without a device nothing is offloaded, and the other keys of an offload have no meaning.
    if key in _OFFLOADS and section.get("device") in (None, "none", "auto"):
        return
    switch = KEYS.get(f"{key}.enabled")
    if switch is not None and section.get("enabled") is False:
        section = {"enabled": False}
    if (
        switch is not None
        and switch.policy is Policy.PASSED_ON
        and section.get("enabled") in (None, "auto", False)
    ):
        return  # DeepSpeed's default is off
    yield from _leaves(section, written, f"{key}.")


def _checked(key: str, value: Any, type_name: str) -> Any:
    """The value in the table's type. Raises: ConfigError; for an unknown key it names the nearest one."""
    if type_name in ("free", "switch") and value is False:
        return {"enabled": False}
    value = _without_quotes(value, type_name)
    if type_name == "dtype" and isinstance(value, str):
        value = value.lower()  # as DeepSpeed does
    checked = to_tree(build(_ROOT, nest(f"deepspeed.{key}", value)))["deepspeed"]
    for name in key.split("."):
        checked = checked[name]
    return checked


def _without_quotes(value: Any, type_name: str) -> Any:
    """A number or a flag that is written as text, as a value."""
    if not isinstance(value, str) or not type_name:
        return value
    expected = OPTION_TYPES[type_name][0]
    if expected is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return float(value) if expected in (int, float) and _NUMBER.fullmatch(value) else value


def _is_off(section: Mapping[str, Any], type_name: str) -> bool:
    """Whether a section turns nothing on. A "switch" is off unless its `enabled`, or one inside it, is true."""
    if "device" in section:
        return section["device"] in (None, "none", "auto")
    state = _state(section)
    return state is False or (state is None and (type_name == "switch" or not section))


def _state(section: Mapping[str, Any]) -> bool | None:
    """The section's `enabled`, else whether a section inside it is enabled; None = there is no `enabled`."""
    if section.get("enabled") is not None:
        return section["enabled"] not in (False, "auto")
    states = [_state(inner) for inner in section.values() if isinstance(inner, Mapping)]
    known = [state for state in states if state is not None]
    return any(known) if known else None
