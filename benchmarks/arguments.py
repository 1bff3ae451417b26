"""Checks of the benchmarks' options: a mistake is one line before anything is measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from data_utils.common.errors import ConfigError
from data_utils.common.files import require_directory, require_writable, write_whole


def check_at_least(options: argparse.Namespace, least: float, *names: str) -> None:
    """Raise ConfigError where an option of `names`, or one of its values, is below `least` (or NaN)."""
    for name in names:
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}.")


def check_once(options: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError where an option of `names` has a value twice."""
    for name in names:
        given = getattr(options, name)
        twice = next((value for value in given if given.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(f"--{name} has {twice} twice; give it once.")


def check_places(directory: str | Path | None = None, result: str | Path | None = None) -> None:
    """Raise ConfigError or DataError for a directory that is missing, or a file that cannot be written."""
    if directory is not None:
        require_directory(Path(directory), "give --directory an existing one")
    if result is not None:
        require_writable(Path(result), "--json")


def write_json(path: str | Path, result: Any) -> None:
    """The whole file or none, in a directory that is made if need be."""
    write_whole(Path(path), (json.dumps(result, indent=1) + "\n").encode(), "--json")
