"""Errors that a user can cause, printed by entry points in one line without a traceback, and exit statuses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar, NoReturn

MESSAGE_LENGTH = 4000  # longest message that is printed
INTERRUPTED_STATUS = 130  # what shells report of a command that Ctrl-C ended


class ExitStatus(IntEnum):
    """How an entry point ended. docs/cluster.md says what a job script makes of each."""

    FINISHED = 0  # training.steps, or training.stop_after_step, is reached and saved
    CRASHED = 1  # Python's own, after a traceback; or another rank died, in one line
    USER_ERROR = 2  # a mistake in configuration, data or checkpoint; the same start fails again
    STOPPED = 75  # a signal asked for it; all is saved, start again to continue (sysexits' EX_TEMPFAIL)
    HALTED = 76  # the file STOP asked for it; all is saved, remove the file to continue
    UNSOUND = 77  # gradients stayed non-finite, or weights that must be equal are not
    HUNG = 78  # a section outlasted its limit; rank, place and stack are on stderr


class UserError(Exception):
    """Something the user can mend. The message names the value, the rule and the remedy."""

    status: ClassVar[ExitStatus] = ExitStatus.USER_ERROR
    only_here = False  # found by this rank and not by the others, so that it must report it


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type, or inconsistent with another."""


class DataError(UserError):
    """A corpus, record, dataset or tokenizer that cannot be used as given."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or made by an incompatible run."""


class DeviceMemoryError(UserError):
    """The device has less memory than the configuration needs."""


class HaltedError(UserError):
    """The run's directory holds the file STOP."""

    status = ExitStatus.HALTED


class TrainingError(UserError):
    """The run cannot go on, for example because its gradients stay non-finite."""

    status = ExitStatus.UNSOUND


class RankError(UserError):
    """Another rank has died."""

    status = ExitStatus.CRASHED


class ArgumentParser(argparse.ArgumentParser):
    """An entry point's arguments: help is printed as it was written, a mistake is a ConfigError.

    argparse prints its usage in front of a mistake, and takes the beginning of an option for the option.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help.")


def run_command(
    main: Callable[[], int | None], quiet: bool = False, report: Callable[[int], None] | None = None
) -> None:
    """Run an entry point: a `UserError` becomes one line on stderr and its exit status, mostly 2.

    Ctrl-C is one line, too.
    Args:
        quiet: another process reports what all find; only what this one alone has found is reported.
        report: called with the exit status before the process ends; not after a traceback.
    """
    status: int
    try:
        status = main() or ExitStatus.FINISHED
    except UserError as error:
        if not quiet or error.only_here:
            message = str(error)
            if len(message) > MESSAGE_LENGTH:  # values are cut where they are shown; this is for what is not
                message = f"{message[: MESSAGE_LENGTH // 2]} ... {message[-MESSAGE_LENGTH // 2 :]}"
            print(f"error: {message}", file=sys.stderr)
        status = error.status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED_STATUS
    except BrokenPipeError:  # the reader of our output has gone, for example `| head`
        sys.exit(1)
    if report is not None:
        report(status)
    sys.exit(status)
