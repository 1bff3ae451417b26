"""The commit of a record: what was measured can be checked out again."""

from __future__ import annotations

import subprocess

from data_utils.common.errors import ConfigError
from support.project import ROOT


def git(*arguments: str) -> str:
    """The output of git; "" where there is no repository."""
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def commit_of_record() -> str:
    """`fdc83156 (2026-11-29)`: what is checked out, and its date. Raises: ConfigError if files differ from it."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/records")
    named = git("log", "-1", "--format=%h (%cs)")
    if changed or not named:
        reason = f"{changed.split()[-1]} differs from the commit" if changed else "there is no commit"
        raise ConfigError(
            f"{reason}, so nobody could repeat this record; commit first, or leave out --output."
        )
    return named
