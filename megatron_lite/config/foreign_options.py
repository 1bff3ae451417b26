"""Options of other training programs on a command line: an answer that names the setting to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from itertools import pairwise

from data_utils.common.errors import ConfigError
from data_utils.common.setting_files import shorten
from data_utils.common.settings import parse_override, setting_names, to_yaml_scalar, wrong_settings
from megatron_lite.config.coming_from import Argument, arguments_by_name, find_argument
from megatron_lite.config.tree import Config


def with_deepspeed_file(arguments: Sequence[str]) -> list[str]:
    """The command line with `--deepspeed FILE`, as Hugging Face's Trainer takes it, as `--deepspeed_config FILE`.

    Raises: ConfigError for a second file, of which the parser would drop the first without a word.
    """
    words = [
        word.replace("--deepspeed=", "--deepspeed_config=", 1) if word.startswith("--deepspeed=") else word
        for word in arguments
    ]
    for index, (option, value) in enumerate(pairwise(arguments)):
        if option == "--deepspeed" and "=" not in value and not value.startswith("-"):
            words[index] = "--deepspeed_config"
    if sum(word.partition("=")[0] == "--deepspeed_config" for word in words) > 1:
        raise ConfigError(
            "--deepspeed_config is given twice, but a run takes one DeepSpeed file; remove one."
        )
    return words


def explain_options(arguments: Sequence[str], unknown: Sequence[str]) -> str:
    """One line that names the settings for options which the command line does not have.

    Args:
        arguments: the command line.
        unknown: the options among them that the parser does not know; values may follow.
    """
    answers = []
    for option, values in _options(arguments):
        if any(option == each.partition("=")[0] for each in unknown):
            answers.append(_answer(option, values))
    return f"write settings as section.key=value, without dashes: {'; '.join(dict.fromkeys(answers))}."


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with the values that follow it."""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-") or _is_number(argument):
            continue
        option, equals, value = argument.partition("=")
        values = [value] if equals else []
        for following in arguments[index + 1 :] if not equals else ():
            if "=" in following or (following.startswith("-") and not _is_number(following)):
                break
            values.append(following)
        yield option, values


def _datasets(values: Sequence[str]) -> list[str]:
    """Items of `data.train` of prefixes, or of a weight before each prefix, as Megatron takes them."""
    weights, prefixes = values[::2], values[1::2]
    if len(weights) == len(prefixes) and all(map(_is_number, weights)):
        return [
            f"{{prefix: {prefix}, weight: {weight}}}"
            for weight, prefix in zip(weights, prefixes, strict=True)
        ]
    return [f"{{prefix: {value}}}" for value in values]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _answer(option: str, values: list[str]) -> str:
    """What to write in place of an option: the setting, or why there is none."""
    name = option.lstrip("-").replace("-", "_")
    typed = shorten(" ".join([option, *values]), 60)
    argument = find_argument(name)
    keys = list(setting_names(Config))
    if argument is None:
        matching = [key for key in keys if name in (key, key.replace(".", "_"))]
        matching = matching or [key for key in keys if name == key.rpartition(".")[2]]
        if not matching:
            near = difflib.get_close_matches(
                name, [*arguments_by_name(), *(key.rpartition(".")[2] for key in keys)], n=1
            )
            hint = _answer(near[0], []) if near else "docs/settings.md lists all settings"
            return f"{typed} is not known ({'the nearest: ' if near else ''}{hint})"
        if len(matching) > 1:
            return f"{typed} is one of {shorten(', '.join(matching), 200)}"
        argument = Argument((name,), f"{matching[0]}={{}}")
    note = f" ({argument.note})" if argument.note else ""
    if not argument.setting:
        return f"{typed}: {argument.note}"
    is_flag = "=" in argument.setting and "{}" not in argument.setting
    if is_flag and [value.lower() for value in values] in (["false"], ["0"]):
        return f"{typed}: leave it out"
    if argument.keys in (["data.train"], ["data.validation"]) and "{}" in argument.setting and values:
        return f"{typed} is {argument.keys[0]}=[{', '.join(_datasets(values))}]{note}"
    if argument.keys == ["model.max_position"] and len(values) == 1 and values[0].isdecimal():
        return f"{typed} is model.max_position={to_yaml_scalar(int(values[0]) - 1)}"
    written = " and ".join(argument.keys)
    if is_flag or ("{}" in argument.setting and values):
        settings = argument.settings(values[0] if len(values) == 1 else f"[{', '.join(values)}]")
        wrong = _refusal(settings)
        if not wrong:
            return f"{typed} is {' '.join(settings)}{note}"
        return f"{typed} is {written}{note or f': {wrong}'}"  # a value of another name, or none
    return f"{typed} is {written}{note or '=VALUE'}"


def _refusal(settings: Sequence[str]) -> str:
    """Why a setting cannot have its value, in words; "" = each can."""
    for text in settings:
        try:
            tree = parse_override(text)
        except ConfigError as error:
            return str(error).rstrip(".")
        for sentence in wrong_settings(Config, tree).values():
            return sentence.rstrip(".")
    return ""
