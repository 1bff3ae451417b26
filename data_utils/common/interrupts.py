"""Ctrl-C ends a command in one line with status 130 at any moment, also while it imports its libraries.

It uses only the standard library, and syntax that an old Python reads: `entry.py` imports it before anything else.
"""

import os
import signal
import sys

INTERRUPTED_STATUS = 130  # what shells report of a command that Ctrl-C ended


def end_at_once(number, frame):  # type: ignore[no-untyped-def]
    """A signal handler for moments in which there is nothing to clean up.

    It raises no exception, because libraries swallow those that meet them while they are imported.
    """
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED_STATUS)


def interrupt(number, frame):  # type: ignore[no-untyped-def]
    """A signal handler for a command at work: KeyboardInterrupt, so that it cleans up.

    A second signal ends it at once, and so does the first one during an import.
    """
    signal.signal(signal.SIGINT, end_at_once)
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            end_at_once(number, frame)
        frame = frame.f_back
    raise KeyboardInterrupt


def arm():  # type: ignore[no-untyped-def]
    """Answer Ctrl-C by `end_at_once` until the command is at work; only where Python's own handler would."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # ignored, as in the background of a script; or another program's
    try:
        signal.signal(signal.SIGINT, end_at_once)
    except ValueError:  # not the main thread, so this is no entry point
        return
    report = sys.unraisablehook

    def report_unless_interrupted(unraisable):  # type: ignore[no-untyped-def]
        if issubclass(unraisable.exc_type, KeyboardInterrupt):  # in a destructor, where it would be ignored
            end_at_once(signal.SIGINT, None)
        report(unraisable)

    sys.unraisablehook = report_unless_interrupted


def begin_work():  # type: ignore[no-untyped-def]
    """From here on a command that was armed is interrupted by an exception."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, interrupt)


def end_work():  # type: ignore[no-untyped-def]
    """Whether the command was interrupted.

    From here on a signal ends it at once, silently if one was answered already.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is interrupt:
        signal.signal(signal.SIGINT, end_at_once)
    elif handler is end_at_once:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return handler is end_at_once
