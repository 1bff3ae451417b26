"""Errors that a user can cause, printed by entry points in one line without a traceback, and exit statuses."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from data_utils.common import interrupts
from data_utils.common.interrupts import INTERRUPTED_STATUS
from data_utils.common.urls import is_url, without_secrets

_SETTING = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")
MESSAGE_LENGTH = 4000  # longest message that is printed


class ExitStatus(IntEnum):
    """How an entry point ended. docs/cluster.md says what a job script does with each status."""

    FINISHED = 0  # the run reached training.steps or training.stop_after_step, and saved
    CRASHED = 1  # after a traceback, as of Python itself; or another rank died (one line)
    USER_ERROR = 2  # a mistake in configuration, data or checkpoint; the same start fails again
    STOPPED = 75  # after a signal; all is saved, start again to continue (EX_TEMPFAIL of sysexits)
    HALTED = 76  # after the file STOP; all is saved, remove the file to continue
    UNSOUND = 77  # gradients stayed non-finite, or weights that must be equal are not
    HUNG = 78  # a section exceeded its time limit; rank, place and stack are on stderr


class UserError(Exception):
    """An error that the user can correct. The message names the value, the rule and the remedy."""

    status = ExitStatus.USER_ERROR
    only_here = False  # only this rank has the error, so it must report it


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
    """An entry point's arguments: help keeps its line breaks, a mistake is a ConfigError.

    Plain argparse prints its usage before an error, and accepts abbreviated options.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self.register(
            "type", Path, lambda text: Path(local_path(text or self.error("a path must not be empty")))
        )

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's own, but settings (section.key=value) may follow an option that takes several values."""
        arguments: list[str] = []
        # The position of an option that takes several values: settings go before it, so that their order stays.
        insert_at: int | None = None
        for argument in sys.argv[1:] if args is None else args:
            if argument.startswith("--"):
                action = self._option_string_actions.get(argument)
                insert_at = len(arguments) if action is not None and action.nargs == "+" else None
            if insert_at is not None and _SETTING.match(argument):
                arguments.insert(insert_at, argument)
                insert_at += 1
            else:
                arguments.append(argument)
        return super().parse_intermixed_args(arguments, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help.")


def expanded_path(text: str, name: str = "path") -> str:
    """A path that a user gave, with `~` expanded, or a URL as it is; `name` is the setting's.

    As `type=` of an argument that stays text.

    Shells expand neither `key=~/x` nor what stands in quotes or in a file.

    Raises: ConfigError for `$`, for `~` of nobody, and for a URL that is no UTF-8.
    """
    if is_url(text):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{name} is {without_secrets(text)!r}, which is not UTF-8, as names in stores are; correct it."
            ) from None
        return text
    if "$" in text:
        raise ConfigError(
            f"{name} is {text!r}, but $ is not expanded; write the path out or start it with ~/."
        )
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ConfigError(
            f"{name} is {text!r}, but this user does not exist; write ./{text} for a file with this name."
        )
    return path


def local_path(text: str, name: str = "path") -> str:
    """As `expanded_path`, but a URL is refused: it would become a directory with its name. Raises ConfigError."""
    if is_url(text):
        raise ConfigError(f"{name} is {without_secrets(text)!r}, a URL; give a path of this machine.")
    return expanded_path(text, name)


def printable(text: str) -> str:
    """Text as one line that a terminal shows and does not obey: newlines and control characters are escaped."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def print_error(error: UserError, place: str = "") -> None:
    """One line on stderr, without secrets of URLs. Args: place: of the rank, if others print their own."""
    message = without_secrets(str(error))
    if len(message) > MESSAGE_LENGTH:  # for values that were not shortened before
        message = f"{message[: MESSAGE_LENGTH // 2]} ... {message[-MESSAGE_LENGTH // 2 :]}"
    print(f"error: {place}{printable(message)}", file=sys.stderr, flush=True)


def run_command(
    main: Callable[[], int | None],
    quiet: bool = False,
    leave: Callable[[int, UserError | None, bool], None] | None = None,
) -> None:
    """Run an entry point: a `UserError`, or Ctrl-C, becomes one line on stderr and its exit status.

    Args:
        quiet: another process reports errors that all ranks have; only errors of this rank alone are reported.
        leave: called before the process ends, but not after a traceback: the exit status, the error if there is one,
            and whether it was printed.
    """
    status: int
    user_error: UserError | None = None
    is_printed = True
    interrupts.begin_work()
    try:
        status = main() or ExitStatus.FINISHED
    except UserError as error:
        user_error, is_printed = error, not quiet or error.only_here
        if is_printed:
            print_error(error)
        status = error.status
    except KeyboardInterrupt:
        status = _interrupted()
    except BrokenPipeError:  # the reader of the output has ended, for example `| head`
        sys.exit(1)
    if interrupts.end_work() and status == ExitStatus.FINISHED:  # a library has swallowed the exception
        status = _interrupted()
    if leave is not None:
        leave(status, user_error, is_printed)
    sys.exit(status)


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED_STATUS
