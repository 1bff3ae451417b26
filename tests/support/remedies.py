"""Settings that the program advises, `section.key=value` in its errors, logs and output: a user pastes them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_utils.common.errors import ConfigError, UserError
from data_utils.common.settings import keys_of, parse_override, wrong_settings
from data_utils.objectives import OBJECTIVES
from megatron_lite.config.tree import Config

# Not what the user wrote, which an error quotes.
_SETTING = re.compile(
    rf"(?<![\w.\-/{{])(?<!override ['\"])((?:{'|'.join(keys_of(Config))})(?:\.\w+)*)=(?=[^\s=])"
)
_PLACEHOLDER = re.compile(r"[A-Z_]*|.*\.\.\..*|\{\}")
_said: list[str] = []


def listen() -> None:
    """Hear every error of a user that is raised from here on in this process."""

    def heard(self: UserError, *arguments: object) -> None:
        Exception.__init__(self, *arguments)
        hear(*map(str, arguments))

    UserError.__init__ = heard  # type: ignore[method-assign]


def hear(*texts: str) -> None:
    _said.extend(text for text in texts if "=" in text)


def false_remedies() -> list[str]:
    """What was heard since the last call and cannot be pasted: the setting, why, and the text."""
    texts, wrong = dict.fromkeys(_said), []
    _said.clear()
    for text in texts:
        for line in text.splitlines():
            wrong += [
                f"{setting}: {why}, in {line!r}" for setting in advised(line) if (why := refusal(setting))
            ]
    return wrong


def advised(line: str) -> Iterator[str]:
    """The settings that a line advises, as a user pastes them."""
    for found in _SETTING.finditer(line):
        value = _value(line[found.end() :])
        if not _PLACEHOLDER.fullmatch(value):
            yield f"{found[1]}={value}"


def _value(rest: str) -> str:
    """The value at the beginning of a text: up to its own bracket, or to a space or the end of a sentence."""
    depth = 0
    for end, sign in enumerate(rest):
        depth += (sign in "[{") - (sign in "]}")
        if depth == 0 and sign in "]}":
            return rest[: end + 1]
        if depth <= 0 and (sign in " ;,)'\"" or depth < 0):
            return rest[:end].rstrip(".:")
    return rest.rstrip(".:")


def refusal(setting: str) -> str:
    """Why a setting is none, or has a value that it cannot have; "" = it is taken."""
    try:
        tree = parse_override(setting)
    except ConfigError as error:
        return str(error)
    for name in OBJECTIVES.keys() & tree.keys():
        OBJECTIVES[name]  # sections of packages are known once they are loaded
    return " ".join(wrong_settings(Config, tree).values())
