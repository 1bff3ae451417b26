"""Errors that a user can cause. Entry points print them in one line, without a traceback, and exit with status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

USER_ERROR_STATUS = 2


class UserError(Exception):
    """Something the user can mend. The message names the value, the rule and the remedy."""


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type, or inconsistent with another."""


class DataError(UserError):
    """A corpus, record, dataset or tokenizer that cannot be used as given."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or made by an incompatible run."""


def run_command(main: Callable[[], int | None], quiet: bool = False) -> None:
    """Run an entry point: a `UserError` becomes one line on stderr (unless `quiet`) and exit status 2."""
    try:
        status = main()
    except UserError as error:
        if not quiet:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR_STATUS)
    except BrokenPipeError:  # the reader of our output has gone, for example `| head`
        sys.exit(1)
    sys.exit(status or 0)
