"""config.json of a directory with one field missing, of another type, or absurd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ABSURD = 10_000_000_000


def edits(described: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A name of each edit, and the fields after it."""
    for name, value in described.items():
        yield f"{name} missing", {key: kept for key, kept in described.items() if key != name}
        for kind, other in (*_other_types(value), *_absurd(value)):
            yield f"{name} {kind}", {**described, name: other}


def _other_types(value: Any) -> Iterator[tuple[str, Any]]:
    others = {
        "a text": "strange",
        "a list": [1, [2]],
        "an object": {"a": {"b": 1}},
        "a flag": True,
        "null": None,
    }
    others |= {"a number": 7, "a fraction": 0.5}
    for name, other in others.items():
        if type(other) is not type(value):
            yield name, other


def _absurd(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool):
        yield "the other", not value
    elif isinstance(value, int):
        yield from (
            ("enormous", ABSURD),
            ("10 million", 10_000_000),
            ("below 0", -1),
            ("0", 0),
            ("other", value + 1),
        )
    elif isinstance(value, float):
        yield from (("enormous", 1e300), ("below 0", -1.0), ("0", 0.0))
    elif isinstance(value, str):
        yield from (("long", "x" * 100_000), ("empty", ""), ("a path", "../../etc/passwd"))
    elif isinstance(value, list):
        yield from (("empty", []), ("repeated", [*value, *value]), ("of numbers", [10**30]))
    elif isinstance(value, dict):
        yield "empty", {}
        yield "of lists", {key: [value[key]] for key in value} or {"x": []}
