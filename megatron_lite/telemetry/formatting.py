"""Numbers for people, and log lines that fit a terminal. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

LINE_LENGTH = 120 - len("12:34:56 ")  # characters after the time in a log line


def format_duration(seconds: float) -> str:
    """A duration in two units at most: 42s, 3m05s, 2h07m, 12d03h."""
    seconds = int(seconds)
    for unit, size, smaller_unit, smaller_size in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // smaller_size:02d}{smaller_unit}"
    return f"{seconds}s"


def format_count(number: float) -> str:
    """A rate for people: 5,923, 123k, 12.3M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 100e3 and number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


def format_percent(share: float) -> str:
    """A share for people: 12.3 %."""
    return f"{100 * share:.3g} %"


def fit_line(items: Iterable[str]) -> str:
    """One log line with as many of the items, the most important first, as fit a terminal."""
    line = ""
    for item in items:
        longer = f"{line} | {item}" if line else item
        if line and len(longer) > LINE_LENGTH:
            break
        line = longer
    return line
