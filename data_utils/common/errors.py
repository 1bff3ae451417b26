"""Errors that a user can cause, printed by entry points in one line without a traceback, and exit statuses."""

from __future__ import annotations

import argparse
import errno
import logging
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
# What helps against an error of the system, whatever was done when it came.
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    errno.EXDEV: "an overlay moves no directory of its lower layers, so copy what holds it (cp -r) and use the copy",
}
_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)


class ExitStatus(IntEnum):
    """How an entry point ended. docs/cluster.md says what a job script does with each status."""

    FINISHED = 0  # the run reached training.steps or training.stop_after_step, and saved
    CRASHED = 1  # after a traceback, as of Python itself; or an error that may pass, or another rank died (one line)
    USER_ERROR = 2  # a mistake in configuration, data or checkpoint, a full disk; the same start fails again
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


def system_problem(error: OSError) -> str:
    """What the system refuses, and for which file: for one in a closed directory, this directory."""
    words = error.strerror or str(error)
    if error.filename is None or isinstance(error.filename, int):
        return words
    path = Path(os.fsdecode(error.filename))
    if error.errno == errno.EACCES:
        closed = (above for above in reversed(path.parents) if not os.access(above, os.X_OK))
        path = next(closed, path)
    return f"{path}: {words}"


def system_remedy(error: OSError, otherwise: str) -> str:
    """What helps against an error of the system. Args: otherwise: what helps against one that depends on the work."""
    return _REMEDIES.get(error.errno or 0, otherwise)


def print_error(error: UserError, place: str = "") -> None:
    """One line on stderr, without secrets of URLs. Args: place: of the rank, if others print their own."""
    message = without_secrets(str(error))
    if len(message) > MESSAGE_LENGTH:  # for values that were not shortened before
        message = f"{message[: MESSAGE_LENGTH // 2]} ... {message[-MESSAGE_LENGTH // 2 :]}"
    # One write: `print` writes the line's end by itself if output is unbuffered, and lines of two ranks run together.
    sys.stderr.write(f"error: {place}{printable(message)}\n")
    sys.stderr.flush()


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
    logging.raiseExceptions = False  # a log that cannot be written costs its lines, and no traceback for each
    try:
        status = _with_output(main)
    except UserError as error:
        user_error, is_printed = error, not quiet or error.only_here
        if is_printed:
            print_error(error)
        status = error.status
    except KeyboardInterrupt:
        status = _interrupted()
    except BrokenPipeError:  # the reader of the output has ended, for example `| head`
        _flush_output()
        sys.exit(1)
    except OSError as error:
        user_error = system_error(error)
        print_error(user_error)
        status = user_error.status
    if interrupts.end_work() and status == ExitStatus.FINISHED:  # a library has swallowed the exception
        status = _interrupted()
    _flush_output()
    if leave is not None:
        leave(status, user_error, is_printed)
    sys.exit(status)


def _with_output(main: Callable[[], int | None]) -> int:
    """The status of an entry point, whose output is written when this returns."""
    try:
        status = main()
    except SystemExit as end:  # of --help
        status = end.code  # type: ignore[assignment]
    if (error := _flush_output()) is not None:
        raise error
    return status or ExitStatus.FINISHED


def _flush_output() -> OSError | None:
    """The error that the output cannot be written for; what is left of it goes nowhere, else Python would try again."""
    try:
        print(end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = "standard output"
        return error
    return None


def system_error(error: OSError) -> UserError:
    """The line of an error of the system that nothing else has explained."""
    remedy = system_remedy(error, "change its permissions" if error.errno in _RIGHTS else "")
    if error.filename is None:
        error = _flush_output() or error  # the same error, if it is that of the output
    found = UserError(f"{system_problem(error)}{f'; {remedy}, and repeat the command' if remedy else ''}.")
    found.only_here = True
    if not remedy:  # it may pass: a job that it ended is queued again
        found.status = ExitStatus.CRASHED  # type: ignore[misc]  # of the instance, not of the class
    return found


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED_STATUS
