"""Settings that a record or file of an earlier version has and this version lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Dotted key -> its default, which means nothing and is left out, and what replaces another value.
REMOVED: dict[str, tuple[Any, str]] = {
    "blank_infilling.short_seq_prob": (0.0, "data.short_prob crops texts"),
    "objective_starts": ({}, "write phases with `objectives`"),
    "events.skip_samples": ([], "write phases, the later one with `skip_samples`"),
    "events.learning_rate": ([], "write phases, the later one with `lr`"),
    "events.embedding_gradient_shrink": ([], "write phases, the later one with `embedding_gradient_shrink`"),
}


def without_removed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without these settings. Raises ValueError for one that is not its default."""
    found = dict(tree)
    for key, (default, instead) in REMOVED.items():
        section, _, name = key.rpartition(".")
        values = found.get(section) if section else found
        if not isinstance(values, Mapping) or name not in values:
            continue
        if values[name] != default:
            raise ValueError(f"sets {key} to {values[name]!r:.40}, which this version lacks: {instead}")
        rest = {other: value for other, value in values.items() if other != name}
        if not section:
            found = rest
        elif rest:
            found[section] = rest
        else:
            del found[section]
    return found
