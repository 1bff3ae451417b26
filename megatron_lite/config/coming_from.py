"""Options of other training programs, and the settings that they are here: coming_from.yaml.

docs/generate.py writes them to docs/coming_from.md; foreign_options.py answers a command line with them.
"""

from __future__ import annotations

import functools
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from data_utils.common.setting_files import load_yaml


class Argument(NamedTuple):
    names: tuple[str, ...]  # with underscores, which also match dashes; `*` stands for any characters
    # All settings that train the same, with spaces between: `key={}` takes the value as it is, `key=VALUE` stands for a
    # flag, `key` alone needs the note; "" = no setting.
    setting: str = ""
    note: str = ""

    @property
    def keys(self) -> list[str]:
        return [part.partition("=")[0] for part in self.settings("")]

    def settings(self, value: str) -> list[str]:
        """The settings with a value in them."""
        return [part.replace("{}", value) for part in re.split(r" (?=[a-z_]+\.)", self.setting) if part]


@functools.cache
def sources() -> dict[str, list[Argument]]:
    """Program -> its options. Read when a command line has a foreign one, as it takes a while."""
    tables = load_yaml(Path(__file__).with_name("coming_from.yaml"))
    return {
        source: [
            Argument(tuple(names.split()), **(row if isinstance(row, dict) else {"setting": row}))
            for names, row in table.items()
        ]
        for source, table in tables.items()
    }


@functools.cache
def arguments_by_name() -> dict[str, Argument]:
    """Where programs share a name, the first table has precedence. A name may be a pattern."""
    return {
        name: argument
        for table in reversed(sources().values())
        for argument in reversed(table)
        for name in argument.names
    }


def find_argument(name: str) -> Argument | None:
    """The row of an option's name, which has underscores and no dashes."""
    by_name = arguments_by_name()
    if name in by_name:
        return by_name[name]
    return next(
        (by_name[pattern] for pattern in by_name if "*" in pattern and fnmatchcase(name, pattern)), None
    )
