"""Numbers for people, and lines that fit a terminal. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

LINE_LENGTH = 120 - len("12:34:56 ")  # of what follows the time in a line of the log


def format_duration(seconds: float) -> str:
    """In two units: 42s, 3m05s, 2h07m, 12d03h."""
    seconds = int(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // part:02d}{smaller}"
    return f"{seconds}s"


def format_count(number: float) -> str:
    """A rate for people: 5,923, 123k, 12.3M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 100e3 and number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


def fitted(parts: Iterable[str]) -> str:
    """As many of the parts, the most important first, as one line of a terminal holds beside the time."""
    line = ""
    for part in parts:
        longer = f"{line} | {part}" if line else part
        if line and len(longer) > LINE_LENGTH:
            break
        line = longer
    return line
