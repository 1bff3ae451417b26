"""Globs over names of objects: `*` and `?` within a folder, `[...]`, and `**` across folders."""

from __future__ import annotations

import re

from data_utils.common.errors import ConfigError

_MAGIC = re.compile(r"[*?[]")


def has_magic(pattern: str) -> bool:
    return _MAGIC.search(pattern) is not None


def fixed_folder(pattern: str) -> str:
    """The folder in which all matches lie, without a / at its end; "" = the top."""
    match = _MAGIC.search(pattern)
    return pattern[: match.start() if match else None].rpartition("/")[0]


def is_deep(pattern: str) -> bool:
    """Whether matches may lie in folders below `fixed_folder`."""
    rest = pattern[len(fixed_folder(pattern)) :].lstrip("/")
    return "/" in rest or "**" in rest


def compiled(pattern: str) -> re.Pattern[str]:
    """The glob as a regular expression for whole names. Raises ConfigError."""
    result, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            result, at = result + "(?:.*/)?", at + 3
        elif pattern.startswith("**", at):
            result, at = result + ".*", at + 2
        elif pattern[at] == "*":
            result, at = result + "[^/]*", at + 1
        elif pattern[at] == "?":
            result, at = result + "[^/]", at + 1
        elif pattern[at] == "[" and (end := pattern.find("]", at + 2 + pattern.startswith("[!", at))) > 0:
            inner = pattern[at + 1 : end].replace("\\", r"\\").replace("[", r"\[")
            inner = "^" + inner[1:] if inner.startswith("!") else inner.replace("^", r"\^")
            result, at = f"{result}(?!/)[{inner}]", end + 1
        else:
            result, at = result + re.escape(pattern[at]), at + 1
    try:
        return re.compile(result, re.DOTALL)
    except re.error:
        raise ConfigError(
            f"{pattern} has a [...] with a range whose end is before its start; write [a-z], or [[] for a bracket."
        ) from None
